"""Stages of the attention kernels: scores, ranges of a split, merge."""

from __future__ import annotations

from torch_paged.ops.triton_compat import HAS_TRITON, tl, triton

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
def _rounded_to_bfloat16(x):
    """Round finite x >= 0 to the nearest bfloat16; no GPU before sm_80 has a conversion."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def alibi_slope(raw, ROUNDED: tl.constexpr):
    """Return loaded ALiBi slopes as `alibi_bias` takes them."""
    if ROUNDED:
        return raw.to(tl.float32)
    return raw.to(tl.float32) * LOG2E


@triton.jit
def alibi_bias(slope, j, i, scale, ROUNDED: tl.constexpr):
    """Return the biases of keys j for queries i in log2 units: ``slope * (j - i)``.

    ROUNDED: ``scale * slope * j``, with j and its product by the slope in bfloat16.
    """
    if ROUNDED:
        bias = _rounded_to_bfloat16(slope * _rounded_to_bfloat16(j.to(tl.float32)))
        return bias * (scale * LOG2E)
    return slope * (j - i).to(tl.float32)


@triton.jit
def range_of_split(
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
    if HAS_WINDOW:
        # A window of one token shows nothing of the cache: its newest block may be gone.
        base = tl.where(first < stop, base, stop)
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
def block_index(j, first, last_block, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the table entries of tokens j; before the first visible and past the last, theirs."""
    index = tl.minimum(j // BLOCK_SIZE, last_block)
    if HAS_WINDOW:
        index = tl.maximum(index, first // BLOCK_SIZE)
    return index


@triton.jit
def is_visible(j, first, high, HAS_WINDOW: tl.constexpr):
    if HAS_WINDOW:
        return (j < high) & (j >= first)
    return j < high


@triton.jit
def load_tile(
    k_ptrs,
    v_ptrs,
    k_mask,
    v_mask,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Load keys [BLOCK_N, BLOCK_D] and values [BLOCK_N, BLOCK_DV]; k_mask None: every row."""
    if D != BLOCK_D:
        in_head = (tl.arange(0, BLOCK_D) < D)[None, :]
        k_mask = in_head if k_mask is None else k_mask & in_head
    if DV != BLOCK_DV:
        v_mask = v_mask & (tl.arange(0, BLOCK_DV) < DV)[None, :]
    if k_mask is None:
        k = tl.load(k_ptrs)
    else:
        k = tl.load(k_ptrs, mask=k_mask, other=0.0)
    return k, tl.load(v_ptrs, mask=v_mask, other=0.0)


@triton.jit
def attend(
    q,
    k,
    v,
    valid,
    index,
    position,
    slope,
    scale,
    softcap,
    peak,
    total,
    weights,
    acc,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    ALIBI_ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take keys and values at `index`, from a query at `position`, into the online softmax."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SOFTCAP or HAS_ALIBI:
        s = capped_scores(s, scale, softcap, HAS_SOFTCAP)
        if HAS_ALIBI:
            s += alibi_bias(slope[:, None], index[None, :], position, scale, ALIBI_ROUNDED)
    s = tl.where(valid[None, :], s, float("-inf"))
    if HAS_SOFTCAP or HAS_ALIBI:
        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.exp2(s - new_peak[:, None])
    else:
        # Scaling after the maximum leaves one multiply-add a score.
        new_peak = tl.maximum(peak, tl.max(s, axis=1) * (scale * LOG2E))
        p = tl.exp2(s * (scale * LOG2E) - new_peak[:, None])
    alpha = tl.exp2(peak - new_peak)
    total = total * alpha
    weights = weights * alpha[:, None] + p
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_peak, total, weights, acc


@triton.jit
def repeat_rows(x, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, COLS: tl.constexpr):
    """Repeat x [ROWS, COLS] down to BLOCK_M rows: the products' M dimension is at least 16."""
    if ROWS == BLOCK_M:
        return x
    repeated = tl.broadcast_to(x[None, :, :], [BLOCK_M // ROWS, ROWS, COLS])
    return tl.reshape(repeated, [BLOCK_M, COLS])


@triton.jit
def _prefetch_tile(
    ptrs,
    block,
    stride_block: tl.constexpr,
    needed,
    stride_token: tl.constexpr,
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


@triton.jit
def prefetch_range(
    k_ptr,
    v_ptr,
    table_ptr,
    low,
    high,
    first,
    stride_kcb: tl.constexpr,
    stride_vcb: tl.constexpr,
    stride_kcs: tl.constexpr,
    stride_vcs: tl.constexpr,
    K_LINES: tl.constexpr,
    V_LINES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Ask for the keys and values of tokens low .. high - 1 in L2."""
    n = tl.arange(0, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        needed = (start + n < high) & (start + n >= first)
        block = tl.load(
            table_ptr + (start + n) // BLOCK_SIZE, mask=needed, other=0, cache_modifier=".cg"
        )
        _prefetch_tile(k_ptr, block, stride_kcb, needed, stride_kcs, K_LINES, BLOCK_SIZE, BLOCK_N)
        _prefetch_tile(v_ptr, block, stride_vcb, needed, stride_vcs, V_LINES, BLOCK_SIZE, BLOCK_N)


@triton.jit
def merge_splits(
    partial_ptr,
    stats_ptr,
    sinks_ptr,
    out_ptr,
    num_active,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """out = sum_j w[j] acc[j] / (sum_j w[j] total[j] + 2^(sink - M)), w[j] = 2^(peak[j] - M).

    Every lane keeps its own elements of the output and walks the splits, unrolled so that their
    loads overlap. It reads its row's statistics itself: no exchange between lanes.
    """
    # Of no known contiguity, so that all loads below get one layout: a layout change here would
    # cost more than narrow loads.
    dv = tl.max_contiguous(tl.arange(0, BLOCK_DV)[None, :], [1, 1])
    for first_g in range(0, GROUP, MERGE_HEADS):
        g = first_g + tl.arange(0, MERGE_HEADS)[:, None]
        rows = g + tl.zeros_like(dv)
        stored = (g < GROUP) & (dv < DV)
        peak = tl.full([MERGE_HEADS, BLOCK_DV], NO_SCORE, tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + rows, mask=stored, other=0.0).to(tl.float32) * LOG2E
            peak = sink
        # Through L2 only: other SMs wrote these.
        for first in range(0, num_active, 8):
            for i in tl.static_range(8):
                mask = rows < tl.where(first + i < num_active, GROUP, 0)
                stats = stats_ptr + ((first + i) * GROUP + rows) * 2
                other = tl.load(stats, mask=mask, other=NO_SCORE, cache_modifier=".cg")
                peak = tl.maximum(peak, other)
        total = tl.zeros([MERGE_HEADS, BLOCK_DV], tl.float32)
        if HAS_SINKS:
            total = tl.exp2(sink - peak)
        out = tl.zeros([MERGE_HEADS, BLOCK_DV], tl.float32)
        for first in range(0, num_active, 8):
            for i in tl.static_range(8):
                mask = rows < tl.where(first + i < num_active, GROUP, 0)
                stats = stats_ptr + ((first + i) * GROUP + rows) * 2
                other = tl.load(stats, mask=mask, other=NO_SCORE, cache_modifier=".cg")
                part = tl.load(stats + 1, mask=mask, other=0.0, cache_modifier=".cg")
                acc = tl.load(
                    partial_ptr + ((first + i) * GROUP + g) * DV + dv,
                    mask=mask & (dv < DV),
                    other=0.0,
                    cache_modifier=".cg",
                )
                weight = tl.exp2(other - peak)
                total += weight * part
                out += weight * acc
        out = out / tl.where(stored, total, 1.0)
        tl.store(out_ptr + g * DV + dv, out.to(out_ptr.dtype.element_ty), mask=stored)


__all__ = [
    "LOG2E",
    "NO_SCORE",
    "attend",
    "block_index",
    "capped_scores",
    "is_visible",
    "load_tile",
    "merge_splits",
    "prefetch_range",
    "range_of_split",
    "repeat_rows",
]
