"""The decode kernel: grid (rows * KV heads, splits), last program to arrive merges."""

from __future__ import annotations

from torch_paged.ops.triton_compat import (
    HAS_TRITON,
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
)

# Scores are kept in log2 units, so that every exponential is one exp2.
LOG2E = tl.constexpr(1.4426950408889634) if HAS_TRITON else 1.4426950408889634
# Stands for "no key seen yet": finite, so that differences of two of them are no NaN.
NO_SCORE = tl.constexpr(-1.0e30) if HAS_TRITON else -1.0e30


@triton.jit
def capped_scores(raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return ``softcap * tanh(raw * scale / softcap)``, or ``raw * scale``, in log2 units."""
    if HAS_SOFTCAP:
        y = raw * (scale / softcap)
        # tanh(y) = 1 - 2 / (exp(2y) + 1) is right at both infinities of the exponential; near
        # zero, where it cancels, the series is.
        far = 1.0 - 2.0 / (tl.exp2(y * (2.0 * LOG2E)) + 1.0)
        z = y * y
        near = y * (1.0 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835)))))
        return tl.where(tl.abs(y) < 0.25, near, far) * (softcap * LOG2E)
    return raw * (scale * LOG2E)


@triton.jit
def _apply_gain(x, rstd, gain, CAST_BEFORE_GAIN: tl.constexpr):
    normed = x.to(tl.float32) * rstd
    if CAST_BEFORE_GAIN:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * gain[None, :]).to(x.dtype)


@triton.jit
def _partner(d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the dimension that `d` is rotated with."""
    if INTERLEAVED:
        return d ^ 1
    return tl.where(d < HALF, d + HALF, d - HALF)


@triton.jit
def _load_head(
    row_ptrs,
    row_mask,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load heads at row_ptrs [M, 1] twice: in order, and as each dimension's partner sees them.

    Reading the partners again is cheaper than an exchange between lanes.
    """
    d = tl.arange(0, BLOCK_D)
    x = tl.load(row_ptrs + d[None, :], mask=row_mask & (d[None, :] < D), other=0.0)
    y = x
    if HALF > 0:
        partner = _partner(d, HALF, INTERLEAVED)
        mask = row_mask & (d[None, :] < 2 * HALF)
        y = tl.load(row_ptrs + partner[None, :], mask=mask, other=0.0)
    return x, y


@triton.jit
def _norm_and_rotate(
    x,
    y,
    cos,
    sin,
    gain,
    partner_gain,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CAST_BEFORE_GAIN: tl.constexpr,
):
    """RMS-normalise heads x [M, BLOCK_D] over D, then rotate them with their partners y."""
    if HAS_NORM:
        wide = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
        x = _apply_gain(x, rstd, gain, CAST_BEFORE_GAIN)
        if HALF > 0:
            y = _apply_gain(y, rstd, partner_gain, CAST_BEFORE_GAIN)
    if HALF > 0:
        x = (x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * sin[None, :]).to(x.dtype)
    return x


@triton.jit
def _load_gain(
    norm_ptr,
    offset,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load a norm's gain [BLOCK_D] twice: in order, and as each dimension's partner sees it."""
    d = tl.arange(0, BLOCK_D)
    gain = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32) + offset
    partner = _partner(d, HALF, INTERLEAVED)
    partner_gain = tl.load(norm_ptr + partner, mask=d < 2 * HALF, other=0.0).to(tl.float32)
    return gain, partner_gain + offset


@triton.jit
def _range_of_split(
    position,
    stop,
    split,
    window,
    num_splits,
    single_tokens,
    min_split_tokens,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return how many ranges the row has, its first visible token, and this split's range."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    base = first // BLOCK_N * BLOCK_N
    num_active = 1
    low = base
    high = stop
    if SPLIT:
        span = stop - base
        share = tl.cdiv(tl.cdiv(span, num_splits), BLOCK_N) * BLOCK_N
        share = tl.maximum(share, min_split_tokens)
        share = tl.where(span <= single_tokens, single_tokens, share)
        num_active = tl.maximum(tl.cdiv(span, share), 1)
        low = base + split * share
        high = tl.minimum(low + share, stop)
    return num_active, first, low, high


@triton.jit
def _prefetch_tile(
    ptrs,
    block,
    stride_block,
    needed,
    stride_token,
    LINES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Ask for a tile's cache lines in L2: hints that nothing waits for."""
    n = tl.arange(0, BLOCK_N)
    line = tl.arange(0, LINES) * (128 // (ptrs.dtype.element_ty.primitive_bitwidth // 8))
    rows = ptrs + block.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * stride_token
    address = (rows[:, None] + line[None, :]).to(tl.int64, bitcast=True)
    wanted = tl.broadcast_to(needed[:, None], [BLOCK_N, LINES]).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# One kernel for every batch size: the split count must not be specialised on.
@triton.jit(
    do_not_specialize=[
        "window",
        "num_splits",
        "single_tokens",
        "min_split_tokens",
        "max_tokens",
        "num_blocks",
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
    max_tokens,
    num_blocks,
    stride_qt,
    stride_kt,
    stride_vt,
    stride_cos,
    stride_table,
    stride_kcb,
    stride_kch,
    stride_vcb,
    stride_vch,
    stride_qh: tl.constexpr,
    stride_kh: tl.constexpr,
    stride_vh: tl.constexpr,
    stride_kcs: tl.constexpr,
    stride_vcs: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE_TILE: tl.constexpr,
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
    PRECISION: tl.constexpr,
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
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    in_group = g < GROUP
    q_head = head * GROUP + g
    if PDL:
        gdc_launch_dependents()
    q_gain, q_partner_gain = 0.0, 0.0
    k_gain, k_partner_gain = 0.0, 0.0
    if HAS_Q_NORM:
        q_gain, q_partner_gain = _load_gain(q_norm_ptr, norm_offset, D, BLOCK_D, HALF, INTERLEAVED)
    if HAS_K_NORM:
        k_gain, k_partner_gain = _load_gain(k_norm_ptr, norm_offset, D, BLOCK_D, HALF, INTERLEAVED)
    if PREFETCH:
        # Read before the wait, so possibly stale: good for hints, and read again below.
        hint = tl.load(slots_ptr + row, cache_modifier=".cg")
        hint_live = hint >= 0
        hint = tl.maximum(hint, 0).to(tl.int64)
        hint_stop = tl.load(context_lens_ptr + hint, mask=hint_live, other=0, cache_modifier=".cg")
        hint_stop = tl.minimum(tl.maximum(hint_stop, 0), max_tokens)
        hint_active, hint_first, hint_low, hint_high = _range_of_split(
            hint_stop,
            hint_stop,
            split,
            window,
            num_splits,
            single_tokens,
            min_split_tokens,
            BLOCK_N,
            SPLIT,
            HAS_WINDOW,
        )
        hint_high = tl.minimum(hint_high, hint_low + PREFETCH)
        for start in range(hint_low, hint_high, BLOCK_N):
            needed = (start + n < hint_high) & (start + n >= hint_first)
            hint_block = tl.load(
                block_table_ptr + hint * stride_table + (start + n) // BLOCK_SIZE,
                mask=needed,
                other=-1,
                cache_modifier=".cg",
            )
            needed = needed & (hint_block >= 0) & (hint_block < num_blocks)
            _prefetch_tile(
                k_cache_ptr + head * stride_kch,
                hint_block,
                stride_kcb,
                needed,
                stride_kcs,
                K_LINES,
                BLOCK_SIZE,
                BLOCK_N,
            )
            _prefetch_tile(
                v_cache_ptr + head * stride_vch,
                hint_block,
                stride_vcb,
                needed,
                stride_vcs,
                V_LINES,
                BLOCK_SIZE,
                BLOCK_N,
            )
    if PDL:
        gdc_wait()

    # Loads that need no other load first; the work on them fills the wait for the lengths.
    slot = tl.load(slots_ptr + row)
    q_rows = q_ptr + row * stride_qt + q_head[:, None] * stride_qh
    q, q_partner = _load_head(q_rows, in_group[:, None], D, BLOCK_D, HALF, INTERLEAVED)
    cos, sin = 0.0, 0.0
    if HALF > 0:
        if INTERLEAVED:
            angle = d // 2
            minus = d % 2 == 0
        else:
            angle = d % HALF
            minus = d < HALF
        cos = tl.load(cos_ptr + row * stride_cos + angle, mask=d < 2 * HALF, other=1.0)
        sin = tl.load(sin_ptr + row * stride_cos + angle, mask=d < 2 * HALF, other=0.0)
        sin = tl.where(minus, -sin, sin)
    if FUSED:
        # The one new key in every row of a tile: no change of layout for its product with q.
        k_rows = k_ptr + row * stride_kt + head * stride_kh + tl.zeros_like(g)[:, None]
        k_new, k_partner = _load_head(k_rows, g[:, None] >= 0, D, BLOCK_D, HALF, INTERLEAVED)
        v_new_ptrs = v_ptr + row * stride_vt + head * stride_vh + dv
        v_new = tl.load(v_new_ptrs, mask=dv < DV, other=0.0)

    live = slot >= 0
    slot = tl.maximum(slot, 0).to(tl.int64)
    table_ptrs = block_table_ptr + slot * stride_table + n // BLOCK_SIZE
    position = tl.load(context_lens_ptr + slot, mask=live, other=0)
    if not HAS_WINDOW:
        # The first tile's blocks, before it is known whether this program has that tile.
        block = tl.load(table_ptrs, mask=n < tl.where(live, max_tokens, 0), other=0)
    q = _norm_and_rotate(
        q, q_partner, cos, sin, q_gain, q_partner_gain, eps, D, HALF, HAS_Q_NORM, CAST_BEFORE_GAIN
    )
    if FUSED:
        k_new = _norm_and_rotate(
            k_new,
            k_partner,
            cos,
            sin,
            k_gain,
            k_partner_gain,
            eps,
            D,
            HALF,
            HAS_K_NORM,
            CAST_BEFORE_GAIN,
        )
        raw_new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1)
        stop = position
    else:
        stop = position + 1

    num_active, first, low, high = _range_of_split(
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
    out_ptrs = out_ptr + (row * NUM_KV_HEADS * GROUP + q_head[:, None]) * DV + dv[None, :]
    out_mask = in_group[:, None] & (dv[None, :] < DV)
    if (split == 0) & (num_active == 0):
        tl.store(out_ptrs, tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty), out_mask)

    if split < num_active:
        if HAS_WINDOW:
            valid = (low + n < high) & (low + n >= first)
            block = tl.load(table_ptrs + low // BLOCK_SIZE, mask=valid, other=0)
        elif SPLIT:
            if low > 0:
                block = tl.load(table_ptrs + low // BLOCK_SIZE, mask=low + n < high, other=0)
        peak = tl.full([BLOCK_M], NO_SCORE, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if FUSED:
            own = split == num_active - 1
            peak = tl.where(own, capped_scores(raw_new, scale, softcap, HAS_SOFTCAP), peak)
            total = tl.where(own, 1.0, total)
            acc = tl.where(own, v_new.to(tl.float32)[None, :], acc)
            if own:
                mine = tl.load(block_table_ptr + slot * stride_table + position // BLOCK_SIZE)
                mine = mine.to(tl.int64)
                inside = position % BLOCK_SIZE
                new_k_ptrs = k_cache_ptr + mine * stride_kcb + head * stride_kch + d[None, :]
                new_k_ptrs += inside * stride_kcs + tl.zeros_like(g)[:, None]
                tl.store(new_k_ptrs, k_new, mask=(d[None, :] < D) & (g[:, None] == 0))
                new_v_ptrs = v_cache_ptr + mine * stride_vcb + head * stride_vch + dv
                tl.store(new_v_ptrs + inside * stride_vcs, v_new, mask=dv < DV)
        if HAS_ALIBI:
            slope = tl.load(slopes_ptr + q_head, mask=in_group, other=0.0).to(tl.float32) * LOG2E

        k_ptrs = (
            k_cache_ptr + head * stride_kch + (n % BLOCK_SIZE)[:, None] * stride_kcs + d[None, :]
        )
        v_ptrs = (
            v_cache_ptr + head * stride_vch + (n % BLOCK_SIZE)[:, None] * stride_vcs + dv[None, :]
        )
        for start in tl.range(low, high, BLOCK_N, num_stages=NUM_STAGES):
            j = start + n
            valid = (j < high) & (j >= first)
            # Slots nobody wrote may hold NaN: masked on load, keys and values alike.
            k_mask = valid[:, None]
            v_mask = valid[:, None]
            if D != BLOCK_D:
                k_mask = k_mask & (d[None, :] < D)
            if DV != BLOCK_DV:
                v_mask = v_mask & (dv[None, :] < DV)
            offset = block.to(tl.int64)[:, None]
            k = tl.load(k_ptrs + offset * stride_kcb, mask=k_mask, other=0.0)
            v = tl.load(v_ptrs + offset * stride_vcb, mask=v_mask, other=0.0)
            # One tile ahead, so that the next tile's loads need not wait for their addresses.
            ahead = j + BLOCK_N
            block = tl.load(
                table_ptrs + (start + BLOCK_N) // BLOCK_SIZE,
                mask=(ahead < high) & (ahead >= first),
                other=0,
            )
            raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            s = capped_scores(raw, scale, softcap, HAS_SOFTCAP)
            if HAS_ALIBI:
                s += slope[:, None] * (j - position)[None, :].to(tl.float32)
            s = tl.where(valid[None, :], s, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(s, axis=1))
            p = tl.exp2(s - new_peak[:, None])
            alpha = tl.exp2(peak - new_peak)
            total = total * alpha + tl.sum(p, axis=1)
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
            peak = new_peak

        if num_active == 1:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + q_head, mask=in_group, other=0.0).to(tl.float32)
                sink = sink * LOG2E
                new_peak = tl.maximum(peak, sink)
                alpha = tl.exp2(peak - new_peak)
                total = total * alpha + tl.exp2(sink - new_peak)
                acc = acc * alpha[:, None]
            tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
        elif SPLIT:
            scratch = pid.to(tl.int64) * num_splits
            stats_ptrs = stats_ptr + (scratch + split) * 2 * GROUP + g
            tl.store(stats_ptrs, peak, mask=in_group)
            tl.store(stats_ptrs + GROUP, total, mask=in_group)
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
                _merge_splits(
                    partial_ptr + scratch * GROUP * DV,
                    stats_ptr + scratch * 2 * GROUP,
                    sinks_ptr + head * GROUP,
                    out_ptr + (row * NUM_KV_HEADS * GROUP + head * GROUP) * DV,
                    num_active,
                    GROUP,
                    DV,
                    BLOCK_DV,
                    MERGE_TILE,
                    MERGE_HEADS,
                    HAS_SINKS,
                )


@triton.jit
def _merge_splits(
    partial_ptr,
    stats_ptr,
    sinks_ptr,
    out_ptr,
    num_active,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """out = sum_j w[j] acc[j] / (sum_j w[j] total[j] + 2^(sink - M)), w[j] = 2^(peak[j] - M)."""
    j = tl.arange(0, MERGE_TILE)
    dv = tl.arange(0, BLOCK_DV)
    # A few heads at once, so that their loads overlap; a tile is [splits, heads, BLOCK_DV].
    for first_g in range(0, GROUP, MERGE_HEADS):
        g = first_g + tl.arange(0, MERGE_HEADS)
        in_group = g < GROUP
        peak = tl.full([MERGE_HEADS], NO_SCORE, tl.float32)
        total = tl.zeros([MERGE_HEADS], tl.float32)
        if HAS_SINKS:
            peak = tl.load(sinks_ptr + g, mask=in_group, other=0.0).to(tl.float32) * LOG2E
            total = tl.full([MERGE_HEADS], 1.0, tl.float32)
        out = tl.zeros([MERGE_HEADS, BLOCK_DV], tl.float32)
        for first in range(0, num_active, MERGE_TILE):
            present = (first + j < num_active)[:, None] & in_group[None, :]
            stats = stats_ptr + (first + j)[:, None] * (2 * GROUP) + g[None, :]
            # Through L2 only: other SMs wrote these.
            peaks = tl.load(stats, mask=present, other=NO_SCORE, cache_modifier=".cg")
            totals = tl.load(stats + GROUP, mask=present, other=0.0, cache_modifier=".cg")
            rows = (first + j)[:, None] * GROUP + g[None, :]
            acc = tl.load(
                partial_ptr + rows[:, :, None] * DV + dv[None, None, :],
                mask=present[:, :, None] & (dv[None, None, :] < DV),
                other=0.0,
                cache_modifier=".cg",
            )
            new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
            weight = tl.exp2(peaks - new_peak[None, :])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(weight * totals, axis=0)
            out = out * shrink[:, None] + tl.sum(weight[:, :, None] * acc, axis=0)
            peak = new_peak
        tl.store(
            out_ptr + g[:, None] * DV + dv[None, :],
            (out / tl.where(in_group, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty),
            mask=in_group[:, None] & (dv[None, :] < DV),
        )


__all__ = ["LOG2E", "NO_SCORE", "capped_scores", "decode_attention_kernel"]
