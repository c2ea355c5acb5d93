"""Tensors with an entry a slot, in one allocation: one transfer writes a row of all of them.

A row that begins has a dozen numbers in as many tensors. Written one by one they are a launch or
two each, and the device waits for the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_paged.decoder.transfer import WORD, aligned_starts, numpy_dtype, upload


class Field(NamedTuple):
    """A tensor of the table: dtype of 4 or 8 bytes, shape of a slot's entry, value at first."""

    dtype: torch.dtype
    fill: float = 0
    shape: tuple[int, ...] = ()


class SlotTable:
    """Tensors [num_slots, *shape] by name, of the dtypes and shapes of their fields.

    Args:
        fields: by name, in the order of a row's values.
    """

    def __init__(self, num_slots: int, fields: Mapping[str, Field], device: torch.device) -> None:
        self._device = device
        sizes = [_num_words(field) for field in fields.values()]
        starts = aligned_starts([num_slots * size for size in sizes])
        self._tensors: dict[str, Tensor] = {}
        # Made under inference_mode, they could not be written outside of it.
        with torch.inference_mode(False):
            self._words = torch.zeros(starts[-1], dtype=torch.int32, device=device)
            for (name, field), start, size in zip(fields.items(), starts, sizes, strict=False):
                words = self._words[start : start + num_slots * size]
                tensor = words.view(field.dtype).view(num_slots, *field.shape)
                self._tensors[name] = tensor.fill_(field.fill)
        # Of each word of a row: where that of slot 0 is, and how far those of two slots are apart.
        self._first = np.concatenate(
            [start + np.arange(n) for start, n in zip(starts, sizes, strict=False)]
        )
        self._stride = np.repeat(sizes, sizes)
        self._row = np.dtype([(name, numpy_dtype(f.dtype), f.shape) for name, f in fields.items()])

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def write(self, slots: Sequence[int], rows: Sequence[tuple[Any, ...]]) -> Tensor:
        """Write the values of all fields of some slots; nothing waits for the device.

        Args:
            slots: each at most once.
            rows: of each slot, a value a field.

        Returns:
            The slots on the device, int64 [len(slots)].
        """
        words = np.array(rows, dtype=self._row).view(np.int32)
        index = np.array(slots, dtype=np.int64)
        places = index[:, None] * self._stride + self._first
        where, values, on_device = upload([places.reshape(-1), words, index], self._device)
        self._words.index_copy_(0, where, values)
        return on_device


def _num_words(field: Field) -> int:
    return field.dtype.itemsize // WORD * int(np.prod(field.shape, dtype=np.int64))


__all__ = ["Field", "SlotTable"]
