"""What the host learns of a step, late and without stopping the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from torch_paged.decoder.state import SlotState


class StepResult:
    """Rows not finished after a step and, where asked for, the tokens [num_rows] of the step."""

    __slots__ = ("num_unfinished", "tokens")

    def __init__(self, num_unfinished: int, tokens: Tensor | None) -> None:
        self.num_unfinished = num_unfinished
        self.tokens = tokens


class Reports(Protocol):
    """Results of launched steps in order."""

    def post(self) -> None:
        """Ask for the result of the step just launched."""
        ...

    def wait(self, step: int) -> StepResult:
        """Return the result of a posted step, waiting until the device has come there."""
        ...


class HostReports:
    """Results of a device that is done when the launch returns; kept until they are waited for."""

    def __init__(self, state: SlotState, index: Tensor | None) -> None:
        self._state = state
        self._index = index
        self._results: dict[int, StepResult] = {}
        self._posted = 0

    def post(self) -> None:
        tokens = None
        if self._index is not None:
            tokens = self._state.last_token[self._index.long()]
        result = StepResult(int(self._state.num_unfinished), tokens)
        self._results[self._posted] = result
        self._posted += 1

    def wait(self, step: int) -> StepResult:
        return self._results.pop(step)


class PinnedReports:
    """Results copied to pinned memory behind each step, with an event after each copy."""

    def __init__(self, state: SlotState, index: Tensor | None, depth: int) -> None:
        self._state = state
        self._index = None if index is None else index.long()
        rows = 0 if index is None else index.shape[0]
        self._counts = torch.empty(depth, dtype=torch.int32, pin_memory=True, device="cpu")
        self._tokens = torch.empty((depth, rows), dtype=torch.int64, pin_memory=True, device="cpu")
        self._events = [torch.cuda.Event() for _ in range(depth)]
        self._posted = 0

    def post(self) -> None:
        at = self._posted % len(self._events)
        self._counts[at : at + 1].copy_(self._state.num_unfinished, non_blocking=True)
        if self._index is not None:
            tokens = self._state.last_token.index_select(0, self._index)
            self._tokens[at].copy_(tokens, non_blocking=True)
        self._events[at].record()
        self._posted += 1

    def wait(self, step: int) -> StepResult:
        at = step % len(self._events)
        self._events[at].synchronize()
        tokens = None if self._index is None else self._tokens[at].clone()
        return StepResult(int(self._counts[at]), tokens)


def make_reports(state: SlotState, index: Tensor | None, lag: int) -> Reports:
    """Return reports for up to `lag` + 1 steps in flight; `index` asks for their tokens."""
    if state.device.type == "cuda":
        return PinnedReports(state, index, lag + 2)
    return HostReports(state, index)
