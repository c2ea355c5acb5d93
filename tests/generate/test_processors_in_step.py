"""Known processors run in the step: equal tokens and generators, with the host ahead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import greedy, left_pad, prompt, reference, seeded, tiny
from transformers import LlamaConfig
from transformers.generation import logits_process

import torch_paged
from torch_paged.generate import samplers

EOS = {"eos_token_id": list(range(3, 20))}
IN_STEP: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "reward_of_repetition": {"repetition_penalty": 0.6},
    "no_repeat_1gram": {"no_repeat_ngram_size": 1},
    "no_repeat_2gram": {"no_repeat_ngram_size": 2},
    "no_repeat_5gram": {"no_repeat_ngram_size": 5},
    "bad_words": {"bad_words_ids": [[5], [7, 9], [11, 9], [20, 21, 22]], **EOS},
    "sequence_bias": {"sequence_bias": [[[5], 3.0], [[6, 7], -4.0], [[8, 7], 6.0]]},
    "min_new_tokens": {"min_new_tokens": 12, **EOS},
    "min_length": {"min_length": 48, **EOS},
    "forced_bos": {"forced_bos_token_id": 9},
    "forced_eos": {"forced_eos_token_id": [9, 10]},
    "suppress": {"suppress_tokens": list(range(20, 40))},
    "begin_suppress": {"begin_suppress_tokens": list(range(3, 50))},
    "remove_invalid": {"remove_invalid_values": True},
    "renormalize": {"renormalize_logits": True, "suppress_tokens": [4]},
    "all_together": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[5], [7, 9]],
        "min_new_tokens": 8,
        "forced_eos_token_id": 9,
        "suppress_tokens": [21, 22],
        "begin_suppress_tokens": [23, 24],
        "renormalize_logits": True,
        **EOS,
    },
}
SAMPLED = {
    "typical": {"typical_p": 0.7},
    "epsilon": {"epsilon_cutoff": 0.01},
    "filters": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
}


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device, vocab_size=64, initializer_range=0.2)


def batch(device, *lengths: int) -> tuple[torch.Tensor, dict[str, Any]]:
    ids, mask = left_pad([prompt(n, n, 64, device) for n in lengths])
    return ids, {"attention_mask": mask}


def assert_equal(got, expected) -> None:
    assert torch.equal(got.result, expected.result)
    assert all(torch.equal(a, b) for a, b in zip(got.states, expected.states, strict=True))


def loop_of(model) -> str:
    call = torch_paged.explain(model).last_call
    assert call.path == "fused" and not call.reasons
    return call.loop


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("name", IN_STEP)
def test_greedy(name, lag, model, device, accelerate) -> None:
    ids, options = batch(device, 2, 9, 31)
    options |= IN_STEP[name]
    expected = greedy(copy.deepcopy(model), ids, 24, **options)
    accelerate(model, lag=lag)
    assert torch.equal(greedy(model, ids, 24, **options), expected)
    assert loop_of(model) == "device"


@pytest.mark.parametrize("name", [*IN_STEP, *SAMPLED])
def test_sampled_with_every_other_warper(name, model, device, accelerate) -> None:
    ids, options = batch(device, 2, 9, 31)
    options |= (IN_STEP | SAMPLED)[name]
    options = {"temperature": 1.5, "top_k": 40, "max_new_tokens": 24} | options
    expected = seeded(copy.deepcopy(model), 5, ids, **options)
    accelerate(model, lag=4)
    assert_equal(seeded(model, 5, ids, **options), expected)
    assert loop_of(model) == "device"


def test_later_calls_of_other_widths_share_a_sampler(model, device, accelerate) -> None:
    untouched = copy.deepcopy(model)
    accelerate(model, lag=4)
    options = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, **EOS}
    for lengths, least in (((3, 9), 4), ((30, 17), 12), ((1, 1), 0), ((9, 3), 20)):
        ids, more = batch(device, *lengths)
        more |= options | {"min_new_tokens": least, "forced_eos_token_id": 12}
        for seed in (1, 2):
            expected = seeded(untouched, seed, ids, max_new_tokens=24, **more)
            assert_equal(seeded(model, seed, ids, max_new_tokens=24, **more), expected)
            assert loop_of(model) == "device"


def test_more_kinds_than_are_kept(model, device, accelerate, monkeypatch) -> None:
    monkeypatch.setattr(samplers, "_MAX_KEPT", 2)
    untouched = copy.deepcopy(model)
    accelerate(model)
    ids, more = batch(device, 3, 9)
    for penalty in (1.1, 1.3, 1.5, 1.1, 1.5):
        options = more | {"repetition_penalty": penalty}
        assert torch.equal(greedy(model, ids, **options), greedy(untouched, ids, **options))


def test_embeddings_as_the_prompt(model, device, accelerate) -> None:
    untouched = copy.deepcopy(model)
    accelerate(model)
    ids = prompt(9, 9, 64, device)
    embeds = model.get_input_embeddings()(ids).detach()
    for given in ({}, {"input_ids": ids}):
        options = {"inputs_embeds": embeds, "max_new_tokens": 20, "do_sample": False, **given}
        options |= {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
        options |= {"bad_words_ids": [[5], [7, 9, 4]], "min_new_tokens": 3, **EOS}
        assert torch.equal(model.generate(**options), untouched.generate(**options))
        assert loop_of(model) == "device"


def test_prompt_that_the_penalty_ignores(model, device, accelerate) -> None:
    untouched = copy.deepcopy(model)
    accelerate(model)
    ids, more = batch(device, 9, 31)
    for ignored in (None, 0, 20, 40):
        kind = logits_process.RepetitionPenaltyLogitsProcessor
        processors = [kind(1.7, prompt_ignore_length=ignored)]
        got, expected = (
            greedy(m, ids, **more, logits_processor=processors) for m in (model, untouched)
        )
        assert torch.equal(got, expected)
        assert loop_of(model) == "device"


def test_streamer_is_served_behind_the_step(model, device, accelerate) -> None:
    ids = prompt(9, 9, 64, device)
    options = {"repetition_penalty": 1.7}
    expected = reference(model, ids, 20, **options).sequences
    puts: list[torch.Tensor] = []
    streamer = type("S", (), {"put": lambda self, v: puts.append(v), "end": lambda self: None})()
    accelerate(model, lag=4)
    assert torch.equal(greedy(model, ids, 20, streamer=streamer, **options), expected)
    assert torch.equal(torch.cat([p.reshape(-1) for p in puts]), expected[0].cpu())
    assert torch_paged.explain(model).last_call.loop == "lagged"


def test_cache_of_ids_that_were_seen_before(model, device, accelerate) -> None:
    from models import CACHE_NAME, cache_of

    untouched = copy.deepcopy(model)
    accelerate(model)
    ids = prompt(9, 9, 64, device)
    options = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 3}
    results = []
    for m in (model, untouched):
        first = greedy(m, ids, 9, return_dict_in_generate=True, **options)
        turn = torch.cat([first.sequences, prompt(6, 11, 64, device)], 1)
        results.append(greedy(m, turn, 12, **options, **{CACHE_NAME: cache_of(first)}))
    assert torch.equal(*results)


def test_what_is_too_long_to_look_back_at_is_stepped(
    model, device, accelerate, monkeypatch
) -> None:
    monkeypatch.setattr(samplers, "_MAX_HISTORY", 40)
    untouched = copy.deepcopy(model)
    accelerate(model)
    ids = prompt(9, 9, 64, device)
    for num_tokens, loop in ((31, "device"), (32, "stepped")):
        expected = greedy(untouched, ids, num_tokens, repetition_penalty=1.5)
        assert torch.equal(greedy(model, ids, num_tokens, repetition_penalty=1.5), expected)
        assert torch_paged.explain(model).last_call.loop == loop


def test_ids_outside_the_vocabulary_raise_as_before(model, device, accelerate) -> None:
    ids = prompt(9, 9, 64, device)
    accelerate(model)
    with pytest.raises(ValueError, match="vocabulary size is 64"):
        greedy(model, ids, bad_words_ids=[[64]])


def test_empty_sequences_do_what_they_did(model, device, accelerate) -> None:
    """Nothing in some releases of transformers, an error in others."""
    ids, options = prompt(17, 17, 64, device), {"bad_words_ids": [[5], []]}
    accelerate(model)
    try:
        expected = greedy(copy.deepcopy(model), ids, **options)
    except IndexError as error:
        with pytest.raises(IndexError, match=str(error)):
            greedy(model, ids, **options)
    else:
        assert torch.equal(greedy(model, ids, **options), expected)
