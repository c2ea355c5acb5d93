"""Equal prompts are prefilled once and share their full blocks; results are as before."""

from __future__ import annotations

import copy

import pytest
import torch
from models import greedy, left_pad, prompt, seeded, tiny, tiny_family
from transformers import LlamaConfig

import torch_paged
from torch_paged.engine.batch import BatchRun


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device)


@pytest.fixture
def prefills(monkeypatch) -> list[tuple[int, int]]:
    """(tokens, blocks held afterwards) of each prefill that follows."""
    found: list[tuple[int, int]] = []
    original = BatchRun.prefill

    def prefill(self, **kwargs):
        logits = original(self, **kwargs)
        found.append((self._prompts.positions.shape[0], self._core.allocator.num_live))
        return logits

    monkeypatch.setattr(BatchRun, "prefill", prefill)
    return found


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_return_sequences(length, model, device, accelerate, prefills) -> None:
    ids = prompt(length, length, device=device)
    options = {"max_new_tokens": 40, "num_return_sequences": 5, "temperature": 1.5}
    expected = seeded(copy.deepcopy(model), 2, ids, **options)
    accelerate(model, lag=4)
    got = seeded(model, 2, ids, **options)
    assert torch.equal(got.result, expected.result)
    assert all(torch.equal(a, b) for a, b in zip(got.states, expected.states, strict=True))
    full, rest = length // 16, length % 16
    assert prefills[-1] == (length, full + (5 if rest else 0))
    assert torch_paged.explain(model).last_call.loop == "device"
    assert torch_paged.stats(model).kv_blocks_used == 0


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_padded_prompts_of_a_training_batch(family, device, accelerate, prefills) -> None:
    model = tiny_family(family, device)
    ids, mask = left_pad([prompt(n, n, device=device) for n in (5, 5, 5, 21, 21, 21)])
    options = {"attention_mask": mask, "max_new_tokens": 30, "temperature": 1.5, "top_k": 0}
    options |= {"eos_token_id": list(range(3, 20))}
    expected = seeded(copy.deepcopy(model), 2, ids, **options)
    accelerate(model)
    assert torch.equal(seeded(model, 2, ids, **options).result, expected.result)
    assert prefills[-1][0] == 26


def test_equal_prompts_that_are_not_neighbours(model, device, accelerate, prefills) -> None:
    ids = torch.cat([prompt(20, seed, device=device) for seed in (1, 2, 1, 3, 2)])
    expected = greedy(copy.deepcopy(model), ids)
    accelerate(model)
    assert torch.equal(greedy(model, ids), expected)
    assert prefills[-1][0] == 60


def test_what_differs_in_its_mask_is_not_equal(model, device, accelerate, prefills) -> None:
    ids = prompt(20, 1, device=device).repeat(3, 1)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    expected = greedy(copy.deepcopy(model), ids, attention_mask=mask)
    accelerate(model)
    assert torch.equal(greedy(model, ids, attention_mask=mask), expected)
    assert prefills[-1][0] == 35


def test_embeddings(model, device, accelerate, prefills) -> None:
    embeds = model.get_input_embeddings()(prompt(9, 9, device=device)).detach()
    options = {"inputs_embeds": embeds, "num_return_sequences": 3, "max_new_tokens": 9}
    results = []
    for m in (copy.deepcopy(model), model):
        if m is model:
            accelerate(model)
        torch.manual_seed(3)
        results.append(m.generate(do_sample=True, **options))
    assert torch.equal(*results)
    assert prefills[-1][0] == 9


def test_returned_cache_and_scores_of_shared_rows(model, device, accelerate) -> None:
    ids = prompt(21, 21, device=device)
    options = {"num_return_sequences": 3, "max_new_tokens": 6, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    outputs = []
    for m in (copy.deepcopy(model), model):
        if m is model:
            accelerate(model)
        outputs.append(seeded(m, 3, ids, **options).result)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for a, b in zip(outputs[0].logits, outputs[1].logits, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-3)
    caches = [output[list(output.keys())[-1]] for output in outputs]
    for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(b.keys, a.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.values, a.values, rtol=1e-4, atol=1e-4)


def test_chunked_prefill_of_shared_prompts(model, device, accelerate) -> None:
    ids = torch.cat([prompt(20, seed, device=device) for seed in (1, 2, 1, 3, 2)])
    expected = greedy(copy.deepcopy(model), ids)
    accelerate(model, max_num_batched_tokens=7)
    assert torch.equal(greedy(model, ids), expected)
