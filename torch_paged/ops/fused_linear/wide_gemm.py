"""`fused_linear` without its norm for 65 rows and more, on Hopper: both operands come by TMA.

The tensor cores read the tiles of x and of the weights where the copies put them, so no element
passes through a register. The descriptors fill what lies beyond a matrix with zeros: no load has a
mask. Each program reads all of its rows of x from L2, hence many output features a program. With
more rows than TOKENS the programs of one weight tile are neighbours in the grid, and all but the
first find it in L2. Until the previous kernel ends a program asks for its first weights in L2.
"""

from __future__ import annotations

from torch_paged.ops.fused_linear.parts import (
    add_updates,
    finish,
    load_bias,
    load_residual,
    locate,
    merge_splits,
)
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _prefetch_rows(row_ptrs, wanted, PREFETCH: tl.constexpr, ROWS: tl.constexpr):
    """Ask for the first PREFETCH bytes of rows [ROWS, 1] in L2: hints that nothing waits for."""
    # A piece for each of 256 threads; two with the same piece would both ask for it.
    PIECES: tl.constexpr = 256 // ROWS if PREFETCH * ROWS >= 256 * 16 else 1
    NBYTES: tl.constexpr = PREFETCH // PIECES // 16 * 16
    address = row_ptrs.to(tl.int64, bitcast=True) + tl.arange(0, PIECES)[None, :] * NBYTES
    wanted = tl.broadcast_to(wanted, [ROWS, PIECES]).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [address, wanted, tl.full([ROWS, PIECES], NBYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


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
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    VEC: tl.constexpr,
    UPCAST: tl.constexpr,
    AFTER_SHRINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, n] = epilogue(sum_k w[n, k] * x[t, k])."""
    tl.static_assert(not NORM, "the norm comes before this kernel")
    if PDL:
        gdc_launch_dependents()
    first_token = tl.program_id(0) * TOKENS
    block_id = tl.program_id(1)
    split = tl.program_id(2)
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
        # Past the last row of x no program has anything to read.
        wanted = (rows < n) & (first_k + PREFETCH // SIZE <= K) & (first_token == 0)
        offsets = rows.to(tl.int64) * VEC
        _prefetch_rows(w_ptr + offsets * stride_w + first_k, wanted, PREFETCH, ROWS)
        if GATED:
            _prefetch_rows(w1_ptr + offsets * stride_w1 + first_k, wanted, PREFETCH, ROWS)
    r_token = tl.arange(0, TOKENS)[None, :]
    tokens = first_token + r_token
    HAS_BIAS: tl.constexpr = HAS_BIAS0 or HAS_BIAS1 or HAS_BIAS2
    if PDL and not AFTER_SHRINK:
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

    y = acc
    y_up = acc_up
    last = True
    if SPLITS > 1:
        last, y, y_up, _ = merge_splits(
            y,
            y_up,
            tl.zeros([TOKENS], tl.float32),
            partials_ptr,
            counters_ptr,
            block_id * tl.num_programs(0) + tl.program_id(0),
            split,
            SPLITS,
            ROWS,
            TOKENS,
            GATED,
            False,
        )
    if last:
        if PDL and AFTER_SHRINK:
            gdc_wait()
        if MAX_RANK:
            WIDTH: tl.constexpr = RANK0 + RANK1 + RANK2
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
                lora_x_ptr + first_token * WIDTH,
                rows,
                n,
                num_tokens - first_token,
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
        mask = (tokens < num_tokens) & (rows < n)
        columns = column + rows
        finish(
            y,
            y_up,
            load_bias(b_ptr, rows, n, has_bias, HAS_BIAS),
            load_bias(b1_ptr, rows, n, True, GATED and HAS_BIAS1),
            load_residual(residual_ptr, stride_residual, tokens, columns, mask, HAS_RESIDUAL),
            out_ptr + tokens.to(tl.int64) * width + columns,
            mask,
            HAS_BIAS,
            GATED and HAS_BIAS1,
            HAS_RESIDUAL,
            ACTIVATION,
            GATED,
        )
