"""Latent attention: the cache holds latents, as Hugging Face's does, and answers stay the same."""

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
    tiny_family,
)
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import torch_paged
from torch_paged.decoder.spec import LatentAttentionSpec
from torch_paged.generate.registry import find_session
from torch_paged.patches.families import read_spec
from torch_paged.patches.refusal import SpecRefusal

LATENT = ["deepseek_v2", "deepseek_v3", "minicpm3"]
RANK, ROPE = 24, 8


@pytest.fixture(params=LATENT)
def model(request, device) -> PreTrainedModel:
    return tiny_family(request.param, device)


def assert_fused(model: nn.Module) -> None:
    assert torch_paged.explain(model).last_call.path == "fused"
    assert torch_paged.stats(model).kv_blocks_used == 0


def test_a_block_holds_a_latent_and_a_key_of_each_token(model, device, accelerate) -> None:
    accelerate(model, block_size=16)
    greedy(model, prompt(21, 3, device=device), 3)
    session = find_session(model)
    assert session is not None and session.core is not None
    pool = session.core.pool
    assert pool.block_bytes == 3 * 16 * (RANK + ROPE) * 4
    assert {tuple(t.shape[1:]) for t in pool.keys} == {(1, 16, RANK)}
    assert {tuple(t.shape[1:]) for t in pool.values} == {(1, 16, ROPE)}


def test_the_expanding_weight_is_read_in_place(model, device, accelerate) -> None:
    ids = prompt(11, 3, device=device)
    accelerate(model)
    before = greedy(model, ids, 12)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(-1.5)
            layer.self_attn.kv_a_layernorm.weight.mul_(0.5)
    after = greedy(model, ids, 12)
    torch_paged.restore(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, reference(model, ids, 12).sequences)


def assert_same_cache(got: Any, expected: Any, mask: torch.Tensor) -> None:
    for ours, theirs in zip(got.layers, expected.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert a.shape == b.shape and a.dtype == b.dtype
            real = mask[:, None, : a.shape[2], None]
            torch.testing.assert_close(a * real, b * real, rtol=1e-4, atol=1e-4)


def test_a_returned_cache_has_hugging_faces_latents(model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 16, 33), device)
    options: dict[str, Any] = {"attention_mask": mask, "return_dict_in_generate": True}
    expected = greedy(copy.deepcopy(model), ids, 20, **options)
    accelerate(model)
    got = greedy(model, ids, 20, **options)
    assert torch.equal(got.sequences, expected.sequences)
    real = torch.cat([mask, mask.new_ones(3, 19)], dim=1)
    assert_same_cache(cache_of(got), cache_of(expected), real)
    assert_fused(model)


@pytest.mark.parametrize("num_cached", [1, 10, 16])
def test_a_cache_passed_in_is_read_into_blocks(num_cached, model, device, accelerate) -> None:
    ids = prompt(21, 5, device=device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :num_cached], **{CACHE_NAME: cache})
    expected = reference(model, ids).sequences
    accelerate(model)
    assert torch.equal(greedy(model, ids, **{CACHE_NAME: cache}), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    assert_fused(model)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}]
)
def test_beams(options, model, device, accelerate) -> None:
    ids, mask = padded_prompts((3, 17), device)
    expected = greedy(copy.deepcopy(model), ids, 24, attention_mask=mask, **options)
    accelerate(model)
    assert torch.equal(greedy(model, ids, 24, attention_mask=mask, **options), expected)
    assert_fused(model)


def test_sampled_sequences_of_one_prompt(model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 20), device)
    options: dict[str, Any] = {
        "attention_mask": mask,
        "num_return_sequences": 3,
        "max_new_tokens": 20,
        "temperature": 0.8,
        "top_k": 40,
    }
    expected = seeded(copy.deepcopy(model), 7, ids, **options)
    accelerate(model)
    got = seeded(model, 7, ids, **options)
    assert torch.equal(got.result, expected.result)
    assert_fused(model)


def test_candidates_of_prompt_lookup(model, device, accelerate) -> None:
    ids = prompt(9, 3, device=device).repeat(1, 3)
    expected = reference(model, ids, 24).sequences
    accelerate(model)
    assert torch.equal(greedy(model, ids, 24, prompt_lookup_num_tokens=4), expected)
    assert_fused(model)


def test_prompts_in_chunks(model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 16, 70), device)
    expected = reference(model, ids, 12, attention_mask=mask).sequences
    accelerate(model, max_num_batched_tokens=32)
    assert torch.equal(greedy(model, ids, 12, attention_mask=mask), expected)
    assert_fused(model)


def test_folded_linears_give_the_same_tokens(model, device, accelerate, monkeypatch) -> None:
    ids, mask = padded_prompts((5, 16, 33), device)
    expected = reference(model, ids, 20, attention_mask=mask).sequences
    accelerate(model)
    session = find_session(model)
    assert session is not None and session.step is not None
    monkeypatch.setattr(session.step, "_fuse_linears", True)
    assert torch.equal(greedy(model, ids, 20, attention_mask=mask), expected)
    plan = str(session.step.plan("decode", 3))
    name = "model.layers.0.self_attn"
    query = f"{name}.q_a_proj" if model.config.q_lora_rank else f"{name}.q_proj"
    assert f"rms_norm+linear[{query} | {name}.kv_a_proj_with_mqa]" in plan
    if model.config.q_lora_rank:
        assert f"q0 = rms_norm+linear[{name}.q_b_proj](qa0)" in plan


def test_the_plan_names_what_attention_reads(model) -> None:
    attention = read_spec(model).layers[0].attention
    assert isinstance(attention, LatentAttentionSpec)
    rotation = {"deepseek_v2": "pairs", "deepseek_v3": "pairs_to_halves", "minicpm3": "halves"}
    assert attention.rotation == rotation[model.config.model_type]
    assert attention.cache_dims == (1, RANK, ROPE)


@pytest.mark.parametrize("part", ["kv_b_proj", "kv_a_layernorm"])
def test_a_part_that_must_be_called_leaves_the_fused_tier(part, device, accelerate) -> None:
    model = tiny_family("deepseek_v3", device)
    module = model.model.layers[1].self_attn.get_submodule(part)
    forward = module.forward
    module.forward = lambda x: 1.5 * forward(x)
    ids = prompt(11, 3, device=device)
    expected = reference(model, ids, 12).sequences
    with pytest.raises(SpecRefusal, match=f"{part} cannot be taken apart"):
        read_spec(model)
    accelerate(model)
    assert torch.equal(greedy(model, ids, 12), expected)
    report = torch_paged.explain(model)
    assert report.tier == "patched" and f"{part} cannot be taken apart" in str(report)
