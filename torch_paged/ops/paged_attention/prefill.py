"""Prefill attention over the paged KV cache for packed prompts."""

from __future__ import annotations

import torch

from torch_paged.ops.paged_attention.checks import (
    check_cache,
    check_heads,
    check_slots,
    check_window,
)
from torch_paged.ops.paged_attention.config import (
    PrefillConfig,
    dot_precision,
    prefill_config,
    row_block,
)
from torch_paged.ops.paged_attention.prefill_kernel import prefill_attention_kernel
from torch_paged.ops.paged_attention.reference import paged_prefill_attention_reference
from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import triton, use_pdl


def _launch_paged_prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size, v_dim = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    num_rows = slots.shape[0]
    group = num_heads // num_kv_heads
    out = torch.empty((num_tokens, num_heads, v_dim), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_dv = max(16, triton.next_power_of_2(v_dim))
    widest = max(block_d, block_dv)
    config = config or prefill_config(query, widest, num_tokens * num_heads, num_rows)
    num_tiles = triton.cdiv(num_tokens * group, config.block_m) + num_rows + 1
    pdl = {"launch_pdl": True} if use_pdl(query) else {}
    prefill_attention_kernel[(num_tiles * num_kv_heads,)](
        query,
        k_cache,
        v_cache,
        block_table,
        slots,
        cu_seqlens_q,
        context_lens,
        query if sinks is None else sinks,
        query if alibi_slopes is None else alibi_slopes,
        out,
        scale,
        softcap,
        window,
        num_tokens,
        num_rows,
        query.stride(0),
        block_table.stride(0),
        stride_qh=query.stride(1),
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
        BLOCK_SIZE=block_size,
        BLOCK_B=row_block(num_rows),
        BLOCK_M=config.block_m,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_N=max(config.block_n, block_size),
        NUM_STAGES=config.num_stages,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        HAS_ALIBI=alibi_slopes is not None,
        ALIBI_ROUNDED=alibi_slopes is not None and alibi_slopes.dtype == torch.bfloat16,
        PRECISION=dot_precision(),
        PDL=bool(pdl),
        num_warps=config.num_warps,
        **pdl,
    )
    return out


def _fake_paged_prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], v_cache.shape[-1])


_paged_prefill_attention = register_op(
    "paged_prefill_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor slots, Tensor cu_seqlens_q, Tensor context_lens, int max_query_len, float scale, "
    "int window=0, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None) -> Tensor",
    cpu=paged_prefill_attention_reference,
    cuda=_launch_paged_prefill_attention,
    fake=_fake_paged_prefill_attention,
)


def paged_prefill_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from packed prompts to their cached prefix and, causally, to themselves.

    Row ``b`` holds queries ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``. Its keys and values, those of
    the queries included, are in the cache already: ``context_lens[slots[b]]`` tokens of prefix,
    then its own. Query ``i`` of a row sees keys at indices up to ``prefix + i``.

    Args:
        query: [num_tokens, num_heads, head_dim], rows may be strided.
        k_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        v_cache: [num_blocks, num_kv_heads, block_size, v_head_dim].
        block_table: [num_slots, max_blocks] int32, blocks of each slot in order.
        slots: [num_rows] int32; a row with slot -1 is padding and its outputs are zero.
        cu_seqlens_q: [num_rows + 1] int32, contiguous. Tokens after the last entry are padding:
            zero outputs.
        context_lens: [num_slots] int32, cached tokens before this call's.
        max_query_len: an upper bound of the rows' query lengths; the grid does not need it.
        scale: factor on the scores.
        window: when positive, a query at index i sees keys j with i - window < j <= i.
        softcap: when positive, scores become ``softcap * tanh(score / softcap)``.
        sinks: [num_heads], one extra logit a head in the softmax denominator.
        alibi_slopes: [num_heads], adds ``slope * (j - i)`` to the score of key j; in bfloat16
            ``scale * (slope * j)``, the product and j in that dtype, as Falcon has it.

    Returns:
        [num_tokens, num_heads, v_head_dim] in the dtype of `query`.
    """
    if not torch.compiler.is_compiling():
        check_cache(query, k_cache, v_cache, scale)
        check_slots(block_table, slots, context_lens)
        check_heads("sinks", sinks, query.shape[1])
        check_heads("alibi_slopes", alibi_slopes, query.shape[1])
        check_window(window, softcap)
        _check_bounds(cu_seqlens_q, slots.shape[0])
    return _paged_prefill_attention(
        query,
        k_cache,
        v_cache,
        block_table,
        slots,
        cu_seqlens_q,
        context_lens,
        max_query_len,
        scale,
        window,
        softcap,
        sinks,
        alibi_slopes,
    )


def _check_bounds(cu_seqlens_q: torch.Tensor, num_rows: int) -> None:
    fits = cu_seqlens_q.shape == (num_rows + 1,) and cu_seqlens_q.is_contiguous()
    if cu_seqlens_q.dtype != torch.int32 or not fits:
        raise TypeError(
            f"cu_seqlens_q must be contiguous int32 [{num_rows + 1}], got {cu_seqlens_q.dtype} "
            f"{list(cu_seqlens_q.shape)} with strides {cu_seqlens_q.stride()}; "
            "call .int().contiguous()"
        )


__all__ = ["paged_prefill_attention", "paged_prefill_attention_reference"]
