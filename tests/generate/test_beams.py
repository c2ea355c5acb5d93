"""Beam search on the paged cache: sequences, scores and beam indices equal Hugging Face's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import CACHE_NAME, cache_of, greedy, padded_prompts, prompt, seeded, tiny, tiny_family
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

import torch_paged
from torch_paged.ops.copy_blocks import copy_blocks

ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device)


def assert_same_output(got, expected) -> None:
    assert type(got) is type(expected) and list(got.keys()) == list(expected.keys())
    assert torch.equal(got.sequences, expected.sequences)
    assert torch.equal(got.beam_indices, expected.beam_indices)
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, rtol=0, atol=1e-4)
    for name in ("scores", "logits"):
        for step, wanted in zip(got[name], expected[name], strict=True):
            torch.testing.assert_close(step, wanted, rtol=1e-4, atol=1e-3)


def assert_fast(model) -> None:
    call = torch_paged.explain(model).last_call
    assert (call.path, call.loop) == ("fused", "stepped")
    assert torch_paged.stats(model).kv_blocks_used == 0


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_beams_of_three_prompts(early_stopping, block_size, model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 16, 17), device)
    options: dict[str, Any] = {"attention_mask": mask, "num_beams": 4, "num_return_sequences": 3}
    options |= {"length_penalty": 0.7, "early_stopping": early_stopping, **ALL}
    expected = greedy(copy.deepcopy(model), ids, 20, **options)
    accelerate(model, block_size=block_size)
    assert_same_output(greedy(model, ids, 20, **options), expected)
    assert_fast(model)


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 2.0])
def test_end_tokens(length_penalty, model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 16, 17), device)
    options = {"attention_mask": mask, "num_beams": 3, "length_penalty": length_penalty, **ALL}
    options |= {"eos_token_id": list(range(3, 60))}
    expected = greedy(copy.deepcopy(model), ids, 20, **options)
    accelerate(model)
    assert_same_output(greedy(model, ids, 20, **options), expected)
    assert_fast(model)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "gpt_neox", "gpt2", "bloom"])
def test_families(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((3, 17), device)
    options = {"attention_mask": mask, "num_beams": 3, **ALL}
    expected = greedy(copy.deepcopy(model), ids, 24, **options)
    accelerate(model)
    assert_same_output(greedy(model, ids, 24, **options), expected)
    assert_fast(model)


class Unknown(LlamaForCausalLM):
    """In no table of families, like any subclass."""


def test_patched_tier(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    model.__class__ = Unknown
    ids, mask = padded_prompts((3, 17), device)
    options = {"attention_mask": mask, "num_beams": 3, **ALL}
    expected = greedy(copy.deepcopy(model), ids, 24, **options)
    accelerate(model)
    assert_same_output(greedy(model, ids, 24, **options), expected)
    assert torch_paged.explain(model).last_call.path == "patched"


@pytest.mark.parametrize("filters", [{}, {"temperature": 1.3, "top_k": 20, "top_p": 0.9}])
def test_sampled_beams(filters, model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 16), device)
    options = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": 16, **filters, **ALL}
    expected = seeded(copy.deepcopy(model), 4, ids, **options)
    accelerate(model)
    got = seeded(model, 4, ids, **options)
    assert_same_output(got.result, expected.result)
    assert all(torch.equal(a, b) for a, b in zip(got.states, expected.states, strict=True))
    assert_fast(model)


class Odd(LogitsProcessor):
    """Keeps the ids it is shown, and chooses by them."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.clone())
        scores = scores.clone()
        scores[:, int(input_ids.sum()) % 2 :: 2] -= 3.0
        return scores


