"""What the kernels of `fused_linear` share: finding a program's weight, and the epilogue."""

from __future__ import annotations

from torch_paged.ops.glu import activate
from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def locate(
    block,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    n0,
    n1,
    n2,
    stride_w0,
    stride_w1,
    stride_w2,
    HAS_BIAS0: tl.constexpr,
    HAS_BIAS1: tl.constexpr,
    HAS_BIAS2: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Map a program to its weight; no block of rows straddles two.

    Returns the block's index within the weight, the weight's and the bias's pointer, row stride,
    number of rows, first output column, whether it has a bias, and the width of the output.
    """
    w_ptr = w0_ptr
    b_ptr = b0_ptr
    stride_w = stride_w0
    n = n0
    column = n0 * 0
    width = n0
    has_bias = HAS_BIAS0
    if NUM_WEIGHTS > 1 and not GATED:
        start = tl.cdiv(n0, BLOCK_N)
        here = block >= start
        w_ptr = tl.where(here, w1_ptr, w_ptr)
        b_ptr = tl.where(here, b1_ptr, b_ptr)
        stride_w = tl.where(here, stride_w1, stride_w)
        n = tl.where(here, n1, n)
        column = tl.where(here, width, column)
        has_bias = tl.where(here, HAS_BIAS1, has_bias)
        index = tl.where(here, block - start, block)
        width += n1
        if NUM_WEIGHTS > 2:
            start += tl.cdiv(n1, BLOCK_N)
            here = block >= start
            w_ptr = tl.where(here, w2_ptr, w_ptr)
            b_ptr = tl.where(here, b2_ptr, b_ptr)
            stride_w = tl.where(here, stride_w2, stride_w)
            n = tl.where(here, n2, n)
            column = tl.where(here, width, column)
            has_bias = tl.where(here, HAS_BIAS2, has_bias)
            index = tl.where(here, block - start, index)
            width += n2
        block = index
    return block, w_ptr, b_ptr, stride_w, n, column, has_bias, width


@triton.jit
def load_streamed(ptrs, k, mask, K: tl.constexpr, EVEN_K: tl.constexpr, MASKED: tl.constexpr):
    """Load a tile of a weight that nobody reads again."""
    if not EVEN_K:
        mask = (k < K) & mask
    if EVEN_K and not MASKED:
        tile = tl.load(ptrs, eviction_policy="evict_first")
    else:
        tile = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def load_gain(norm_ptr, k, K: tl.constexpr):
    """Load the norm's gain as it is: converting it would wait for it."""
    return tl.load(norm_ptr + k, mask=k < K, other=0.0)


@triton.jit
def load_bias(b_ptr, rows, n, has_bias, HAS_BIAS: tl.constexpr):
    """Load the bias of the rows, zero where there is none."""
    if HAS_BIAS:
        bias = tl.load(b_ptr + rows, mask=(rows < n) & has_bias, other=0.0)
    else:
        bias = 0.0
    return bias


@triton.jit
def load_residual(residual_ptr, stride, tokens, columns, mask, HAS_RESIDUAL: tl.constexpr):
    """Load the residual of a block; early, because nothing else would hide its latency."""
    if HAS_RESIDUAL:
        offsets = tokens.to(tl.int64) * stride + columns
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    else:
        residual = 0.0
    return residual


@triton.jit
def merge_splits(
    y,
    y_up,
    squares,
    partials_ptr,
    counters_ptr,
    block_id,
    split,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
):
    """Hand over one split's sums; the split that arrives last gets the sums over all.

    Every split has a slot in `partials`: y [ROWS, TOKENS], y_up likewise, squares [TOKENS]. They
    are added in the order of the splits, whoever does it. Leaves the counter zero.
    """
    SLOT: tl.constexpr = ROWS * TOKENS * (2 if GATED else 1) + TOKENS
    UP: tl.constexpr = ROWS * TOKENS
    r_token = tl.arange(0, TOKENS)
    offsets = tl.arange(0, ROWS)[:, None] * TOKENS + r_token[None, :]
    base = partials_ptr + block_id.to(tl.int64) * (SLOT * SPLITS)
    mine = base + split * SLOT
    tl.store(mine + offsets, y)
    if GATED:
        tl.store(mine + UP + offsets, y_up)
    if HAS_SQUARES:
        tl.store(mine + SLOT - TOKENS + r_token, squares)
    # All stores of the program come before the release by its one atomic.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + block_id, 1, sem="acq_rel", scope="gpu")
    last = arrived == SPLITS - 1
    if last:
        tl.store(counters_ptr + block_id, 0)
        y = tl.zeros([ROWS, TOKENS], tl.float32)
        y_up = y
        squares = tl.zeros([TOKENS], tl.float32)
        for s in range(SPLITS):
            slot = base + s * SLOT
            y += tl.load(slot + offsets, cache_modifier=".cg")
            if GATED:
                y_up += tl.load(slot + UP + offsets, cache_modifier=".cg")
            if HAS_SQUARES:
                squares += tl.load(slot + SLOT - TOKENS + r_token, cache_modifier=".cg")
    return last, y, y_up, squares


@triton.jit
def finish(
    y,
    up,
    bias,
    up_bias,
    residual,
    out_ptrs,
    mask,
    HAS_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """out = act(y + bias) [* (up + up_bias)] [+ residual], in fp32 and rounded once."""
    if HAS_BIAS:
        y += bias.to(tl.float32)
    if ACTIVATION != "":
        y = activate(y, ACTIVATION)
    if GATED:
        if HAS_UP_BIAS:
            up += up_bias.to(tl.float32)
        y *= up
    if HAS_RESIDUAL:
        y += residual.to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptrs.dtype.element_ty), mask=mask)
