"""`fused_linear` on FP32 units: few rows, and float32 at any number of rows.

The warps of a program form a grid: WARPS / K_WARPS along the output features, ROWS of them a
warp, and K_WARPS along in_features. There a warp takes chunks of 32 lanes x VEC elements (16 bytes
a lane), CHUNKS of them at a time: one tile. The first tile does not wait for the previous kernel,
and each later one is loaded while its predecessor is multiplied. Small programs with few registers
do best: with programmatic dependent launch those of the next kernel then move in, one by one, with
their weights in flight, while the current kernel drains.

The order of the sum over in_features depends on neither the number of rows nor the grid.
"""

from __future__ import annotations

from torch_paged.ops.fused_linear.parts import (
    finish,
    load_bias,
    load_gain,
    load_residual,
    load_streamed,
    locate,
)
from torch_paged.ops.fused_linear.updates import (
    load_lora_x,
    load_update,
    locate_update,
    rounded_product,
)
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _lane_sums(products, WARPS: tl.constexpr, VEC: tl.constexpr):
    """Sum within each lane: [T, R, CHUNKS, WARPS * 32 * VEC] -> [T, R, WARPS * 32]."""
    T: tl.constexpr = products.shape[0]
    R: tl.constexpr = products.shape[1]
    products = tl.reshape(products, [T, R, products.shape[2], WARPS * 32, VEC])
    return tl.sum(tl.sum(products, axis=4), axis=2)


