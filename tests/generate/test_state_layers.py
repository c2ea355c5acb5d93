"""Layers that keep a state besides keys and values: recurrences and convolutions."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from models import cache_of, greedy, left_pad, padded_prompts, prompt, seeded
from torch import nn
from transformers import DynamicCache

import torch_paged
from torch_paged.generate.registry import find_session
from torch_paged.generate.support.zoo import tiny_model
from torch_paged.patches import seams

# Gated delta rule; short convolutions; Mamba; Mamba 2 beside attention in every layer.
TYPES = ["qwen3_next", "lfm2", "jamba", "falcon_h1"]


@functools.cache
def original(model_type: str) -> nn.Module:
    return tiny_model(model_type)


@pytest.fixture(params=TYPES)
def models(request: pytest.FixtureRequest, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The same tiny model twice."""
    model = original(request.param)
    return copy.deepcopy(model).to(device), copy.deepcopy(model).to(device)


def vocabulary(model: nn.Module) -> int:
    return model.get_input_embeddings().weight.shape[0]


def ragged(model: nn.Module, device: torch.device, seed: int = 0) -> dict[str, Any]:
    rows = [prompt(n, seed + n, vocabulary(model), device)[0] for n in (5, 17, 2)]
    ids, mask = left_pad([row[None] for row in rows])
    return {"ids": ids, "attention_mask": mask}


def assert_path(model: nn.Module, loop: str | None = None) -> None:
    call = torch_paged.explain(model).last_call
    assert call.path == "patched", call.reasons
    assert loop is None or call.loop == loop


@pytest.mark.parametrize("lag", [0, 4])
def test_greedy_batches_equal_hugging_face(models, device, accelerate, lag: int) -> None:
    plain, fast = models
    accelerate(fast, lag=lag)
    for seed in (0, 20):
        case = ragged(plain, device, seed)
        expected = greedy(plain, num_tokens=40, **case)
        assert torch.equal(greedy(fast, num_tokens=40, **case), expected)
        assert_path(fast, "device")


def test_mask_of_other_numbers_is_hugging_faces(models, device, accelerate) -> None:
    """What enters a state is multiplied by the mask, so that 2 is not 1."""
    plain, fast = models
    case = ragged(plain, device)
    case["attention_mask"] = case["attention_mask"] * 2
    accelerate(fast, on_unsupported="fallback")
    assert torch.equal(greedy(fast, num_tokens=12, **case), greedy(plain, num_tokens=12, **case))
    (why,) = torch_paged.explain(fast).last_call.reasons
    assert why.startswith("a mask of other numbers than 0 and 1")


# Shared attention between Mamba layers; layers that are only an MLP; no attention at all.
@pytest.mark.parametrize("model_type", ["zamba2", "nemotron_h", "mamba2"])
def test_other_orders_of_layers(model_type: str, device, accelerate) -> None:
    plain = copy.deepcopy(original(model_type)).to(device)
    fast = accelerate(copy.deepcopy(plain))
    case = ragged(plain, device)
    assert torch.equal(greedy(fast, num_tokens=12, **case), greedy(plain, num_tokens=12, **case))
    assert_path(fast)


def test_slots_are_taken_again_and_their_number_grows(models, device, accelerate) -> None:
    plain, fast = models
    accelerate(fast)
    for rows in (1, 4, 2, 1):
        ids = torch.cat([prompt(9, 30 + rows + i, vocabulary(plain), device) for i in range(rows)])
        assert torch.equal(greedy(fast, ids), greedy(plain, ids))
    assert_path(fast)


def test_one_prompt_with_many_answers_is_computed_once(models, device, accelerate) -> None:
    plain, fast = models
    accelerate(fast)
    ids = prompt(11, 3, vocabulary(plain), device)
    arguments = {"ids": ids, "num_return_sequences": 3, "max_new_tokens": 20, "temperature": 2.0}
    expected, got = seeded(plain, 5, **arguments), seeded(fast, 5, **arguments)
    assert torch.equal(got.result, expected.result)
    for state, wanted in zip(got.states, expected.states, strict=True):
        assert torch.equal(state, wanted)
    assert_path(fast)
    same = ids.repeat(3, 1)
    assert torch.equal(greedy(fast, same), greedy(plain, same))


