"""A checksum of memory that notices any single change and any exchange of two values.

Over the 32-bit words of a tensor, in 64-bit integers that wrap::

    checksum[0] += sum_i words[i] * weight(offset + i),   weight(i) = 2 * (hash(i) mod 2^31) + 1

Weights are odd, so one changed word always shows. Integer addition commutes: the result depends
neither on the order in which programs run nor on the device.
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

_BLOCK = 4096
_CHUNK = 1 << 22  # words that the reference widens at a time
_MULTIPLIER_A, _MULTIPLIER_B = 0x45D9F3B, 0x119DE1F3
_MASK = 0x7FFFFFFF


def _weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return weight(i) for `count` indices from `start` on, int64."""
    i = torch.arange(start, start + count, device=device, dtype=torch.int64)
    h = ((i ^ (i >> 31)) * _MULTIPLIER_A) & _MASK
    h = ((h ^ (h >> 15)) * _MULTIPLIER_B) & _MASK
    return ((h ^ (h >> 16)) << 1) + 1


def checksum_reference(words: torch.Tensor, offset: int, checksum: torch.Tensor) -> None:
    """Add the weighted words to the checksum."""
    for start in range(0, words.shape[0], _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        weights = _weights(offset + start, part.shape[0], words.device)
        checksum += (part * weights).sum()


@triton.jit
def _checksum_kernel(
    words_ptr,
    checksum_ptr,
    num_words,
    offset,
    MULTIPLIER_A: tl.constexpr,
    MULTIPLIER_B: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """checksum[0] += sum over one block of words[i] * weight(offset + i)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + i, mask=i < num_words, other=0).to(tl.int64)
    k = offset + i
    h = ((k ^ (k >> 31)) * MULTIPLIER_A) & 0x7FFFFFFF
    h = ((h ^ (h >> 15)) * MULTIPLIER_B) & 0x7FFFFFFF
    weight = ((h ^ (h >> 16)) << 1) + 1
    tl.atomic_add(checksum_ptr, tl.sum(word * weight, axis=0), sem="relaxed")


def _launch_checksum(words: torch.Tensor, offset: int, checksum: torch.Tensor) -> None:
    num_words = words.shape[0]
    if num_words == 0:
        return
    pdl = use_pdl(words)
    launch = {"launch_pdl": True} if pdl else {}
    _checksum_kernel[(triton.cdiv(num_words, _BLOCK),)](
        words,
        checksum,
        num_words,
        offset,
        MULTIPLIER_A=_MULTIPLIER_A,
        MULTIPLIER_B=_MULTIPLIER_B,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=8,
        **launch,
    )


def _checksum_fake(words: torch.Tensor, offset: int, checksum: torch.Tensor) -> None:
    return None


_checksum_op = register_op(
    "checksum(Tensor words, int offset, Tensor(a!) checksum) -> ()",
    cpu=checksum_reference,
    cuda=_launch_checksum,
    fake=_checksum_fake,
)


def add_to_checksum(words: torch.Tensor, checksum: torch.Tensor, *, offset: int = 0) -> None:
    """Add a tensor's words to a checksum, in place; nothing waits for the device.

    Args:
        words: [num_words] int32, contiguous; see `as_words`.
        checksum: [1] int64.
        offset: words added before, so that equal tensors in another order differ.
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
    _checksum_op(words, offset, checksum)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a tensor as int32 [num_words]; copied where no view of that kind exists.

    Up to three bytes at the end are widened to a word.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    tail = flat.numel() % 4
    if tail or flat.data_ptr() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    return flat.view(torch.int32)


__all__ = ["add_to_checksum", "as_words", "checksum_reference"]
