"""The attention ops as torch sees them: registration, compile, checks, graphs, large pools."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_paged.ops import paged_attention as ops
from torch_paged.ops.paged_attention.config import DecodeConfig, num_splits

sys.path.append(str(Path(__file__).parent))

from paged_attention_case import (  # noqa: E402
    DEVICE,
    Pool,
    assert_within_budget,
    dense_attention,
    make_pool,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
OPS = torch.ops.torch_paged


def _case(**options: object) -> tuple[Pool, dict[str, Tensor]]:
    torch.manual_seed(0)
    pool = make_pool([20, 0, 37], num_kv_heads=2, head_dim=16, new_token_cached=False, **options)
    dtype = pool.k_cache.dtype
    tensors = {
        "query": torch.randn(3, 4, 16, dtype=dtype, device=DEVICE),
        "key": torch.randn(3, 2, 16, dtype=dtype, device=DEVICE),
        "value": torch.randn(3, 2, 16, dtype=dtype, device=DEVICE),
        "cos": torch.randn(3, 8, device=DEVICE),
        "sin": torch.randn(3, 8, device=DEVICE),
        "counters": torch.zeros(6, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE),
    }
    return pool, tensors


def _fused(pool: Pool, t: dict[str, Tensor], **options: object) -> Tensor:
    return ops.fused_decode_attention(
        t["query"],
        t["key"],
        t["value"],
        t["cos"],
        t["sin"],
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        pool.slots,
        pool.context_lens,
        t["counters"],
        **{"scale": 0.25, **options},
    )


def _paged(pool: Pool, t: dict[str, Tensor], **options: object) -> Tensor:
    return ops.paged_decode_attention(
        t["query"],
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        pool.slots,
        pool.context_lens,
        t["counters"],
        **{"scale": 0.25, **options},
    )


def _prefill(pool: Pool, t: dict[str, Tensor], **options: object) -> Tensor:
    return ops.paged_prefill_attention(
        t["query"],
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        pool.slots,
        t["cu_seqlens_q"],
        pool.context_lens,
        **{"scale": 0.25, "max_query_len": 1, **options},
    )


@pytest.mark.parametrize("call", [_fused, _paged, _prefill])
def test_compiles_without_a_graph_break(call: Callable[..., Tensor]) -> None:
    eager_pool, tensors = _case(poison=0.0)
    compiled_pool, _ = _case(poison=0.0)
    expected = call(eager_pool, tensors, window=9)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(compiled_pool, tensors, window=9), expected)
    assert torch.equal(compiled_pool.k_cache, eager_pool.k_cache)


def test_ops_pass_opcheck() -> None:
    pool, t = _case(poison=0.0)
    caches = (pool.k_cache, pool.v_cache)
    decode = (pool.block_table, pool.slots, pool.context_lens, t["counters"], 0.25)
    prefill = (pool.block_table, pool.slots, t["cu_seqlens_q"], pool.context_lens, 1, 0.25)
    new = (t["query"], t["key"], t["value"], t["cos"], t["sin"])
    extras = {"window": 9, "softcap": 3.0, "sinks": torch.randn(4, device=DEVICE)}
    torch.library.opcheck(OPS.fused_decode_attention.default, (*new, *caches, *decode), extras)
    torch.library.opcheck(
        OPS.paged_decode_attention.default, (t["query"], *caches, *decode), extras
    )
    torch.library.opcheck(
        OPS.paged_prefill_attention.default, (t["query"], *caches, *prefill), extras
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda t: t[..., :8], "head_dim"),
        ("query", lambda t: t.double(), "one dtype"),
        ("query", lambda t: t[0], "num_tokens"),
        ("key", lambda t: t[:, :1], "key must be"),
        ("value", lambda t: t.half(), "value must have the cache's dtype"),
        ("cos", lambda t: t[:, :4], "cos and sin must be alike"),
        ("cos", lambda t: None, "given together"),
        ("counters", lambda t: t[:4], "counters must be contiguous int32 zeros of at least 6"),
    ],
)
def test_bad_arguments_are_named(
    name: str, change: Callable[[Tensor], Tensor], message: str
) -> None:
    pool, tensors = _case()
    tensors[name] = change(tensors[name])
    with pytest.raises((TypeError, ValueError), match=message):
        _fused(pool, tensors)


@pytest.mark.parametrize("call", [_fused, _paged, _prefill])
def test_bad_options_are_named(call: Callable[..., Tensor]) -> None:
    pool, tensors = _case()
    with pytest.raises(ValueError, match="sinks must be contiguous"):
        call(pool, tensors, sinks=torch.zeros(3, device=DEVICE))
    with pytest.raises(ValueError, match="window and softcap must be >= 0"):
        call(pool, tensors, window=-1)
    with pytest.raises(ValueError, match="scale must be positive"):
        call(pool, tensors, scale=0.0)
    pool.block_table = pool.block_table.long()
    with pytest.raises(TypeError, match=r"block_table must be contiguous int32 .* call \.int"):
        call(pool, tensors)


def test_split_count_follows_from_shapes() -> None:
    config = DecodeConfig(
        single_tokens=256, min_split_tokens=128, programs_per_sm=2, max_splits=64
    )
    assert num_splits(8, 256, 132, config) == 1
    assert num_splits(8, 32768, 132, config) == 33
    assert num_splits(8, 512, 132, config) == 4
    assert num_splits(1, 1 << 20, 132, config) == 64
    assert num_splits(4096, 1 << 20, 132, config) == 1


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_graph_captured_short_runs_long(dtype: torch.dtype) -> None:
    lengths = [17, 257, 1025, 1900, 17]
    heads, kv_heads, dim = 8, 2, 64
    pool = make_pool(lengths, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype)
    query = torch.randn(1, heads, dim, dtype=dtype, device=DEVICE)
    slot = pool.slots[:1].clone()
    counters = torch.zeros(kv_heads, dtype=torch.int32, device=DEVICE)

    def step() -> Tensor:
        return ops.paged_decode_attention(
            query,
            pool.k_cache,
            pool.v_cache,
            pool.block_table,
            slot,
            pool.context_lens,
            counters,
            scale=0.125,
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for order in (range(5), reversed(range(5))):
        for row in order:
            slot.copy_(pool.slots[row : row + 1])
            query.normal_()
            output.fill_(float("nan"))
            graph.replay()
            replayed = output.clone()
            assert torch.equal(replayed, step())
            dense = (query, pool.keys[row], pool.values[row])
            exact = dense_attention(*dense, torch.float64, scale=0.125)
            low = dense_attention(*dense, dtype, scale=0.125)
            assert_within_budget(replayed, exact, low)
            assert not counters.any()


@needs_cuda
def test_fused_steps_in_a_graph_equal_eager_steps() -> None:
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        pool = make_pool(
            [250, 0, 30], num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, max_blocks=40
        )
        free = pool.k_cache.shape[0] - 1
        pool.k_cache = torch.cat((pool.k_cache, torch.zeros_like(pool.k_cache).repeat(3, 1, 1, 1)))
        pool.v_cache = torch.cat((pool.v_cache, torch.zeros_like(pool.v_cache).repeat(3, 1, 1, 1)))
        for row, used in ((0, 16), (2, 2)):
            ids = torch.arange(20, dtype=torch.int32, device=DEVICE) + free + 1 + 10 * row
            pool.block_table[pool.slots[row], used : used + 20] = ids
            pool.context_lens[pool.slots[row]] += 1
        new = [torch.empty(3, n, 64, dtype=torch.bfloat16, device=DEVICE) for n in (8, 2, 2)]
        counters = torch.zeros(6, dtype=torch.int32, device=DEVICE)
        tokens = [[torch.randn_like(x) for x in new] for _ in range(20)]

        def step(pool: Pool = pool, new: list = new, counters: Tensor = counters) -> Tensor:
            indices = (pool.block_table, pool.slots, pool.context_lens, counters)
            caches = (pool.k_cache, pool.v_cache)
            out = ops.fused_decode_attention(*new, None, None, *caches, *indices, scale=0.1)
            pool.context_lens += 1
            return out

        if captured:
            for x in new:
                x.zero_()
            step()
            pool.context_lens -= 1
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = step()
        outputs = []
        for token in tokens:
            for x, y in zip(new, token, strict=True):
                x.copy_(y)
            if captured:
                graph.replay()
            else:
                output = step()
            outputs.append(output.clone())
        results.append(torch.stack(outputs))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])


@needs_cuda
def test_offsets_past_two_to_the_31() -> None:
    num_blocks, kv_heads, block_size, dim, length = 132_000, 8, 16, 128, 100
    dtype = torch.bfloat16
    k_cache = torch.zeros(num_blocks, kv_heads, block_size, dim, dtype=dtype, device=DEVICE)
    v_cache = torch.zeros_like(k_cache)
    assert k_cache.numel() > 2**31
    torch.manual_seed(0)
    keys = torch.randn(length, kv_heads, dim, device=DEVICE).to(dtype)
    values = torch.randn(length, kv_heads, dim, device=DEVICE).to(dtype)
    query = torch.randn(length, 32, dim, device=DEVICE).to(dtype)
    context_lens = torch.tensor([length - 1], dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    counters = torch.zeros(kv_heads, dtype=torch.int32, device=DEVICE)
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    results = []
    for first in (num_blocks - 7, 0):
        blocks = torch.arange(first, first + 7, dtype=torch.int32, device=DEVICE)[None]
        for j in range(length - 1):
            k_cache[first + j // block_size, :, j % block_size] = keys[j]
            v_cache[first + j // block_size, :, j % block_size] = values[j]
        decoded = ops.fused_decode_attention(
            query[-1:],
            keys[-1:],
            values[-1:],
            None,
            None,
            k_cache,
            v_cache,
            blocks,
            slots,
            context_lens,
            counters,
            scale=0.09,
        )
        index = (first + (length - 1) // block_size, slice(None), (length - 1) % block_size)
        assert torch.equal(k_cache[index], keys[-1])
        assert torch.equal(v_cache[index], values[-1])
        prefilled = ops.paged_prefill_attention(
            query,
            k_cache,
            v_cache,
            blocks,
            slots,
            cu_seqlens,
            context_lens * 0,
            max_query_len=length,
            scale=0.09,
        )
        results.append((decoded, prefilled))
        # Nothing outside the seven blocks changed: they are cleared, so all must be zero.
        k_cache[first : first + 7] = 0
        v_cache[first : first + 7] = 0
        assert not k_cache.any()
        assert not v_cache.any()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    exact = dense_attention(query, keys, values, torch.float64, scale=0.09)
    torch.testing.assert_close(results[0][0].double(), exact[-1:], atol=2e-3, rtol=2**-8)
    assert_within_budget(
        results[0][1], exact, dense_attention(query, keys, values, dtype, scale=0.09)
    )


@needs_cuda
def test_prefill_queries_past_two_to_the_31() -> None:
    num_heads, dim = 128, 128
    num_tokens = 2**31 // (num_heads * dim) + 40
    dtype = torch.bfloat16
    torch.manual_seed(0)
    pool = make_pool([40], num_kv_heads=1, head_dim=dim, dtype=dtype, num_queries=[40])
    query = torch.zeros(num_tokens, num_heads, dim, dtype=dtype, device=DEVICE)
    query[-40:] = torch.randn(40, num_heads, dim, device=DEVICE).to(dtype)
    # All tokens but the last row's belong to a padding row.
    slots = torch.tensor([-1, int(pool.slots[0])], dtype=torch.int32, device=DEVICE)
    bounds = [0, num_tokens - 40, num_tokens]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    output = ops.paged_prefill_attention(
        query,
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        slots,
        cu_seqlens,
        pool.context_lens,
        max_query_len=num_tokens,
        scale=0.09,
    )
    dense = (query[-40:], pool.keys[0], pool.values[0])
    exact = dense_attention(*dense, torch.float64, scale=0.09)
    assert_within_budget(output[-40:], exact, dense_attention(*dense, dtype, scale=0.09))
    assert not output[:-40].any()
