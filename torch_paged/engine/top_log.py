"""The most likely tokens of each step: by slot on the device, and copies of that on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_paged.ops.top_logprobs import MAX_TOP_LOGPROBS

# Numbers of tokens for which a step is captured; a batch takes the next one that suits all rows.
TOP_SIZES = (1, 5, MAX_TOP_LOGPROBS)
_LOG_BYTES = 64 << 20


def top_size(count: int) -> int:
    """Return the next size of the step for `count` tokens, 0 for none."""
    return next(size for size in (0, *TOP_SIZES) if size >= count)


class TopTable:
    """[MAX_TOP_LOGPROBS, 2, num_slots + 1] int32: tokens, and the bits of log-probabilities.

    The likeliest tokens come first, so that those that a step computes lie together. The last
    column is for the padding rows.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        shape = (MAX_TOP_LOGPROBS, 2, num_slots + 1)
        # Made under inference_mode, they could not be written outside of it.
        with torch.inference_mode(False):
            self.words = torch.zeros(shape, dtype=torch.int32, device=device)

    def record(self, top: tuple[Tensor, Tensor], slots: Tensor) -> None:
        """Write ids int32 and log-probabilities float32 [num_rows, n] of `slots` [num_rows]."""
        ids, logprobs = top
        columns = slots.masked_fill(slots < 0, self.words.shape[2] - 1).long()
        words = torch.stack([ids.T, logprobs.view(torch.int32).T], dim=1)
        self.words[: ids.shape[1]].index_copy_(2, columns, words)


class TopLog:
    """The newest copies of a table, in pinned memory; see `TokenLog`.

    Args:
        num_steps: copies to hold, fewer if they are large.
        depth: copies that may be on their way at the same time.
    """

    def __init__(self, table: TopTable, num_steps: int, depth: int) -> None:
        words = table.words
        fitting = _LOG_BYTES // (4 * words.numel())
        self.num_steps = min(num_steps, max(fitting, 4 * depth))
        self._table = words
        with torch.inference_mode(False):
            self._steps = torch.zeros(
                (self.num_steps, *words.shape),
                dtype=torch.int32,
                pin_memory=words.is_cuda,
                device="cpu",
            )
        self._array: Any = self._steps.numpy()

    def post(self, step: int, count: int) -> None:
        """Have the first `count` tokens of every slot copied to the host."""
        target = self._steps[step % self.num_steps]
        target[:count].copy_(self._table[:count], non_blocking=True)

    def read(self, slot: int, first: int, last: int, count: int) -> list[Any]:
        """Return arrays [num_steps, count, 2] of a row from step `first` to step `last`."""
        start, stop = first % self.num_steps, last % self.num_steps + 1
        if start < stop:
            return [self._array[start:stop, :count, :, slot]]
        parts = (self._array[start:], self._array[:stop])
        return [part[:, :count, :, slot] for part in parts]


__all__ = ["TOP_SIZES", "TopLog", "TopTable", "top_size"]
