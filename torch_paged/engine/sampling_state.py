"""Sampling parameters by slot, read by the graphs that choose tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged.decoder.state import to_device
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

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_slots,), value, dtype=dtype, device=device)

        # Made under inference_mode, they could not be written outside of it.
        with torch.inference_mode(False):
            self.temperature = full(0.0, torch.float64)
            self.top_k = full(0, torch.int32)
            self.top_p = full(1.0, torch.float64)
            self.min_p = full(0.0, torch.float64)
            self.seeds = full(0, torch.int64)
            self.repetition_penalty = full(1.0, torch.float64)
            self.min_new_tokens = full(0, torch.int32)
            self.seen = torch.zeros((num_slots, words), dtype=torch.int32, device=device)
            self.suppressed = torch.zeros((num_slots, words), dtype=torch.int32, device=device)

    def grown(self, num_slots: int) -> SamplingState:
        """Return a larger state with the same rows."""
        new = SamplingState(num_slots, self._vocab_size, self._device)
        for name, tensor in vars(self).items():
            if isinstance(tensor, Tensor):
                getattr(new, name)[: tensor.shape[0]].copy_(tensor)
        return new

    def start_rows(self, rows: Sequence[SamplingStart]) -> None:
        """Write the parameters of rows that begin; nothing waits for the device."""
        params = [row.params for row in rows]
        floats = torch.tensor(
            [
                [p.temperature for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                [p.repetition_penalty for p in params],
            ],
            dtype=torch.float64,
            device="cpu",
        )
        ints = torch.tensor(
            [
                [row.slot for row in rows],
                [p.top_k for p in params],
                [p.min_new_tokens for p in params],
                [_signed(p.seed) for p in params],
            ],
            device="cpu",
        )
        # One transfer: the floats travel as the integers of their bits.
        packed = to_device(torch.cat([ints, floats.view(torch.int64)]), self._device)
        slots, seeds = packed[0], packed[3]
        _, top_k, min_new_tokens, _ = packed[:4].to(torch.int32)
        temperature, top_p, min_p, penalty = packed[4:].view(torch.float64)
        self.temperature[slots] = temperature
        self.top_k[slots] = top_k
        self.top_p[slots] = top_p
        self.min_p[slots] = min_p
        self.seeds[slots] = seeds
        self.repetition_penalty[slots] = penalty
        self.min_new_tokens[slots] = min_new_tokens
        self._mark(self.seen, slots, [r for r in rows if r.params.repetition_penalty != 1.0])
        suppressing = [
            SamplingStart(row.slot, row.params, row.params.suppressed)
            for row in rows
            if row.params.suppressed
        ]
        self._mark(self.suppressed, slots, suppressing)

    def _mark(self, mask: Tensor, cleared: Tensor, rows: Sequence[SamplingStart]) -> None:
        mask.index_fill_(0, cleared, 0)
        if not rows:
            return
        slots = torch.tensor([row.slot for row in rows for _ in row.token_ids], device="cpu")
        tokens = torch.tensor([token for row in rows for token in row.token_ids], device="cpu")
        packed = to_device(torch.stack([slots, tokens]), self._device)
        mark_seen(mask, packed[0].to(torch.int32), packed[1])


def _signed(seed: int) -> int:
    """Wrap 64 bits into the range of int64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


__all__ = ["SamplingStart", "SamplingState"]
