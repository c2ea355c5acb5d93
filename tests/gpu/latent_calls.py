"""Calls of latent attention for kernel_calls.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ops.paged_attention_case import DEVICE, make_pool
from torch_paged.ops.head_linear import head_linear
from torch_paged.ops.latent_attention import latent_cache_write
from torch_paged.ops.latent_attention.config import DecodeConfig, PrefillConfig
from torch_paged.ops.latent_attention.decode import _launch_latent_decode_attention
from torch_paged.ops.latent_attention.prefill import _launch_latent_prefill_attention
from torch_paged.ops.latent_attention.write import ROTATIONS

LATENT_CALLS: dict[str, Callable[[], None]] = {}

# The interpreter has no bf16 products.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
_GENERATOR = torch.Generator().manual_seed(0)


def _add(name: str, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    assert name not in LATENT_CALLS, name
    LATENT_CALLS[name] = lambda: function(*args, **kwargs)


def _randn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(*shape, generator=_GENERATOR).to(dtype).to(DEVICE)


def _queries(
    num_tokens: int, heads: int, rank: int, rope: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    latent = _randn(heads, num_tokens, rank, dtype=dtype).transpose(0, 1)
    return latent, _randn(num_tokens, heads, 5 + rope, dtype=dtype)[..., 5:]


def _decode(
    lengths: list[int],
    *,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype = HALF,
    block_size: int = 16,
    table: int = 0,
    config: DecodeConfig | None = None,
) -> None:
    rank, rope = dims
    pool = make_pool(
        lengths,
        num_kv_heads=1,
        head_dim=rank,
        v_dim=rope,
        dtype=dtype,
        block_size=block_size,
        max_blocks=table,
    )
    out = _launch_latent_decode_attention(
        *_queries(len(lengths), heads, rank, rope, dtype),
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        pool.slots,
        pool.context_lens,
        rank**-0.5,
        config=config,
    )
    assert out.cpu().isfinite().all()


def _prefill(
    prefixes: list[int],
    lengths: list[int],
    *,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype = HALF,
    block_size: int = 16,
    padding: int = 0,
    config: PrefillConfig | None = None,
) -> None:
    rank, rope = dims
    pool = make_pool(
        [a + b for a, b in zip(prefixes, lengths, strict=True)],
        num_kv_heads=1,
        head_dim=rank,
        v_dim=rope,
        dtype=dtype,
        block_size=block_size,
        num_queries=lengths,
    )
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    out = _launch_latent_prefill_attention(
        *_queries(int(starts[-1]) + padding, heads, rank, rope, dtype),
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        pool.slots,
        starts.to(DEVICE),
        pool.context_lens,
        rank**-0.5,
        config=config,
    )
    assert out.cpu().isfinite().all()


def _write(rotation: str, dims: tuple[int, int], dtype: torch.dtype, mapped: bool) -> None:
    rank, rope = dims
    blocks, heads = 3, 5
    ints = {"dtype": torch.int32, "device": DEVICE}
    if mapped:
        places = torch.tensor([0, blocks * 16 - 1, -1, 16, 7])
        place = {"slot_mapping": places.to(DEVICE)}
    else:
        place = {
            "block_table": torch.tensor([[0, 2], [2, -1], [1, 0]], **ints),
            "slots": torch.tensor([2, -1, 0, 1, -1], **ints),
            "context_lens": torch.tensor([31, 15, 0], **ints),
        }
    angle = torch.rand(5, rope // 2, generator=_GENERATOR) * 6
    latent_cache_write(
        _randn(5, heads, 3 + rope, dtype=dtype),
        _randn(5, rank + rope, dtype=dtype),
        angle.cos().to(DEVICE),
        angle.sin().to(DEVICE),
        _randn(blocks, 1, 16, rank, dtype=dtype),
        _randn(blocks, 1, 16, rope, dtype=dtype),
        _randn(rank, dtype=dtype),
        eps=1e-6,
        rotation=rotation,
        **place,
    )


def _products(num_tokens: int, heads: int, nope: int, rank: int, v_dim: int) -> None:
    weight = _randn(heads, nope + v_dim, rank)
    query = _randn(num_tokens, heads, nope + 3)[..., :nope]
    latent = head_linear(query, weight[:, :nope])
    out = head_linear(latent, weight[:, nope:].transpose(1, 2))
    assert out.cpu().isfinite().all()


_LONG = [1, 255, 0, 257, 433, 512] if DEVICE == "cuda" else [1, 17, 0, 65, 96]
_TABLE = 33 if DEVICE == "cuda" else 7
_DIMS = (512, 64) if DEVICE == "cuda" else (64, 16)
_TALL = DecodeConfig(block_m=32, num_warps=8) if DEVICE == "cuda" else None
_RAGGED = ([0, 16, 5, 0, 40], [17, 1, 33, 0, 9])
_WIDE = PrefillConfig(64, 32, 8, 2) if DEVICE == "cuda" else None
_add("latent-decode", _decode, _LONG, heads=16, dims=_DIMS, table=_TABLE)
_add("latent-decode-tall", _decode, _LONG, heads=40, dims=_DIMS, table=_TABLE, config=_TALL)
_add("latent-decode-short", _decode, [5, 16, 0, 33], heads=16, dims=_DIMS)
_add("latent-decode-odd", _decode, _LONG, heads=3, dims=(96, 24), table=2 * _TABLE, block_size=8)
_add("latent-decode-fp32", _decode, _LONG, heads=4, dims=(64, 16), dtype=torch.float32)
_add("latent-prefill", _prefill, *_RAGGED, heads=16, dims=_DIMS, padding=5)
_add("latent-prefill-wide", _prefill, *_RAGGED, heads=7, dims=_DIMS, config=_WIDE)
_add("latent-prefill-odd", _prefill, [0, 3], [1, 20], heads=3, dims=(96, 24), block_size=32)
_add("latent-prefill-fp32", _prefill, *_RAGGED, heads=2, dims=(64, 16), dtype=torch.float32)
for _rotation in ROTATIONS:
    _add(f"latent-write-{_rotation}", _write, _rotation, _DIMS, HALF, True)
_add("latent-write-rows", _write, "pairs", (96, 24), torch.float32, False)
for _tokens in (1, 17, 32, 33):
    _add(f"head_linear-{_tokens}", _products, _tokens, 3, 128, 512, 128)
_add("head_linear-odd", _products, 5, 7, 20, 96, 24)
