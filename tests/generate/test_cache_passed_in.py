"""A cache handed to generate() is read into blocks, only the rest is prefilled, and it grows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import (
    CACHE_NAME,
    cache_of,
    greedy,
    left_pad,
    padded_prompts,
    prompt,
    reference,
    seeded,
    tiny,
    tiny_family,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import torch_paged
from torch_paged.engine.batch import BatchRun


@pytest.fixture
def case(device):
    model = tiny(LlamaConfig, 5, device)
    return model, copy.deepcopy(model), prompt(13, 3, device=device)


@pytest.fixture
def prefilled_tokens(monkeypatch) -> list[int]:
    """The tokens of each prefill that follows."""
    counts: list[int] = []
    original = BatchRun.prefill

    def prefill(self, **kwargs):
        counts.append(self._prompts.positions.shape[0])
        return original(self, **kwargs)

    monkeypatch.setattr(BatchRun, "prefill", prefill)
    return counts


def filled(model, ids, **kwargs: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{CACHE_NAME: cache}, **kwargs)
    return cache


def assert_same_cache(got, expected, mask=None) -> None:
    """Compare two caches where `mask` [rows, columns] says that there are tokens."""
    assert got.get_seq_length() == expected.get_seq_length()
    for ours, theirs in zip(got.layers, expected.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert a.shape == b.shape and a.dtype == b.dtype
            if mask is not None:
                keep = mask[:, None, :, None].to(a)
                a, b = a * keep, b * keep
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_next_turn_prefills_only_what_is_new(case, device, accelerate, prefilled_tokens) -> None:
    model, untouched, ids = case
    accelerate(model)
    first = greedy(model, ids, 9, return_dict_in_generate=True)
    assert first.sequences.shape[1] == 22
    following = torch.cat([first.sequences, prompt(6, 11, device=device)], 1)
    got = greedy(model, following, **{CACHE_NAME: cache_of(first)})
    assert torch.equal(got, reference(untouched, following).sequences)
    assert prefilled_tokens[-2:] == [13, 7]
    assert torch_paged.explain(model).last_call.path == "fused"
    assert cache_of(first).get_seq_length() == got.shape[1] - 1


@pytest.mark.parametrize("num_cached", [1, 10, 12])
def test_prefix_filled_by_the_models_own_forward(num_cached, case, accelerate) -> None:
    model, untouched, ids = case
    accelerate(model)
    caches = [filled(model, ids[:, :num_cached]) for _ in range(2)]
    got = greedy(model, ids, **{CACHE_NAME: caches[0]})
    expected = greedy(untouched, ids, **{CACHE_NAME: caches[1]})
    assert torch.equal(got, expected)
    assert torch.equal(got, reference(untouched, ids).sequences)
    assert_same_cache(caches[0], caches[1])


def test_one_prefix_for_three_questions(case, device, accelerate) -> None:
    model, untouched, ids = case
    accelerate(model)
    prefix = filled(model, ids)
    for seed in (11, 13, 14):
        question = torch.cat([ids, prompt(6, seed, device=device)], 1)
        got = greedy(model, question, **{CACHE_NAME: copy.deepcopy(prefix)})
        assert torch.equal(got, greedy(untouched, question))
    assert prefix.get_seq_length() == 13


@pytest.mark.parametrize("num_given", [1, 4])
def test_only_the_new_ids(num_given, case, accelerate) -> None:
    model, untouched, ids = case
    accelerate(model)
    mask = torch.ones_like(ids)
    caches = [filled(model, ids[:, :-num_given]) for _ in range(2)]
    rest = ids[:, -num_given:]
    got = greedy(model, rest, attention_mask=mask, **{CACHE_NAME: caches[0]})
    expected = greedy(untouched, rest, attention_mask=mask, **{CACHE_NAME: caches[1]})
    assert torch.equal(got, expected)
    assert torch.equal(got[:, num_given:], reference(untouched, ids).sequences[:, 13:])
    assert_same_cache(caches[0], caches[1])


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_neox", "gpt2", "opt", "bloom"])
@pytest.mark.parametrize("by", ["forward", "generate"])
def test_left_padded_batch(family, by, device, accelerate) -> None:
    model = tiny_family(family, device)
    untouched = copy.deepcopy(model)
    accelerate(model)
    ids, mask = padded_prompts((5, 16, 17), device)
    caches = []
    for source in (model, untouched):
        if by == "forward":
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            caches.append(filled(source, ids, attention_mask=mask, position_ids=positions))
            turn, seen = ids, mask
        else:
            first = greedy(source, ids, 6, attention_mask=mask, return_dict_in_generate=True)
            caches.append(cache_of(first))
            turn = first.sequences
            seen = torch.cat([mask, mask.new_ones(3, 6)], 1)
    more, more_mask = left_pad([prompt(n, n + 40, device=device) for n in (4, 4, 4)])
    turn, seen = torch.cat([turn, more], 1), torch.cat([seen, more_mask], 1)
    got = greedy(model, turn, attention_mask=seen, **{CACHE_NAME: caches[0]})
    expected = greedy(untouched, turn, attention_mask=seen, **{CACHE_NAME: caches[1]})
    assert torch.equal(got, expected)
    assert torch_paged.explain(model).last_call.path == "fused"
    after = torch.cat([seen, seen.new_ones(3, 23)], 1)
    assert_same_cache(caches[0], caches[1], after)


def test_holes_keep_their_columns(case, device, accelerate) -> None:
    model, untouched, ids = case
    accelerate(model)
    mask = torch.ones_like(ids)
    mask[:, [2, 5, 11]] = 0
    outputs = [
        greedy(m, ids, 5, attention_mask=mask, return_dict_in_generate=True)
        for m in (model, untouched)
    ]
    after = torch.cat([mask, mask.new_ones(1, 4)], 1)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert_same_cache(cache_of(outputs[0]), cache_of(outputs[1]), after)
    turn = torch.cat([outputs[0].sequences, prompt(4, 4, device=device)], 1)
    seen = torch.cat([after, after.new_ones(1, 5)], 1)
    got, expected = (
        greedy(m, turn, attention_mask=seen, **{CACHE_NAME: cache_of(output)})
        for m, output in zip((model, untouched), outputs, strict=True)
    )
    assert torch.equal(got, expected)


def test_sampled_turn_leaves_the_generator_where_it_was(case, device, accelerate) -> None:
    model, untouched, ids = case
    accelerate(model, lag=4)
    caches = [filled(model, ids[:, :10]) for _ in range(2)]
    options = {"max_new_tokens": 12, "eos_token_id": list(range(3, 40)), "top_k": 20}
    expected = seeded(untouched, 3, ids, **options, **{CACHE_NAME: caches[1]})
    got = seeded(model, 3, ids, **options, **{CACHE_NAME: caches[0]})
    assert torch.equal(got.result, expected.result)
    assert all(torch.equal(a, b) for a, b in zip(got.states, expected.states, strict=True))
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_three_turns_on_one_cache(case, device, accelerate) -> None:
    model, untouched, ids = case
    accelerate(model)
    cache, turn = DynamicCache(config=model.config), ids
    for seed in (1, 2, 3):
        got = greedy(model, turn, 8, **{CACHE_NAME: cache})
        assert torch.equal(got, reference(untouched, turn, 8).sequences)
        assert cache.get_seq_length() == got.shape[1] - 1
        turn = torch.cat([got, prompt(5, seed, device=device)], 1)


def test_static_cache_and_windows_fall_back(device, accelerate) -> None:
    for family in ("llama", "mistral"):
        model = tiny_family(family, device)
        ids = prompt(13, 3, device=device)
        cache = (
            StaticCache(config=model.config, max_cache_len=64)
            if family == "llama"
            else filled(model, ids[:, :10])
        )
        expected = greedy(copy.deepcopy(model), ids, **{CACHE_NAME: copy.deepcopy(cache)})
        accelerate(model, on_unsupported="fallback")
        assert torch.equal(greedy(model, ids, **{CACHE_NAME: cache}), expected)
        call = torch_paged.explain(model).last_call
        assert call.path == "eager" and "passed in" in call.reasons[0]


class Unknown(LlamaForCausalLM):
    """In no table of families, like any subclass."""


def test_patched_tier(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    model.__class__ = Unknown
    untouched = copy.deepcopy(model)
    accelerate(model)
    ids, mask = padded_prompts((9, 13), device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :10]
    options = {"attention_mask": mask[:, :10], "position_ids": positions}
    caches = [filled(m, ids[:, :10], **options) for m in (model, untouched)]
    got = greedy(model, ids, attention_mask=mask, **{CACHE_NAME: caches[0]})
    expected = greedy(untouched, ids, attention_mask=mask, **{CACHE_NAME: caches[1]})
    assert torch.equal(got, expected)
    assert torch_paged.explain(model).last_call.path == "patched"
    assert_same_cache(caches[0], caches[1], torch.cat([mask, mask.new_ones(2, 23)], 1))


def test_blocks_are_given_back(case, device, accelerate) -> None:
    model, _, ids = case
    accelerate(model)
    greedy(model, ids, 30, **{CACHE_NAME: filled(model, ids[:, :10])})
    assert torch_paged.stats(model).kv_blocks_used == 0
