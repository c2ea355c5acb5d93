"""A returned cache keeps the blocks of its call, and shows tensors when somebody looks."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path
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
    tiny,
    tiny_family,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import torch_paged
from torch_paged.engine import batch
from torch_paged.engine.leased_blocks import LeaseReader

sys.path.append(str(Path(__file__).parent))

from lease_case import (  # noqa: E402
    Streamer,
    assert_equal,
    assert_nothing_held,
    immediate,
    lent,
    tensors,
    turn,
)


@pytest.fixture
def case(device, accelerate):
    model = tiny(LlamaConfig, 5, device)
    return accelerate(copy.deepcopy(model)), model, prompt(13, 3, device=device)


@pytest.fixture
def copies(monkeypatch) -> Counter[str]:
    """Count how often keys and values of a layer or a call leave blocks, or enter them."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(batch, "load_kv", "load")
    counted(batch, "gather_kv", "gather")
    counted(LeaseReader, "__call__", "gather")
    return counts


class Unknown(LlamaForCausalLM):
    """In no table of families, like any subclass."""


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "at a block's end": {"max_new_tokens": 15},
    "end tokens": {"eos_token_id": list(range(3, 90)), "max_new_tokens": 20},
    "sampling": {"do_sample": True, "top_k": 20},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "stepped": {"output_scores": True},
    "a streamer": {"streamer": Streamer()},
}


@pytest.mark.parametrize("name", CALLS)
def test_bit_for_bit_what_copying_gives(name, device, accelerate, monkeypatch) -> None:
    model = accelerate(tiny(LlamaConfig, 5, device), lag=4)
    ids, mask = padded_prompts((5, 16, 17), device)
    if name == "a streamer":
        ids, mask = ids[1:2], mask[1:2]
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}

    def call() -> Any:
        torch.manual_seed(3)
        return model.generate(ids, return_dict_in_generate=True, **{**options, **CALLS[name]})

    with immediate(monkeypatch):
        expected = call()
    got = call()
    assert lent(cache_of(got)) and not lent(cache_of(expected))
    assert torch_paged.stats(model).kv_blocks_used == 0
    assert torch_paged.stats(model).kv_blocks_leased > 0
    assert torch.equal(got.sequences, expected.sequences)
    assert_equal(cache_of(got), cache_of(expected))
    assert_nothing_held(model)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gpt_neox", "mistral", "gemma2", "patched"])
def test_families(family, device, accelerate, monkeypatch) -> None:
    model = tiny_family("llama" if family == "patched" else family, device)
    if family == "patched":
        model.__class__ = Unknown
    accelerate(model)
    ids, mask = padded_prompts((5, 16, 17), device)
    with immediate(monkeypatch):
        expected = turn(model, ids, attention_mask=mask)
    got = turn(model, ids, attention_mask=mask)
    # A cache that forgets is filled at once.
    assert lent(cache_of(got)) == (family not in ("mistral", "gemma2"))
    assert_equal(cache_of(got), cache_of(expected))
    assert_nothing_held(model)


def test_a_genuine_cache(case, copies) -> None:
    model, untouched, ids = case
    cache, theirs = cache_of(turn(model, ids)), cache_of(turn(untouched, ids))
    assert type(cache) is type(theirs) is DynamicCache
    assert all(isinstance(layer, DynamicLayer) for layer in cache.layers)
    for ask in (
        len,
        repr,
        lambda c: c.get_seq_length(),
        lambda c: c.get_seq_length(2),
        lambda c: c.get_mask_sizes(4, 1),
        lambda c: (c.get_max_length(), c.is_sliding, c.is_initialized, c.is_compileable),
        lambda c: [layer.device for layer in c.layers],
    ):
        assert ask(cache) == ask(theirs)
    assert lent(cache) and not copies["gather"]
    for ours, expected in zip(cache, theirs, strict=True):
        torch.testing.assert_close(ours[:2], expected[:2], rtol=1e-4, atol=1e-4)
    assert not lent(cache) and all(type(layer) is DynamicLayer for layer in cache.layers)
    assert sorted(vars(cache.layers[0])) == sorted(vars(theirs.layers[0]))
    assert_nothing_held(model)


def test_three_turns_without_a_copy(case, device, copies, monkeypatch) -> None:
    model, untouched, ids = case

    def talk() -> Any:
        following, cache = ids, {}
        for seed in (11, 13, 14):
            out = turn(model, following, **cache)
            assert torch.equal(out.sequences, reference(untouched, following, 9).sequences)
            cache = {CACHE_NAME: cache_of(out)}
            following = torch.cat([out.sequences, prompt(6, seed, device=device)], 1)
        return cache_of(out)

    with immediate(monkeypatch):
        expected = talk()
    assert copies["load"] == 2 and copies["gather"] == 3 * 3
    copies.clear()
    got = talk()
    assert not copies and lent(got)
    # What an earlier turn alone has held is free: 58 tokens.
    assert torch_paged.stats(model).kv_blocks_leased == 4
    assert_equal(got, expected)
    assert copies["gather"] == 3
    assert_nothing_held(model)


