"""Calls that together launch every kernel of torch_paged.ops, at small and awkward shapes.

Tensors are made on the CPU and copied, so that on the device hardly any kernel but ours runs, and
each has an allocation of its own size. Rows, blocks and slots in use reach up to the ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.gpu.expert_calls import EXPERT_CALLS
from tests.gpu.latent_calls import LATENT_CALLS
from tests.ops.paged_attention_case import DEVICE, Pool, make_pool
from torch_paged.ops.advance import advance
from torch_paged.ops.argmax import argmax
from torch_paged.ops.checksum import add_to_checksum
from torch_paged.ops.copy_blocks import copy_blocks
from torch_paged.ops.embed import embed
from torch_paged.ops.fused_linear import NUM_COUNTERS
from torch_paged.ops.fused_linear.configs import (
    Config,
    GemvConfig,
    SmallGemmConfig,
    TileGemmConfig,
)
from torch_paged.ops.fused_linear.joined import _launch_joined_linear
from torch_paged.ops.fused_linear.launch import _launch_fused_linear
from torch_paged.ops.fused_linear.shrink_norm import launch_shrink_norm
from torch_paged.ops.fused_linear.wide_config import AheadGemmConfig, WideGemmConfig
from torch_paged.ops.glu import ACTIVATIONS, activation, glu
from torch_paged.ops.lora_expand import lora_expand_
from torch_paged.ops.lora_shrink import lora_shrink
from torch_paged.ops.min_tokens import apply_min_tokens
from torch_paged.ops.paged_attention.config import PrefillConfig
from torch_paged.ops.paged_attention.decode_launch import _launch_fused_decode_attention
from torch_paged.ops.paged_attention.prefill import _launch_paged_prefill_attention
from torch_paged.ops.penalties import apply_repetition_penalty, apply_suppress_mask, mark_seen
from torch_paged.ops.record_tokens import record_tokens
from torch_paged.ops.rms_norm import add_rms_norm, rms_norm, rms_norm_add
from torch_paged.ops.rotary_by_span import rotary_by_span
from torch_paged.ops.rotary_cache_write import rotary_cache_write
from torch_paged.ops.rotary_table import rotary_table
from torch_paged.ops.sample import sample, sample_with_scores
from torch_paged.ops.token_logprobs import token_logprobs
from torch_paged.ops.top_logprobs import top_logprobs

CALLS: dict[str, Callable[[], None]] = EXPERT_CALLS | LATENT_CALLS

# The interpreter has no bf16 products.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
_GENERATOR = torch.Generator().manual_seed(0)


def _add(name: str, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    assert name not in CALLS, name
    CALLS[name] = lambda: function(*args, **kwargs)


def _randn(*shape: int, dtype: torch.dtype = HALF, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=_GENERATOR)).to(dtype).to(DEVICE)


def _rows(num_rows: int, width: int, *, extra: int = 3, dtype: torch.dtype = HALF) -> Tensor:
    """Return [num_rows, width] inside wider rows; the last row ends the allocation."""
    flat = _randn(num_rows * (width + extra) - extra, dtype=dtype)
    return flat.as_strided((num_rows, width), (width + extra, 1))


def _ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def _zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype).to(DEVICE)


def _rotary(num_rows: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(num_rows, half, generator=_GENERATOR) * 6
    return angle.cos().to(DEVICE), angle.sin().to(DEVICE)


def _slopes(num_heads: int, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else _randn(num_heads, dtype=torch.float32).abs().to(dtype)


def _decode(
    lengths: list[int],
    *,
    heads: tuple[int, int, int],
    v_dim: int = 0,
    dtype: torch.dtype = HALF,
    block_size: int = 16,
    table: int = 0,
    half: int | None = None,
    norm: bool = False,
    fused: bool = True,
    interleaved: bool = False,
    extras: bool = False,
    window: int = 0,
    slopes: torch.dtype | None = None,
) -> None:
    """Two steps in a row, as the counters of the first must be zero for the second."""
    num_heads, num_kv_heads, head_dim = heads
    v_dim = v_dim or head_dim
    pool: Pool = make_pool(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=dtype,
        block_size=block_size,
        max_blocks=table,
        new_token_cached=not fused,
    )
    num_rows = len(lengths)
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * v_dim]
    query, key, value = _rows(num_rows, sum(widths), dtype=dtype).split(widths, dim=1)
    query = query.unflatten(1, (num_heads, head_dim))
    key = key.unflatten(1, (num_kv_heads, head_dim))
    value = value.unflatten(1, (num_kv_heads, v_dim))
    half = head_dim // 2 if half is None else half
    cos, sin = _rotary(num_rows, half) if fused and half else (None, None)
    counters = _zeros(num_rows * num_kv_heads)
    for _ in range(2):
        out = _launch_fused_decode_attention(
            query,
            key if fused else None,
            value if fused else None,
            cos,
            sin,
            pool.k_cache,
            pool.v_cache,
            pool.block_table,
            pool.slots,
            pool.context_lens,
            counters,
            head_dim**-0.5,
            q_norm=_randn(head_dim, dtype=dtype) if norm else None,
            k_norm=_randn(head_dim, dtype=dtype) if norm else None,
            eps=1e-6,
            interleaved=interleaved,
            window=window,
            softcap=5.0 if extras else 0.0,
            sinks=_randn(num_heads, dtype=dtype) if extras else None,
            alibi_slopes=_slopes(num_heads, torch.float32 if extras else slopes),
        )
    assert not counters.cpu().any() and out.cpu().isfinite().all()


# Past one range, so that rows are split and merged: one token, the edges of the first range, most
# of the table, all of it but for one token, a padding row.
_SPLIT = [1, 255, 0, 257, 433, 512] if DEVICE == "cuda" else [1, 17, 0, 65, 96]
_TABLE = 33 if DEVICE == "cuda" else 7
_add("decode-split", _decode, _SPLIT, heads=(8, 2, 128), table=_TABLE, norm=True)
_add("decode-split-cached", _decode, _SPLIT, heads=(7, 1, 64), table=_TABLE, fused=False)
_add("decode-split-fp32", _decode, _SPLIT, heads=(4, 2, 64), table=_TABLE, dtype=torch.float32)
# A few programs for each multiprocessor, and many.
_WAVE = [1, 0, 16, 17, 100] if DEVICE == "cpu" else [1, 0, 16, 17, 100] * 5
_add("decode-several", _decode, _WAVE, heads=(8, 8, 64), table=7, norm=True)
_add("decode-several-256", _decode, _WAVE, heads=(8, 8, 256), table=7)
_add("decode-waves", _decode, _WAVE * 3, heads=(16, 8, 128), table=7, norm=True)
_add("decode-waves-window", _decode, _WAVE * 3, heads=(8, 8, 80), table=7, window=33, extras=True)
_add("decode-waves-fp32", _decode, _WAVE * 3, heads=(8, 8, 64), table=7, dtype=torch.float32)
_add("decode-window", _decode, _SPLIT, heads=(6, 2, 80), table=_TABLE, window=300, half=16)
_add("decode-256", _decode, [5, 16, 33], heads=(8, 1, 256), norm=True, extras=True)
_add("decode-96", _decode, [8, 9, 0, 20], heads=(3, 3, 96), block_size=8, interleaved=True)
_add("decode-block-32", _decode, [31, 32, 33], heads=(4, 1, 32), block_size=32, half=0, window=7)
_add("decode-v-dim", _decode, [3, 17], heads=(4, 4, 48), v_dim=32, fused=False, extras=True)
_add("decode-alibi", _decode, [1, 18, 0, 33], heads=(3, 3, 64), half=0, slopes=torch.bfloat16)


def _prefill(
    prefixes: list[int],
    lengths: list[int],
    *,
    heads: tuple[int, int, int],
    v_dim: int = 0,
    dtype: torch.dtype = HALF,
    block_size: int = 16,
    padding: int = 0,
    window: int = 0,
    extras: bool = False,
    config: PrefillConfig | None = None,
    slopes: torch.dtype | None = None,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    totals = [a + b for a, b in zip(prefixes, lengths, strict=True)]
    pool = make_pool(
        totals,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=dtype,
        block_size=block_size,
        num_queries=lengths,
    )
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    num_tokens = int(starts[-1]) + padding
    query = _rows(num_tokens, num_heads * head_dim, dtype=dtype)
    out = _launch_paged_prefill_attention(
        query.unflatten(1, (num_heads, head_dim)),
        pool.k_cache,
        pool.v_cache,
        pool.block_table,
        pool.slots,
        starts.to(DEVICE),
        pool.context_lens,
        max(lengths),
        head_dim**-0.5,
        window=window,
        softcap=5.0 if extras else 0.0,
        sinks=_randn(num_heads, dtype=dtype) if extras else None,
        alibi_slopes=_slopes(num_heads, torch.float32 if extras else slopes),
        config=config,
    )
    assert out.cpu().isfinite().all()


_RAGGED = ([0, 16, 5, 0, 40], [17, 1, 33, 0, 9])
_WIDE = PrefillConfig(128, 128, 8, 2) if DEVICE == "cuda" else None
_WIDEST = PrefillConfig(128, 64, 8, 2) if DEVICE == "cuda" else None
_add("prefill", _prefill, *_RAGGED, heads=(8, 2, 128), padding=5)
_add("prefill-wide", _prefill, *_RAGGED, heads=(4, 1, 128), config=_WIDE)
_add("prefill-80", _prefill, *_RAGGED, heads=(6, 2, 80), window=7, block_size=8)
_add("prefill-256", _prefill, *_RAGGED, heads=(2, 1, 256), extras=True)
_add("prefill-256-wide", _prefill, *_RAGGED, heads=(2, 1, 256), config=_WIDEST)
_add("prefill-alibi", _prefill, *_RAGGED, heads=(3, 3, 64), slopes=torch.bfloat16)
_add("prefill-fp32", _prefill, *_RAGGED, heads=(3, 1, 64), dtype=torch.float32, padding=1)
_add("prefill-v-dim", _prefill, [0, 3], [1, 20], heads=(7, 1, 48), v_dim=32, block_size=32)


def _rotary_write(
    *,
    heads: tuple[int, int, int] = (4, 2, 80),
    half: int = 40,
    dtype: torch.dtype = HALF,
    block_size: int = 16,
    norm: bool = True,
    full_width: bool = False,
    interleaved: bool = False,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    num_tokens, num_blocks = 5, 3
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    parts = _rows(num_tokens, sum(widths), dtype=dtype).split(widths, dim=1)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in parts)
    cos, sin = _rotary(num_tokens, half) if half else (None, None)
    cache = (num_blocks, num_kv_heads, block_size, head_dim)
    q_width, k_width = widths[:2] if full_width else (head_dim, head_dim)
    rotary_cache_write(
        query,
        key,
        value,
        cos,
        sin,
        _randn(*cache, dtype=dtype),
        _randn(*cache, dtype=dtype),
        _ints(0, num_blocks * block_size - 1, -1, block_size, 7, dtype=torch.int64),
        q_norm=_randn(q_width, dtype=dtype) if norm else None,
        k_norm=_randn(k_width, dtype=dtype) if norm else None,
        eps=1e-6,
        interleaved=interleaved,
        full_width_norm=full_width,
    )


_add("rotary_write", _rotary_write)
_add("rotary_write-fp32", _rotary_write, dtype=torch.float32, half=16, norm=False, block_size=8)
_add("rotary_write-full-width", _rotary_write, heads=(6, 2, 64), half=32, full_width=True)
_add("rotary_write-pairs", _rotary_write, heads=(3, 1, 96), half=20, interleaved=True)
_add("rotary_write-nope", _rotary_write, heads=(8, 1, 256), half=0, block_size=32)


def _linear(
    config: Config | None,
    num_tokens: int,
    sizes: list[int],
    in_features: int,
    *,
    dtype: torch.dtype = HALF,
    gated: bool = False,
    extra: int = 0,
    norm: str = "gain",
    ranks: tuple[int, ...] = (),
    update_dtype: torch.dtype = HALF,
) -> None:
    """Two calls in a row, as the counters of the first must be zero for the second."""
    width = sizes[0] if gated else sum(sizes)
    updates = [_randn(n, rank, dtype=update_dtype) for n, rank in zip(sizes, ranks, strict=False)]
    counters = _zeros(NUM_COUNTERS)
    weights = [_rows(n, in_features, extra=extra, dtype=dtype) for n in sizes]
    x = _rows(num_tokens, in_features, extra=extra, dtype=dtype)
    lora_x = _randn(num_tokens, sum(ranks), dtype=torch.float32)
    downs = [_randn(rank, in_features, dtype=update_dtype) for rank in ranks]
    for halves in ({"lora_x": lora_x}, {"downs": downs}):
        out = _launch_fused_linear(
            x,
            weights,
            [_randn(n, dtype=dtype) if norm else None for n in sizes],
            _randn(in_features, dtype=dtype) if norm == "gain" else None,
            norm=bool(norm),
            eps=1e-6,
            residual=_rows(num_tokens, width, dtype=dtype) if norm else None,
            activation="silu" if gated else "",
            gated=gated,
            counters=counters,
            **(halves if ranks else {}),
            updates=updates or None,
            update_scales=[0.5] * len(updates),
            config=config,
        )
    assert not counters.cpu().any() and out.cpu().isfinite().all()


def _joined(
    config: GemvConfig | None,
    num_tokens: int,
    sizes: list[int],
    in_features: int,
    *,
    dtype: torch.dtype = HALF,
    gated: bool = False,
    extra: int = 0,
    norm: bool = True,
) -> None:
    branch, stream = (_rows(num_tokens, in_features, extra=extra, dtype=dtype) for _ in range(2))
    outs = _launch_joined_linear(
        branch,
        stream,
        _randn(in_features, dtype=dtype) if norm else None,
        1e-6,
        1.0 if norm else 0.0,
        True,
        [_rows(n, in_features, extra=extra, dtype=dtype) for n in sizes],
        [_randn(n, dtype=dtype) if norm else None for n in sizes],
        _randn(in_features, dtype=dtype) if norm else None,
        norm=norm,
        eps=1e-6,
        activation="silu" if gated else "",
        gated=gated,
        counters=_zeros(NUM_COUNTERS),
        config=config,
    )
    assert all(out.cpu().isfinite().all() for out in outs)


_GEMV = GemvConfig(rows=2, chunks=1, warps=4, k_warps=2, registers=128)
_GEMV_DEEP = GemvConfig(rows=1, chunks=4, warps=4, k_warps=4, registers=80)
_SMALL = SmallGemmConfig(rows=16, chunks=1, warps=4, splits=1)
_SMALL_SPLIT = SmallGemmConfig(rows=8, chunks=2, warps=4, splits=2)
_TILE = TileGemmConfig(rows=64, block_k=64, warps=4, splits=1, stages=4)
_TILE_SPLIT = TileGemmConfig(rows=32, block_k=64, warps=4, splits=4, stages=3)
# K of 520 is no multiple of any step; 575 with three more a row allows no vectors.
_add("gemv", _linear, _GEMV, 1, [33, 7, 5], 520)
_add("gemv-deep", _linear, _GEMV_DEEP, 2, [21, 21], 520, gated=True)
_add("gemv-odd", _linear, _GEMV, 3, [33, 7, 5], 575, extra=3)
_add("gemv-fp32", _linear, _GEMV, 9, [33, 7, 5], 259, dtype=torch.float32, extra=1)
_add("joined", _joined, None, 1, [33, 7, 5], 520)
_add("joined-gated", _joined, None, 2, [21, 21], 520, gated=True)
_add("joined-odd", _joined, _GEMV, 3, [33, 7, 5], 575, extra=3)
_add("joined-fp32", _joined, _GEMV_DEEP, 2, [33, 7, 5], 259, dtype=torch.float32, extra=1)
_add("joined-bare", _joined, None, 1, [33, 7, 5], 1032, norm=False)
_add("joined-two-kernels", _joined, None, 5, [33, 7, 5], 520)
_add("small_gemm", _linear, _SMALL, 8, [33, 7, 5], 520)
_add("small_gemm-gated", _linear, _SMALL, 11, [40, 40], 575, gated=True, extra=3)
_add("small_gemm-split", _linear, _SMALL_SPLIT, 16, [33, 7, 5], 520)
_add("small_gemm-gated-split", _linear, _SMALL_SPLIT, 3, [24, 24], 1032, gated=True)
_add("tile_gemm", _linear, _TILE, 17, [33, 70, 5], 520)
_add("tile_gemm-odd", _linear, _TILE, 64, [100], 575, extra=3)
_add("tile_gemm-split", _linear, _TILE_SPLIT, 33, [33, 7, 5], 520)
_add("tile_gemm-gated-split", _linear, _TILE_SPLIT, 16, [40, 40], 520, gated=True)
if DEVICE == "cpu" or torch.cuda.get_device_capability() == (9, 0):
    _WIDE = WideGemmConfig(rows=64, tokens=128, block_k=64, warps=8, splits=1, stages=4)
    _WIDE_SPLIT = _WIDE._replace(tokens=64, splits=3, stages=3)
    _add("wide_gemm", _linear, _WIDE, 70, [33, 70, 5], 520, extra=8)
    _add("wide_gemm-odd", _linear, _WIDE, 129, [100], 573, extra=3, norm="")
    _add("wide_gemm-split", _linear, _WIDE_SPLIT, 65, [33, 70, 5], 520, extra=8)
    _add("wide_gemm-gated", _linear, _WIDE, 70, [72, 72], 520, gated=True, extra=8)
    _add("wide_gemm-gated-split", _linear, _WIDE_SPLIT, 130, [40, 40], 520, gated=True, extra=8)
    _WIDE_FEW = WideGemmConfig(rows=64, tokens=32, block_k=64, warps=4, splits=2, stages=4)
    _add("wide_gemm-16", _linear, _WIDE_FEW._replace(tokens=16), 11, [33, 70, 5], 520, extra=8)
    _add("wide_gemm-32", _linear, _WIDE_FEW, 27, [33, 70, 5], 520, extra=8)
    # 520 in one tile of 1024, in two of 512 and in three of 256.
    _AHEAD = AheadGemmConfig(rows=64, block_k=1024, warps=8, splits=1)
    _AHEAD_TWO = AheadGemmConfig(rows=64, block_k=512, warps=8, splits=2)
    _AHEAD_THREE = AheadGemmConfig(rows=128, block_k=256, warps=8, splits=3)
    _add("ahead_gemm", _linear, _AHEAD, 27, [33, 70, 5], 520, extra=8)
    _add("ahead_gemm-fp16", _linear, _AHEAD, 9, [33, 5], 520, extra=8, dtype=torch.float16)
    _add("ahead_gemm-bare", _linear, _AHEAD_TWO, 64, [100], 573, extra=3, norm="")
    _add("ahead_gemm-many", _linear, _AHEAD_TWO, 100, [100, 5], 573, extra=3)
    _add("ahead_gemm-gated", _linear, _AHEAD_TWO, 32, [72, 72], 520, gated=True, extra=8)
    _add("ahead_gemm-lora", _linear, _AHEAD_THREE, 17, [130, 5], 520, extra=8, ranks=(16, 5))
    _add("wide_gemm-lora", _linear, _WIDE, 130, [33, 70, 5], 520, extra=8, ranks=(16, 0, 5))
# Other code reads a tile, or none does, which changes how it is buffered.
for _norm in ("plain", ""):
    _label = f"norm-{_norm}" if _norm else "bare"
    _add(f"gemv-{_label}", _linear, _GEMV, 2, [33, 7, 5], 520, norm=_norm)
    _add(f"small_gemm-{_label}", _linear, _SMALL, 8, [40, 40], 520, gated=True, norm=_norm)
    _add(f"tile_gemm-{_label}", _linear, _TILE, 17, [100], 1032, norm=_norm)
    _add(f"tile_gemm-split-{_label}", _linear, _TILE_SPLIT, 33, [33, 7, 5], 520, norm=_norm)
# Ranks that fill no chunk, one that takes several, a linear without an update.
for _name, _config, _tokens in (
    ("gemv", _GEMV, 3),
    ("small", _SMALL_SPLIT, 9),
    ("tile", _TILE, 17),
):
    _add(f"lora-{_name}", _linear, _config, _tokens, [33, 7, 5], 520, ranks=(16, 0, 3))
    _wide = {"ranks": (70, 5), "update_dtype": torch.float32}
    _add(f"lora-{_name}-gated", _linear, _config, _tokens, [40, 40], 520, gated=True, **_wide)


def _shrink(num_tokens: int, in_features: int, dtype: torch.dtype, extra: int) -> None:
    x = _rows(num_tokens, in_features, extra=extra)
    downs = [_rows(rank, in_features, extra=extra, dtype=dtype) for rank in (16, 1, 5)]
    lora_shrink(x, downs, _randn(in_features), norm=True, eps=1e-6)
    assert lora_shrink(x, downs).cpu().isfinite().all()
    for out in launch_shrink_norm(x, downs, _randn(in_features), 1e-6, 0.0, True):
        assert out.cpu().isfinite().all()


def _expand(num_tokens: int, n: int, rank: int, dtype: torch.dtype) -> None:
    out, lora_x = _rows(num_tokens, n), _rows(num_tokens, rank, dtype=torch.float32)
    lora_expand_(out, lora_x, _randn(n, rank, dtype=dtype), scale=0.5)
    assert out.cpu().isfinite().all()


_add("expand", _expand, 65, 130, 16, HALF)
_add("expand-fp32", _expand, 3, 63, 21, torch.float32)
for _tokens in (1, 2, 7, 64):
    _add(f"shrink-{_tokens}", _shrink, _tokens, 520, HALF, 0)
    _add(f"shrink-{_tokens}-fp32", _shrink, _tokens, 575, torch.float32, 3)
for _tokens in (1, 5, 13, 40):  # as chosen for the device
    _add(f"linear-{_tokens}", _linear, None, _tokens, [48, 16, 16], 264)
    _add(f"linear-gated-{_tokens}", _linear, None, _tokens, [48, 48], 264, gated=True)


def _norms() -> None:
    for width, dtype in ((1, HALF), (100, HALF), (1537, HALF), (64, torch.float32)):
        x, gain = _rows(3, width, dtype=dtype), _randn(width, dtype=dtype)
        rms_norm(x, gain, eps=1e-6)
        rms_norm(x, None, eps=1e-6)
        add_rms_norm(x, _rows(3, width, dtype=dtype), gain, eps=1e-6, offset=1.0)
        rms_norm_add(x, _rows(3, width, dtype=dtype), gain, eps=1e-6, offset=1.0)
    rms_norm(_rows(3, 160).unflatten(1, (2, 80)), _randn(80), eps=1e-6)


def _elementwise() -> None:
    for name in ACTIVATIONS:
        glu(_rows(3, 1025), _rows(3, 1025), activation=name)
        activation(_rows(2, 7, dtype=torch.float32), activation=name)
    # Ids outside the table, slots up to the last one.
    for scale in (1.0, 3.5):
        embed(_ints(0, 10, -1, 11, 1 << 40, dtype=torch.int64), None, _rows(11, 1100), scale=scale)
        embed(_ints(4, 10, 3, dtype=torch.int64), _ints(2, -1, 0), _rows(11, 33))
    inv_freq = _randn(20, dtype=torch.float32)
    rotary_table(_ints(0, 100000, 7), _ints(2, -1), inv_freq, scaling=1.5)
    rotary_table(_ints(0, 1, 5, dtype=torch.int64), None, inv_freq)
    spans = (_ints(2, -1), _ints(0, 3, 9), _ints(90, 0, 0))
    rotary_by_span(_ints(0, 100000, 7), *spans, inv_freq, limit=64, base=1e4, factor=2.0)
    rotary_by_span(_ints(0, 70), None, None, _ints(0, 0), inv_freq, inv_freq * 0.5, limit=64)
    copy_blocks(_rows(7, 2 * 16 * 65), *(_ints(*v, dtype=torch.int64) for v in ((0, 6), (5, 1))))
    copy_blocks(_rows(2, 3, extra=0), _ints(0, dtype=torch.int64), _ints(1, dtype=torch.int64))
    for num_words in (1, 4095, 4097):
        words = torch.arange(num_words, dtype=torch.int32).to(DEVICE)
        add_to_checksum(words, _zeros(1, dtype=torch.int64), first_row=3)


_add("rms_norm", _norms)
_add("elementwise", _elementwise)


def _sampling(vocab_size: int, dtype: torch.dtype) -> None:
    logits, slots = _rows(3, vocab_size, dtype=dtype), _ints(3, -1, 0)
    tokens = argmax(logits)
    num_words = -(-vocab_size // 32)
    mask = _zeros(4, num_words)
    # The last token, one past the vocabulary within the last word or after it, and far outside.
    marks = (0, vocab_size - 1, vocab_size, 32 * num_words, 1 << 40, 5)
    mark_seen(mask, _ints(3, 3, 3, 0, 0, -1), _ints(*marks, dtype=torch.int64))
    apply_repetition_penalty(logits, mask, slots, _randn(4, dtype=torch.float64))
    apply_suppress_mask(logits, mask, slots)
    eos_ids = [[vocab_size - 1, -1, 0], [-1, -1, -1], [1, 2, 3], [vocab_size - 2, 4, -1]]
    eos = torch.tensor(eos_ids, dtype=torch.int64).to(DEVICE)
    apply_min_tokens(logits, slots, _ints(0, 5, 1, 2), _ints(3, 3, 3, 3), eos)
    parameters = (
        *(torch.tensor(v).to(DEVICE) for v in ([0.7, 0.0, 1.0, 2.0], [50, 0, 1, 0])),
        torch.tensor([0.9, 1.0, 1.0, 0.5], dtype=torch.float64).to(DEVICE),
        torch.tensor([0.0, 0.0, 0.0, 0.01], dtype=torch.float64).to(DEVICE),
        _ints(1, 2, 3, 4, dtype=torch.int64),
        _ints(0, 1, 2, 3),
    )
    drawn = sample(logits, slots, *parameters)
    sample_with_scores(logits, slots, *parameters)
    logprobs = token_logprobs(logits, _ints(0, -1, vocab_size - 1, dtype=torch.int64))
    for count in (1, 20):
        top_logprobs(logits, count)
    failed, recorded = _zeros(4, dtype=torch.bool), _zeros(4, dtype=torch.float32)
    record_tokens(logits, drawn, slots, logprobs, failed, recorded)
    record_tokens(logits, tokens, slots, None, failed, recorded)


_add("sampling", _sampling, 4099, HALF)
_add("sampling-fp32", _sampling, 31, torch.float32)
_add("sampling-long", _sampling, 70001 if DEVICE == "cuda" else 5000, HALF)


def _advance(num_rows: int, num_eos: int = 2) -> None:
    num_slots = num_rows + 1
    slots = torch.arange(num_rows, dtype=torch.int32).flip(0) + 1
    slots[num_rows // 2] = -1
    state = [_zeros(num_slots, dtype=torch.int64), *(_zeros(num_slots) for _ in range(3))]
    eos = torch.tensor([[*range(7, 6 + num_eos), -1]] * num_slots).to(DEVICE)
    pad = torch.full((num_slots,), -1, dtype=torch.int64).to(DEVICE)
    output, finished = _zeros(3, num_slots, dtype=torch.int64), _zeros(num_slots, dtype=torch.bool)
    tokens = torch.arange(num_rows, dtype=torch.int64).to(DEVICE)
    for _ in range(4):  # once around the ring of three
        advance(
            tokens,
            slots.to(DEVICE),
            *state,
            _ints(*[3] * num_slots),
            finished,
            eos,
            pad,
            output,
            _zeros(1),
        )


for _count in (1, 33, 1030):
    _add(f"advance-{_count}", _advance, _count)
_add("advance-many-ends", _advance, 5, 71)
