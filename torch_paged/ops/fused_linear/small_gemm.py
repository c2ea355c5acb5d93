"""`fused_linear` on tensor cores for 16-bit dtypes, weights going from memory to registers to mma.

A program owns ROWS output features and, with SPLITS > 1, a share of in_features. Its warps split
in_features among them: a tile gives each warp CHUNKS pieces of 32 elements of every row. Within a
piece the order of a sum is free, so it is chosen such that the 16 bytes that a lane loads in one
go are the fragments that the lane has to hand to the tensor core: reshape and permute below only
rename registers. No shared memory, shuffle or conversion stands between a weight and its product.
x is read the same way, each program reading each element once.

As in gemv.py the first tile does not wait for the previous kernel and later ones, of x too, are
loaded while their predecessors are multiplied. x comes through L1, where the programs of a
multiprocessor share it. The sums of the warps meet in shared memory at the end. Those
of SPLITS programs meet in `partials`: the program that arrives last, as `counters` tells, adds
them in a fixed order, so that results are reproducible.

Sums take the same order at any number of rows for the same configuration.
"""

from __future__ import annotations

from torch_paged.ops.fused_linear.parts import (
    finish,
    load_bias,
    load_gain,
    load_residual,
    load_streamed,
    locate,
    merge_splits,
)
from torch_paged.ops.fused_linear.updates import add_updates, prefetch_updates
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _as_rows(tile, WARPS: tl.constexpr, UPCAST: tl.constexpr):
    """[R / 8, C, WARPS * 256] as loaded -> [WARPS, R, C * 32], an operand of the batched dot.

    The last dim of the tile is (warp, row % 8, lane % 4, step, half, pair); a fragment of mma
    m16n8k16 wants k to be (step, half, lane % 4, pair).
    """
    if UPCAST:
        tile = tile.to(tl.float32)
    GROUPS: tl.constexpr = tile.shape[0]
    CHUNKS: tl.constexpr = tile.shape[1]
    tile = tl.reshape(tile, [GROUPS, CHUNKS, WARPS, 8, 4, 2, 2, 2])
    tile = tl.permute(tile, [2, 0, 3, 1, 5, 6, 4, 7])
    return tl.reshape(tile, [WARPS, GROUPS * 8, CHUNKS * 32])