def assert_same_states(got: Any, expected: Any) -> None:
    for layer, wanted in zip(got.layers, expected.layers, strict=True):
        assert type(layer) is type(wanted)
        for name in ("conv_states", "recurrent_states"):
            states, others = getattr(layer, name, {}), getattr(wanted, name, {})
            assert states.keys() == others.keys()
            for state, other in zip(states.values(), others.values(), strict=True):
                torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-5)
        if hasattr(wanted, "keys"):
            torch.testing.assert_close(layer.values, wanted.values, rtol=1e-4, atol=1e-5)


def test_the_cache_comes_back_with_its_states(models, device, accelerate) -> None:
    plain, fast = models
    accelerate(fast, lag=4)
    case = {"ids": prompt(13, 4, vocabulary(plain), device), "return_dict_in_generate": True}
    expected, got = greedy(plain, num_tokens=9, **case), greedy(fast, num_tokens=9, **case)
    assert torch.equal(got.sequences, expected.sequences)
    assert_path(fast, "stepped")
    assert_same_states(cache_of(got), cache_of(expected))
    accelerate(fast, on_unsupported="fallback")
    more = prompt(5, 6, vocabulary(plain), device)
    name = next(n for n in seams.CACHE_NAMES if n in seams.forward_arguments(plain))
    answers = []
    for model, output in ((plain, expected), (fast, got)):
        ids = torch.cat([output.sequences, more], dim=-1)
        answers.append(greedy(model, ids, num_tokens=9, **{name: cache_of(output)}))
    assert torch.equal(*answers)


def test_beams_take_their_states_along(models, device, accelerate) -> None:
    plain, fast = models
    accelerate(fast)
    ids = torch.cat([prompt(7, 8 + i, vocabulary(plain), device) for i in range(2)])
    arguments = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(greedy(fast, ids, **arguments), greedy(plain, ids, **arguments))
    assert_path(fast)


def test_a_prompt_is_computed_whole_whatever_the_budget(models, device, accelerate) -> None:
    plain, fast = models
    accelerate(fast, max_num_batched_tokens=4)
    case = ragged(plain, device)
    assert torch.equal(greedy(fast, **case), greedy(plain, **case))
    assert_path(fast)


def test_states_are_given_back_with_the_rest(models, device, accelerate) -> None:
    _, fast = models
    accelerate(fast)
    greedy(fast, prompt(5, 1, vocabulary(fast), device))
    states = find_session(fast).step._states
    assert states.nbytes > 0
    torch_paged.release(fast)
    assert states.nbytes == 0
    greedy(fast, prompt(5, 1, vocabulary(fast), device))
    assert states.nbytes > 0


def test_holes_in_a_mask_are_left_to_hugging_face(device) -> None:
    plain = copy.deepcopy(original("lfm2")).to(device)
    fast = torch_paged.accelerate(copy.deepcopy(plain))
    ids, mask = padded_prompts((9, 12), device)
    ids = ids % vocabulary(plain)
    mask[1, 5] = 0
    expected = greedy(plain, ids, attention_mask=mask)
    assert torch.equal(greedy(fast, ids, attention_mask=mask), expected)
    call = torch_paged.explain(fast).last_call
    assert call.path == "eager" and "a mask with holes and layers with a state" in call.reasons


def test_a_state_outside_the_cache_is_left_to_hugging_face(device) -> None:
    fast = torch_paged.accelerate(tiny_model("recurrent_gemma").to(device))
    report = torch_paged.explain(fast)
    assert report.tier == "eager"
    assert any("state outside the cache" in r or "state of their own" in r for r in report.reasons)


def test_a_cache_without_keys_is_told_from_one_that_was_used(device) -> None:
    plain = copy.deepcopy(original("mamba2")).to(device)
    fast = torch_paged.accelerate(copy.deepcopy(plain))
    ids = prompt(7, 5, vocabulary(plain), device)
    name = next(n for n in seams.CACHE_NAMES if n in seams.forward_arguments(plain))
    outputs = []
    for model in (plain, fast):
        cache = DynamicCache(config=model.config)
        first = greedy(model, ids, num_tokens=6, **{name: cache})
        outputs.append((first, greedy(model, first, num_tokens=6, **{name: cache})))
    for got, expected in zip(*outputs, strict=True):
        assert torch.equal(got, expected)
    assert torch_paged.explain(fast).last_call.path == "eager"
