"""From the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Arrays = Sequence[npt.NDArray[Any]]

WORD = 4
# Kernels are compiled for pointers that are multiples of 16 bytes.
_ALIGNMENT = 64
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float64: np.dtype(np.float64),
}
_OURS = {theirs: ours for ours, theirs in _DTYPES.items()}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return _DTYPES[dtype]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy host values to `device`."""
    return upload([values.numpy()], device)[0]


def upload(parts: Arrays, device: torch.device) -> list[Tensor]:
    """Copy arrays of int32, int64 or float64 to `device` with one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(part) for part in parts]
    starts = aligned_starts([part.nbytes // WORD for part in parts])
    words = torch.empty(starts[-1], dtype=torch.int32, pin_memory=True, device="cpu")
    put_words(words.numpy(), parts, starts)
    return cut_words(words.to(device, non_blocking=True), parts, starts)


def aligned_starts(sizes: Sequence[int]) -> list[int]:
    """Return where parts of so many words begin, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size * WORD // _ALIGNMENT) * (_ALIGNMENT // WORD))
    return starts


def put_words(words: npt.NDArray[np.int32], parts: Arrays, starts: Sequence[int]) -> None:
    """Write arrays into words, each at its start.

    Not by torch, which wakes other threads for as little as 256 KB of it.
    """
    for part, start in zip(parts, starts, strict=False):
        words[start : start + part.nbytes // WORD] = (
            np.ascontiguousarray(part).reshape(-1).view(np.int32)
        )


def cut_words(words: Tensor, parts: Arrays, starts: Sequence[int]) -> list[Tensor]:
    """Return views of words, each of the dtype and the shape of its array."""
    return [
        words[start : start + part.nbytes // WORD].view(_OURS[part.dtype]).view(part.shape)
        for part, start in zip(parts, starts, strict=False)
    ]


__all__ = [
    "WORD",
    "aligned_starts",
    "cut_words",
    "numpy_dtype",
    "put_words",
    "to_device",
    "upload",
]
