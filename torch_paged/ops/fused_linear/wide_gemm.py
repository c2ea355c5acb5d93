"""`fused_linear` without its norm on Hopper, most of all for many rows: operands come by TMA.

The tensor cores read the tiles of x and of the weights where the copies put them, so no element
passes through a register. The descriptors fill what lies beyond a matrix with zeros: no load has a
mask. Each program reads all of its rows of x from L2, hence many output features a program. With
more rows than TOKENS the programs of one weight tile are neighbours in the grid, and all but the
first find it in L2. Until the previous kernel ends a program asks for its first weights in L2. One
whose weights are a single tile (few rows of x leave room for that) has all of them in shared memory
by then: nothing before it writes them.

With SPLITS > 1 programs share out in_features and hand over their sums. Where the whole grid fits
the device, a multiprocessor to each program, they wait for each other and each finishes a share of
the tile (TOGETHER): one alone would take longer over it than over its product. Elsewhere the last
to arrive finishes all.
"""

from __future__ import annotations

from torch_paged.ops.fused_linear.parts import (
    add_updates,
    finish,
    load_bias,
    load_residual,
    locate,
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


@triton.jit
def _multiply(w, x, acc, UPCAST: tl.constexpr):
    if UPCAST:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, tl.trans(x), acc)


@triton.jit
def _hand_over(
    acc,
    acc_up,
    slot_ptr,
    counter_ptr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    GATED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Store a split's sums; TOGETHER: wait for those of all. Return how many had arrived."""
    offsets = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tl.store(slot_ptr + offsets, acc)
    if GATED:
        tl.store(slot_ptr + ROWS * TOKENS + offsets, acc_up)
    # All stores of the program come before the release by its one atomic.
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") + 1
    if TOGETHER:
        while arrived < SPLITS:
            arrived = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    return arrived


@triton.jit
def _sum_of_splits(
    ptr, SLOT: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr
):
    """Add up some rows of all slots in the order of the splits, whoever does it."""
    offsets = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    y = tl.load(ptr + offsets, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        y += tl.load(ptr + split * SLOT + offsets, cache_modifier=".cg")
    return y


@triton.jit
def _finish_rows(
    y,
    y_up,
    block_id,
    rows,
    first_token,
    b_ptr,
    b1_ptr,
    residual_ptr,
    u0_ptr,
    u1_ptr,
    u2_ptr,
    lora_x_ptr,
    out_ptr,
    num_tokens,
    n,
    n0,
    n1,
    column,
    width,
    has_bias,
    stride_residual,
    scale0,
    scale1,
    scale2,
    NUM_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BIAS1: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add low-rank updates to the sums of `rows` and write what follows them."""
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
    r_token = tl.arange(0, TOKENS)[None, :]
    tokens = first_token + r_token
    mask = (tokens < num_tokens) & (rows < n)
    columns = column + rows
    # Offsets within a tile fit 32 bits (`MAX_FEATURES`), and such keep the sums in registers.
    tile_ptr = out_ptr + first_token.to(tl.int64) * width + column
    finish(
        y,
        y_up,
        load_bias(b_ptr, rows, n, has_bias, HAS_BIAS),
        load_bias(b1_ptr, rows, n, True, GATED and HAS_BIAS1),
        load_residual(residual_ptr, stride_residual, tokens, columns, mask, HAS_RESIDUAL),
        tile_ptr + (r_token * width + rows),
        mask,
        HAS_BIAS,
        GATED and HAS_BIAS1,
        HAS_RESIDUAL,
        ACTIVATION,
        GATED,
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
    AHEAD: tl.constexpr = TILES == 1
    if PREFETCH and PDL:
        SIZE: tl.constexpr = w0_ptr.dtype.element_ty.primitive_bitwidth // 8
        wanted = (rows < n) & (first_k + PREFETCH // SIZE <= K) & (first_token == 0)
        offsets = rows.to(tl.int64) * VEC
        # The first of two tiles that come ahead is waited for before the second is asked for.
        if not AHEAD:
            _prefetch_rows(w_ptr + offsets * stride_w + first_k, wanted, PREFETCH, ROWS)
        if GATED:
            _prefetch_rows(w1_ptr + offsets * stride_w1 + first_k, wanted, PREFETCH, ROWS)
    HAS_BIAS: tl.constexpr = HAS_BIAS0 or HAS_BIAS1 or HAS_BIAS2
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = acc
    if AHEAD:
        w = w_desc.load([first_row, first_k])
        if GATED:
            up = w1_desc.load([first_row, first_k])
        if PDL:
            gdc_wait()
        x = x_desc.load([first_token, first_k])
        acc = _multiply(w, x, acc, UPCAST)
        if GATED:
            acc_up = _multiply(up, x, acc_up, UPCAST)
    else:
        if PDL:
            gdc_wait()
        for tile in tl.range(0, TILES, num_stages=STAGES):
            k = first_k + tile * BLOCK_K
            w = w_desc.load([first_row, k])
            x = x_desc.load([first_token, k])
            acc = _multiply(w, x, acc, UPCAST)
            if GATED:
                acc_up = _multiply(w1_desc.load([first_row, k]), x, acc_up, UPCAST)

    if SPLITS == 1:
        _finish_rows(
            acc,
            acc_up,
            block_id,
            rows,
            first_token,
            b_ptr,
            b1_ptr,
            residual_ptr,
            u0_ptr,
            u1_ptr,
            u2_ptr,
            lora_x_ptr,
            out_ptr,
            num_tokens,
            n,
            n0,
            n1,
            column,
            width,
            has_bias,
            stride_residual,
            scale0,
            scale1,
            scale2,
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
        )
    else:
        SLOT: tl.constexpr = ROWS * TOKENS * (2 if GATED else 1)
        sum_id = block_id * tl.num_programs(1) + tl.program_id(1)
        sum_ptr = partials_ptr + sum_id.to(tl.int64) * (SLOT * SPLITS)
        counter_ptr = counters_ptr + sum_id
        arrived = _hand_over(
            acc, acc_up, sum_ptr + split * SLOT, counter_ptr, SPLITS, ROWS, TOKENS, GATED, TOGETHER
        )
        first = split
        STEP: tl.constexpr = SPLITS if TOGETHER else 1
        if not TOGETHER:
            first = tl.where(arrived == SPLITS, 0, ROWS // SHARE)
        for share in range(first, ROWS // SHARE, STEP):
            share_ptr = sum_ptr + share * (SHARE * TOKENS)
            y = _sum_of_splits(share_ptr, SLOT, SPLITS, SHARE, TOKENS)
            y_up = y
            if GATED:
                y_up = _sum_of_splits(share_ptr + ROWS * TOKENS, SLOT, SPLITS, SHARE, TOKENS)
            _finish_rows(
                y,
                y_up,
                block_id,
                first_row + share * SHARE + tl.arange(0, SHARE)[:, None],
                first_token,
                b_ptr,
                b1_ptr,
                residual_ptr,
                u0_ptr,
                u1_ptr,
                u2_ptr,
                lora_x_ptr,
                out_ptr,
                num_tokens,
                n,
                n0,
                n1,
                column,
                width,
                has_bias,
                stride_residual,
                scale0,
                scale1,
                scale2,
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
            )
        # The last to leave resets the counter: all others have seen it full.
        left = arrived
        if TOGETHER:
            left = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") + 1 - SPLITS
        if left == SPLITS:
            tl.store(counter_ptr, 0)
