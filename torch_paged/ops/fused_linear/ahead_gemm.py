"""`fused_linear` for a few dozen rows on Hopper: the weights are there before x is.

Where all weights of a layer fit the multiprocessors' shared memory, a program's are one tile: no
kernel of a step writes them, so it copies them, by TMA, while its predecessor still runs. What
follows the wait is short: x is read, normalised on the way where the layer has a norm, and
multiplied by all weights at once on Hopper's tensor cores, which read them where they lie.
Programs share out in_features as in wide_gemm.py.
"""

from __future__ import annotations

from torch_paged.ops.fused_linear.parts import load_gain, locate
from torch_paged.ops.fused_linear.updates import prefetch_updates
from torch_paged.ops.fused_linear.wide_parts import (
    finish_tile,
    prefetch_rows,
)
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _load_x(x_rows, k, token_mask, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        x = tl.load(x_rows + k, mask=token_mask, other=0.0)
    else:
        x = tl.load(x_rows + k, mask=token_mask & (k < K), other=0.0)
    return x


@triton.jit
def _squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _ahead_gemm_kernel(
    x_desc,
    w0_desc,
    w1_desc,
    w2_desc,
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
    SHARE: tl.constexpr,
    PREFETCH: tl.constexpr,
    VEC: tl.constexpr,
    UPCAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    AFTER_SHRINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] = epilogue(rsqrt(mean_k x^2 + eps) * sum_k w[n, k] * (gain[k] * x[t, k]))."""
    tl.static_assert(BLOCK_K * SPLITS >= K, "all of a program's weights are one tile")
    tl.static_assert(not AFTER_SHRINK, "the wait comes before x")
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(0)
    block_id = tl.program_id(1)
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
    w_desc = w0_desc
    if NUM_WEIGHTS > 1 and not GATED:
        start = tl.cdiv(n0, ROWS)
        if block_id >= start:
            w_desc = w1_desc
        if NUM_WEIGHTS > 2:
            if block_id >= start + tl.cdiv(n1, ROWS):
                w_desc = w2_desc
    first_row = block * ROWS
    first_token = tl.full((), 0, tl.int32)
    first_k = split * BLOCK_K
    rows = first_row + tl.arange(0, ROWS)[:, None]
    if GATED and PREFETCH and PDL:
        # The copies of the first weight are waited for before those of the second begin.
        SIZE: tl.constexpr = w0_ptr.dtype.element_ty.primitive_bitwidth // 8
        wanted = (rows < n) & (first_k + PREFETCH // SIZE <= K)
        up_ptrs = w1_ptr + rows.to(tl.int64) * VEC * stride_w1 + first_k
        prefetch_rows(up_ptrs, wanted, PREFETCH, ROWS)
    w = w_desc.load([first_row, first_k])
    up = w
    if GATED:
        up = w1_desc.load([first_row, first_k])
    k = first_k + tl.arange(0, BLOCK_K)[None, :]
    gain = k
    if HAS_GAIN:
        gain = load_gain(norm_ptr, k, K)
    HAS_BIAS: tl.constexpr = HAS_BIAS0 or HAS_BIAS1 or HAS_BIAS2
    PRESCALE: tl.constexpr = NORM and x_ptr.dtype.element_ty == tl.float16
    if PDL and MAX_RANK:
        prefetch_updates(
            block_id,
            first_row,
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
    if PDL:
        gdc_wait()

    r_token = tl.arange(0, TOKENS)
    squares = tl.zeros([TOKENS], tl.float32)
    if NORM:
        x_rows = x_ptr + r_token[:, None].to(tl.int64) * stride_x * VEC
        token_mask = r_token[:, None] < num_tokens
        x = _load_x(x_rows, k, token_mask, K, K % (BLOCK_K * SPLITS) == 0)
        if PRESCALE:
            # gain * x can leave the range of float16, so there the scale is found first.
            for start in range(0, K, BLOCK_K):
                k_all = start + tl.arange(0, BLOCK_K)[None, :]
                squares += _squares(_load_x(x_rows, k_all, token_mask, K, K % BLOCK_K == 0))
            x = (x.to(tl.float32) * tl.rsqrt(squares / K + eps)[:, None]).to(x.dtype)
        else:
            squares = _squares(x)
        if HAS_GAIN:
            x = (x.to(tl.float32) * (gain.to(tl.float32) + norm_offset)).to(x.dtype)
    else:
        x = x_desc.load([first_token, first_k])
    if UPCAST:
        w = w.to(tl.float32)
        up = up.to(tl.float32)
        x = x.to(tl.float32)
    acc = tl.dot(w, tl.trans(x))
    acc_up = acc
    if GATED:
        acc_up = tl.dot(up, tl.trans(x))

    finish_tile(
        acc,
        acc_up,
        squares,
        block_id,
        block_id,
        split,
        first_row,
        first_token,
        b_ptr,
        b1_ptr,
        residual_ptr,
        u0_ptr,
        u1_ptr,
        u2_ptr,
        lora_x_ptr,
        out_ptr,
        partials_ptr,
        counters_ptr,
        num_tokens,
        n,
        n0,
        n1,
        column,
        width,
        has_bias,
        stride_residual,
        eps,
        scale0,
        scale1,
        scale2,
        K,
        NORM and not PRESCALE,
        NUM_WEIGHTS,
        HAS_BIAS,
        HAS_BIAS1,
        HAS_RESIDUAL,
        RANK0,
        RANK1,
        RANK2,
        MAX_RANK,
        ACTIVATION,
        GATED,
        TOKENS,
        ROWS,
        SPLITS,
        SHARE,
        TOGETHER,
    )
