"""One tiny model with images, its untouched copy, and what Hugging Face makes of a batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import greedy, smallest_gap
from multimodal import KINDS, Picture, inputs_for, tiny_multimodal
from torch import Tensor, nn

import torch_paged

WITH_WINDOW = ["llava-mistral", "gemma3"]
WITHOUT_WINDOW = [name for name in KINDS if name not in WITH_WINDOW]
# Two images beside one beside none: 40 new tokens take each row past blocks of the cache.
ROWS: list[list[int | Picture]] = [
    [5, Picture((1, 4, 4), 1), 4, Picture((1, 4, 8), 2), 3],
    [7, Picture((1, 8, 4), 3), 6],
    [9],
]
NUM_TOKENS = 40
# Of the two best logits. Rounding moves them by less than a hundredth of this.
LEAST_GAP = 5e-4


class Case:
    """A model, its untouched copy and the inputs of a batch."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.model = tiny_multimodal(name, device)
        self.untouched = copy.deepcopy(self.model)
        self.inputs = inputs_for(name, ROWS, device)

    def expected(self, num_tokens: int = NUM_TOKENS, **kwargs: Any) -> Tensor:
        """Return what Hugging Face generates greedily, no token of it decided by a near tie."""
        output = greedy(
            self.untouched,
            num_tokens=num_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **{**split(self.inputs), **kwargs},
        )
        assert smallest_gap(output.logits) > LEAST_GAP
        return output.sequences

    def compare(self, num_tokens: int = NUM_TOKENS, **kwargs: Any) -> None:
        """Generate with both, from inputs changed by kwargs; the tokens must be equal."""
        expected = self.expected(num_tokens, **kwargs)
        got = greedy(self.model, num_tokens=num_tokens, **{**split(self.inputs), **kwargs})
        assert torch.equal(got, expected)
        self.assert_fused()

    def assert_fused(self) -> None:
        last = torch_paged.explain(self.model).last_call
        assert last is not None and last.path == "fused", last


def split(inputs: dict[str, Any]) -> dict[str, Any]:
    """Name the ids as `greedy` does."""
    return {"ids": inputs["input_ids"], **{k: v for k, v in inputs.items() if k != "input_ids"}}


def text_of(model: Any) -> nn.Module:
    body = model.model
    return body.language_model if hasattr(body, "language_model") else body.text_model


def forbid_decoding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the text model's forward, and its layer's, raise for anything but a prompt."""
    for module in (text_of(model), text_of(model).layers[0]):
        original = type(module).forward

        def forward(self, *args, _original=original, **kwargs):
            states = args[0] if args else kwargs["inputs_embeds"]
            assert states is None or states.shape[1] > 1, "a token was decoded by Hugging Face"
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(type(module), "forward", forward)


__all__ = [
    "LEAST_GAP",
    "NUM_TOKENS",
    "ROWS",
    "WITHOUT_WINDOW",
    "WITH_WINDOW",
    "Case",
    "forbid_decoding",
    "split",
    "text_of",
]
