"""A checksum of memory that notices any single change, and an exchange of two values.

The 32-bit words of a tensor lie in rows of 4096. In 64-bit integers that wrap::

    checksum[0] += sum_rc words[r, c] * (row_weight(first_row + r) + column_weight(c))

Row weights are even and column weights odd, so one changed word always shows. Integer addition
commutes: the result depends neither on the order in which programs run nor on the device.
"""

from __future__ import annotations

import torch

from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

ROW_WORDS = 4096
_MULTIPLIER_A, _MULTIPLIER_B = 0x45D9F3B, 0x119DE1F3
_MASK = 0x7FFFFFFF


def _hash(i: torch.Tensor) -> torch.Tensor:
    """Mix int64 indices into 31 bits."""
    h = ((i ^ (i >> 31)) * _MULTIPLIER_A) & _MASK
    h = ((h ^ (h >> 15)) * _MULTIPLIER_B) & _MASK
    return h ^ (h >> 16)


def checksum_reference(words: torch.Tensor, first_row: int, checksum: torch.Tensor) -> None:
    """Add the weighted words to the checksum."""
    full = words.shape[0] // ROW_WORDS * ROW_WORDS
    column_weights = 2 * _hash(torch.arange(ROW_WORDS, device=words.device)) + 1
    for part in (words[:full].view(-1, ROW_WORDS), words[full:].view(1, -1)):
        rows, columns = part.shape
        index = torch.arange(first_row, first_row + rows, device=words.device)
        checksum += (part.sum(1, dtype=torch.int64) * 2 * _hash(index)).sum()
        checksum += (part.sum(0, dtype=torch.int64) * column_weights[:columns]).sum()
        first_row += rows


@triton.jit
def _mix(i, MULTIPLIER_A: tl.constexpr, MULTIPLIER_B: tl.constexpr):
    h = ((i ^ (i >> 31)) * MULTIPLIER_A) & 0x7FFFFFFF
    h = ((h ^ (h >> 15)) * MULTIPLIER_B) & 0x7FFFFFFF
    return h ^ (h >> 16)


@triton.jit
def _checksum_kernel(
    words_ptr,
    checksum_ptr,
    num_words,
    first_row,
    MULTIPLIER_A: tl.constexpr,
    MULTIPLIER_B: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """checksum[0] += sum_c words[r, c] * (row_weight(first_row + r) + column_weight(c))."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK).to(tl.int64)
    i = row * BLOCK + column
    word = tl.load(words_ptr + i, mask=i < num_words, other=0).to(tl.int64)
    row_weight = 2 * _mix(first_row + row, MULTIPLIER_A, MULTIPLIER_B)
    column_weight = 2 * _mix(column, MULTIPLIER_A, MULTIPLIER_B) + 1
    total = tl.sum(word * (row_weight + column_weight), axis=0)
    tl.atomic_add(checksum_ptr, total, sem="relaxed")


def _launch_checksum(words: torch.Tensor, first_row: int, checksum: torch.Tensor) -> None:
    num_words = words.shape[0]
    if num_words == 0:
        return
    pdl = use_pdl(words)
    launch = {"launch_pdl": True} if pdl else {}
    _checksum_kernel[(triton.cdiv(num_words, ROW_WORDS),)](
        words,
        checksum,
        num_words,
        first_row,
        MULTIPLIER_A=_MULTIPLIER_A,
        MULTIPLIER_B=_MULTIPLIER_B,
        BLOCK=ROW_WORDS,
        PDL=pdl,
        num_warps=8,
        **launch,
    )


def _checksum_fake(words: torch.Tensor, first_row: int, checksum: torch.Tensor) -> None:
    return None


_checksum_op = register_op(
    "checksum(Tensor words, int first_row, Tensor(a!) checksum) -> ()",
    cpu=checksum_reference,
    cuda=_launch_checksum,
    fake=_checksum_fake,
)


def add_to_checksum(words: torch.Tensor, checksum: torch.Tensor, *, first_row: int = 0) -> None:
    """Add a tensor's words to a checksum, in place; nothing waits for the device.

    Args:
        words: [num_words] int32, contiguous; see `as_words`.
        checksum: [1] int64.
        first_row: rows added before, so that equal tensors in another order differ.
    """
    if not torch.compiler.is_compiling():
        if words.dtype != torch.int32 or words.dim() != 1 or not words.is_contiguous():
            raise TypeError(
                f"words must be contiguous int32 [num_words], got {words.dtype} "
                f"{list(words.shape)}; call as_words"
            )
        if checksum.dtype != torch.int64 or checksum.shape != (1,):
            raise TypeError(
                f"checksum must be int64 [1], got {checksum.dtype} {list(checksum.shape)}"
            )
    _checksum_op(words, first_row, checksum)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a tensor as int32 [num_words]; copied where no view of that kind exists.

    Up to three bytes at the end are widened to a word.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    tail = flat.numel() % 4
    if tail or flat.data_ptr() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    return flat.view(torch.int32)


__all__ = ["ROW_WORDS", "add_to_checksum", "as_words", "checksum_reference"]
