"""When requests must have ended."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heappop, heappush

from torch_paged.engine.request import Request


class Deadlines:
    """The deadlines of requests; O(log n) each, and nothing for a request that has none."""

    def __init__(self) -> None:
        # Heap of (seconds, arrival, id); an entry may outlive its request by a long time.
        self._heap: list[tuple[float, int, Hashable]] = []

    def watch(self, request: Request) -> None:
        """Have a request come up in `passed` when its deadline, if any, has passed."""
        if request.deadline is not None:
            heappush(self._heap, (request.deadline, request.arrival, request.request_id))

    def passed(
        self, now: Callable[[], float], requests: Mapping[Hashable, Request]
    ) -> Iterator[Request]:
        """Yield those of `requests` whose deadline is not after `now()`, each once."""
        while self._heap and self._heap[0][0] <= now():
            _, arrival, request_id = heappop(self._heap)
            request = requests.get(request_id)
            if request is not None and request.arrival == arrival:
                yield request


__all__ = ["Deadlines"]
