"""A device whose copies to the host come late, and hold anything until they are here."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torch_paged.engine import scoring
from torch_paged.engine.token_log import TokenLog

_GARBAGE = 0x5A


class LateDevice:
    """Keeps back what is copied to the host: reports, likely tokens and scores of prompts.

    Copies arrive in the order in which they were launched. Whoever waits for one waits for all
    that were launched before it, too.

    Args:
        is_due: asked whenever somebody looks whether a report is here.
    """

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self._is_due = is_due
        self._copies: deque[tuple[Tensor, Tensor]] = deque()  # to where, and what
        self._num_launched = self._num_arrived = 0
        self._events: dict[tuple[int, int], int] = {}  # log and step -> copies up to its report
        self.num_late = 0

    def hold(self, target: Tensor) -> Tensor:
        """Let a copy that was just made arrive later; until then there is garbage."""
        assert not any(target.data_ptr() == other.data_ptr() for other, _ in self._copies)
        self._copies.append((target, target.clone()))
        self._num_launched += 1
        target.view(torch.uint8).fill_(_GARBAGE)
        return target

    def posted(self, log: TokenLog, step: int) -> None:
        """Note that all that was copied so far belongs to a step or to one before it."""
        self._events[id(log), step] = self._num_launched

    def is_here(self, log: TokenLog, step: int) -> bool:
        """Look whether a report has arrived; by chance it has just done so."""
        if self._events[id(log), step] > self._num_arrived:
            if not self._is_due():
                self.num_late += 1
                return False
            self.wait(log, step)
        return True

    def wait(self, log: TokenLog, step: int) -> None:
        """Let everything up to a report arrive."""
        while self._num_arrived < self._events[id(log), step]:
            target, values = self._copies.popleft()
            target.copy_(values)
            self._num_arrived += 1


@contextlib.contextmanager
def late_reports(is_due: Callable[[], bool]) -> Iterator[LateDevice]:
    """Within the block the engines of a CPU learn of their tokens as late as those of a GPU."""
    device = LateDevice(is_due)
    post, is_here, wait, to_host = (
        TokenLog.post,
        TokenLog.is_here,
        TokenLog.wait,
        scoring._to_host,
    )

    def late_post(log: TokenLog, step: int, num_tops: int = 0) -> None:
        post(log, step, num_tops)
        device.hold(log._reports[step % log.num_steps])
        if num_tops:
            assert log._top_log is not None
            steps = log._top_log._steps
            device.hold(steps[step % len(steps)][:num_tops])
        device.posted(log, step)

    TokenLog.post = late_post  # type: ignore[method-assign]
    TokenLog.is_here = lambda log, step: device.is_here(log, step)  # type: ignore[method-assign]
    TokenLog.wait = lambda log, step: device.wait(log, step)  # type: ignore[method-assign]
    scoring._to_host = lambda words: device.hold(words.clone())
    try:
        yield device
    finally:
        TokenLog.post, TokenLog.is_here, TokenLog.wait = post, is_here, wait  # type: ignore[method-assign]
        scoring._to_host = to_host
