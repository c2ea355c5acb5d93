"""While it decodes, no forward of Hugging Face's model runs."""

from __future__ import annotations

import functools

import pytest
import torch
from models import FAMILIES, greedy, ragged_reference, seeded, tiny_family
from torch import nn
from transformers import LogitsProcessor

import torch_paged

NUM_TOKENS = 12


class Unknown(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Silent:
    def put(self, value) -> None:
        pass

    def end(self) -> None:
        pass


LOOPS = {
    "device": {},
    "lagged": {"streamer": Silent()},
    "stepped": {"logits_processor": [Unknown()]},
}


def forbid_forwards(model, monkeypatch) -> None:
    """Make the forwards of the model, its body, its layers, attentions and MLPs raise."""

    def raising(original):
        @functools.wraps(original)  # generate() reads the signature
        def forward(self, *args, **kwargs):
            raise AssertionError(f"{type(self).__name__}.forward ran")

        return forward

    body = getattr(model.base_model, "decoder", model.base_model)
    lists = [child for child in body.children() if isinstance(child, nn.ModuleList)]
    (layer,) = [children[0] for children in lists]
    parts = [child for child in layer.children() if next(child.children(), None) is not None]
    assert parts
    norms = [child for name, child in layer.named_children() if "norm" in name or "ln_" in name]
    modules = (model, body, layer, *parts, norms[0])
    # A norm of torch's own, as in GPT-NeoX, may be called as it is.
    for module in (m for m in modules if type(m).__module__.startswith("transformers.")):
        monkeypatch.setattr(type(module), "forward", raising(type(module).forward))


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, device, accelerate, monkeypatch) -> None:
    model = tiny_family(family, device)
    ids, mask, expected = ragged_reference(family, device)
    accelerate(model)
    # The self-test runs the model's own forward, once.
    greedy(model, ids, 2, attention_mask=mask)
    forbid_forwards(model, monkeypatch)

    for loop, options in LOOPS.items():
        got = greedy(model, ids, NUM_TOKENS, attention_mask=mask, **options)
        assert torch.equal(got, expected[:, : 33 + NUM_TOKENS]), loop
        assert torch_paged.explain(model).last_call.loop == loop

    options = {"attention_mask": mask, "max_new_tokens": NUM_TOKENS, "top_p": 0.9}
    result = seeded(model, 1, ids, **options).result
    assert result.shape == (3, 33 + NUM_TOKENS)
    again = seeded(model, 1, ids, return_dict_in_generate=True, output_scores=True, **options)
    assert torch.equal(again.result.sequences, result)

    with pytest.raises(AssertionError, match="forward ran"):
        model(ids)
