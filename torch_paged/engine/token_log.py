"""What the host knows of the tokens: one report a step, copied behind it, read when it is here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torch_paged.decoder.state import SlotState, report_parts
from torch_paged.engine.top_log import TopLog, TopTable


class TokenLog:
    """The newest `num_steps` reports of all slots, in pinned memory; nothing is copied twice.

    A step costs one transfer whatever the batch; the tokens of a row are read by column, when
    somebody asks for them. Steps are numbered by the caller, consecutively.

    Args:
        depth: reports that may be on their way at the same time.
        tops: where the most likely tokens of the steps are; None: of no step.
    """

    def __init__(
        self, state: SlotState, num_steps: int, depth: int, tops: TopTable | None = None
    ) -> None:
        self.num_steps = num_steps
        self._state = state
        self._depth = depth
        self._tops = tops
        self._top_log: TopLog | None = None  # made when a step reports some
        self._on_cuda = state.device.type == "cuda"
        shape = (num_steps, state.report.shape[0])
        with torch.inference_mode(False):
            self._reports = torch.zeros(
                shape, dtype=torch.uint8, pin_memory=self._on_cuda, device="cpu"
            )
            # Arrays over the same memory, which are read sooner than tensors.
            self._tokens, self._logprobs, self._finished, self._failed = (
                part.numpy() for part in report_parts(self._reports)
            )
        self._events = [torch.cuda.Event() for _ in range(depth)] if self._on_cuda else []

    @property
    def state(self) -> SlotState:
        """The state whose reports these are."""
        return self._state

    @property
    def num_safe_steps(self) -> int:
        """Steps that may follow one before its tokens have to be read."""
        held = self.num_steps if self._top_log is None else self._top_log.num_steps
        return held // 2

    def post(self, step: int, num_tops: int = 0) -> None:
        """Have the report of the step just launched copied to the host.

        Args:
            num_tops: most likely tokens of each row to copy along.
        """
        if num_tops:
            if self._top_log is None:
                assert self._tops is not None
                self._top_log = TopLog(self._tops, self.num_steps, self._depth)
            self._top_log.post(step, num_tops)
        self._reports[step % self.num_steps].copy_(self._state.report, non_blocking=True)
        if self._on_cuda:
            self._events[step % len(self._events)].record()

    def is_here(self, step: int) -> bool:
        """Whether the report of a posted step can be read without waiting."""
        return not self._on_cuda or self._events[step % len(self._events)].query()

    def wait(self, step: int) -> None:
        """Wait until the report of a posted step can be read."""
        if self._on_cuda:
            self._events[step % len(self._events)].synchronize()

    def any_ended(self, step: int, slots: Tensor) -> list[int]:
        """Return the indices into `slots` [num_rows] int64 of rows that finished or failed."""
        at, index = step % self.num_steps, slots.numpy()
        ended = self._finished[at].take(index)
        ended |= self._failed[at].take(index)
        return cast("list[int]", ended.nonzero()[0].tolist()) if ended.any() else []

    def has_ended(self, step: int, slot: int) -> bool:
        """Whether a row has finished or failed with a step."""
        at = step % self.num_steps
        return bool(self._finished[at, slot]) or bool(self._failed[at, slot])

    def has_failed(self, step: int, slot: int) -> bool:
        """Whether the logits of a row were NaN in a step."""
        return bool(self._failed[step % self.num_steps, slot])

    def tokens(self, slot: int, first: int, last: int) -> list[int]:
        """Return the tokens of a row from step `first` to step `last`."""
        return cast("list[int]", self._column(self._tokens, slot, first, last))

    def columns(self, slots: Sequence[int], first: int, last: int) -> list[list[int]]:
        """Return what `tokens` does for each of several slots."""
        start, stop = first % self.num_steps, last % self.num_steps + 1
        if start < stop:
            return cast("list[list[int]]", self._tokens[start:stop].take(slots, 1).T.tolist())
        head = self._tokens[start:].take(slots, 1).T.tolist()
        tail = self._tokens[:stop].take(slots, 1).T.tolist()
        return [old + new for old, new in zip(head, tail, strict=True)]

    def all_tokens(self, step: int) -> list[int]:
        """Return the token of every slot in one step."""
        return cast("list[int]", self._tokens[step % self.num_steps].tolist())

    def logprobs(self, slot: int, first: int, last: int) -> list[float]:
        """Return the log-probabilities of these tokens."""
        return cast("list[float]", self._column(self._logprobs, slot, first, last))

    def tops(self, slot: int, first: int, last: int, count: int) -> list[Any]:
        """Return the `count` most likely tokens of these steps, in one or two arrays.

        Each is [num_steps, count, 2] int32, a view: a token and the bits of its log-probability.
        """
        assert self._top_log is not None
        return self._top_log.read(slot, first, last, count)

    def _column(self, steps: Any, slot: int, first: int, last: int) -> list[Any]:
        start, stop = first % self.num_steps, last % self.num_steps + 1
        if start < stop:
            return cast("list[Any]", steps[start:stop, slot].tolist())
        return cast("list[Any]", steps[start:, slot].tolist() + steps[:stop, slot].tolist())


__all__ = ["TokenLog"]
