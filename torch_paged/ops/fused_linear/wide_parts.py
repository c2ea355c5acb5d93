"""What kernels over Hopper's tile copies share: splits that wait for each other, and the end."""

from __future__ import annotations

from torch_paged.ops.fused_linear.parts import finish, load_bias, load_residual
from torch_paged.ops.fused_linear.updates import add_updates
from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def prefetch_rows(row_ptrs, wanted, PREFETCH: tl.constexpr, ROWS: tl.constexpr):
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
def hand_over(
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
def sum_of_splits(
    ptr, SLOT: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr
):
    """Add up some rows of all slots in the order of the splits, whoever does it."""
    offsets = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    y = tl.load(ptr + offsets, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        y += tl.load(ptr + split * SLOT + offsets, cache_modifier=".cg")
    return y


@triton.jit
def load_ends(
    rows,
    first_token,
    b_ptr,
    b1_ptr,
    residual_ptr,
    num_tokens,
    n,
    column,
    has_bias,
    stride_residual,
    HAS_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Load what is added to the sums of `rows`: bias, bias of the up projection, residual."""
    tokens = first_token + tl.arange(0, TOKENS)[None, :]
    mask = (tokens < num_tokens) & (rows < n)
    bias = load_bias(b_ptr, rows, n, has_bias, HAS_BIAS)
    up_bias = load_bias(b1_ptr, rows, n, True, HAS_UP_BIAS)
    columns = column + rows
    residual = load_residual(residual_ptr, stride_residual, tokens, columns, mask, HAS_RESIDUAL)
    return bias, up_bias, residual


@triton.jit
def _finish_rows(
    y,
    y_up,
    bias,
    up_bias,
    residual,
    block_id,
    rows,
    first_token,
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
    """Add low-rank updates and what `load_ends` loaded to the sums of `rows`, and write them."""
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
    # Offsets within a tile fit 32 bits (`MAX_FEATURES`), and such keep the sums in registers.
    tile_ptr = out_ptr + first_token.to(tl.int64) * width + column
    finish(
        y,
        y_up,
        bias,
        up_bias,
        residual,
        tile_ptr + (r_token * width + rows),
        mask,
        HAS_BIAS,
        GATED and HAS_BIAS1,
        HAS_RESIDUAL,
        ACTIVATION,
        GATED,
    )


@triton.jit
def finish_tile(
    acc,
    acc_up,
    squares,
    block_id,
    sum_id,
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
    K: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
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
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Bring a tile's sums over in_features together and write what follows them.

    HAS_SQUARES: they are still to be divided by the root mean square of each token, of which
    `squares` [TOKENS] is this split's share. `sum_id` numbers the tiles, for their scratch memory.
    """
    if SPLITS == 1:
        y = acc
        y_up = acc_up
        if HAS_SQUARES:
            by_token = tl.rsqrt(squares / K + eps)[None, :]
            y *= by_token
            y_up *= by_token
        rows = first_row + tl.arange(0, ROWS)[:, None]
        bias, up_bias, residual = load_ends(
            rows,
            first_token,
            b_ptr,
            b1_ptr,
            residual_ptr,
            num_tokens,
            n,
            column,
            has_bias,
            stride_residual,
            HAS_BIAS,
            GATED and HAS_BIAS1,
            HAS_RESIDUAL,
            TOKENS,
        )
        _finish_rows(
            y,
            y_up,
            bias,
            up_bias,
            residual,
            block_id,
            rows,
            first_token,
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
        r_token = tl.arange(0, TOKENS)
        SUMS: tl.constexpr = ROWS * TOKENS * (2 if GATED else 1)
        SLOT: tl.constexpr = SUMS + (TOKENS if HAS_SQUARES else 0)
        sum_ptr = partials_ptr + sum_id.to(tl.int64) * (SLOT * SPLITS)
        counter_ptr = counters_ptr + sum_id
        if HAS_SQUARES:
            tl.store(sum_ptr + split * SLOT + SUMS + r_token, squares)
        # What a program adds to its one share is on its way while it waits for the others.
        EARLY: tl.constexpr = TOGETHER and ROWS // SHARE <= SPLITS
        if EARLY:
            own_rows = first_row + split * SHARE + tl.arange(0, SHARE)[:, None]
            own_bias, own_up_bias, own_residual = load_ends(
                own_rows,
                first_token,
                b_ptr,
                b1_ptr,
                residual_ptr,
                num_tokens,
                n,
                column,
                has_bias,
                stride_residual,
                HAS_BIAS,
                GATED and HAS_BIAS1,
                HAS_RESIDUAL,
                TOKENS,
            )
        arrived = hand_over(
            acc, acc_up, sum_ptr + split * SLOT, counter_ptr, SPLITS, ROWS, TOKENS, GATED, TOGETHER
        )
        first = split
        STEP: tl.constexpr = SPLITS if TOGETHER else 1
        if not TOGETHER:
            first = tl.where(arrived == SPLITS, 0, ROWS // SHARE)
        for share in range(first, ROWS // SHARE, STEP):
            share_ptr = sum_ptr + share * (SHARE * TOKENS)
            if EARLY:
                rows, bias, up_bias, residual = own_rows, own_bias, own_up_bias, own_residual
            else:
                rows = first_row + share * SHARE + tl.arange(0, SHARE)[:, None]
                bias, up_bias, residual = load_ends(
                    rows,
                    first_token,
                    b_ptr,
                    b1_ptr,
                    residual_ptr,
                    num_tokens,
                    n,
                    column,
                    has_bias,
                    stride_residual,
                    HAS_BIAS,
                    GATED and HAS_BIAS1,
                    HAS_RESIDUAL,
                    TOKENS,
                )
            y = sum_of_splits(share_ptr, SLOT, SPLITS, SHARE, TOKENS)
            y_up = y
            if GATED:
                y_up = sum_of_splits(share_ptr + ROWS * TOKENS, SLOT, SPLITS, SHARE, TOKENS)
            if HAS_SQUARES:
                all_squares = sum_of_splits(sum_ptr + SUMS, SLOT, SPLITS, 1, TOKENS)
                y *= tl.rsqrt(all_squares / K + eps)
                y_up *= tl.rsqrt(all_squares / K + eps)
            _finish_rows(
                y,
                y_up,
                bias,
                up_bias,
                residual,
                block_id,
                rows,
                first_token,
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
                SHARE,
            )
        # The last to leave resets the counter: all others have seen it full.
        left = arrived
        if TOGETHER:
            left = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") + 1 - SPLITS
        if left == SPLITS:
            tl.store(counter_ptr, 0)