def test_processors_see_the_ids_of_their_beam(model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 16), device)
    options: dict[str, Any] = {"attention_mask": mask, "num_beams": 3, **ALL}
    options |= {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    seen = [Odd(), Odd()]
    expected = greedy(copy.deepcopy(model), ids, 12, logits_processor=[seen[0]], **options)
    accelerate(model)
    got = greedy(model, ids, 12, logits_processor=[seen[1]], **options)
    assert_same_output(got, expected)
    for ours, theirs in zip(seen[1].seen, seen[0].seen, strict=True):
        assert torch.equal(ours, theirs)


def test_sequences_alone(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    expected = greedy(copy.deepcopy(model), ids, num_beams=5)
    accelerate(model)
    assert torch.equal(greedy(model, ids, num_beams=5), expected)


def test_returned_cache_is_that_of_the_last_beams(model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 17), device)
    options = {"attention_mask": mask, "num_beams": 3, **ALL}
    outputs = []
    for m in (copy.deepcopy(model), model):
        if m is model:
            accelerate(model)
        outputs.append(greedy(m, ids, 12, **options))
    real = torch.cat([mask, mask.new_ones(2, 11)], 1).repeat_interleave(3, 0)
    keep = real[:, None, :, None].bool()
    caches = [cache_of(output) for output in outputs]
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 28
    for ours, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(ours.keys * keep, theirs.keys * keep, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values * keep, theirs.values * keep, rtol=1e-4, atol=1e-4)


def test_embeddings_as_the_prompt(model, device, accelerate) -> None:
    embeds = model.get_input_embeddings()(prompt(9, 9, device=device)).detach()
    options = {"inputs_embeds": embeds, "num_beams": 3, "max_new_tokens": 12, "do_sample": False}
    expected = copy.deepcopy(model).generate(**options)
    accelerate(model)
    assert torch.equal(model.generate(**options), expected)
    assert_fast(model)


def test_beams_that_raise_leave_a_usable_model(model, device, accelerate) -> None:
    class Raises(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 20:
                raise RuntimeError("enough")
            return scores

    ids = prompt(17, 17, device=device)
    expected = greedy(copy.deepcopy(model), ids, num_beams=3)
    accelerate(model)
    with pytest.raises(RuntimeError, match="enough"):
        greedy(model, ids, num_beams=3, logits_processor=[Raises()])
    assert torch_paged.stats(model).kv_blocks_used == 0
    assert torch.equal(greedy(model, ids, num_beams=3), expected)


def test_a_prompt_is_prefilled_once_and_partial_blocks_alone_are_copied(
    model, device, accelerate, monkeypatch
) -> None:
    from torch_paged.engine import batch, kv_transfer

    prefilled, copied = [], []
    original = batch.BatchRun.prefill

    def prefill(self, **kwargs):
        prefilled.append(self._prompts.ids.shape[0])
        return original(self, **kwargs)

    def copying(cache, source, target):
        copied.append(source.shape[0])
        copy_blocks(cache, source, target)

    accelerate(model)
    ids = prompt(40, 40, device=device)
    greedy(model, ids, 1, num_beams=4)
    monkeypatch.setattr(batch.BatchRun, "prefill", prefill)
    monkeypatch.setattr(kv_transfer, "copy_blocks", copying)
    greedy(model, ids, 24, num_beams=4)
    assert prefilled == [40]
    assert copied and max(copied) <= 3


def test_cache_passed_in(model, device, accelerate) -> None:
    untouched = copy.deepcopy(model)
    accelerate(model, on_unsupported="fallback")
    ids = prompt(13, 3, device=device)
    results = []
    for m in (model, untouched):
        first = greedy(m, ids, 4, return_dict_in_generate=True)
        turn = torch.cat([first.sequences, prompt(5, 5, device=device)], 1)
        cache = cache_of(first)
        # A cache of one row does not fit two beams.
        with pytest.raises(RuntimeError):
            greedy(m, turn, 9, num_beams=2, **{CACHE_NAME: copy.deepcopy(cache)})
        cache.batch_repeat_interleave(2)
        results.append(greedy(m, turn, 9, num_beams=2, **{CACHE_NAME: cache}))
        assert cache.get_seq_length() == turn.shape[1] + 8
    assert torch.equal(*results)
    assert_fast(model)
