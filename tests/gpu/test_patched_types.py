"""Every causal-LM type that is accelerated, captured: in its own tier, and in the patched one.

In float32, as captured graphs against the same step without graphs and against Hugging Face.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import torch_paged
from tests.patches import tiers
from torch_paged.generate.registry import find_session
from torch_paged.generate.support import parity, zoo
from torch_paged.generate.support.parity import LEAST_COMPARED, NEW_TOKENS
from torch_paged.patches.refusal import SpecRefusal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEAST_PATCHED = 60
LOGITS = {"return_dict_in_generate": True, "output_logits": True}

# Their forward does on the host what no graph can hold.
NOT_CAPTURED = {
    "aria_text": "cuts its tokens by expert with counts that it reads back",
    "dbrx": "loops over the experts that were hit",
    "jetmoe": "reads the sizes of its groups of tokens back",
    "longcat_flash": "loops over the experts that were hit",
    "phimoe": "works its rotary frequencies out on the host",
    "xmod": "picks the rows of each language with a mask",
}
ACCELERATED = [name for name in zoo.causal_lm_types() if tiers.tier(name) != "eager"]
TYPES = [name for name in ACCELERATED if name not in NOT_CAPTURED]


def only_patched() -> contextlib.AbstractContextManager[Any]:
    """Refuse every model the fused tier, as a model without a row in the table is refused."""
    refusal = SpecRefusal("the fused tier is switched off")
    return mock.patch("torch_paged.generate.session.read_spec", side_effect=refusal)


def greedy(model: PreTrainedModel, rows: slice = slice(None), **kwargs: Any) -> Any:
    ids, mask = parity.prompts(DEVICE)
    kwargs |= {"attention_mask": mask[rows], "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(ids[rows], **kwargs)


class Calls:
    """Counts replays of graphs and calls of a model's own forward."""

    def __init__(self) -> None:
        self.replays = 0
        self.forwards = 0

    @contextlib.contextmanager
    def counted(self, cls: type) -> Iterator[None]:
        self.replays = self.forwards = 0
        graph = torch.cuda.CUDAGraph
        with (
            mock.patch.object(graph, "replay", self._counting(graph.replay, "replays")),
            mock.patch.object(cls, "forward", self._counting(cls.forward, "forwards")),
        ):
            yield

    def _counting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return function(*args, **kwargs)

        return counting


def run_tier(model: PreTrainedModel, tier: str, cuda_graphs: bool) -> list[Tensor]:
    """Generate for one prompt and for the batch; with graphs three times, the last all replays."""
    torch_paged.accelerate(model, on_unsupported="raise", cuda_graphs=cuda_graphs)
    outputs = []
    try:
        for rows in (slice(2, None), slice(None)):
            first = [greedy(model, rows) for _ in range(2 if cuda_graphs else 0)]
            calls = Calls()
            with calls.counted(type(model)):
                last = greedy(model, rows)
            assert all(torch.equal(last, other) for other in first), "replays differ"
            outputs.append(last)
            if cuda_graphs and DEVICE == "cuda":
                assert calls.replays >= NEW_TOKENS - 1, f"{calls.replays} replays"
                assert calls.forwards <= prompt_forwards(model, last), f"{calls.forwards} forwards"
        report, stats = torch_paged.explain(model), torch_paged.stats(model)
        assert (report.tier, report.last_call.path) == (tier, tier), str(report)
        assert not stats.fallbacks, stats.fallbacks
        if cuda_graphs and DEVICE == "cuda":
            # States for more rows are new tensors, and graphs of the old ones are gone.
            least = 1 if find_session(model).step.keeps_state else 2
            assert stats.graphs >= least and stats.recaptures == 0, str(stats)
        return outputs
    finally:
        torch_paged.restore(model)


def prompt_forwards(model: PreTrainedModel, output: Tensor) -> int:
    """Return how often a prefill may call the model: once, or for each row that has a state."""
    step = find_session(model).step
    assert step is not None
    return len(output) if step.keeps_state else 1


