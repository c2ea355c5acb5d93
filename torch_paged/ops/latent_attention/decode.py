"""Decode attention over cached latents: one token a row, split over the context."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.latent_attention.checks import check_queries
from torch_paged.ops.latent_attention.config import DecodeConfig, decode_config
from torch_paged.ops.latent_attention.decode_kernel import (
    latent_decode_kernel,
    latent_merge_kernel,
)
from torch_paged.ops.latent_attention.reference import latent_decode_attention_reference
from torch_paged.ops.paged_attention.checks import check_slots
from torch_paged.ops.paged_attention.config import dot_precision, sm_count
from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import triton, use_pdl

# Columns of one program of the merge.
_MERGE_COLUMNS = 128


def num_splits(num_programs: int, max_tokens: int, num_sms: int, config: DecodeConfig) -> int:
    """Return how many programs share a row and a tile of heads; a function of shapes alone."""
    if max_tokens <= config.single_tokens:
        return 1
    wanted = config.programs_per_sm * num_sms // max(num_programs, 1)
    return max(1, min(wanted, config.max_splits, -(-max_tokens // config.min_split_tokens)))


def _launch_latent_decode_attention(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
    config: DecodeConfig | None = None,
) -> Tensor:
    num_rows, num_heads, rank = latent_query.shape
    out = torch.empty((num_rows, num_heads, rank), dtype=latent_query.dtype, device=slots.device)
    if num_rows == 0:
        return out
    config = config or decode_config(latent_query)
    block_size, rope_dim = latent_cache.shape[2], rope_cache.shape[3]
    programs = num_rows * triton.cdiv(num_heads, config.block_m)
    max_tokens = block_table.shape[1] * block_size
    splits = num_splits(programs, max_tokens, sm_count(slots.device), config)
    scratch = splits * num_rows * num_heads if splits > 1 else 0
    partial = torch.empty(scratch * (rank + 2), dtype=torch.float32, device=slots.device)
    stats = partial[scratch * rank :]
    block_n = max(config.block_n, block_size)
    ranges = (splits, config.single_tokens, max(config.min_split_tokens, block_n))
    pdl = {"launch_pdl": True} if use_pdl(latent_query) else {}
    latent_decode_kernel[(programs, splits)](
        latent_query,
        rope_query,
        latent_cache,
        rope_cache,
        block_table,
        slots,
        context_lens,
        partial,
        stats,
        out,
        scale,
        *ranges,
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
        BLOCK_M=config.block_m,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
        BLOCK_P=max(16, triton.next_power_of_2(rope_dim)),
        BLOCK_N=block_n,
        NUM_STAGES=config.num_stages,
        SPLIT=splits > 1,
        PRECISION=dot_precision(),
        PDL=bool(pdl),
        num_warps=config.num_warps,
        **pdl,
    )
    if splits > 1:
        columns = min(_MERGE_COLUMNS, triton.next_power_of_2(rank))
        latent_merge_kernel[(num_rows * num_heads, triton.cdiv(rank, columns))](
            slots,
            context_lens,
            partial,
            stats,
            out,
            *ranges,
            NUM_HEADS=num_heads,
            RANK=rank,
            BLOCK_N=block_n,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_C=columns,
            PDL=bool(pdl),
            num_warps=4,
            **pdl,
        )
    return out


def _fake_latent_decode_attention(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    return latent_query.new_empty(latent_query.shape)


_latent_decode_attention = register_op(
    "latent_decode_attention(Tensor latent_query, Tensor rope_query, Tensor latent_cache, "
    "Tensor rope_cache, Tensor block_table, Tensor slots, Tensor context_lens, float scale) "
    "-> Tensor",
    cpu=latent_decode_attention_reference,
    cuda=_launch_latent_decode_attention,
    fake=_fake_latent_decode_attention,
)


def latent_decode_attention(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attend from one token a row to the latents of its context, its own already in the cache.

    `context_lens` does not count the row's own token: attention covers ``context_lens[slot] + 1``
    tokens. The grid depends on shapes only, so a graph captured at short contexts stays right at
    long ones.

    Args:
        latent_query: [num_rows, num_heads, rank], last dimension contiguous.
        rope_query: [num_rows, num_heads, rope_dim], last dimension contiguous.
        latent_cache: [num_blocks, 1, block_size, rank].
        rope_cache: [num_blocks, 1, block_size, rope_dim].
        block_table: [num_slots, max_blocks] int32, blocks of each slot in order.
        slots: [num_rows] int32; a row with slot -1 is padding: zero output.
        context_lens: [num_slots] int32, cached tokens before this one.
        scale: factor on the scores.

    Returns:
        [num_rows, num_heads, rank], contiguous, in the dtype of `latent_query`.
    """
    if not torch.compiler.is_compiling():
        check_queries(latent_query, rope_query, latent_cache, rope_cache, scale)
        check_slots(block_table, slots, context_lens)
    return _latent_decode_attention(
        latent_query, rope_query, latent_cache, rope_cache, block_table, slots, context_lens, scale
    )


__all__ = ["latent_decode_attention", "latent_decode_attention_reference", "num_splits"]
