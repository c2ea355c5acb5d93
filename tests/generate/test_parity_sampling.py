"""Seeded sampling draws Hugging Face's tokens and leaves the generators where it leaves them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import FAMILIES, greedy, padded_prompts, prompt, reference, seeded, tiny, tiny_family
from transformers import LlamaConfig

import torch_paged

PARAMETERS = {
    "defaults": {},
    "no_filter": {"top_k": 0},
    "temperature": {"temperature": 0.7, "top_k": 0},
    "hot": {"temperature": 3.0, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_k": 0, "top_p": 0.8},
    "min_p": {"top_k": 0, "min_p": 0.05},
    "top_k_top_p": {"top_k": 20, "top_p": 0.9},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "all_cold": {"temperature": 0.4, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
    "repetition": {"temperature": 1.5, "repetition_penalty": 1.3},
}


def assert_same_run(got, expected) -> None:
    assert torch.equal(got.result, expected.result)
    for state, expected_state in zip(got.states, expected.states, strict=True):
        assert torch.equal(state, expected_state)


def ragged(device) -> dict[str, Any]:
    ids, mask = padded_prompts((3, 16, 21), device)
    return {"ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name, device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device, initializer_range=0.15)
    arguments = {**ragged(device), "max_new_tokens": 24, **PARAMETERS[name]}
    expected = seeded(copy.deepcopy(model), 11, **arguments)
    for lag in (0, 4):
        accelerate(model, lag=lag)
        assert_same_run(seeded(model, 11, **arguments), expected)
    assert torch_paged.explain(model).last_call.path == "fused"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    arguments = {**ragged(device), "max_new_tokens": 40, "temperature": 1.5, "top_p": 0.95}
    expected = seeded(copy.deepcopy(model), 5, **arguments)
    accelerate(model)
    assert_same_run(seeded(model, 5, **arguments), expected)
    call = torch_paged.explain(model).last_call
    assert (call.path, call.loop) == ("fused", "device")


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_sizes_and_lags(block_size, lag, device, accelerate) -> None:
    model = tiny_family("llama", device)
    arguments = {**ragged(device), "max_new_tokens": 40, "temperature": 2.0}
    expected = seeded(copy.deepcopy(model), 7, **arguments)
    accelerate(model, block_size=block_size, lag=lag)
    assert_same_run(seeded(model, 7, **arguments), expected)


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_rows_that_end_early(lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device, initializer_range=0.15)
    arguments = {**ragged(device), "max_new_tokens": 40, "top_k": 0}
    free = seeded(copy.deepcopy(model), 11, **arguments).result[:, 21:]
    # Row 0 ends at the fourth token, row 1 at the ninth, row 2 at the thirteenth at the latest.
    arguments["eos_token_id"] = [int(free[0, 3]), int(free[1, 8]), int(free[2, 12])]
    expected = seeded(copy.deepcopy(model), 11, **arguments)
    assert 21 < expected.result.shape[1] <= 21 + 13
    accelerate(model, lag=lag)
    assert_same_run(seeded(model, 11, **arguments), expected)
    assert torch_paged.explain(model).last_call.loop == "device"


@pytest.mark.parametrize("lag", [0, 4])
def test_every_row_ends_at_the_first_step(lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    arguments = {**ragged(device), "max_new_tokens": 40, "eos_token_id": list(range(3, 257))}
    expected = seeded(copy.deepcopy(model), 11, **arguments, suppress_tokens=[0, 1, 2])
    assert expected.result.shape[1] == 22
    accelerate(model, lag=lag)
    assert_same_run(seeded(model, 11, **arguments, suppress_tokens=[0, 1, 2]), expected)


@pytest.mark.parametrize("lag", [0, 4])
def test_calls_in_a_row_continue_the_random_numbers(lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device, initializer_range=0.15)
    arguments = {**ragged(device), "do_sample": True, "top_k": 0}
    ids = arguments.pop("ids")
    lengths = (17, 3, 1, 30)

    def run(m):
        torch.manual_seed(23)
        outputs = [m.generate(ids, max_new_tokens=n, **arguments) for n in lengths]
        return [*outputs, torch.rand(4, device=device), torch.rand(4)]

    expected = run(copy.deepcopy(model))
    accelerate(model, lag=lag)
    for got, want in zip(run(model), expected, strict=True):
        assert torch.equal(got, want)


def test_num_return_sequences(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    arguments = {**ragged(device), "max_new_tokens": 24, "temperature": 2.0}
    arguments["num_return_sequences"] = 3
    expected = seeded(copy.deepcopy(model), 2, **arguments)
    assert expected.result.shape[0] == 9
    assert len({tuple(row.tolist()) for row in expected.result}) == 9
    accelerate(model)
    assert_same_run(seeded(model, 2, **arguments), expected)
    assert torch_paged.explain(model).last_call.path == "fused"


@pytest.mark.parametrize(
    "edge",
    [{"top_p": 0.0}, {"top_p": 1e-8}, {"top_k": 1}, {"temperature": 1e-5}],
    ids=lambda edge: "_".join(f"{k}_{v}" for k, v in edge.items()),
)
def test_edge_that_means_greedy(edge, device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 8)
    same = seeded(copy.deepcopy(model), 3, ids, max_new_tokens=8, **edge)
    assert torch.equal(same.result, expected.sequences)
    accelerate(model)
    assert_same_run(seeded(model, 3, ids, max_new_tokens=8, **edge), same)


@pytest.mark.parametrize("top_k", [0, 1_000_000])
def test_top_k_that_filters_nothing(top_k, device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device, initializer_range=0.1)
    ids = prompt(17, 17, device=device)
    expected = seeded(copy.deepcopy(model), 3, ids, max_new_tokens=24, top_k=257)
    accelerate(model)
    assert_same_run(seeded(model, 3, ids, max_new_tokens=24, top_k=top_k), expected)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0.0}, {"top_k": -1}, {"repetition_penalty": 0.0}],
    ids=lambda wrong: "_".join(f"{k}_{v}" for k, v in wrong.items()),
)
def test_wrong_parameter_raises_as_before_and_leaves_the_model_usable(
    wrong, device, accelerate
) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 8)
    with pytest.raises(ValueError):
        seeded(copy.deepcopy(model), 3, ids, max_new_tokens=8, **wrong)
    accelerate(model)
    with pytest.raises(ValueError):
        seeded(model, 3, ids, max_new_tokens=8, **wrong)
    assert torch.equal(greedy(model, ids, 8), expected.sequences)


def test_greedy_draws_no_random_numbers(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids = prompt(17, 17, device=device)
    accelerate(model)
    greedy(model, ids, 2)
    idle = seeded(model, 9, ids, max_new_tokens=20, do_sample=False)
    torch.manual_seed(9)
    assert torch.equal(idle.states[0], torch.get_rng_state())


def test_large_batch_is_sampled_as_one(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device, initializer_range=0.15)
    ids, mask = padded_prompts([3 + 2 * k for k in range(11)], device)
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "top_k": 0}
    expected = seeded(copy.deepcopy(model), 4, ids, **arguments)
    accelerate(model, batch_buckets=(1, 2, 4))
    assert_same_run(seeded(model, 4, ids, **arguments), expected)