def decided_model(model_type: str) -> tuple[PreTrainedModel, list[Any]]:
    """Build weights that near ties do not decide, with what Hugging Face makes of them.

    Where experts score alike, that depends on the device.
    """
    for seed in range(1, 4):
        model = zoo.tiny_model(model_type, seed=seed).to(DEVICE)
        if "grouped_mm" in model.get_experts_implementation().values():
            # In float32 it reads the sizes of its groups back; in the end it runs in bfloat16.
            model.set_experts_implementation("batched_mm")
        expected = [greedy(model, rows, **LOGITS) for rows in (slice(2, None), slice(None))]
        steps = [parity.steps_to_compare(torch.stack(part.logits)) for part in expected]
        if min(map(min, steps)) >= LEAST_COMPARED:
            return model, expected
    raise AssertionError(f"near ties decide {model_type} with each of three seeds")


def assert_same_until_a_near_tie(got: Tensor, expected: Any) -> None:
    steps_of_rows = parity.steps_to_compare(torch.stack(expected.logits))
    for row, steps in enumerate(steps_of_rows):
        assert steps >= LEAST_COMPARED, "a near tie decides this case"
        end = got.shape[1] - NEW_TOKENS + steps
        assert torch.equal(got[row, :end], expected.sequences[row, :end]), f"row {row}"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Default configs warn about their token ids by the page."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("model_type", TYPES)
def test_captured_type(model_type: str, record_property: Callable[[str, object], None]) -> None:
    model, expected = decided_model(model_type)
    other = () if model_type in tiers.FUSED_ONLY else ("patched",)
    for tier in dict.fromkeys((tiers.tier(model_type), *other)):
        forced = only_patched() if tier == "patched" else contextlib.nullcontext()
        with forced:
            captured = run_tier(model, tier, cuda_graphs=True)
            launched = run_tier(model, tier, cuda_graphs=False)
        for got, same, theirs in zip(captured, launched, expected, strict=True):
            assert torch.equal(got, same), f"{tier}: the captured step differs"
            assert_same_until_a_near_tie(got, theirs)
        record_property(f"captured {tier}", model_type)
    if "batched_mm" in model.get_experts_implementation().values():
        model.set_experts_implementation("grouped_mm")
        assert_grouped_experts_replay(model.to(torch.bfloat16))


def assert_grouped_experts_replay(model: PreTrainedModel) -> None:
    """A prompt that fills its bucket, so that nothing is padded and bits are comparable."""
    ids = torch.randint(3, zoo.VOCAB, (1, 32), generator=torch.Generator().manual_seed(32))
    kwargs = {"attention_mask": torch.ones_like(ids).to(DEVICE), "do_sample": False}
    outputs = []
    for cuda_graphs in (True, False):
        # Rounded, experts change places at a near tie, which the self-test would find.
        config = {"cuda_graphs": cuda_graphs, "verify": False, "on_unsupported": "raise"}
        with only_patched(), torch_paged.accelerated(model, **config):
            calls = Calls()
            with calls.counted(type(model)):
                for _ in range(2):
                    outputs.append(model.generate(ids.to(DEVICE), max_new_tokens=8, **kwargs))
            assert not cuda_graphs or DEVICE == "cpu" or calls.replays >= 14
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("model_type", NOT_CAPTURED)
def test_a_type_that_is_not_captured_still_answers(model_type: str) -> None:
    """Among them float32 experts as they come, in grouped products."""
    model = zoo.tiny_model(model_type).to(DEVICE)
    expected = greedy(model, **LOGITS)
    torch_paged.accelerate(model)
    for _ in range(3):
        assert_same_until_a_near_tie(greedy(model), expected)


def test_enough_types_are_captured() -> None:
    """All of them must pass above; conftest.py counts those that did."""
    assert len(TYPES) >= LEAST_PATCHED
