"""`fused_linear` on tensor cores for more rows of 16-bit dtypes: tiles in shared memory.

Past some 16 rows the programs of small_gemm.py read x from L2 faster than the weights from memory.
Here all warps of a program share one tile of x, so it can own more output features and read x less
often. With SPLITS > 1 programs also share out in_features, as in small_gemm.py. The first tile of
weights waits in registers for the previous kernel to end and is added last.
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
def _load_x(x_ptrs, k, token_mask, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        x = tl.load(x_ptrs, mask=token_mask, other=0.0)
    else:
        x = tl.load(x_ptrs, mask=token_mask & (k < K), other=0.0)
    return x


@triton.jit
def _squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit
def _accumulate(
    acc,
    acc_up,
    squares,
    weight,
    up,
    gain,
    x,
    scale,
    norm_offset,
    NORM: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    PRESCALE: tl.constexpr,
    GATED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add one tile to the sums of products and of squares."""
    if NORM and not PRESCALE:
        squares += _squares(x)
    if PRESCALE:
        x = (x.to(tl.float32) * scale[:, None]).to(x.dtype)
    if HAS_GAIN:
        x = (x.to(tl.float32) * (gain.to(tl.float32) + norm_offset)).to(x.dtype)
    elif NORM and not PRESCALE:
        # norm_offset is 0 without a gain, which the compiler cannot know. Were the very tile of
        # the squares an operand of the product too, Triton (3.6) would count the first use alone
        # and give the tile one buffer too few: the next copy would overwrite what the tensor
        # cores still read.
        x = (x.to(tl.float32) + norm_offset).to(x.dtype)
    if UPCAST:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
        up = up.to(tl.float32)
    x_t = tl.trans(x)
    acc = tl.dot(weight, x_t, acc)
    if GATED:
        acc_up = tl.dot(up, x_t, acc_up)
    return acc, acc_up, squares


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _tile_gemm_kernel(
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
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
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
    TILES: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    r_row = tl.arange(0, ROWS)
    r_token = tl.arange(0, TOKENS)
    rows = block * ROWS + r_row[:, None]
    row_mask = rows < n
    k = split * (TILES * BLOCK_K) + tl.arange(0, BLOCK_K)[None, :]
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
    out_mask = (r_token[None, :] < num_tokens) & row_mask
    out_columns = column + rows
    bias = load_bias(b_ptr, rows, n, has_bias, HAS_BIAS)
    up_bias = load_bias(b1_ptr, rows, n, True, GATED and HAS_BIAS1)
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
    token_mask = r_token[:, None] < num_tokens
    x_rows = x_ptr + r_token[:, None].to(tl.int64) * stride_x * VEC
    x_ptrs = x_rows + k
    squares = tl.zeros([TOKENS], tl.float32)
    # gain * x can leave the range of float16, so there the scale is found first.
    scale = squares
    PRESCALE: tl.constexpr = NORM and x_ptr.dtype.element_ty == tl.float16
    if PRESCALE:
        for start in range(0, K, BLOCK_K):
            k_all = start + tl.arange(0, BLOCK_K)[None, :]
            squares += _squares(_load_x(x_rows + k_all, k_all, token_mask, K, False))
        scale = tl.rsqrt(squares / K + eps)

    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = acc
    x = _load_x(x_ptrs, k, token_mask, K, EVEN_K)
    for tile in tl.range(1, TILES, num_stages=STAGES):
        k_tile = k + tile * BLOCK_K
        x_tile = _load_x(x_ptrs + tile * BLOCK_K, k_tile, token_mask, K, EVEN_K)
        w_tile = load_streamed(w_ptrs + tile * BLOCK_K, k_tile, row_mask, K, EVEN_K, not EVEN_N)
        up_tile = w_tile
        if GATED:
            up_tile = load_streamed(
                up_ptrs + tile * BLOCK_K, k_tile, row_mask, K, EVEN_K, not EVEN_N
            )
        gain_tile = k_tile
        if HAS_GAIN:
            gain_tile = load_gain(norm_ptr, k_tile, K)
        acc, acc_up, squares = _accumulate(
            acc,
            acc_up,
            squares,
            w_tile,
            up_tile,
            gain_tile,
            x_tile,
            scale,
            norm_offset,
            NORM,
            HAS_GAIN,
            PRESCALE,
            GATED,
            UPCAST,
        )
    y, y_up, squares = _accumulate(
        acc,
        acc_up,
        squares,
        weight,
        up,
        gain,
        x,
        scale,
        norm_offset,
        NORM,
        HAS_GAIN,
        PRESCALE,
        GATED,
        UPCAST,
    )

    last = True
    if SPLITS > 1:
        last, y, y_up, squares = merge_splits(
            y,
            y_up,
            squares,
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
            by_token = tl.rsqrt(squares / K + eps)[None, :]
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
                rows,
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
                True,
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
