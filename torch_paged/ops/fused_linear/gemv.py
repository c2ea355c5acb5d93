"""`fused_linear` for few rows: every weight is read once into registers and meets FP32 units.

A program owns ROWS x WARPS output features; warp w owns features w, w + WARPS, ... of them whole, so
nothing crosses warps. Along in_features a warp takes chunks of 32 lanes x VEC elements (16 bytes a
lane), CHUNKS of them at a time: one tile. The first tile does not wait for the previous kernel,
and each later one is loaded while its predecessor is multiplied. With programmatic dependent
launch, the aim of a configuration is therefore that all programs of a small layer are resident at
once, next to those of the previous kernel, with most of their weights in flight.

The order of the sum over in_features depends on neither the number of rows nor the grid.
"""

from __future__ import annotations

from torch_paged.ops.glu import activate
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _load_tile(ptrs, k, row_mask, K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr):
    """Load one tile of a streamed weight; it will not be read again."""
    if EVEN_K and EVEN_N:
        tile = tl.load(ptrs, eviction_policy="evict_first")
    elif EVEN_K:
        tile = tl.load(ptrs, mask=row_mask, other=0.0, eviction_policy="evict_first")
    elif EVEN_N:
        tile = tl.load(ptrs, mask=k < K, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(ptrs, mask=row_mask & (k < K), other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _lane_sums(products, WARPS: tl.constexpr, VEC: tl.constexpr):
    """Sum within each lane: [T, R, CHUNKS, WARPS * 32 * VEC] -> [T, R, WARPS * 32]."""
    T: tl.constexpr = products.shape[0]
    R: tl.constexpr = products.shape[1]
    products = tl.reshape(products, [T, R, products.shape[2], WARPS * 32, VEC])
    return tl.sum(tl.sum(products, axis=4), axis=2)


@triton.jit
def _warp_sums(sums, WARPS: tl.constexpr):
    """Sum over the lanes of each warp: [T, R, WARPS * 32] -> [T, R, WARPS]."""
    return tl.sum(tl.reshape(sums, [sums.shape[0], sums.shape[1], WARPS, 32]), axis=3)


@triton.jit
def _gemv_kernel(
    x_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_tokens,
    n0,
    n1,
    n2,
    stride_x,  # in units of VEC, as the strides of the weights
    stride_w0,
    stride_w1,
    stride_w2,
    stride_residual,
    eps,
    norm_offset,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    HAS_BIAS0: tl.constexpr,
    HAS_BIAS1: tl.constexpr,
    HAS_BIAS2: tl.constexpr,
    NORM: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] = epilogue(rsqrt(mean_k x^2 + eps) * sum_k w[n, k] * gain[k] * x[t, k] + bias[n])."""
    if PDL:
        gdc_launch_dependents()
    CHUNK: tl.constexpr = 32 * VEC
    block = tl.program_id(0)
    w_ptr = w0_ptr
    b_ptr = b0_ptr
    n = n0
    stride_w = stride_w0
    column = 0
    width = n0
    has_bias = HAS_BIAS0
    if NUM_WEIGHTS > 1 and not GATED:
        width += n1
        first = tl.cdiv(n0, ROWS * WARPS)
        second = block >= first
        w_ptr = tl.where(second, w1_ptr, w_ptr)
        b_ptr = tl.where(second, b1_ptr, b_ptr)
        stride_w = tl.where(second, stride_w1, stride_w)
        has_bias = tl.where(second, HAS_BIAS1, has_bias)
        n = tl.where(second, n1, n)
        column = tl.where(second, n0, column)
        start = tl.where(second, first, 0)
        if NUM_WEIGHTS > 2:
            width += n2
            first += tl.cdiv(n1, ROWS * WARPS)
            third = block >= first
            w_ptr = tl.where(third, w2_ptr, w_ptr)
            b_ptr = tl.where(third, b2_ptr, b_ptr)
            stride_w = tl.where(third, stride_w2, stride_w)
            has_bias = tl.where(third, HAS_BIAS2, has_bias)
            n = tl.where(third, n2, n)
            column = tl.where(third, n0 + n1, column)
            start = tl.where(third, first, start)
        block -= start

    # The last dim spans the threads: warp, lane, element. Rows follow the warp, k the rest.
    r_token = tl.arange(0, TOKENS)[:, None, None, None]
    r_row = tl.arange(0, ROWS)[None, :, None, None]
    r_chunk = tl.arange(0, CHUNKS)[None, None, :, None]
    r_thread = tl.arange(0, WARPS * CHUNK)[None, None, None, :]
    rows = block * (ROWS * WARPS) + r_row * WARPS + r_thread // CHUNK
    row_mask = rows < n
    k = r_chunk * CHUNK + r_thread % CHUNK
    TILE: tl.constexpr = CHUNKS * CHUNK
    TILES: tl.constexpr = (K + TILE - 1) // TILE

    w_ptrs = w_ptr + rows.to(tl.int64) * stride_w * VEC + k
    weight = _load_tile(w_ptrs, k, row_mask, K, EVEN_K, EVEN_N)
    up = weight
    up_ptrs = w_ptrs
    if GATED:
        up_ptrs = w1_ptr + rows.to(tl.int64) * stride_w1 * VEC + k
        up = _load_tile(up_ptrs, k, row_mask, K, EVEN_K, EVEN_N)
    gain_ptrs = norm_ptr + k
    if PDL:
        gdc_wait()

    token_mask = r_token < num_tokens
    x_ptrs = x_ptr + r_token.to(tl.int64) * stride_x * VEC + k
    squares = tl.zeros([TOKENS, 1, WARPS * 32], tl.float32)
    acc = tl.zeros([TOKENS, ROWS, WARPS * 32], tl.float32)
    acc_up = acc
    for tile in range(TILES):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=token_mask, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptrs, mask=token_mask & (k + tile * TILE < K), other=0.0)
            x = x.to(tl.float32)
        if NORM:
            squares += _lane_sums(x * x, WARPS, VEC)
            if HAS_GAIN:
                if EVEN_K:
                    gain = tl.load(gain_ptrs).to(tl.float32)
                else:
                    gain = tl.load(gain_ptrs, mask=k + tile * TILE < K, other=0.0)
                    gain = gain.to(tl.float32)
                x *= gain + norm_offset
        this = weight
        this_up = up
        if tile + 1 < TILES:
            w_ptrs += TILE
            weight = _load_tile(w_ptrs, k + (tile + 1) * TILE, row_mask, K, EVEN_K, EVEN_N)
            if GATED:
                up_ptrs += TILE
                up = _load_tile(up_ptrs, k + (tile + 1) * TILE, row_mask, K, EVEN_K, EVEN_N)
        acc += _lane_sums(this.to(tl.float32) * x, WARPS, VEC)
        if GATED:
            acc_up += _lane_sums(this_up.to(tl.float32) * x, WARPS, VEC)
        x_ptrs += TILE
        gain_ptrs += TILE

    tokens = tl.arange(0, TOKENS)[:, None, None]
    r_warp = tl.arange(0, WARPS)[None, None, :]
    rows = block * (ROWS * WARPS) + tl.arange(0, ROWS)[None, :, None] * WARPS + r_warp
    row_mask = rows < n
    mask = (tokens < num_tokens) & row_mask
    y = _warp_sums(acc, WARPS)
    if NORM:
        scale = tl.rsqrt(_warp_sums(squares, WARPS) / K + eps)
        y *= scale
    if HAS_BIAS0 or HAS_BIAS1 or HAS_BIAS2:
        y += tl.load(b_ptr + rows, mask=row_mask & has_bias, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        y = activate(y, ACTIVATION)
    if GATED:
        up = _warp_sums(acc_up, WARPS)
        if NORM:
            up *= scale
        if HAS_BIAS1:
            up += tl.load(b1_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
        y *= up
    columns = column + rows
    if HAS_RESIDUAL:
        offset = tokens.to(tl.int64) * stride_residual + columns
        y += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + tokens.to(tl.int64) * width + columns
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)
