"""Decode over latents: ranges of a row's tokens side by side, and the merge of their results."""

from __future__ import annotations

from torch_paged.ops.latent_attention.stages import attend_latents, load_query, load_tokens
from torch_paged.ops.paged_attention.stages import NO_SCORE, range_of_split
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


# One kernel for every batch size: the split count must not be specialised on.
@triton.jit(do_not_specialize=["num_splits", "single_tokens", "min_split_tokens"])
def latent_decode_kernel(
    q_ptr,
    r_ptr,
    latent_cache_ptr,
    rope_cache_ptr,
    block_table_ptr,
    slots_ptr,
    context_lens_ptr,
    partial_ptr,
    stats_ptr,
    out_ptr,
    scale,
    num_splits,
    single_tokens,
    min_split_tokens,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_table,
    stride_lcb: tl.constexpr,
    stride_lcs: tl.constexpr,
    stride_rcb: tl.constexpr,
    stride_rcs: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[b, h] = sum_j softmax_j(scale (q[b, h] . c[j] + r[b, h] . k[j])) c[j].

    Each program holds a tile of heads of one row as the M dimension of its products and walks one
    range of the row's tokens, whose latents all heads share. Ranges follow from context_lens at
    run time, alike in all programs of a row; the only range of a short row is written to `out`,
    of others (accumulator, maximum, sum) are left for the merge.
    """
    NUM_TILES: tl.constexpr = (NUM_HEADS + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    split = tl.program_id(1)
    row = (pid // NUM_TILES).to(tl.int64)
    head = pid % NUM_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    in_heads = head < NUM_HEADS
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_R)
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row)
    live = slot >= 0
    slot = tl.maximum(slot, 0).to(tl.int64)
    table_ptr = block_table_ptr + slot * stride_table
    position = tl.load(context_lens_ptr + slot, mask=live, other=0, cache_modifier=".cg")
    num_active, _, low, high = range_of_split(
        position,
        position + 1,
        split,
        0,
        num_splits,
        single_tokens,
        min_split_tokens,
        BLOCK_N,
        SPLIT,
        False,
    )
    num_active = tl.where(live, num_active, 0)
    if PDL:
        gdc_wait()
    index = row * NUM_HEADS + head
    out_ptrs = out_ptr + (index * RANK)[:, None] + d[None, :]
    out_mask = in_heads[:, None] & (d < RANK)[None, :]
    if (split == 0) & (num_active == 0):
        tl.store(out_ptrs, tl.zeros([BLOCK_M, BLOCK_R], out_ptr.dtype.element_ty), out_mask)

    if split < num_active:
        q = load_query(q_ptr + row * stride_qt + head * stride_qh, in_heads, RANK, BLOCK_R)
        r = load_query(r_ptr + row * stride_rt + head * stride_rh, in_heads, ROPE, BLOCK_P)
        peak = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        last_block = (high - 1) // BLOCK_SIZE
        block = tl.load(table_ptr + tl.minimum((low + n) // BLOCK_SIZE, last_block))
        for start in tl.range(low, high, BLOCK_N, num_stages=NUM_STAGES):
            exists = start + n < high
            inside = n % BLOCK_SIZE
            c = load_tokens(
                latent_cache_ptr, block, inside, exists, stride_lcb, stride_lcs, RANK, BLOCK_R
            )
            k = load_tokens(
                rope_cache_ptr, block, inside, exists, stride_rcb, stride_rcs, ROPE, BLOCK_P
            )
            # One tile ahead, so that the next tile's loads need not wait for their addresses.
            following = (start + BLOCK_N + n) // BLOCK_SIZE
            block = tl.load(table_ptr + tl.minimum(following, last_block))
            peak, total, acc = attend_latents(
                q, r, c, k, exists[None, :], scale, peak, total, acc, PRECISION
            )
        if num_active == 1:
            out = acc * (1.0 / total)[:, None]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)
        elif SPLIT:
            scratch = index * num_splits + split
            tl.store(stats_ptr + scratch * 2, peak, mask=in_heads)
            tl.store(stats_ptr + scratch * 2 + 1, total, mask=in_heads)
            partial_ptrs = partial_ptr + (scratch * RANK)[:, None] + d[None, :]
            tl.store(partial_ptrs, acc, mask=out_mask)


@triton.jit(do_not_specialize=["num_splits", "single_tokens", "min_split_tokens"])
def latent_merge_kernel(
    slots_ptr,
    context_lens_ptr,
    partial_ptr,
    stats_ptr,
    out_ptr,
    num_splits,
    single_tokens,
    min_split_tokens,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = sum_s w[s] acc[s] / sum_s w[s] total[s], w[s] = 2^(peak[s] - max(peak)).

    One head of a row and some columns a program; rows of one range have their output already.
    """
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.arange(0, BLOCK_S)
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + index // NUM_HEADS)
    live = slot >= 0
    position = tl.load(
        context_lens_ptr + tl.maximum(slot, 0), mask=live, other=0, cache_modifier=".cg"
    )
    num_active, _, _, _ = range_of_split(
        position,
        position + 1,
        0,
        0,
        num_splits,
        single_tokens,
        min_split_tokens,
        BLOCK_N,
        True,
        False,
    )
    if PDL:
        gdc_wait()
    if live & (num_active > 1):
        there = split < num_active
        scratch = index * num_splits + split
        peak = tl.load(stats_ptr + scratch * 2, mask=there, other=NO_SCORE)
        total = tl.load(stats_ptr + scratch * 2 + 1, mask=there, other=0.0)
        acc = tl.load(
            partial_ptr + (scratch * RANK)[:, None] + columns[None, :],
            mask=there[:, None] & (columns < RANK)[None, :],
            other=0.0,
        )
        weight = tl.exp2(peak - tl.max(peak, axis=0))
        out = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
        out_ptrs = out_ptr + index * RANK + columns
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=columns < RANK)


__all__ = ["latent_decode_kernel", "latent_merge_kernel"]
