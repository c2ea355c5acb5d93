"""The requests without a slot, in the order in which they are served."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Literal

from torch_paged.engine.request import Request


class WaitingLine:
    """Order requests by arrival, or by priority against time waited.

    With the policy "priority", one level of priority is worth `aging_steps` steps of waiting.
    Requests in line age alike, so the order of two of them never changes: it is settled when they
    arrive, and a preempted request comes back to its old place.

    Attributes:
        head_waits: the first in line was found not to fit, and nobody came or left since.
        num_free_before: blocks that were free then.
    """

    def __init__(self, policy: Literal["fcfs", "priority"], aging_steps: int) -> None:
        if policy not in ("fcfs", "priority"):
            raise ValueError(f'policy must be "fcfs" or "priority", got {policy!r}')
        self.head_waits = False
        self.num_free_before = 0
        self._aging_steps = aging_steps if policy == "priority" else 0
        self._num_arrived = 0
        self._heap: list[tuple[int, int, Request]] = []  # may hold requests that have ended

    def arrive(self, request: Request, step: int) -> None:
        """Give a new request its place, without letting it in line yet."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        if self._aging_steps:
            request.rank = request.priority * self._aging_steps + step

    def join(self, request: Request) -> None:
        """Let a new or preempted request in line."""
        heappush(self._heap, (request.rank, request.arrival, request))
        self.head_waits = False

    def first(self) -> Request | None:
        """Return the first in line, None if there is nobody."""
        while self._heap and self._heap[0][-1].is_finished:
            heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def remove_first(self) -> None:
        """Take the first in line out."""
        heappop(self._heap)


__all__ = ["WaitingLine"]
