"""Latent attention: kernels and references against dense float64 attention over poisoned pools."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_paged.ops import latent_attention as ops
from torch_paged.ops.latent_attention.config import DecodeConfig, PrefillConfig
from torch_paged.ops.latent_attention.decode import (
    _launch_latent_decode_attention,
    num_splits,
)
from torch_paged.ops.latent_attention.prefill import _launch_latent_prefill_attention

sys.path.append(str(Path(__file__).parent))

from paged_attention_case import (  # noqa: E402
    DEVICE,
    DTYPES,
    Pool,
    assert_within_budget,
    dense_attention,
    make_pool,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LENGTHS = [1, 15, 16, 17, 0, 31, 33, 129]
# Many ranges at small sizes: every length above 16 is merged from several.
SPLIT = DecodeConfig(
    block_n=16,
    num_stages=1,
    single_tokens=16,
    min_split_tokens=16,
    programs_per_sm=64,
    max_splits=6,
)
TALL = DecodeConfig(block_m=32, block_n=32, num_warps=8)


def latent_pool(
    lengths: list[int], rank: int, rope: int, dtype: torch.dtype, **options: object
) -> Pool:
    """Latents as the keys of a pool of one head, rotary keys as its values."""
    return make_pool(lengths, num_kv_heads=1, head_dim=rank, v_dim=rope, dtype=dtype, **options)


def queries(
    num_tokens: int, heads: int, rank: int, rope: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return queries as a step has them: heads outermost, and the end of a wider projection."""
    torch.manual_seed(0)
    latent = torch.randn(heads, num_tokens, rank, device=DEVICE).to(dtype).transpose(0, 1)
    wide = torch.randn(num_tokens, heads, 5 + rope, device=DEVICE).to(dtype)
    return latent, wide[..., 5:]


def dense_latent(latent: Tensor, rope: Tensor, pool: Pool, row: int, dtype: torch.dtype) -> Tensor:
    """Attention of the last tokens of a row in `dtype`; [tokens, heads, rank]."""
    query = torch.cat((latent, rope), dim=-1)
    keys = torch.cat((pool.keys[row], pool.values[row]), dim=-1)
    return dense_attention(query, keys, pool.keys[row], dtype, scale=0.25)


