"""Prefill attention: kernel and reference against dense float64 attention over poisoned pools."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_paged.ops import paged_attention as ops
from torch_paged.ops.paged_attention.config import PrefillConfig
from torch_paged.ops.paged_attention.prefill import _launch_paged_prefill_attention

sys.path.append(str(Path(__file__).parent))

from paged_attention_case import (  # noqa: E402
    DEVICE,
    DTYPES,
    assert_within_budget,
    dense_attention,
    make_pool,
)

WIDE = PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _check_prefill(
    rows: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_dim: int = 0,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    scale: float = 0.25,
    padding_tokens: int = 0,
    config: PrefillConfig | None = None,
    **features: object,
) -> None:
    """Check kernel and reference on rows of (prefix, query length); (0, 0) is a padding row."""
    lengths = [prefix + count for prefix, count in rows]
    counts = [count for _, count in rows]
    pool = make_pool(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=dtype,
        block_size=block_size,
        num_queries=counts,
    )
    # A padding row may hold tokens: their outputs are zero.
    counts = [count if length else 3 for count, length in zip(counts, lengths, strict=True)]
    bounds = [sum(counts[:i]) for i in range(len(counts) + 1)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    num_tokens = bounds[-1] + padding_tokens
    query = torch.randn(num_tokens, num_heads, head_dim + 8, dtype=dtype, device=DEVICE)
    query = query[..., :head_dim]  # strided, as a view into a projection is
    arguments = [query, pool.k_cache, pool.v_cache, pool.block_table, pool.slots, cu_seqlens]
    arguments.append(pool.context_lens)
    kernel = _launch_paged_prefill_attention(
        *arguments, max(counts), scale, config=config, **features
    )
    # The reference indexes with CPU lists: it is the CPU kernel.
    moved = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in features.items()}
    reference = ops.paged_prefill_attention_reference(
        *[a.cpu() for a in arguments], max(counts), scale, **moved
    ).to(DEVICE)
    exact = torch.zeros(kernel.shape, dtype=torch.float64, device=DEVICE)
    low = torch.zeros_like(kernel)
    live = torch.zeros(num_tokens, dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(lengths):
        if length:
            tokens = slice(bounds[row], bounds[row + 1])
            live[tokens] = True
            dense = (query[tokens], pool.keys[row], pool.values[row])
            exact[tokens] = dense_attention(*dense, torch.float64, scale=scale, **features)
            low[tokens] = dense_attention(*dense, dtype, scale=scale, **features)
    for output in (kernel, reference):
        assert (output[~live] == 0).all()
        assert_within_budget(output, exact, low)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unwritten_slots_never_reach_the_output(dtype: torch.dtype) -> None:
    rows = [(0, 1), (0, 15), (3, 13), (16, 1), (0, 31), (32, 1), (250, 5), (241, 16)]
    _check_prefill(rows, head_dim=64, dtype=dtype, config=WIDE)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 255, 257])
def test_whole_prompts_of_every_length(length: int) -> None:
    _check_prefill([(0, length)], config=WIDE)


@pytest.mark.parametrize("num_rows", [255, 256])
def test_every_row_finds_its_tiles(num_rows: int) -> None:
    """Twice as many lanes look for the rows of tiles past 255 of them."""
    _check_prefill([(i % 3, 1 + i % 2) for i in range(num_rows)], num_kv_heads=4, config=WIDE)


@pytest.mark.parametrize("config", [None, WIDE], ids=["default", "wide"])
def test_padding_rows_and_tokens_give_zeros(config: PrefillConfig | None) -> None:
    _check_prefill([(0, 0), (5, 20), (0, 0), (0, 7), (0, 0)], padding_tokens=70, config=config)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(14, 2), (15, 5), (12, 2), (5, 1), (28, 4), (9, 9), (40, 1)]
)
def test_every_group_size_is_computed(num_heads: int, num_kv_heads: int) -> None:
    _check_prefill([(7, 18), (0, 5)], num_heads=num_heads, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 112, 128, 192, 256])
def test_every_head_dim_is_computed(head_dim: int, dtype: torch.dtype) -> None:
    _check_prefill([(0, 17), (30, 9)], head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(("head_dim", "v_dim"), [(48, 32), (32, 80), (192, 128)])
def test_values_may_have_another_head_dim(head_dim: int, v_dim: int) -> None:
    _check_prefill([(0, 17), (30, 9)], head_dim=head_dim, v_dim=v_dim)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("window", [1, 8, 17])
@pytest.mark.parametrize("config", [None, WIDE], ids=["default", "wide"])
def test_window_counts_the_token_itself(
    window: int, block_size: int, config: PrefillConfig | None
) -> None:
    # Whole prompts, and the same cut into chunks of five.
    rows = [(0, 40), (0, 5), (5, 5), (15, 5), (16, 5), (60, 5)]
    _check_prefill(rows, window=window, block_size=block_size, config=config)


@pytest.mark.parametrize("window", [0, 32])
def test_sinks_count_once_a_query(window: int) -> None:
    sinks = torch.linspace(-1.0, 3.0, 4, device=DEVICE)
    _check_prefill([(0, 60), (0, 5), (90, 9)], sinks=sinks, window=window)


@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
def test_softcap_applies_to_scaled_scores(softcap: float) -> None:
    _check_prefill([(0, 60), (70, 5)], scale=8**-0.5, softcap=softcap, window=64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alibi_is_relative_to_the_query(dtype: torch.dtype) -> None:
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(4)], device=DEVICE)
    sinks = torch.linspace(-1.0, 3.0, 4, device=DEVICE)
    _check_prefill([(0, 40), (35, 5)], dtype=dtype, alibi_slopes=slopes, sinks=sinks)


def test_alibi_in_bfloat16_is_rounded_at_every_key() -> None:
    slopes = torch.tensor([2.0 ** (-0.3 * (i + 1)) for i in range(4)], device=DEVICE)
    _check_prefill([(0, 40), (300, 21)], alibi_slopes=slopes.bfloat16(), scale=0.3)


# No memory is there: whoever reads it does not survive.
NOWHERE = 1 << 30


@pytest.mark.parametrize("config", [None, WIDE], ids=["default", "wide"])
@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_table_entries_behind_the_window_are_not_followed(
    window: int, config: PrefillConfig | None
) -> None:
    # (tokens in all, queries): prefixes of 0, of whole blocks, and of blocks +- 1.
    rows = [(70, 10), (20, 20), (48, 16), (52, 3)]
    lengths, counts = [n for n, _ in rows], [q for _, q in rows]
    pool = make_pool(lengths, num_kv_heads=2, head_dim=16, num_queries=counts)
    query = torch.randn(sum(counts), 4, 16, device=DEVICE)
    bounds = torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)
    tables = {"intact": pool.block_table, "nowhere": pool.block_table.clone()}
    tables["NaN"] = pool.block_table.clone()
    free = int((~pool.written().any(1)).nonzero()[0])
    for row, (length, count) in enumerate(rows):
        behind = max(length - count - window + 1, 0) // 16
        tables["nowhere"][pool.slots[row], :behind] = NOWHERE
        tables["NaN"][pool.slots[row], :behind] = free

    def kernel(name: str) -> Tensor:
        indices = (tables[name], pool.slots, bounds, pool.context_lens, 20, 0.25)
        return _launch_paged_prefill_attention(
            query, pool.k_cache, pool.v_cache, *indices, window=window, config=config
        )

    def reference(name: str) -> Tensor:
        args = (query, pool.k_cache, pool.v_cache, tables[name], pool.slots, bounds)
        args = tuple(t.cpu() for t in (*args, pool.context_lens))
        return ops.paged_prefill_attention_reference(*args, 20, 0.25, window=window)

    expected = kernel("intact")
    assert torch.isfinite(expected).all()
    assert (expected.cpu() - reference("intact")).abs().max() < 1e-5
    for name in ("nowhere", "NaN"):
        assert torch.equal(expected, kernel(name))
        assert torch.equal(reference("intact"), reference(name))


def test_no_tokens_give_an_empty_output() -> None:
    pool = make_pool([4], num_kv_heads=2, head_dim=16)
    cu_seqlens = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    query = torch.empty(0, 4, 16, device=DEVICE)
    for function in (_launch_paged_prefill_attention, ops.paged_prefill_attention_reference):
        output = function(
            query,
            pool.k_cache,
            pool.v_cache,
            pool.block_table,
            pool.slots[:0],
            cu_seqlens,
            pool.context_lens,
            0,
            1.0,
        )
        assert output.shape == (0, 4, 16)
