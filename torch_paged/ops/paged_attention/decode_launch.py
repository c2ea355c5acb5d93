"""Launch of the decode kernel: tiles, split count and scratch, all from shapes alone."""

from __future__ import annotations

import torch

from torch_paged.ops.paged_attention.config import (
    DecodeConfig,
    decode_config,
    dot_precision,
    num_splits,
    sm_count,
)
from torch_paged.ops.paged_attention.decode_kernel import decode_attention_kernel
from torch_paged.ops.triton_compat import triton, use_pdl


def _cache_lines(row_bytes: int) -> int:
    """Return how many 128-byte lines of a cached head to prefetch: a power of two."""
    return 1 << (max(row_bytes // 128, 1).bit_length() - 1)


def _launch_fused_decode_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    counters: torch.Tensor,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    interleaved: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Launch the kernel; without a new `key` and `value` the cache holds the row's own token."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size, v_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    group = num_heads // num_kv_heads
    out = torch.empty((num_rows, num_heads, v_dim), dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return out
    max_tokens = block_table.shape[1] * block_size
    config = config or decode_config(query, num_rows * num_kv_heads, max_tokens)
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_dv = max(16, triton.next_power_of_2(v_dim))
    block_m = max(16, triton.next_power_of_2(group))
    num_warps = config.num_warps if block_m < 64 else 8
    # At least a row a warp for the work on new heads: no sums across warps, and little waste.
    rows = max(triton.next_power_of_2(group), min(num_warps, block_m))
    tile = config.tile_bytes // (max(block_d, block_dv) * query.element_size())
    if query.element_size() == 4:
        tile //= 2  # exact float32 products run on registers alone
    # Scores and their sums take block_m * tile registers each.
    tile = min(tile, 512 * num_warps // block_m)
    tile = max(tile, block_size, 16)
    reach = min(max_tokens, window + tile) if window > 0 else max_tokens
    splits = num_splits(num_rows * num_kv_heads, reach, sm_count(query.device), config)
    scratch = splits * num_rows * num_heads if splits > 1 else 0
    partial = torch.empty(scratch * (v_dim + 2), dtype=torch.float32, device=query.device)
    pdl = {"launch_pdl": True} if use_pdl(query) else {}
    bounds = {} if config.registers is None else {"maxnreg": config.registers}
    fused = key is not None and value is not None
    key = query if key is None else key
    value = query if value is None else value
    decode_attention_kernel[(num_rows * num_kv_heads, splits)](
        query,
        key,
        value,
        query if cos is None else cos,
        query if sin is None else sin,
        query if q_norm is None else q_norm,
        query if k_norm is None else k_norm,
        k_cache,
        v_cache,
        block_table,
        slots,
        context_lens,
        counters,
        query if sinks is None else sinks,
        query if alibi_slopes is None else alibi_slopes,
        partial,
        partial[scratch * v_dim :],
        out,
        scale,
        softcap,
        window,
        eps,
        norm_offset,
        splits,
        config.single_tokens,
        max(config.min_split_tokens, tile),
        block_table.shape[1],
        query.stride(0),
        key.stride(0),
        value.stride(0),
        0 if cos is None else cos.stride(0),
        block_table.stride(0),
        stride_qh=query.stride(1),
        stride_kh=key.stride(1),
        stride_vh=value.stride(1),
        stride_kcb=k_cache.stride(0),
        stride_kch=k_cache.stride(1),
        stride_kcs=k_cache.stride(2),
        stride_vcb=v_cache.stride(0),
        stride_vch=v_cache.stride(1),
        stride_vcs=v_cache.stride(2),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        DV=v_dim,
        HALF=0 if cos is None else cos.shape[1],
        BLOCK_SIZE=block_size,
        ROWS=rows,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_N=tile,
        MERGE_HEADS=min(triton.next_power_of_2(group), 8),
        NUM_STAGES=config.num_stages,
        FUSED=fused,
        SPLIT=splits > 1,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        CAST_BEFORE_GAIN=cast_before_gain and norm_offset == 0,
        INTERLEAVED=interleaved,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        HAS_ALIBI=alibi_slopes is not None,
        ALIBI_ROUNDED=alibi_slopes is not None and alibi_slopes.dtype == torch.bfloat16,
        PRECISION=dot_precision(),
        EARLY=fused and config.early_tile,
        HEADS_FIRST=config.heads_first,
        PREFETCH=config.prefetch_tokens if pdl else 0,
        K_LINES=_cache_lines(head_dim * query.element_size()),
        V_LINES=_cache_lines(v_dim * query.element_size()),
        PDL=bool(pdl),
        num_warps=num_warps,
        **bounds,
        **pdl,
    )
    return out


def _launch_paged_decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    counters: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    return _launch_fused_decode_attention(
        query,
        None,
        None,
        None,
        None,
        k_cache,
        v_cache,
        block_table,
        slots,
        context_lens,
        counters,
        scale,
        None,
        None,
        0.0,
        0.0,
        True,
        False,
        window,
        softcap,
        sinks,
        alibi_slopes,
        config,
    )