def caches(pool: Pool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return pool.k_cache, pool.v_cache, pool.block_table, pool.slots


def on_cpu(function, *arguments: object) -> Tensor:
    moved = [a.cpu() if isinstance(a, Tensor) else a for a in arguments]
    return function(*moved).to(DEVICE)


def _check_decode(
    lengths: list[int],
    heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    config: DecodeConfig | None = None,
    block_size: int = 16,
) -> None:
    pool = latent_pool(lengths, rank, rope, dtype, block_size=block_size)
    latent, rotated = queries(len(lengths), heads, rank, rope, dtype)
    arguments = (latent, rotated, *caches(pool), pool.context_lens, 0.25)
    outputs = [
        _launch_latent_decode_attention(*arguments, config=config),
        on_cpu(ops.latent_decode_attention_reference, *arguments),
    ]
    exact = torch.zeros(latent.shape, dtype=torch.float64, device=DEVICE)
    low = torch.zeros(latent.shape, dtype=dtype, device=DEVICE)
    for row, length in enumerate(lengths):
        if length == 0:
            assert all((output[row] == 0).all() for output in outputs)
            continue
        one = slice(row, row + 1)
        exact[row] = dense_latent(latent[one], rotated[one], pool, row, torch.float64)[0]
        low[row] = dense_latent(latent[one], rotated[one], pool, row, dtype)[0]
    for output in outputs:
        assert output.is_contiguous() and output.dtype == dtype
        assert_within_budget(output, exact, low)


@pytest.mark.parametrize("config", [None, SPLIT], ids=["default", "split"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_matches_dense_attention(dtype: torch.dtype, config: DecodeConfig | None) -> None:
    _check_decode(LENGTHS, 4, 32, 16, dtype, config)


@pytest.mark.parametrize(
    ("heads", "rank", "rope"), [(1, 16, 8), (17, 24, 10), (20, 48, 4), (3, 33, 2)], ids=str
)
def test_decode_takes_any_heads_and_widths(heads: int, rank: int, rope: int) -> None:
    _check_decode([17, 5], heads, rank, rope, torch.float32, SPLIT)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_decode_walks_blocks_of_any_size(block_size: int) -> None:
    _check_decode([1, 31, 33], 4, 16, 8, torch.float32, SPLIT, block_size)


def test_decode_with_tall_tiles() -> None:
    _check_decode([40, 3], 40, 32, 16, torch.float16, TALL)


def test_an_empty_batch_gives_an_empty_output() -> None:
    pool = latent_pool([3], 16, 8, torch.float32)
    latent, rotated = queries(0, 4, 16, 8, torch.float32)
    no_rows = pool.slots[:0]
    out = ops.latent_decode_attention(
        latent,
        rotated,
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        no_rows,
        pool.context_lens,
        scale=1.0,
    )
    assert out.shape == (0, 4, 16)


def test_a_row_is_the_same_beside_other_rows() -> None:
    lengths = [37, 129, 5]
    pool = latent_pool(lengths, 32, 16, torch.float16)
    latent, rotated = queries(3, 4, 32, 16, torch.float16)
    # The split count follows from the batch, so it is fixed here.
    together = _launch_latent_decode_attention(
        latent, rotated, *caches(pool), pool.context_lens, 0.25, config=SPLIT
    )
    for row in range(3):
        one = slice(row, row + 1)
        alone = _launch_latent_decode_attention(
            latent[one],
            rotated[one],
            pool.k_cache,
            pool.v_cache,
            pool.block_table,
            pool.slots[one],
            pool.context_lens,
            0.25,
            config=SPLIT,
        )
        assert torch.equal(alone[0], together[row])


def test_splits_follow_from_shapes_alone() -> None:
    config = DecodeConfig(single_tokens=128, min_split_tokens=128, max_splits=64)
    assert num_splits(1, 128, 132, config) == 1
    assert num_splits(1, 4096, 132, config) == 32
    assert num_splits(1, 1 << 17, 132, config) == 64
    assert num_splits(64, 1 << 17, 132, config) == 2
    assert num_splits(256, 1 << 17, 132, config) == 1


def _check_prefill(
    lengths: list[int],
    num_queries: list[int],
    heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    config: PrefillConfig | None = None,
    padding: int = 0,
) -> None:
    pool = latent_pool(lengths, rank, rope, dtype, num_queries=num_queries)
    bounds = [0]
    for count in num_queries:
        bounds.append(bounds[-1] + count)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    latent, rotated = queries(bounds[-1] + padding, heads, rank, rope, dtype)
    arguments = (latent, rotated, *caches(pool), cu_seqlens, pool.context_lens, 0.25)
    outputs = [
        _launch_latent_prefill_attention(*arguments, config=config),
        on_cpu(ops.latent_prefill_attention_reference, *arguments),
    ]
    exact = torch.zeros(latent.shape, dtype=torch.float64, device=DEVICE)
    low = torch.zeros(latent.shape, dtype=dtype, device=DEVICE)
    for row, length in enumerate(lengths):
        tokens = slice(bounds[row], bounds[row + 1])
        if length == 0:
            continue
        exact[tokens] = dense_latent(latent[tokens], rotated[tokens], pool, row, torch.float64)
        low[tokens] = dense_latent(latent[tokens], rotated[tokens], pool, row, dtype)
    for output in outputs:
        assert output.is_contiguous() and output.dtype == dtype
        assert_within_budget(output, exact, low)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_matches_dense_attention(dtype: torch.dtype) -> None:
    _check_prefill([7, 33, 0, 17, 20], [7, 20, 3, 17, 1], 3, 32, 16, dtype)


@pytest.mark.parametrize(
    ("heads", "rank", "rope"), [(1, 16, 8), (5, 24, 10), (17, 16, 4)], ids=str
)
def test_prefill_takes_any_heads_and_widths(heads: int, rank: int, rope: int) -> None:
    _check_prefill([18, 5], [9, 5], heads, rank, rope, torch.float32, padding=3)


def test_prefill_with_tall_tiles() -> None:
    _check_prefill([40, 3], [21, 3], 8, 32, 16, torch.float16, PrefillConfig(32, 64, 8, 2))


def test_padding_behind_the_rows_is_zero() -> None:
    pool = latent_pool([5], 16, 8, torch.float32, num_queries=[5])
    latent, rotated = queries(9, 2, 16, 8, torch.float32)
    cu_seqlens = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    out = _launch_latent_prefill_attention(
        latent, rotated, *caches(pool), cu_seqlens, pool.context_lens, 0.25
    )
    assert (out[5:] == 0).all() and out[:5].isfinite().all()


def step_arguments(dtype: torch.dtype = torch.float32) -> tuple[Pool, dict[str, Tensor]]:
    pool = latent_pool([20, 0, 37], 16, 8, dtype)
    latent, rotated = queries(3, 4, 16, 8, dtype)
    return pool, {"latent": latent, "rotated": rotated}


def test_opcheck() -> None:
    pool, tensors = step_arguments()
    arguments = [t.cpu() for t in (tensors["latent"], tensors["rotated"], *caches(pool))]
    lens, names = pool.context_lens.cpu(), torch.ops.torch_paged
    torch.library.opcheck(names.latent_decode_attention.default, (*arguments, lens, 0.5))
    bounds = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    torch.library.opcheck(names.latent_prefill_attention.default, (*arguments, bounds, lens, 0.5))


def test_compiles_without_graph_breaks() -> None:
    pool, tensors = step_arguments()

    def step(latent: Tensor, rotated: Tensor) -> Tensor:
        return ops.latent_decode_attention(
            latent, rotated, *caches(pool), pool.context_lens, scale=0.5
        )

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    arguments = (tensors["latent"], tensors["rotated"])
    assert torch.equal(compiled(*arguments), step(*arguments))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"latent_query": torch.zeros(3, 4, 15)}, ValueError, "latent_query must be"),
        ({"rope_query": torch.zeros(3, 2, 8)}, ValueError, "agree in tokens and heads"),
        ({"latent_query": torch.zeros(3, 4, 16).half()}, TypeError, "the cache's dtype"),
        ({"latent_cache": torch.zeros(9, 2, 16, 16)}, ValueError, "latent_cache must be"),
        ({"rope_cache": torch.zeros(9, 1, 8, 8)}, ValueError, "the same blocks"),
        ({"slots": torch.zeros(3)}, TypeError, "slots must be contiguous int32"),
        ({"scale": 0.0}, ValueError, "scale must be positive"),
    ],
)
def test_wrong_arguments_are_named(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments = {
        "latent_query": torch.zeros(3, 4, 16),
        "rope_query": torch.zeros(3, 4, 8),
        "latent_cache": torch.zeros(9, 1, 16, 16),
        "rope_cache": torch.zeros(9, 1, 16, 8),
        "block_table": torch.zeros(4, 2, dtype=torch.int32),
        "slots": torch.zeros(3, dtype=torch.int32),
        "context_lens": torch.zeros(4, dtype=torch.int32),
        "scale": 1.0,
        **changes,
    }
    with pytest.raises(error, match=message):
        ops.latent_decode_attention(**arguments)


@needs_cuda
def test_pools_past_2_to_the_31_elements() -> None:
    # 2.3e9 elements of latents: the row's blocks are the last ones.
    num_blocks, rank, rope = 280_000, 512, 64
    latents = torch.empty(num_blocks, 1, 16, rank, dtype=torch.bfloat16, device=DEVICE)
    keys = torch.empty(num_blocks, 1, 16, rope, dtype=torch.bfloat16, device=DEVICE)
    latents[-4:].normal_()
    keys[-4:].normal_()
    table = torch.arange(num_blocks - 4, num_blocks, dtype=torch.int32, device=DEVICE)[None]
    slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    lens = torch.full((1,), 49, dtype=torch.int32, device=DEVICE)
    latent, rotated = queries(1, 16, rank, rope, torch.bfloat16)
    got = _launch_latent_decode_attention(latent, rotated, latents, keys, table, slots, lens, 0.1)
    small = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    expected = _launch_latent_decode_attention(
        latent, rotated, latents[-4:].clone(), keys[-4:].clone(), small, slots, lens, 0.1
    )
    assert torch.equal(got, expected)


@needs_cuda
@pytest.mark.parametrize("heads", [16, 128])
def test_true_widths_in_a_graph_captured_short_and_run_long(heads: int) -> None:
    lengths = [1000, 64, 3000]
    pool = latent_pool(lengths, 512, 64, torch.bfloat16)
    latent, rotated = queries(3, heads, 512, 64, torch.bfloat16)
    lens = pool.context_lens.clone()

    def step() -> Tensor:
        return ops.latent_decode_attention(
            latent, rotated, *caches(pool), pool.context_lens, scale=0.05
        )

    pool.context_lens.zero_()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    pool.context_lens.copy_(lens)
    graph.replay()
    assert torch.equal(out, step())
    for row in range(3):
        one = slice(row, row + 1)
        query = torch.cat((latent[one], rotated[one]), dim=-1)
        keys = torch.cat((pool.keys[row], pool.values[row]), dim=-1)
        exact, low = (
            dense_attention(query, keys, pool.keys[row], dtype, scale=0.05)
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert_within_budget(out[one], exact, low)


@needs_cuda
@pytest.mark.parametrize(
    "config",
    [None, PrefillConfig(64, 32, 8, 2), PrefillConfig(64, 64, 8, 1)],
    ids=["default", "wide", "wide-one-stage"],
)
@pytest.mark.parametrize("heads", [16, 128])
def test_prefill_of_true_widths(heads: int, config: PrefillConfig | None) -> None:
    lengths, num_queries = [300, 65, 0, 1000], [300, 20, 3, 129]
    pool = latent_pool(lengths, 512, 64, torch.bfloat16, num_queries=num_queries)
    bounds = [0, 300, 320, 323, 452]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    latent, rotated = queries(452, heads, 512, 64, torch.bfloat16)
    arguments = (latent, rotated, *caches(pool), cu_seqlens, pool.context_lens, 0.05)
    out = _launch_latent_prefill_attention(*arguments, config=config)
    # A race shows as a difference between runs before it shows as an error.
    for _ in range(20):
        assert torch.equal(out, _launch_latent_prefill_attention(*arguments, config=config))
    for row in (0, 1, 3):
        tokens = slice(bounds[row], bounds[row + 1])
        query = torch.cat((latent[tokens], rotated[tokens]), dim=-1)
        keys = torch.cat((pool.keys[row], pool.values[row]), dim=-1)
        exact, low = (
            dense_attention(query, keys, pool.keys[row], dtype, scale=0.05)
            for dtype in (torch.float64, torch.bfloat16)
        )
        assert_within_budget(out[tokens], exact, low)
