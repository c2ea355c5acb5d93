"""Prefill attention over cached latents for packed prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.latent_attention.checks import check_queries
from torch_paged.ops.latent_attention.config import PrefillConfig, prefill_config
from torch_paged.ops.latent_attention.prefill_kernel import latent_prefill_kernel
from torch_paged.ops.latent_attention.reference import latent_prefill_attention_reference
from torch_paged.ops.paged_attention.checks import check_slots
from torch_paged.ops.paged_attention.config import dot_precision, row_block
from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import triton, use_pdl


def _launch_latent_prefill_attention(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
    config: PrefillConfig | None = None,
) -> Tensor:
    num_tokens, num_heads, rank = latent_query.shape
    out = torch.empty((num_tokens, num_heads, rank), dtype=latent_query.dtype, device=slots.device)
    if num_tokens == 0:
        return out
    config = config or prefill_config(latent_query)
    num_rows, block_size, rope_dim = slots.shape[0], latent_cache.shape[2], rope_cache.shape[3]
    pdl = {"launch_pdl": True} if use_pdl(latent_query) else {}
    num_tiles = triton.cdiv(num_tokens * num_heads, config.block_m) + num_rows + 1
    latent_prefill_kernel[(num_tiles,)](
        latent_query,
        rope_query,
        latent_cache,
        rope_cache,
        block_table,
        slots,
        cu_seqlens_q,
        context_lens,
        out,
        scale,
        num_tokens,
        num_rows,
        latent_query.stride(0),
        latent_query.stride(1),
        rope_query.stride(0),
        rope_query.stride(1),
        block_table.stride(0),
        stride_lcb=latent_cache.stride(0),
        stride_lcs=latent_cache.stride(2),
        stride_rcb=rope_cache.stride(0),
        stride_rcs=rope_cache.stride(2),
        NUM_HEADS=num_heads,
        RANK=rank,
        ROPE=rope_dim,
        BLOCK_SIZE=block_size,
        BLOCK_B=row_block(num_rows),
        BLOCK_M=config.block_m,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
        BLOCK_P=max(16, triton.next_power_of_2(rope_dim)),
        BLOCK_N=max(config.block_n, block_size),
        NUM_STAGES=config.num_stages,
        PRECISION=dot_precision(),
        PDL=bool(pdl),
        num_warps=config.num_warps,
        **pdl,
    )
    return out


def _fake_latent_prefill_attention(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    return latent_query.new_empty(latent_query.shape)


_latent_prefill_attention = register_op(
    "latent_prefill_attention(Tensor latent_query, Tensor rope_query, Tensor latent_cache, "
    "Tensor rope_cache, Tensor block_table, Tensor slots, Tensor cu_seqlens_q, "
    "Tensor context_lens, float scale) -> Tensor",
    cpu=latent_prefill_attention_reference,
    cuda=_launch_latent_prefill_attention,
    fake=_fake_latent_prefill_attention,
)


def latent_prefill_attention(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attend causally from packed tokens to the latents of their rows, theirs already written.

    Args:
        latent_query: [num_tokens, num_heads, rank], last dimension contiguous.
        rope_query: [num_tokens, num_heads, rope_dim], last dimension contiguous.
        latent_cache: [num_blocks, 1, block_size, rank].
        rope_cache: [num_blocks, 1, block_size, rope_dim].
        block_table: [num_slots, max_blocks] int32, blocks of each slot in order.
        slots: [num_rows] int32; the output of a row with slot -1 is zero.
        cu_seqlens_q: [num_rows + 1] int32 bounds of the rows in the packing; tokens behind the
            last one are padding.
        context_lens: [num_slots] int32, tokens cached before those of this call.
        scale: factor on the scores.

    Returns:
        [num_tokens, num_heads, rank], contiguous, in the dtype of `latent_query`.
    """
    if not torch.compiler.is_compiling():
        check_queries(latent_query, rope_query, latent_cache, rope_cache, scale)
        check_slots(block_table, slots, context_lens)
        is_bounds = cu_seqlens_q.shape == (slots.shape[0] + 1,) and cu_seqlens_q.is_contiguous()
        if cu_seqlens_q.dtype != torch.int32 or not is_bounds:
            raise TypeError(
                f"cu_seqlens_q must be contiguous int32 [{slots.shape[0] + 1}], got "
                f"{cu_seqlens_q.dtype} {list(cu_seqlens_q.shape)} with strides "
                f"{cu_seqlens_q.stride()}; call .int().contiguous()"
            )
    return _latent_prefill_attention(
        latent_query,
        rope_query,
        latent_cache,
        rope_cache,
        block_table,
        slots,
        cu_seqlens_q,
        context_lens,
        scale,
    )


__all__ = ["latent_prefill_attention", "latent_prefill_attention_reference"]
