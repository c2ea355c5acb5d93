"""`fused_linear` without its norm on Hopper, above all from 65 rows on: operands come by TMA.

The tensor cores read the tiles of x and of the weights where the copies put them, so no element
passes through a register. The descriptors fill what lies beyond a matrix with zeros: no load has a
mask. Each program reads all of its rows of x from L2, hence many output features a program. With
more rows than TOKENS the programs of one weight tile are neighbours in the grid, and all but the
first find it in L2. Until the previous kernel ends a program asks for its first weights in L2.

With SPLITS > 1 programs share out in_features and hand over their sums. Where the whole grid fits
the device, a multiprocessor to each program, they wait for each other and each finishes a share of
the tile (TOGETHER): one alone would take longer over it than over its product. Elsewhere the last
to arrive finishes all.
"""

from __future__ import annotations

from torch_paged.ops.fused_linear.parts import locate
from torch_paged.ops.fused_linear.updates import prefetch_updates
from torch_paged.ops.fused_linear.wide_parts import (
    finish_tile,
    prefetch_rows,
)
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _wide_gemm_kernel(
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
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    VEC: tl.constexpr,
    UPCAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    AFTER_SHRINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] = epilogue(sum_k w[n, k] * x[t, k])."""
    tl.static_assert(not NORM, "the norm comes before this kernel")
    tl.static_assert(not AFTER_SHRINK, "the wait comes before the first tile")
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(0)
    first_token = tl.program_id(1) * TOKENS
    block_id = tl.program_id(2)
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
    TILES: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    first_row = block * ROWS
    first_k = split * (TILES * BLOCK_K)
    rows = first_row + tl.arange(0, ROWS)[:, None]
    if PREFETCH and PDL:
        SIZE: tl.constexpr = w0_ptr.dtype.element_ty.primitive_bitwidth // 8
        wanted = (rows < n) & (first_k + PREFETCH // SIZE <= K) & (first_token == 0)
        offsets = rows.to(tl.int64) * VEC
        prefetch_rows(w_ptr + offsets * stride_w + first_k, wanted, PREFETCH, ROWS)
        if GATED:
            prefetch_rows(w1_ptr + offsets * stride_w1 + first_k, wanted, PREFETCH, ROWS)
    HAS_BIAS: tl.constexpr = HAS_BIAS0 or HAS_BIAS1 or HAS_BIAS2
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

    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = acc
    for tile in tl.range(0, TILES, num_stages=STAGES):
        k = first_k + tile * BLOCK_K
        w = w_desc.load([first_row, k])
        x = x_desc.load([first_token, k])
        if UPCAST:
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(w, tl.trans(x), acc)
        if GATED:
            up = w1_desc.load([first_row, k])
            if UPCAST:
                up = up.to(tl.float32)
            acc_up = tl.dot(up, tl.trans(x), acc_up)

    finish_tile(
        acc,
        acc_up,
        0.0,
        block_id,
        block_id * tl.num_programs(1) + tl.program_id(1),
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
        False,
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
