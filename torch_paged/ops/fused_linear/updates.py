"""Low-rank updates within the kernels of `fused_linear`: located, asked for, loaded, added."""

from __future__ import annotations

from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def locate_update(
    block,
    u0_ptr,
    u1_ptr,
    u2_ptr,
    scale0,
    scale1,
    scale2,
    n0,
    n1,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Map a program, as `locate` does, to the low-rank update of its weight.

    Returns the pointer of the update, its rank (0: none), its first column in `lora_x`, its scale.
    """
    ptr = u0_ptr
    rank = n0 * 0 + RANK0
    column = n0 * 0
    scale = scale0
    if NUM_WEIGHTS > 1 and not GATED:
        start = tl.cdiv(n0, BLOCK_N)
        here = block >= start
        ptr = tl.where(here, u1_ptr, ptr)
        rank = tl.where(here, RANK1, rank)
        column = tl.where(here, RANK0, column)
        scale = tl.where(here, scale1, scale)
        if NUM_WEIGHTS > 2:
            here = block >= start + tl.cdiv(n1, BLOCK_N)
            ptr = tl.where(here, u2_ptr, ptr)
            rank = tl.where(here, RANK2, rank)
            column = tl.where(here, RANK0 + RANK1, column)
            scale = tl.where(here, scale2, scale)
    return ptr, rank, column, scale


@triton.jit
def _prefetch(ptr, count, MOST: tl.constexpr):
    """Ask for `count` <= MOST elements in L2: hints that nothing waits for."""
    SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    line = tl.arange(0, MOST * SIZE // 128) * 128
    wanted = (line < count * SIZE).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [ptr.to(tl.int64, bitcast=True) + line, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_updates(
    block_id,
    first_row,
    u0_ptr,
    u1_ptr,
    u2_ptr,
    n,
    n0,
    n1,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    MAX_RANK: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Ask for a program's rows of its low-rank update in L2, where the epilogue will find them."""
    # A power of two, and lines enough; of large ranks the first part is asked for.
    MOST: tl.constexpr = ROWS * (MAX_RANK if MAX_RANK < 64 else 64)
    u_ptr, rank, _, _ = locate_update(
        block_id,
        u0_ptr,
        u1_ptr,
        u2_ptr,
        0.0,
        0.0,
        0.0,
        n0,
        n1,
        RANK0,
        RANK1,
        RANK2,
        NUM_WEIGHTS,
        GATED,
        ROWS,
    )
    num_rows = tl.minimum(n - first_row, ROWS)
    _prefetch(u_ptr + first_row * rank, num_rows * rank, MOST)
    if GATED and RANK1:
        _prefetch(u1_ptr + first_row * RANK1, num_rows * RANK1, MOST)


@triton.jit
def load_update(ptr, rows, row_mask, rank, r):
    """Load columns r of the rows of an update [n, rank], zero past its rank."""
    return tl.load(ptr + rows * rank + r, mask=row_mask & (r < rank), other=0.0)


@triton.jit
def load_lora_x(ptr, tokens, token_mask, column, rank, r, WIDTH: tl.constexpr):
    """Load elements r of an update's share of `lora_x` [num_tokens, WIDTH]."""
    offsets = tokens.to(tl.int64) * WIDTH + column + r
    return tl.load(ptr + offsets, mask=token_mask & (r < rank), other=0.0)


@triton.jit
def rounded_product(a, b):
    """Return a * b, broadcast, of which no first sum of lanes makes a multiply-add.

    That would round the lane's own product no more: lanes that hold the same sum would differ in
    its last bit.
    """
    a, b = tl.broadcast(a, b)
    return tl.fma(a, b, tl.zeros_like(a))


@triton.jit
def add_update(
    y,
    u_ptr,
    rank,
    column,
    scale,
    lora_x_ptr,
    rows,
    n,
    num_tokens,
    MAX_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return y + scale * update[rows] @ lora_x.T, [ROWS, TOKENS]; `rows` is [ROWS, 1].

    With DOT on tensor cores, in three TF32 products, which leave less of an error than the
    rounding of the result.
    """
    CHUNK: tl.constexpr = 16
    tokens = tl.arange(0, TOKENS)[:, None]
    # Not unrolled: the loads of large ranks, all ahead of the products, would spill.
    for start in tl.range(0, MAX_RANK, CHUNK, num_stages=1):
        r = start + tl.arange(0, CHUNK)[None, :]
        u = load_update(u_ptr, rows, rows < n, rank, r).to(tl.float32)
        x = load_lora_x(lora_x_ptr, tokens, tokens < num_tokens, column, rank, r, WIDTH)
        x *= scale
        if DOT:
            y = tl.dot(u, tl.trans(x), y, input_precision="tf32x3")
        else:
            y += tl.sum(rounded_product(u[:, None, :], x[None, :, :]), axis=2)
    return y


@triton.jit
def add_updates(
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
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    MAX_RANK: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Add the updates of a program's weight, and where GATED those of its up projection."""
    WIDTH: tl.constexpr = RANK0 + RANK1 + RANK2
    u_ptr, rank, first, u_scale = locate_update(
        block_id,
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
        ROWS,
    )
    y = add_update(
        y,
        u_ptr,
        rank,
        first,
        u_scale,
        lora_x_ptr,
        rows,
        n,
        num_tokens,
        MAX_RANK,
        WIDTH,
        TOKENS,
        DOT,
    )
    if GATED and RANK1:
        y_up = add_update(
            y_up,
            u1_ptr,
            RANK1,
            RANK0,
            scale1,
            lora_x_ptr,
            rows,
            n,
            num_tokens,
            MAX_RANK,
            WIDTH,
            TOKENS,
            DOT,
        )
    return y, y_up
