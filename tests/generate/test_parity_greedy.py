"""Greedy tokens equal those of Hugging Face under eager attention."""

from __future__ import annotations

import pytest
import torch
from models import (
    FAMILIES,
    greedy,
    padded_prompts,
    prompt,
    ragged_reference,
    reference,
    tiny,
    tiny_family,
)
from transformers import LlamaConfig

import torch_paged

BLOCK_SIZES = [8, 16, 32]
LAGS = [0, 1, 4]


def assert_device_loop(model) -> None:
    call = torch_paged.explain(model).last_call
    assert (call.path, call.loop) == ("fused", "device"), str(call)


@pytest.mark.parametrize("family", FAMILIES)
def test_single_prompt(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids = prompt(33, 33, device=device)
    expected = reference(model, ids, 40)
    accelerate(model)
    assert torch_paged.explain(model).tier == "fused"
    assert torch.equal(greedy(model, ids, 40), expected.sequences)
    assert_device_loop(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_left_padded_batch(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask, expected = ragged_reference(family, device)
    accelerate(model)
    assert torch.equal(greedy(model, ids, 40, attention_mask=mask), expected)
    assert_device_loop(model)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes_and_lags(family, block_size, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask, expected = ragged_reference(family, device)
    for lag in LAGS:
        accelerate(model, block_size=block_size, lag=lag)
        got = greedy(model, ids, 40, attention_mask=mask)
        assert torch.equal(got, expected), f"lag {lag}"
        assert_device_loop(model)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "qwen3")])
@pytest.mark.parametrize("block_size", [8, 32])
def test_other_families_in_other_block_sizes(family, block_size, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask, expected = ragged_reference(family, device)
    accelerate(model, block_size=block_size)
    # Each row passes the end of a block of 32.
    got = greedy(model, ids, 34, attention_mask=mask)
    assert torch.equal(got, expected[:, : 33 + 34])


@pytest.mark.parametrize("length", [1, 7, 15, 16, 17, 31, 32, 33, 48])
def test_prompts_around_block_multiples(length, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(length, length, device=device)
    expected = {n: reference(model, ids, n).sequences for n in (1, 16, 17)}
    accelerate(model)
    for num_tokens, sequences in expected.items():
        for _ in range(2):
            assert torch.equal(greedy(model, ids, num_tokens), sequences), num_tokens


def test_growth_from_one_block(device, accelerate) -> None:
    model = tiny(LlamaConfig, 16, device)
    ids = prompt(3, 3, device=device)
    expected = reference(model, ids, 300)
    accelerate(model)
    assert torch.equal(greedy(model, ids, 300), expected.sequences)


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_lengths_change_between_calls(order, device, accelerate) -> None:
    model = tiny(LlamaConfig, 1, device, max_position_embeddings=2048)
    prompts = [prompt(n, n, device=device) for n in (17, 257, 1025, 17)]
    expected = [reference(model, ids, 12).sequences for ids in prompts]
    accelerate(model)
    for ids, sequences in list(zip(prompts, expected, strict=True))[::order]:
        assert torch.equal(greedy(model, ids, 12), sequences)


@pytest.mark.parametrize("rows", [3, 5, 9])
def test_batches_between_and_above_the_buckets(rows, device, accelerate) -> None:
    model = tiny(LlamaConfig, 7, device)
    lengths = [3 + 4 * k for k in range(rows)]
    ids, mask = padded_prompts(lengths, device)
    singles = [reference(model, prompt(n, n, device=device), 20).sequences for n in lengths]
    accelerate(model, batch_buckets=(1, 2, 4, 8))
    got = greedy(model, ids, 20, attention_mask=mask)
    for row, single in zip(got, singles, strict=True):
        assert torch.equal(row[-20:], single[0, -20:])
    assert_device_loop(model)


def test_batch_of_more_sequences_than_slots(device, accelerate) -> None:
    model = tiny(LlamaConfig, 7, device)
    lengths = [3 + 4 * k for k in range(5)]
    ids, mask = padded_prompts(lengths, device)
    expected = reference(model, ids, 20, attention_mask=mask)
    accelerate(model, max_num_seqs=2, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 20, attention_mask=mask), expected.sequences)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seed"), [(14, 2, 1), (15, 5, 4), (5, 1, 3), (9, 9, 0)]
)
def test_head_groups(heads, kv_heads, seed, device, accelerate) -> None:
    model = tiny(
        LlamaConfig,
        seed,
        device,
        hidden_size=16 * heads,
        initializer_range=0.2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )
    ids = prompt(20, 3, device=device)
    expected = reference(model, ids)
    accelerate(model)
    assert torch.equal(greedy(model, ids), expected.sequences)


@pytest.mark.parametrize(("head_dim", "seed"), [(40, 5), (80, 1), (128, 3), (256, 4)])
def test_head_dims(head_dim, seed, device, accelerate) -> None:
    model = tiny(LlamaConfig, seed, device, head_dim=head_dim)
    ids = prompt(20, 3, device=device)
    expected = reference(model, ids)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids), expected.sequences)


def test_tied_head(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device, tie_word_embeddings=True)
    ids = prompt(20, 3, device=device)
    expected = reference(model, ids, 40)
    accelerate(model)
    assert torch.equal(greedy(model, ids, 40), expected.sequences)


def test_prefill_in_pieces(device, accelerate) -> None:
    model = tiny_family("llama", device)
    ids, mask = padded_prompts((5, 16, 100), device)
    expected = reference(model, ids, 40, attention_mask=mask)
    accelerate(model, max_num_batched_tokens=32)
    assert torch.equal(greedy(model, ids, 40, attention_mask=mask), expected.sequences)


def test_statistics_count_the_tokens(device, accelerate) -> None:
    model = tiny_family("llama", device)
    ids, mask = padded_prompts((5, 16, 33), device)
    accelerate(model)
    greedy(model, ids, 20, attention_mask=mask)
    stats = torch_paged.stats(model)
    assert stats.tokens == 60
    assert stats.fallbacks == {}
    assert stats.kv_blocks_used == 0 < stats.kv_blocks_total
