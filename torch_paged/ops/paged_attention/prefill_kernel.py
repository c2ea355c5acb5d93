"""The prefill kernel: flash attention over the paged cache, one program a tile and KV head."""

from __future__ import annotations

from torch_paged.ops.paged_attention.stages import (
    LOG2E,
    NO_SCORE,
    alibi_bias,
    alibi_slope,
    capped_scores,
)
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _attend_range(
    acc,
    peak,
    total,
    q,
    k_ptrs,
    v_ptrs,
    table_ptr,
    low,
    high,
    first_key,
    last_key,
    query_index,
    slope,
    scale,
    softcap,
    window,
    stride_kcb: tl.constexpr,
    stride_vcb: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ALIBI_ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the tiles of keys low .. high - 1 into the online softmax.

    MASKED tiles read keys first_key .. last_key - 1 alone: what lies around them may be NaN.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    # Every row of a tile reads a block between these: what lies around them may be gone.
    first_block = first_key // BLOCK_SIZE
    last_block = (last_key - 1) // BLOCK_SIZE
    index = low // BLOCK_SIZE + n // BLOCK_SIZE
    index = tl.minimum(tl.maximum(index, first_block), last_block)
    block = tl.load(table_ptr + index, mask=n < high - low, other=0)
    for start in tl.range(low, high, BLOCK_N, num_stages=NUM_STAGES):
        j = start + n
        k_tile = k_ptrs + (block.to(tl.int64) * stride_kcb)[:, None]
        v_tile = v_ptrs + (block.to(tl.int64) * stride_vcb)[:, None]
        if D == BLOCK_D:
            k = tl.load(k_tile)
        else:
            k = tl.load(k_tile, mask=d[None, :] < D, other=0.0)
        v_mask = dv[None, :] < DV
        if MASKED:
            # Slots nobody wrote may hold NaN. Their scores are replaced below; their values have
            # to be masked here, since a weight of zero does not silence NaN.
            v_mask = v_mask & ((j >= first_key) & (j < last_key))[:, None]
        if MASKED or DV != BLOCK_DV:
            v = tl.load(v_tile, mask=v_mask, other=0.0)
        else:
            v = tl.load(v_tile)
        # One tile ahead, so that the next tile's loads need not wait for their addresses.
        index = (start + BLOCK_N) // BLOCK_SIZE + n // BLOCK_SIZE
        if HAS_WINDOW:
            index = tl.maximum(index, first_block)
        block = tl.load(table_ptr + tl.minimum(index, last_block))

        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_SOFTCAP or HAS_ALIBI:
            s = capped_scores(s, scale, softcap, HAS_SOFTCAP)
            if HAS_ALIBI:
                s += alibi_bias(
                    slope[:, None], j[None, :], query_index[:, None], scale, ALIBI_ROUNDED
                )
        if MASKED:
            seen = (j[None, :] <= query_index[:, None]) & (j[None, :] < last_key)
            if HAS_WINDOW:
                seen = seen & (j[None, :] > query_index[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        if HAS_SOFTCAP or HAS_ALIBI:
            new_peak = tl.maximum(peak, tl.max(s, axis=1))
            p = tl.exp2(s - new_peak[:, None])
        else:
            # Scaling after the maximum leaves one multiply-add a score.
            new_peak = tl.maximum(peak, tl.max(s, axis=1) * (scale * LOG2E))
            p = tl.exp2(s * (scale * LOG2E) - new_peak[:, None])
        alpha = tl.exp2(peak - new_peak)
        total = total * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["window", "num_tokens", "num_rows"])
def prefill_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    sinks_ptr,
    slopes_ptr,
    out_ptr,
    scale,
    softcap,
    window,
    num_tokens,
    num_rows,
    stride_qt,
    stride_table,
    stride_qh: tl.constexpr,
    stride_kcb: tl.constexpr,
    stride_kch: tl.constexpr,
    stride_kcs: tl.constexpr,
    stride_vcb: tl.constexpr,
    stride_vch: tl.constexpr,
    stride_vcs: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ALIBI_ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[i, h] = sum_j softmax_j(score(q[i, h], K[j])) V[j] over the keys j <= prefix + i.

    The M dimension of a tile holds (query, head of the group) pairs, head fastest, so that the
    keys of a KV head are read once for its whole group. Row b owns the tiles from
    cu_seqlens[b] * GROUP // BLOCK_M + b on: always enough of them, without knowing the lengths
    on the host. The row after the last one stands for the padding tokens behind it.
    """
    # Late tiles see the most keys and go first.
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    head = pid % NUM_KV_HEADS
    tile = pid // NUM_KV_HEADS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.arange(0, BLOCK_B)
    starts = tl.load(cu_seqlens_ptr + b, mask=b <= num_rows, other=0)
    first_tiles = tl.where(b <= num_rows, starts * GROUP // BLOCK_M + b, 0x7FFFFFFF)
    row = tl.sum((first_tiles <= tile).to(tl.int32), axis=0) - 1
    begin = tl.load(cu_seqlens_ptr + row)
    end = tl.load(cu_seqlens_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    length = end - begin
    first_pair = (tile - begin * GROUP // BLOCK_M - row) * BLOCK_M

    if first_pair < length * GROUP:
        pair = first_pair + tl.arange(0, BLOCK_M)
        token = pair // GROUP
        q_head = head * GROUP + pair % GROUP
        in_row = token < length
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        n = tl.arange(0, BLOCK_N)
        global_token = (begin + token).to(tl.int64)
        out_ptrs = out_ptr + (global_token * (NUM_KV_HEADS * GROUP) + q_head)[:, None] * DV
        out_ptrs += dv[None, :]
        out_mask = in_row[:, None] & (dv[None, :] < DV)
        slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
        if slot < 0:
            zeros = tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty)
            tl.store(out_ptrs, zeros, mask=out_mask)
        else:
            q = tl.load(
                q_ptr + (global_token * stride_qt + q_head * stride_qh)[:, None] + d[None, :],
                mask=in_row[:, None] & (d[None, :] < D),
                other=0.0,
            )
            table_ptr = block_table_ptr + slot.to(tl.int64) * stride_table
            prefix = tl.load(context_lens_ptr + slot)
            query_index = prefix + token
            first_token = first_pair // GROUP
            last_token = tl.minimum((first_pair + BLOCK_M - 1) // GROUP, length - 1)
            high = prefix + last_token + 1
            # Every query of the tile sees all keys before this one.
            seen_by_all = (prefix + first_token + 1) // BLOCK_N * BLOCK_N
            inside = (n % BLOCK_SIZE)[:, None]
            k_ptrs = k_cache_ptr + head.to(tl.int64) * stride_kch
            k_ptrs = k_ptrs + inside * stride_kcs + d[None, :]
            v_ptrs = v_cache_ptr + head.to(tl.int64) * stride_vch
            v_ptrs = v_ptrs + inside * stride_vcs + dv[None, :]
            slope = tl.zeros([BLOCK_M], tl.float32)
            if HAS_ALIBI:
                slope = alibi_slope(tl.load(slopes_ptr + q_head), ALIBI_ROUNDED)
            peak = tl.full([BLOCK_M], NO_SCORE, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            if HAS_SINKS:
                peak = tl.load(sinks_ptr + q_head).to(tl.float32) * LOG2E
                total = tl.full([BLOCK_M], 1.0, tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            first_key = 0
            if HAS_WINDOW:
                first_key = tl.maximum(prefix + first_token - window + 1, 0)
                masked_from = first_key // BLOCK_N * BLOCK_N
            else:
                masked_from = seen_by_all
                acc, peak, total = _attend_range(
                    acc,
                    peak,
                    total,
                    q,
                    k_ptrs,
                    v_ptrs,
                    table_ptr,
                    0,
                    seen_by_all,
                    0,
                    seen_by_all,
                    query_index,
                    slope,
                    scale,
                    softcap,
                    window,
                    stride_kcb,
                    stride_vcb,
                    D,
                    DV,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_N,
                    BLOCK_SIZE,
                    NUM_STAGES,
                    False,
                    HAS_WINDOW,
                    HAS_SOFTCAP,
                    HAS_ALIBI,
                    ALIBI_ROUNDED,
                    PRECISION,
                )
            acc, peak, total = _attend_range(
                acc,
                peak,
                total,
                q,
                k_ptrs,
                v_ptrs,
                table_ptr,
                masked_from,
                high,
                first_key,
                high,
                query_index,
                slope,
                scale,
                softcap,
                window,
                stride_kcb,
                stride_vcb,
                D,
                DV,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_N,
                BLOCK_SIZE,
                NUM_STAGES,
                True,
                HAS_WINDOW,
                HAS_SOFTCAP,
                HAS_ALIBI,
                ALIBI_ROUNDED,
                PRECISION,
            )
            out = acc * (1.0 / total)[:, None]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)


__all__ = ["prefill_attention_kernel"]
