"""Weights asked for in L2 by programs that wait for the kernel before theirs.

Attention of a few rows is a chain of latencies: the memory stands still while it runs, and so it
does where one linear ends and the next has yet to load x. A program's first tile of weights is on
its way to registers by then. What follows it, up to `AHEAD_BYTES` over all programs, is asked for
in L2 meanwhile: the rest of the program's own rows, and the rows of programs that have to wait for
a place on a multiprocessor.
"""

from __future__ import annotations

from typing import NamedTuple

from torch_paged.ops.fused_linear.parts import locate
from torch_paged.ops.triton_compat import tl, triton

# Of the 50 MB of an H200's L2, beside what is in use.
AHEAD_BYTES = 32 << 20

_REGISTERS = 1 << 16
_THREADS = 2048
_SHARED_BYTES = 227 << 10


class Ahead(NamedTuple):
    """What the programs of a kernel ask for while they wait.

    Attributes:
        wave: programs that run at once.
        waves: waves whose weights the first one asks for, itself among them; 0: none does.
    """

    wave: int
    waves: int


def plan_ahead(
    num_processors: int,
    num_programs: int,
    program_bytes: int,
    threads: int,
    registers: int,
    shared_bytes: int = 0,
) -> Ahead:
    """Return what a kernel asks for ahead, by what its programs read and take of a multiprocessor.

    Args:
        program_bytes: bytes of weights that one program reads.
        registers: of a thread.
        shared_bytes: shared memory of a program.
    """
    resident = min(_REGISTERS // (threads * registers), _THREADS // threads)
    if shared_bytes:
        resident = min(resident, _SHARED_BYTES // shared_bytes)
    wave = min(max(resident, 1) * num_processors, num_programs)
    further = round((AHEAD_BYTES - wave * program_bytes) / (wave * program_bytes))
    return Ahead(wave, 1 + max(0, min(further, -(-num_programs // wave) - 1, 3)))


@triton.jit
def _prefetch_rows(
    w_ptr, stride, rows_left, num_bytes, FIRST: tl.constexpr, ROWS: tl.constexpr, NUM: tl.constexpr
):
    """Ask for the bytes FIRST to num_bytes of ROWS rows in L2, shared out among NUM threads."""
    # Each thread has a piece of its own: with fewer elements than threads several would ask for
    # the same.
    PIECES: tl.constexpr = NUM // ROWS if NUM > ROWS else 1
    t = tl.arange(0, ROWS * PIECES)
    row = t // PIECES
    rest = tl.cdiv(num_bytes - FIRST, PIECES)
    # Whole lines, and no pieces so small that asking costs more than it gives.
    piece = tl.maximum(tl.cdiv(rest, 128) * 128, 512)
    start = FIRST + t % PIECES * piece
    wanted = (start < num_bytes) & (row < rows_left)
    size = tl.where(wanted, tl.minimum(piece, num_bytes - start), 16)
    SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    address = w_ptr.to(tl.int64, bitcast=True) + row.to(tl.int64) * stride * SIZE + start
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [address, wanted.to(tl.int32), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_program(
    program,
    num_blocks,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    n0,
    n1,
    n2,
    stride_w0,
    stride_w1,
    stride_w2,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    GATED: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    LOADED: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    """Ask for the weights of one program but the first LOADED of each row."""
    SIZE: tl.constexpr = w0_ptr.dtype.element_ty.primitive_bitwidth // 8
    first_k = program // num_blocks * SHARE
    block, w_ptr, _, stride_w, n, _, _, _ = locate(
        program % num_blocks,
        w0_ptr,
        w1_ptr,
        w2_ptr,
        w0_ptr,
        w1_ptr,
        w2_ptr,
        n0,
        n1,
        n2,
        stride_w0,
        stride_w1,
        stride_w2,
        False,
        False,
        False,
        NUM_WEIGHTS,
        GATED,
        ROWS,
    )
    first_row = (block * ROWS).to(tl.int64) * VEC
    rows_left = n - block * ROWS
    # Past the last program nothing is left of any row.
    num_bytes = tl.minimum(SHARE, K - first_k) * SIZE
    _prefetch_rows(
        w_ptr + first_row * stride_w + first_k,
        stride_w * VEC,
        rows_left,
        num_bytes,
        LOADED * SIZE,
        ROWS,
        NUM_THREADS,
    )
    if GATED:
        _prefetch_rows(
            w1_ptr + first_row * stride_w1 + first_k,
            stride_w1 * VEC,
            rows_left,
            num_bytes,
            LOADED * SIZE,
            ROWS,
            NUM_THREADS,
        )


@triton.jit
def prefetch_ahead(
    program,
    num_blocks,
    wave,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    n0,
    n1,
    n2,
    stride_w0,
    stride_w1,
    stride_w2,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    GATED: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    LOADED: tl.constexpr,
    WAVES: tl.constexpr,
    NUM_THREADS: tl.constexpr,
):
    """Ask for the weights of a program of the first wave and of WAVES - 1 programs behind it.

    Program i has block i % num_blocks of ROWS output features, SHARE input features of each from
    i // num_blocks * SHARE on, LOADED of which it loads itself by now. Rows are 16-byte aligned.
    """
    if program < wave:
        if LOADED < SHARE:
            _prefetch_program(
                program,
                num_blocks,
                w0_ptr,
                w1_ptr,
                w2_ptr,
                n0,
                n1,
                n2,
                stride_w0,
                stride_w1,
                stride_w2,
                K,
                NUM_WEIGHTS,
                GATED,
                VEC,
                ROWS,
                SHARE,
                LOADED,
                NUM_THREADS,
            )
        for i in tl.static_range(1, WAVES):
            _prefetch_program(
                program + i * wave,
                num_blocks,
                w0_ptr,
                w1_ptr,
                w2_ptr,
                n0,
                n1,
                n2,
                stride_w0,
                stride_w1,
                stride_w2,
                K,
                NUM_WEIGHTS,
                GATED,
                VEC,
                ROWS,
                SHARE,
                0,
                NUM_THREADS,
            )


__all__ = ["AHEAD_BYTES", "Ahead", "plan_ahead", "prefetch_ahead"]