@triton.jit
def _feature_sums(sums, WARPS: tl.constexpr, K_WARPS: tl.constexpr):
    """Sum over the threads that share features: [T, R, WARPS * 32] -> [T, R, WARPS / K_WARPS]."""
    T: tl.constexpr = sums.shape[0]
    R: tl.constexpr = sums.shape[1]
    return tl.sum(tl.reshape(sums, [T, R, WARPS // K_WARPS, K_WARPS * 32]), axis=3)


@triton.jit
def _load_x(x_ptrs, k, token_mask, K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_T: tl.constexpr):
    if EVEN_K and EVEN_T:
        x = tl.load(x_ptrs)
    elif EVEN_K:
        x = tl.load(x_ptrs, mask=token_mask, other=0.0)
    elif EVEN_T:
        x = tl.load(x_ptrs, mask=k < K, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=token_mask & (k < K), other=0.0)
    return x


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
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
    u0_ptr,
    u1_ptr,
    u2_ptr,
    lora_x_ptr,
    out_ptr,
    num_tokens,
    n0,
    n1,
    n2,
    stride_x,  # strides of x and of the weights: in units of VEC
    stride_w0,
    stride_w1,
    stride_w2,
    stride_residual,
    eps,
    norm_offset,
    scale0,
    scale1,
    scale2,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    HAS_BIAS0: tl.constexpr,
    HAS_BIAS1: tl.constexpr,
    HAS_BIAS2: tl.constexpr,
    NORM: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    K_WARPS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_T: tl.constexpr,
    AFTER_SHRINK: tl.constexpr,
    RELEASE_LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] = epilogue(rsqrt(mean_k x^2 + eps) * sum_k w[n, k] * gain[k] * x[t, k])."""
    tl.static_assert(not AFTER_SHRINK, "the wait comes before the first row of x")
    if PDL and not RELEASE_LATE:
        gdc_launch_dependents()
    block, w_ptr, b_ptr, stride_w, n, column, has_bias, width = locate(
        tl.program_id(0),
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
        HAS_BIAS0,
        HAS_BIAS1,
        HAS_BIAS2,
        NUM_WEIGHTS,
        GATED,
        ROWS * (WARPS // K_WARPS),
    )
    N_WARPS: tl.constexpr = WARPS // K_WARPS
    BLOCK_N: tl.constexpr = ROWS * N_WARPS
    CHUNK: tl.constexpr = 32 * VEC
    TILE: tl.constexpr = K_WARPS * CHUNKS * CHUNK
    TILES: tl.constexpr = (K + TILE - 1) // TILE
    # Short sums unroll: no registers to shuffle between the turns of a loop.
    UNROLL: tl.constexpr = TILES if TILES <= 3 else 1

    # The last dim spans the threads (warp, lane, element): rows follow the warp, k the rest.
    r_thread = tl.arange(0, WARPS * CHUNK)[None, None, None, :]
    r_row = tl.arange(0, ROWS)[None, :, None, None]
    r_warp = r_thread // CHUNK
    rows = block * BLOCK_N + r_row * N_WARPS + r_warp // K_WARPS
    row_mask = rows < n
    r_chunk = r_warp % K_WARPS * CHUNKS + tl.arange(0, CHUNKS)[None, None, :, None]
    k = r_chunk * CHUNK + r_thread % CHUNK
    w_ptrs = w_ptr + rows.to(tl.int64) * stride_w * VEC + k
    weight = load_streamed(w_ptrs, k, row_mask, K, EVEN_K, not EVEN_N)
    up_ptrs = w_ptrs
    up = weight
    if GATED:
        up_ptrs = w1_ptr + rows.to(tl.int64) * stride_w1 * VEC + k
        up = load_streamed(up_ptrs, k, row_mask, K, EVEN_K, not EVEN_N)
    gain = k
    if HAS_GAIN:
        gain = load_gain(norm_ptr, k, K)
    HAS_BIAS: tl.constexpr = HAS_BIAS0 or HAS_BIAS1 or HAS_BIAS2
    r_row = tl.arange(0, ROWS)[None, :, None] * N_WARPS + tl.arange(0, N_WARPS)[None, None, :]
    out_rows = block * BLOCK_N + r_row
    bias = load_bias(b_ptr, out_rows, n, has_bias, HAS_BIAS)
    up_bias = load_bias(b1_ptr, out_rows, n, True, GATED and HAS_BIAS1)
    WIDTH: tl.constexpr = RANK0 + RANK1 + RANK2
    R_CHUNK: tl.constexpr = MAX_RANK if MAX_RANK < 64 else 64
    u_scale = scale0
    if MAX_RANK:
        u_ptr, rank, first, u_scale = locate_update(
            tl.program_id(0),
            u0_ptr,
            u1_ptr,
            u2_ptr,
            scale0,
            scale1,
            scale2,
            n0,
            n1,
            RANK0,
            RANK1,
            RANK2,
            NUM_WEIGHTS,
            GATED,
            BLOCK_N,
        )
        r = tl.arange(0, R_CHUNK)[None, None, None, :]
        u_rows = out_rows[:, :, :, None]
        u = load_update(u_ptr, u_rows, u_rows < n, rank, r)
        if GATED:
            u_up = load_update(u1_ptr, u_rows, u_rows < n, RANK1, r)
    if PDL:
        gdc_wait()
    if PDL and RELEASE_LATE:
        gdc_launch_dependents()

    out_tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    out_mask = (out_tokens < num_tokens) & (out_rows < n)
    out_columns = column + out_rows
    residual = load_residual(
        residual_ptr, stride_residual, out_tokens, out_columns, out_mask, HAS_RESIDUAL
    )
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None, None, None]
    token_mask = tokens < num_tokens
    if MAX_RANK:
        u_x = load_lora_x(lora_x_ptr, tokens, token_mask, first, rank, r, WIDTH)
        if GATED:
            up_x = load_lora_x(lora_x_ptr, tokens, token_mask, RANK0, RANK1, r, WIDTH)
    x_ptrs = x_ptr + tokens.to(tl.int64) * stride_x * VEC + k
    squares = tl.zeros([TOKENS, 1, WARPS * 32], tl.float32)
    acc = tl.zeros([TOKENS, ROWS, WARPS * 32], tl.float32)
    acc_up = acc
    for tile in tl.range(0, TILES, loop_unroll_factor=UNROLL):
        x = _load_x(x_ptrs, k, token_mask, K, EVEN_K, EVEN_T)
        this = weight
        this_up = up
        this_gain = gain
        k += TILE
        x_ptrs += TILE
        w_ptrs += TILE
        more = row_mask & (tile + 1 < TILES)
        weight = load_streamed(w_ptrs, k, more, K, EVEN_K, True)
        if GATED:
            up_ptrs += TILE
            up = load_streamed(up_ptrs, k, more, K, EVEN_K, True)
        if HAS_GAIN:
            gain = load_gain(norm_ptr, k, K)
        x = x.to(tl.float32)
        if NORM:
            squares += _lane_sums(x * x, WARPS, VEC)
        if HAS_GAIN:
            x *= this_gain.to(tl.float32) + norm_offset
        acc += _lane_sums(this.to(tl.float32) * x, WARPS, VEC)
        if GATED:
            acc_up += _lane_sums(this_up.to(tl.float32) * x, WARPS, VEC)

    y = _feature_sums(acc, WARPS, K_WARPS)
    y_up = y
    if GATED:
        y_up = _feature_sums(acc_up, WARPS, K_WARPS)
    if NORM:
        scale = tl.rsqrt(_feature_sums(squares, WARPS, K_WARPS) / K + eps)
        y *= scale
        y_up *= scale
    if MAX_RANK:
        y += u_scale * tl.sum(rounded_product(u.to(tl.float32), u_x), axis=3)
        if GATED:
            y_up += scale1 * tl.sum(rounded_product(u_up.to(tl.float32), up_x), axis=3)
        for _ in tl.static_range(R_CHUNK, MAX_RANK, R_CHUNK):
            r += R_CHUNK
            u = load_update(u_ptr, u_rows, u_rows < n, rank, r)
            u_x = load_lora_x(lora_x_ptr, tokens, token_mask, first, rank, r, WIDTH)
            y += u_scale * tl.sum(rounded_product(u.to(tl.float32), u_x), axis=3)
            if GATED:
                u = load_update(u1_ptr, u_rows, u_rows < n, RANK1, r)
                u_x = load_lora_x(lora_x_ptr, tokens, token_mask, RANK0, RANK1, r, WIDTH)
                y_up += scale1 * tl.sum(rounded_product(u.to(tl.float32), u_x), axis=3)
    finish(
        y,
        y_up,
        bias,
        up_bias,
        residual,
        out_ptr + out_tokens.to(tl.int64) * width + out_columns,
        out_mask,
        HAS_BIAS,
        GATED and HAS_BIAS1,
        HAS_RESIDUAL,
        ACTIVATION,
        GATED,
    )
