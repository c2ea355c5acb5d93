"""Greedy choice: ``token[b] = min { i : logits[b, i] = max_j logits[b, j] }``, NaN maximal.

Two small kernels: every tile of a row reduces to one 64-bit word, then one program a row takes
the largest word. A word orders by value first and by lowest index second, so the result depends
neither on the tiling nor on the order in which programs run.
"""

from __future__ import annotations

import torch

from torch_paged.ops.logits import check_logits
from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row's maximum, a NaN being larger than any number."""
    return torch.argmax(logits, dim=-1)


@triton.jit
def order_key(x):
    """Map fp32 to int32 so that integers order as torch orders floats: -0 = 0, NaN maximal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def pack_choice(key, index):
    """Pack an int32 key and index into int64: ordered by key, then by lowest index first."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack_index(word):
    """Return the index packed by `pack_choice`, as int64."""
    return 0x7FFFFFFF - (word & 0x7FFFFFFF)


@triton.jit
def _argmax_tiles_kernel(
    logits_ptr,
    words_ptr,
    vocab_size,
    stride_b,
    stride_wb,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """words[b, t] = max over tile t of pack(order_key(logits[b, i]), i)."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    index = tile * BLOCK + tl.arange(0, BLOCK)
    in_row = index < vocab_size
    if PDL:
        gdc_wait()
    x = tl.load(logits_ptr + row * stride_b + index, mask=in_row, other=float("-inf"))
    # A masked lane ties with a real -inf at worst and loses by its higher index.
    word = pack_choice(order_key(x.to(tl.float32)), index)
    tl.store(words_ptr + row * stride_wb + tile, tl.max(word, axis=0))


@triton.jit
def _argmax_rows_kernel(
    words_ptr,
    tokens_ptr,
    num_tiles,
    stride_wb,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """tokens[b] = index of the largest of words[b, :]."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    word = tl.load(
        words_ptr + row * stride_wb + tile, mask=tile < num_tiles, other=-0x8000000000000000
    )
    tl.store(tokens_ptr + row, unpack_index(tl.max(word, axis=0)))


def _tile_size(num_rows: int) -> int:
    # Few rows: small tiles, so that one row still spreads over every SM (149 tiles at 152k).
    return 1024 if num_rows <= 4 else 4096


def _launch_argmax(logits: torch.Tensor) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    tile_size = _tile_size(num_rows)
    num_tiles = triton.cdiv(vocab_size, tile_size)
    words = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    pdl = use_pdl(logits)
    launch = {"launch_pdl": True} if pdl else {}
    _argmax_tiles_kernel[(num_rows, num_tiles)](
        logits,
        words,
        vocab_size,
        logits.stride(0),
        num_tiles,
        BLOCK=tile_size,
        PDL=pdl,
        num_warps=4,
        **launch,
    )
    _argmax_rows_kernel[(num_rows,)](
        words,
        tokens,
        num_tiles,
        num_tiles,
        BLOCK=triton.next_power_of_2(num_tiles),
        PDL=pdl,
        num_warps=1,
        **launch,
    )
    return tokens


def _argmax_fake(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


_argmax_op = register_op(
    "argmax(Tensor logits) -> Tensor",
    cpu=argmax_reference,
    cuda=_launch_argmax,
    fake=_argmax_fake,
)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row's maximum as int64 [num_rows].

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; contiguous in the last
            dimension, row stride free. A NaN counts as larger than any number.
    """
    if not torch.compiler.is_compiling():
        check_logits(logits)
    return _argmax_op(logits)


__all__ = ["argmax", "argmax_reference", "order_key", "pack_choice", "unpack_index"]
