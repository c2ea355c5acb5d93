"""What return_dict_in_generate hands out: scores, logits, hidden states, a usable cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import (
    CACHE_NAME,
    cache_of,
    greedy,
    padded_prompts,
    prompt,
    reference,
    seeded,
    tiny,
    tiny_family,
)
from transformers import LlamaConfig
from transformers.generation import GenerateDecoderOnlyOutput

import torch_paged

FAMILIES = ["llama", "qwen3", "mistral", "gemma2"]


def dictionary(model, ids, num_tokens=6, **kwargs: Any):
    return greedy(model, ids, num_tokens, return_dict_in_generate=True, **kwargs)


def assert_close(got: tuple, expected: tuple) -> None:
    assert len(got) == len(expected)
    for step, wanted in zip(got, expected, strict=True):
        assert step.shape == wanted.shape and step.dtype == wanted.dtype
        torch.testing.assert_close(step, wanted, rtol=1e-4, atol=1e-3)


def test_dictionary_without_extras(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids, mask = padded_prompts((3, 17, 33), device)
    expected = dictionary(copy.deepcopy(model), ids, attention_mask=mask)
    accelerate(model)
    got = dictionary(model, ids, attention_mask=mask)
    assert isinstance(got, GenerateDecoderOnlyOutput)
    assert torch.equal(got.sequences, expected.sequences)
    assert list(got.keys()) == list(expected.keys())
    assert torch_paged.explain(model).last_call.path == "fused"


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_logits(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((5, 16, 33), device)
    options = {"attention_mask": mask, "output_scores": True, "output_logits": True}
    options |= {"repetition_penalty": 1.3, "suppress_tokens": [5, 6, 7]}
    expected = dictionary(copy.deepcopy(model), ids, 20, **options)
    accelerate(model)
    got = dictionary(model, ids, 20, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(got.logits, expected.logits)
    assert_close(got.scores, expected.scores)
    assert torch_paged.explain(model).last_call.path == "fused"


def test_scores_of_a_sampled_run_give_the_transition_scores(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids, mask = padded_prompts((3, 17, 33), device)
    options = {"attention_mask": mask, "max_new_tokens": 6, "temperature": 0.7, "top_k": 20}
    options |= {"repetition_penalty": 1.3, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    copied = copy.deepcopy(model)
    expected = seeded(copied, 1, ids, **options)
    accelerate(model)
    got = seeded(model, 1, ids, **options)
    assert torch.equal(got.result.sequences, expected.result.sequences)
    assert torch.equal(got.states[-1], expected.states[-1])
    assert all(torch.isfinite(step).all() for step in got.result.logits)
    assert all(torch.isinf(step).any() for step in got.result.scores)
    ours = model.compute_transition_scores(got.result.sequences, got.result.scores)
    theirs = copied.compute_transition_scores(expected.result.sequences, expected.result.scores)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_hidden_states_and_attentions(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids, mask = padded_prompts((3, 17, 33), device)
    options = {"attention_mask": mask, "output_hidden_states": True, "output_attentions": True}
    accelerate(model, on_unsupported="fallback")
    got = dictionary(model, ids, **options)
    assert len(got.hidden_states) == len(got.attentions) == 6
    assert got.hidden_states[0][0].shape == (3, 33, 64)
    assert got.hidden_states[1][0].shape == (3, 1, 64)
    assert got.attentions[0][0].shape == (3, 4, 33, 33)
    # Hugging Face leaves hooks of its own behind; they are no reason to stay slow.
    plain = greedy(model, ids, 6, attention_mask=mask)
    assert torch.equal(plain, got.sequences)
    assert torch_paged.explain(model).last_call.path == "fused"


def test_finished_rows_keep_their_logits(device, accelerate) -> None:
    model = tiny(LlamaConfig, 14, device)
    ids, mask = padded_prompts((5, 17), device)
    free = reference(model, ids, attention_mask=mask).sequences[:, 17:]
    options = {"attention_mask": mask, "output_logits": True, "output_scores": True}
    options["eos_token_id"] = [int(free[1, 2])]
    expected = dictionary(copy.deepcopy(model), ids, 16, **options)
    accelerate(model)
    got = dictionary(model, ids, 16, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(got.logits, expected.logits)
    assert_close(got.scores, expected.scores)


def test_logits_are_float32_and_kept_apart(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device).to(torch.bfloat16)
    ids = prompt(17, 17, device=device)
    accelerate(model)
    got = dictionary(model, ids, output_logits=True)
    assert all(step.dtype is torch.float32 and step.shape == (1, 257) for step in got.logits)
    assert len({step.data_ptr() for step in got.logits}) == 6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lag", [0, 4])
def test_returned_cache_equals_hugging_faces(family, lag, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((5, 16, 33), device)
    copied = copy.deepcopy(model)
    expected = dictionary(copied, ids, 20, attention_mask=mask)
    accelerate(model, lag=lag)
    got = dictionary(model, ids, 20, attention_mask=mask)
    assert torch.equal(got.sequences, expected.sequences)
    cache, wanted = cache_of(got), cache_of(expected)
    assert type(cache) is type(wanted)
    assert cache.get_seq_length() == wanted.get_seq_length() == 33 + 19
    assert len(cache.layers) == len(wanted.layers)
    # The next step of the untouched model on it: valid keys and values are what count.
    last = got.sequences[:, -1:]
    longer = torch.cat([mask, mask.new_ones(3, 20)], 1)
    logits = []
    for held in (cache, wanted):
        with torch.no_grad():
            positions = longer.cumsum(1)[:, -1:] - 1
            output = copied(
                last, attention_mask=longer, position_ids=positions, **{CACHE_NAME: held}
            )
        logits.append(output.logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("by", ["hugging_face", "torch_paged"])
def test_returned_cache_serves_the_next_turn(by, device, accelerate) -> None:
    model = tiny(LlamaConfig, 5, device)
    copied = copy.deepcopy(model)
    ids = prompt(13, 3, device=device)
    accelerate(model, on_unsupported="fallback")
    first = dictionary(model, ids, 9)
    following = torch.cat([first.sequences, prompt(6, 11, device=device)], 1)
    expected = reference(copied, following).sequences
    second = copied if by == "hugging_face" else model
    got = greedy(second, following, **{CACHE_NAME: cache_of(first)})
    assert torch.equal(got, expected)


def test_cache_outlives_later_calls_release_and_restore(device, accelerate) -> None:
    model = tiny(LlamaConfig, 5, device)
    copied = copy.deepcopy(model)
    ids = prompt(13, 3, device=device)
    accelerate(model)
    first = dictionary(model, ids, 9)
    following = torch.cat([first.sequences, prompt(6, 11, device=device)], 1)
    expected = reference(copied, following).sequences
    greedy(model, prompt(40, 1, device=device), 30)
    torch_paged.release(model)
    greedy(model, prompt(40, 2, device=device), 30)
    torch_paged.restore(model)
    assert torch.equal(greedy(copied, following, **{CACHE_NAME: cache_of(first)}), expected)


def test_cache_of_a_run_that_ended_early(device, accelerate) -> None:
    model = tiny(LlamaConfig, 14, device)
    ids = prompt(17, 17, device=device)
    copied = copy.deepcopy(model)
    free = reference(model, ids).sequences[0, 17:]
    accelerate(model, lag=4)
    got = dictionary(model, ids, 24, eos_token_id=int(free[4]))
    assert got.sequences.shape[1] == 22
    assert cache_of(got).get_seq_length() == 21
    following = torch.cat([got.sequences, prompt(6, 14, device=device)], 1)
    expected = reference(copied, following).sequences
    assert torch.equal(greedy(copied, following, **{CACHE_NAME: cache_of(got)}), expected)


def test_results_belong_to_the_caller(device, accelerate) -> None:
    model = tiny(LlamaConfig, 9, device)
    ids = prompt(17, 17, device=device)
    accelerate(model)
    first = dictionary(model, ids, 20, output_logits=True)
    kept = first.sequences.clone(), [step.clone() for step in first.logits]
    second = dictionary(model, prompt(21, 21, device=device), 20, output_logits=True)
    assert second.sequences.data_ptr() != first.sequences.data_ptr()
    assert torch.equal(first.sequences, kept[0])
    assert all(torch.equal(a, b) for a, b in zip(first.logits, kept[1], strict=True))
