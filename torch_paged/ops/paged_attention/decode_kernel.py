"""The decode kernel: grid (rows * KV heads, splits), last program to arrive merges."""

from __future__ import annotations

from torch_paged.ops.paged_attention.heads import load_gain, load_new_heads, norm_and_rotate
from torch_paged.ops.paged_attention.stages import (
    LOG2E,
    NO_SCORE,
    alibi_bias,
    alibi_slope,
    attend,
    block_index,
    capped_scores,
    is_visible,
    load_tile,
    merge_splits,
    prefetch_range,
    range_of_split,
    repeat_rows,
)
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


# One kernel for every batch size: the split count must not be specialised on.
@triton.jit(
    do_not_specialize=[
        "window",
        "num_splits",
        "single_tokens",
        "min_split_tokens",
        "max_blocks",
    ]
)
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    slots_ptr,
    context_lens_ptr,
    counters_ptr,
    sinks_ptr,
    slopes_ptr,
    partial_ptr,
    stats_ptr,
    out_ptr,
    scale,
    softcap,
    window,
    eps,
    norm_offset,
    num_splits,
    single_tokens,
    min_split_tokens,
    max_blocks,
    stride_qt,
    stride_kt,
    stride_vt,
    stride_cos,
    stride_table,
    stride_qh: tl.constexpr,
    stride_kh: tl.constexpr,
    stride_vh: tl.constexpr,
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
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    FUSED: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    CAST_BEFORE_GAIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ALIBI_ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    PREFETCH: tl.constexpr,
    K_LINES: tl.constexpr,
    V_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[b, h] = sum_j softmax_j(score(q[b, h], K[j])) V[j] over the tokens j of row b.

    Each program holds the query heads of one KV head of one row as the M dimension of its
    products and walks one range of the row's tokens with an online softmax. Which ranges there
    are follows from context_lens at run time, alike in all programs of a row: up to
    single_tokens tokens are one range whose program writes the output; above that, programs
    leave (accumulator, maximum, sum) in scratch and the last to arrive merges. The new token
    (FUSED) never takes the way through memory: the program of the last range starts its softmax
    from it, and writes it to the cache, which no other program reads at that index.
    """
    pid = tl.program_id(0)
    split = tl.program_id(1)
    row = (pid // NUM_KV_HEADS).to(tl.int64)
    head = pid % NUM_KV_HEADS
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    k_head_ptr = k_cache_ptr + head.to(tl.int64) * stride_kch
    v_head_ptr = v_cache_ptr + head.to(tl.int64) * stride_vch
    if PDL:
        gdc_launch_dependents()
    # What tells which keys and values to read, and these themselves, is complete long before the
    # previous kernel ends: kernels that write slots, lengths, tables or other rows' blocks let no
    # successor start early. Only the new token's heads come from the kernel just before this one.
    slot = tl.load(slots_ptr + row)
    live = slot >= 0
    slot = tl.maximum(slot, 0).to(tl.int64)
    table_ptr = block_table_ptr + slot * stride_table
    # Where programs wait for each other rather than for the previous kernel, what counts is how
    # many loads follow one another: the new heads and the table are asked for beside the length.
    TABLE_FIRST: tl.constexpr = HEADS_FIRST and not (SPLIT or HAS_WINDOW)
    OWN_FIRST: tl.constexpr = FUSED and (EARLY or HEADS_FIRST)
    first_blocks = n
    any_block = slot
    if HEADS_FIRST:
        if PDL:
            gdc_wait()
        q, q_partner, k_new, k_partner, v_new, cos, sin = load_new_heads(
            q_ptr,
            k_ptr,
            v_ptr,
            cos_ptr,
            sin_ptr,
            row,
            head,
            stride_qt,
            stride_kt,
            stride_vt,
            stride_cos,
            stride_qh,
            stride_kh,
            stride_vh,
            GROUP,
            D,
            DV,
            HALF,
            ROWS,
            BLOCK_D,
            BLOCK_DV,
            FUSED,
            INTERLEAVED,
        )
    if TABLE_FIRST:
        first_blocks = tl.load(
            table_ptr + n // BLOCK_SIZE,
            mask=n // BLOCK_SIZE < max_blocks,
            other=0,
            cache_modifier=".cg",
        )
        any_block = tl.load(table_ptr)
    position = tl.load(context_lens_ptr + slot, mask=live, other=0, cache_modifier=".cg")
    stop = position
    if not FUSED:
        stop = position + 1
    num_active, first, low, high = range_of_split(
        position,
        stop,
        split,
        window,
        num_splits,
        single_tokens,
        min_split_tokens,
        BLOCK_N,
        SPLIT,
        HAS_WINDOW,
    )
    num_active = tl.where(live, num_active, 0)
    # The program of the last range takes the new token, into the block that holds its place. With
    # registers to spare it looks that up while it waits anyway.
    own = split == num_active - 1
    mine = slot
    if OWN_FIRST:
        block_ptr = table_ptr + position // BLOCK_SIZE
        mine = tl.load(block_ptr, mask=own, other=0, cache_modifier=".cg").to(tl.int64)
    # Every row of a tile reads a block of this row's context; past the end, its last one.
    last_block = tl.maximum(high - 1, 0) // BLOCK_SIZE
    needed = n < tl.where(split < num_active, BLOCK_N, 0)
    if TABLE_FIRST:
        block = tl.where(n < high, first_blocks, any_block)
    else:
        block = tl.load(
            table_ptr + block_index(low + n, first, last_block, BLOCK_SIZE, HAS_WINDOW),
            mask=needed,
            other=0,
            cache_modifier=".cg",
        )
    k_ptrs = k_head_ptr + ((n % BLOCK_SIZE) * stride_kcs)[:, None] + d[None, :]
    v_ptrs = v_head_ptr + ((n % BLOCK_SIZE) * stride_vcs)[:, None] + dv[None, :]
    if EARLY:
        valid = needed & is_visible(low + n, first, high, HAS_WINDOW)
        k, v = load_tile(
            k_ptrs + (block.to(tl.int64) * stride_kcb)[:, None],
            v_ptrs + (block.to(tl.int64) * stride_vcb)[:, None],
            valid[:, None],
            valid[:, None],
            D,
            DV,
            BLOCK_D,
            BLOCK_DV,
        )
        block = tl.load(
            table_ptr + block_index(low + BLOCK_N + n, first, last_block, BLOCK_SIZE, HAS_WINDOW),
            mask=needed,
            other=0,
            cache_modifier=".cg",
        )
    q_gain, q_partner_gain = 0.0, 0.0
    k_gain, k_partner_gain = 0.0, 0.0
    if HAS_Q_NORM:
        q_gain, q_partner_gain = load_gain(q_norm_ptr, ROWS, D, BLOCK_D, HALF, INTERLEAVED)
    if HAS_K_NORM:
        k_gain, k_partner_gain = load_gain(k_norm_ptr, ROWS, D, BLOCK_D, HALF, INTERLEAVED)
    if PREFETCH:
        hint_low = tl.where(split < num_active, low, high) + (BLOCK_N if EARLY else 0)
        prefetch_range(
            k_head_ptr,
            v_head_ptr,
            table_ptr,
            hint_low,
            tl.minimum(high, low + PREFETCH),
            first,
            stride_kcb,
            stride_vcb,
            stride_kcs,
            stride_vcs,
            K_LINES,
            V_LINES,
            BLOCK_SIZE,
            BLOCK_N,
        )
    if not HEADS_FIRST:
        if PDL:
            gdc_wait()
        q, q_partner, k_new, k_partner, v_new, cos, sin = load_new_heads(
            q_ptr,
            k_ptr,
            v_ptr,
            cos_ptr,
            sin_ptr,
            row,
            head,
            stride_qt,
            stride_kt,
            stride_vt,
            stride_cos,
            stride_qh,
            stride_kh,
            stride_vh,
            GROUP,
            D,
            DV,
            HALF,
            ROWS,
            BLOCK_D,
            BLOCK_DV,
            FUSED,
            INTERLEAVED,
        )

    r = tl.arange(0, ROWS)
    q = norm_and_rotate(
        q,
        q_partner,
        cos,
        sin,
        q_gain,
        q_partner_gain,
        norm_offset,
        eps,
        D,
        HALF,
        HAS_Q_NORM,
        CAST_BEFORE_GAIN,
    )
    if FUSED:
        k_new = norm_and_rotate(
            k_new,
            k_partner,
            cos,
            sin,
            k_gain,
            k_partner_gain,
            norm_offset,
            eps,
            D,
            HALF,
            HAS_K_NORM,
            CAST_BEFORE_GAIN,
        )
        raw_new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1)
        raw_new = tl.reshape(repeat_rows(raw_new[:, None], ROWS, BLOCK_M, 1), [BLOCK_M])
    # From here on rows past the group repeat its heads; they are never stored.
    q = repeat_rows(q, ROWS, BLOCK_M, BLOCK_D)

    g = tl.arange(0, BLOCK_M)
    in_group = g < GROUP
    q_head = head * GROUP + g
    out_ptrs = out_ptr + (row * NUM_KV_HEADS * GROUP + q_head[:, None]) * DV + dv[None, :]
    out_mask = in_group[:, None] & (dv[None, :] < DV)
    if (split == 0) & (num_active == 0):
        tl.store(out_ptrs, tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty), out_mask)

    if split < num_active:
        peak = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        slope = 0.0
        if HAS_ALIBI:
            raw_slope = tl.load(slopes_ptr + q_head, mask=in_group, other=0.0)
            slope = alibi_slope(raw_slope, ALIBI_ROUNDED)
        if FUSED:
            new_score = capped_scores(raw_new, scale, softcap, HAS_SOFTCAP)
            if ALIBI_ROUNDED:
                new_score += alibi_bias(slope, position, position, scale, ALIBI_ROUNDED)
            peak = tl.where(own, new_score, peak)
            total = tl.where(own, 1.0, total)
            acc = tl.where(own, v_new.to(tl.float32)[None, :], acc)
            if own:
                if not OWN_FIRST:
                    mine = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
                inside = position % BLOCK_SIZE
                new_k_ptrs = k_head_ptr + mine * stride_kcb + inside * stride_kcs + d[None, :]
                new_k_ptrs += tl.zeros_like(r)[:, None]
                tl.store(new_k_ptrs, k_new, mask=(d[None, :] < D) & (r[:, None] == 0))
                new_v_ptrs = v_head_ptr + mine * stride_vcb + inside * stride_vcs + dv
                tl.store(new_v_ptrs, v_new, mask=dv < DV)
        # Summed over the tile once, at the end.
        weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if EARLY:
            peak, total, weights, acc = attend(
                q,
                k,
                v,
                is_visible(low + n, first, high, HAS_WINDOW),
                low + n,
                position,
                slope,
                scale,
                softcap,
                peak,
                total,
                weights,
                acc,
                HAS_SOFTCAP,
                HAS_ALIBI,
                ALIBI_ROUNDED,
                PRECISION,
            )
            low += BLOCK_N
        for start in tl.range(low, high, BLOCK_N, num_stages=NUM_STAGES):
            valid = is_visible(start + n, first, high, HAS_WINDOW)
            # Slots nobody wrote may hold NaN. Their scores are replaced; their values have to be
            # masked here, since a weight of zero does not silence NaN.
            k, v = load_tile(
                k_ptrs + (block.to(tl.int64) * stride_kcb)[:, None],
                v_ptrs + (block.to(tl.int64) * stride_vcb)[:, None],
                None,
                valid[:, None],
                D,
                DV,
                BLOCK_D,
                BLOCK_DV,
            )
            # One tile ahead, so that the next tile's loads need not wait for their addresses.
            block = tl.load(
                table_ptr
                + block_index(start + BLOCK_N + n, first, last_block, BLOCK_SIZE, HAS_WINDOW)
            )
            peak, total, weights, acc = attend(
                q,
                k,
                v,
                valid,
                start + n,
                position,
                slope,
                scale,
                softcap,
                peak,
                total,
                weights,
                acc,
                HAS_SOFTCAP,
                HAS_ALIBI,
                ALIBI_ROUNDED,
                PRECISION,
            )
        total += tl.sum(weights, axis=1)

        if num_active == 1:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + q_head, mask=in_group, other=0.0).to(tl.float32)
                sink = sink * LOG2E
                new_peak = tl.maximum(peak, sink)
                alpha = tl.exp2(peak - new_peak)
                total = total * alpha + tl.exp2(sink - new_peak)
                acc = acc * alpha[:, None]
            out = acc * (1.0 / total)[:, None]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)
        elif SPLIT:
            scratch = pid.to(tl.int64) * num_splits
            stats_ptrs = stats_ptr + ((scratch + split) * GROUP + g) * 2
            tl.store(stats_ptrs, peak, mask=in_group)
            tl.store(stats_ptrs + 1, total, mask=in_group)
            tl.store(
                partial_ptr + ((scratch + split) * GROUP + g[:, None]) * DV + dv[None, :],
                acc,
                mask=out_mask,
            )
            # All warps' stores before the one release below.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters_ptr + pid, 1, sem="acq_rel")
            if arrived == num_active - 1:
                tl.store(counters_ptr + pid, 0)
                merge_splits(
                    partial_ptr + scratch * GROUP * DV,
                    stats_ptr + scratch * 2 * GROUP,
                    sinks_ptr + head * GROUP,
                    out_ptr + (row * NUM_KV_HEADS * GROUP + head * GROUP) * DV,
                    num_active,
                    GROUP,
                    DV,
                    BLOCK_DV,
                    MERGE_HEADS,
                    HAS_SINKS,
                )


__all__ = ["decode_attention_kernel"]
