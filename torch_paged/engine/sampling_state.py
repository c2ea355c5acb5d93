"""Sampling parameters by slot, read by the graphs that choose tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_paged.decoder.slot_table import Field, SlotTable
from torch_paged.decoder.transfer import upload
from torch_paged.engine.params import SamplingParams
from torch_paged.engine.top_log import TopTable
from torch_paged.ops.penalties import mark_seen


class SamplingStart(NamedTuple):
    """A row that begins: its slot, its parameters, and all its tokens so far."""

    slot: int
    params: SamplingParams
    token_ids: Sequence[int]


class SamplingState:
    """Static tensors [num_slots], and bitmaps of tokens [num_slots, ceil(vocab_size / 32)].

    Attributes:
        tops: the most likely tokens of the newest step, by slot.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        words = -(-vocab_size // 32)
        self.tops = TopTable(num_slots, device)
        fields = {
            "temperature": Field(torch.float64),
            "top_k": Field(torch.int32),
            "top_p": Field(torch.float64, 1.0),
            "min_p": Field(torch.float64),
            "seeds": Field(torch.int64),
            "repetition_penalty": Field(torch.float64, 1.0),
            "min_new_tokens": Field(torch.int32),
        }
        self._table = table = SlotTable(num_slots, fields, device)
        self.temperature, self.top_k = table["temperature"], table["top_k"]
        self.top_p, self.min_p = table["top_p"], table["min_p"]
        self.seeds, self.repetition_penalty = table["seeds"], table["repetition_penalty"]
        self.min_new_tokens = table["min_new_tokens"]
        # Made under inference_mode, they could not be written outside of it.
        with torch.inference_mode(False):
            self.seen = torch.zeros((num_slots, words), dtype=torch.int32, device=device)
            self.suppressed = torch.zeros((num_slots, words), dtype=torch.int32, device=device)
        # Slots with bits in the bitmaps.
        self._seeing: set[int] = set()
        self._suppressing: set[int] = set()

    def grown(self, num_slots: int) -> SamplingState:
        """Return a larger state with the same rows."""
        new = SamplingState(num_slots, self._vocab_size, self._device)
        for name, tensor in vars(self).items():
            if isinstance(tensor, Tensor):
                getattr(new, name)[: tensor.shape[0]].copy_(tensor)
        new._seeing, new._suppressing = set(self._seeing), set(self._suppressing)
        return new

    def start_rows(self, rows: Sequence[SamplingStart]) -> None:
        """Write the parameters of rows that begin; nothing waits for the device."""
        slots = [row.slot for row in rows]
        index = self._table.write(slots, [_values(row.params) for row in rows])
        seeing = [row for row in rows if row.params.repetition_penalty != 1.0]
        suppressing = [
            SamplingStart(row.slot, row.params, row.params.suppressed)
            for row in rows
            if row.params.suppressed
        ]
        for mask, marked, marking in (
            (self.seen, self._seeing, seeing),
            (self.suppressed, self._suppressing, suppressing),
        ):
            # The bitmaps of rows that are not penalised gather tokens, too, beside those that are.
            if marking or not marked.isdisjoint(slots):
                mask.index_fill_(0, index, 0)
                marked.difference_update(slots)
            self._mark(mask, marking)
            marked.update(row.slot for row in marking)

    def _mark(self, mask: Tensor, rows: Sequence[SamplingStart]) -> None:
        tokens = [np.array(row.token_ids, dtype=np.int64) for row in rows]
        if not tokens:
            return
        of_rows = np.array([row.slot for row in rows], dtype=np.int32)
        slots = np.repeat(of_rows, [len(ids) for ids in tokens])
        mark_seen(mask, *upload([slots, np.concatenate(tokens)], self._device))


def _values(params: SamplingParams) -> tuple[float, ...]:
    """Return the values of a row in the order of the table's fields."""
    return (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        _signed(params.seed),
        params.repetition_penalty,
        params.min_new_tokens,
    )


def _signed(seed: int) -> int:
    """Wrap 64 bits into the range of int64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


__all__ = ["SamplingStart", "SamplingState"]