@triton.jit
def _load_x(x_ptrs, k, token_mask, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        x = tl.load(x_ptrs, mask=token_mask, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=token_mask & (k < K), other=0.0)
    return x


@triton.jit
def _thread_squares(x, WARPS: tl.constexpr):
    """Sum of squares within each thread: [T / 8, C, WARPS * 256] -> [T / 8, WARPS * 32]."""
    x = x.to(tl.float32)
    x = tl.reshape(x * x, [x.shape[0], x.shape[1], WARPS * 32, 8])
    return tl.sum(tl.sum(x, axis=3), axis=1)


@triton.jit
def _token_squares(squares, WARPS: tl.constexpr):
    """[T / 8, WARPS * 32] sums of the threads -> [T]."""
    squares = tl.reshape(squares, [squares.shape[0], WARPS, 8, 4])
    squares = tl.sum(tl.sum(squares, axis=3), axis=1)
    return tl.reshape(squares, [squares.shape[0] * 8])


@triton.jit
def _accumulate(
    acc,
    acc_up,
    squares,
    weight,
    up,
    gain,
    x,
    prescale,
    norm_offset,
    NORM: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    PRESCALE: tl.constexpr,
    GATED: tl.constexpr,
    WARPS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add one tile to the sums of products and of squares."""
    if NORM and not PRESCALE:
        squares += _thread_squares(x, WARPS)
    if PRESCALE:
        x = (x.to(tl.float32) * prescale).to(x.dtype)
    if HAS_GAIN:
        x = (x.to(tl.float32) * (gain.to(tl.float32) + norm_offset)).to(x.dtype)
    x_t = tl.permute(_as_rows(x, WARPS, UPCAST), [0, 2, 1])
    acc = tl.dot(_as_rows(weight, WARPS, UPCAST), x_t, acc)
    if GATED:
        acc_up = tl.dot(_as_rows(up, WARPS, UPCAST), x_t, acc_up)
    return acc, acc_up, squares


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _small_gemm_kernel(
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
    partials_ptr,
    counters_ptr,
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
    SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    UPCAST: tl.constexpr,
    AFTER_SHRINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] = epilogue(rsqrt(mean_k x^2 + eps) * sum_k w[n, k] * (gain[k] * x[t, k]))."""
    if PDL:
        gdc_launch_dependents()
    block_id = tl.program_id(0)
    split = tl.program_id(1)
    block, w_ptr, b_ptr, stride_w, n, column, has_bias, width = locate(
        block_id,
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
        ROWS,
    )
    TILE: tl.constexpr = WARPS * CHUNKS * 32
    TILES: tl.constexpr = (K + TILE * SPLITS - 1) // (TILE * SPLITS)
    # Short sums unroll: no registers to shuffle between the turns of a loop.
    UNROLL: tl.constexpr = TILES - 1 if TILES == 2 or TILES == 3 else 1

    # The last dim spans the threads: warp, row or token within 8, element within 32.
    r_thread = tl.arange(0, WARPS * 256)[None, None, :]
    r_eighth = r_thread // 32 % 8
    rows = block * ROWS + tl.arange(0, ROWS // 8)[:, None, None] * 8 + r_eighth
    row_mask = rows < n
    r_chunk = tl.arange(0, CHUNKS)[None, :, None]
    k = split * (TILES * TILE) + (r_thread // 256 * CHUNKS + r_chunk) * 32 + r_thread % 32
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
    r_row = tl.arange(0, ROWS)
    r_token = tl.arange(0, TOKENS)
    out_rows = block * ROWS + r_row[:, None]
    out_mask = (r_token[None, :] < num_tokens) & (out_rows < n)
    out_columns = column + out_rows
    bias = load_bias(b_ptr, out_rows, n, has_bias, HAS_BIAS)
    up_bias = load_bias(b1_ptr, out_rows, n, True, GATED and HAS_BIAS1)
    if PDL and MAX_RANK:
        prefetch_updates(
            block_id,
            block * ROWS,
            u0_ptr,
            u1_ptr,
            u2_ptr,
            n,
            n0,
            n1,
            RANK0,
            RANK1,
            RANK2,
            MAX_RANK,
            NUM_WEIGHTS,
            GATED,
            ROWS,
        )
    if PDL and not AFTER_SHRINK:
        gdc_wait()

    residual = load_residual(
        residual_ptr, stride_residual, r_token[None, :], out_columns, out_mask, HAS_RESIDUAL
    )
    tokens = tl.arange(0, TOKENS // 8)[:, None, None] * 8 + r_eighth
    token_mask = tokens < num_tokens
    x_ptrs = x_ptr + tokens.to(tl.int64) * stride_x * VEC + k
    squares = tl.zeros([TOKENS // 8, WARPS * 32], tl.float32)
    # gain * x can leave the range of float16, so there the scale is found first.
    prescale = 0.0
    PRESCALE: tl.constexpr = NORM and x_ptr.dtype.element_ty == tl.float16
    if PRESCALE:
        k_all = (r_thread // 256 * CHUNKS + r_chunk) * 32 + r_thread % 32
        all_ptrs = x_ptr + tokens.to(tl.int64) * stride_x * VEC + k_all
        for _ in range(TILES * SPLITS):
            x = _load_x(all_ptrs, k_all, token_mask, K, EVEN_K)
            squares += _thread_squares(x, WARPS)
            k_all += TILE
            all_ptrs += TILE
        scale = tl.rsqrt(_token_squares(squares, WARPS) / K + eps)
        scale = tl.reshape(scale, [TOKENS // 8, 1, 8, 1])
        scale = tl.broadcast_to(scale, [TOKENS // 8, WARPS, 8, 32])
        prescale = tl.reshape(scale, [TOKENS // 8, 1, WARPS * 256])

    acc = tl.zeros([WARPS, ROWS, TOKENS], tl.float32)
    acc_up = acc
    x = _load_x(x_ptrs, k, token_mask, K, EVEN_K)
    for _ in tl.range(1, TILES, loop_unroll_factor=UNROLL):
        this = weight
        this_up = up
        this_gain = gain
        this_x = x
        k += TILE
        x_ptrs += TILE
        w_ptrs += TILE
        weight = load_streamed(w_ptrs, k, row_mask, K, EVEN_K, not EVEN_N)
        if GATED:
            up_ptrs += TILE
            up = load_streamed(up_ptrs, k, row_mask, K, EVEN_K, not EVEN_N)
        if HAS_GAIN:
            gain = load_gain(norm_ptr, k, K)
        x = _load_x(x_ptrs, k, token_mask, K, EVEN_K)
        acc, acc_up, squares = _accumulate(
            acc,
            acc_up,
            squares,
            this,
            this_up,
            this_gain,
            this_x,
            prescale,
            norm_offset,
            NORM,
            HAS_GAIN,
            PRESCALE,
            GATED,
            WARPS,
            UPCAST,
        )
    acc, acc_up, squares = _accumulate(
        acc,
        acc_up,
        squares,
        weight,
        up,
        gain,
        x,
        prescale,
        norm_offset,
        NORM,
        HAS_GAIN,
        PRESCALE,
        GATED,
        WARPS,
        UPCAST,
    )

    y = tl.sum(acc, axis=0)
    y_up = y
    if GATED:
        y_up = tl.sum(acc_up, axis=0)
    square = r_token * 0.0
    if NORM and not PRESCALE:
        square = _token_squares(squares, WARPS)
    last = True
    if SPLITS > 1:
        last, y, y_up, square = merge_splits(
            y,
            y_up,
            square,
            partials_ptr,
            counters_ptr,
            block_id,
            split,
            SPLITS,
            ROWS,
            TOKENS,
            GATED,
            NORM and not PRESCALE,
        )
    if last:
        if NORM and not PRESCALE:
            by_token = tl.rsqrt(square / K + eps)[None, :]
            y *= by_token
            y_up *= by_token
        if PDL and AFTER_SHRINK:
            gdc_wait()
        if MAX_RANK:
            y, y_up = add_updates(
                y,
                y_up,
                block_id,
                u0_ptr,
                u1_ptr,
                u2_ptr,
                scale0,
                scale1,
                scale2,
                lora_x_ptr,
                out_rows,
                n,
                num_tokens,
                n0,
                n1,
                RANK0,
                RANK1,
                RANK2,
                MAX_RANK,
                NUM_WEIGHTS,
                GATED,
                ROWS,
                TOKENS,
                False,
            )
        finish(
            y,
            y_up,
            bias,
            up_bias,
            residual,
            out_ptr + r_token[None, :].to(tl.int64) * width + out_columns,
            out_mask,
            HAS_BIAS,
            GATED and HAS_BIAS1,
            HAS_RESIDUAL,
            ACTIVATION,
            GATED,
        )