@pytest.mark.parametrize("num_given", ["all ids", "the new ids"])
def test_padded_turns_without_a_copy(num_given, device, accelerate, copies, monkeypatch) -> None:
    model = accelerate(tiny(LlamaConfig, 5, device))
    ids, mask = padded_prompts((5, 16, 17), device)
    more, more_mask = left_pad([prompt(n, n + 40, device=device) for n in (2, 4, 3)])

    def talk() -> Any:
        first = turn(model, ids, 7, attention_mask=mask)
        seen = torch.cat([mask, mask.new_ones(3, 7), more_mask], 1)
        following = torch.cat([first.sequences, more], 1)
        if num_given == "the new ids":
            # The last token of a turn is not in its cache.
            following = following[:, -5:]
        return turn(model, following, attention_mask=seen, **{CACHE_NAME: cache_of(first)})

    with immediate(monkeypatch):
        expected = talk()
    copies.clear()
    got = talk()
    assert not copies
    assert torch.equal(got.sequences, expected.sequences)
    assert_equal(cache_of(got), cache_of(expected))


def test_a_mask_that_hides_more_is_not_taken_for_the_same(case, device, copies) -> None:
    model, untouched, ids = case
    first = [turn(m, ids) for m in (model, untouched)]
    following = torch.cat([first[0].sequences, prompt(6, 11, device=device)], 1)
    mask = torch.ones_like(following)
    mask[:, 2:5] = 0
    got, expected = (
        turn(m, following, attention_mask=mask, **{CACHE_NAME: cache_of(out)})
        for m, out in zip((model, untouched), first, strict=True)
    )
    assert torch.equal(got.sequences, expected.sequences)
    assert copies["load"] == 1
    # Hidden columns keep what they had: they come from the first turn.
    for a, b in zip(tensors(cache_of(got)), tensors(cache_of(expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_the_models_forward_left_in_hidden_columns(case, device, monkeypatch) -> None:
    model, untouched, _ = case
    ids, mask = padded_prompts((9, 13), device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :10]

    def talk() -> Any:
        cache = DynamicCache(config=model.config)
        kwargs = {"attention_mask": mask[:, :10], "position_ids": positions}
        with torch.no_grad():
            model(ids[:, :10], **kwargs, **{CACHE_NAME: cache})
        out = turn(model, ids, attention_mask=mask, **{CACHE_NAME: cache})
        following = torch.cat([out.sequences, prompt(4, 4, device=device).repeat(2, 1)], 1)
        seen = torch.cat([mask, mask.new_ones(2, 13)], 1)
        return cache_of(turn(model, following, attention_mask=seen, **{CACHE_NAME: cache}))

    with immediate(monkeypatch):
        expected = talk()
    got = talk()
    assert lent(got)
    kept = copy.deepcopy(got)
    for cache in (got, kept, expected):
        cache.crop(-25)
    assert lent(got) and got.get_seq_length() < 10
    assert_equal(got, expected)
    assert_equal(kept, expected)


def test_one_prefix_for_three_questions_without_a_copy(case, device, copies) -> None:
    model, untouched, ids = case
    out = turn(model, ids)
    prefix, length = cache_of(out), cache_of(out).get_seq_length()
    for seed in (11, 13, 14):
        question = torch.cat([out.sequences, prompt(6, seed, device=device)], 1)
        own = copy.deepcopy(prefix)
        got = turn(model, question, **{CACHE_NAME: own})
        assert torch.equal(got.sequences, reference(untouched, question, 9).sequences)
        assert own.get_seq_length() == got.sequences.shape[1] - 1
    assert not copies and lent(prefix) and prefix.get_seq_length() == length
    theirs = cache_of(turn(untouched, ids))
    for a, b in zip(tensors(prefix), tensors(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 9, 14])
def test_an_answer_taken_back(count, case, device, copies) -> None:
    model, untouched, ids = case
    out = turn(model, ids)
    cache = cache_of(out)
    cache.crop(-count)
    ahead = torch.cat([out.sequences[:, : 22 - count], prompt(6, 11, device=device)], 1)
    got = turn(model, ahead, **{CACHE_NAME: cache})
    assert torch.equal(got.sequences, reference(untouched, ahead, 9).sequences)
    assert not copies and lent(cache)


def test_a_cache_passed_back_twice(case, device) -> None:
    model, untouched, ids = case
    results = []
    for m in (model, untouched):
        first = turn(m, ids)
        following = torch.cat([first.sequences, prompt(6, 11, device=device)], 1)
        options = {CACHE_NAME: cache_of(first)}
        second = greedy(m, following, 9, **options)
        # The same turn once more: the cache has more than that by now.
        cache_of(first).crop(-(cache_of(first).get_seq_length() - 21))
        third = greedy(m, following, 9, **options)
        results.append((second, third, cache_of(first).get_seq_length()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_a_call_that_fails_leaves_the_cache_as_it_was(case, device) -> None:
    model, untouched, ids = case
    out = turn(model, ids)
    following = torch.cat([out.sequences, prompt(6, 11, device=device)], 1)

    class Failing(Streamer):
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        greedy(model, following, 9, streamer=Failing(), **{CACHE_NAME: cache_of(out)})
    assert lent(cache_of(out)) and cache_of(out).get_seq_length() == 21
    got = greedy(model, following, 9, **{CACHE_NAME: cache_of(out)})
    assert torch.equal(got, reference(untouched, following, 9).sequences)
