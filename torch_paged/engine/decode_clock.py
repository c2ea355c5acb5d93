"""The rows that decode, and the step at which each of them next needs attention."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from heapq import heappop, heappush

from torch_paged.engine.request import Request

# (arrival, decode_since, request_id): the id, not the request, which may be long gone by then.
_Appointment = tuple[int, int, Hashable]


class _Calendar:
    """Rows by the step at which they are due; many on one step cost little more than one.

    An appointment counts only while its row is in the decoding period that made it.

    Args:
        rows: the decoding rows by request id.
    """

    def __init__(self, rows: Mapping[Hashable, Request]) -> None:
        self._rows = rows
        self._days: dict[int, list[_Appointment]] = {}  # by step
        self._steps: list[int] = []  # heap of the keys; may hold some that are gone

    def note(self, step: int, request: Request) -> None:
        """Have a decoding row come up at `step`."""
        day = self._days.get(step)
        if day is None:
            day = self._days[step] = []
            heappush(self._steps, step)
        day.append((request.arrival, request.decode_since, request.request_id))

    def due(self, step: int) -> Iterator[Request]:
        """Take out the rows that are due up to `step`: by step, then in order of arrival."""
        while self._steps and self._steps[0] <= step:
            first = self._steps[0]
            day = self._days.get(first)
            if day is None:
                heappop(self._steps)
                continue
            day.sort(reverse=True)
            # Whoever asked may break off: then the rest stays.
            while day:
                arrival, since, request_id = day.pop()
                request = self._rows.get(request_id)
                if request is not None and (request.arrival, request.decode_since) == (
                    arrival,
                    since,
                ):
                    yield request
            del self._days[first]


class DecodeClock:
    """Count the steps instead of the tokens of every row.

    All rows decode one token a step, so a row's own counters stand still meanwhile: it has
    decoded as many tokens as steps have passed since it started. The step at which it reaches its
    length limit is known then, and so is the step at which its blocks are full. Both wait in a
    heap, and a step in which nothing is due costs nothing.

    Attributes:
        step: number of the next step.
        rows: the decoding rows by request id.
    """

    def __init__(self, block_size: int) -> None:
        self.step = 0
        self.rows: dict[Hashable, Request] = {}
        self._block_size = block_size
        self._endings = _Calendar(self.rows)
        self._growths = _Calendar(self.rows)

    def start(self, request: Request) -> None:
        """Let a row decode from the next step on."""
        request.decode_since = self.step
        self.rows[request.request_id] = request
        tokens_left = request.max_new_tokens - request.num_output_tokens
        self._endings.note(self.step + tokens_left, request)
        self.watch_blocks(request)

    def stop(self, request: Request) -> None:
        """Bring the counters of a row up to date and forget it."""
        decoded = self.num_decoded(request)
        request.num_computed_tokens += decoded
        request.num_output_tokens += decoded
        request.decode_since = -1
        del self.rows[request.request_id]

    def num_decoded(self, request: Request) -> int:
        """Tokens decoded since the row started; 0 for a request that does not decode."""
        if request.decode_since < 0:
            return 0
        tokens_left = request.max_new_tokens - request.num_output_tokens
        return min(self.step - request.decode_since, tokens_left)

    def watch_blocks(self, request: Request) -> None:
        """Have a row come up in `rows_to_grow` when the blocks that it has now are full."""
        self.watch_tokens(request, request.num_columns * self._block_size)

    def watch_tokens(self, request: Request, num_tokens: int) -> None:
        """Have a row come up in `rows_to_grow` when it has filled blocks for so many tokens."""
        if num_tokens < request.max_kv_tokens:
            full = request.decode_since + num_tokens - request.num_computed_tokens
            self._growths.note(full, request)

    def ended_rows(self) -> Iterator[Request]:
        """Rows that have reached their length limit, each once."""
        return self._endings.due(self.step)

    def tokens_to_hold(self, num_steps: int) -> list[tuple[Request, int]]:
        """Return `rows_to_grow`, and for how many tokens each then needs blocks."""
        until = self.step + num_steps
        return [
            # Past its limit a row decodes no more.
            (
                row,
                min(row.num_computed_tokens + until - row.decode_since, row.max_kv_tokens),
            )
            for row in self.rows_to_grow(num_steps)
        ]

    def rows_to_grow(self, num_steps: int) -> Iterator[Request]:
        """Rows whose blocks do not last for the next `num_steps` steps, each once."""
        return self._growths.due(self.step + num_steps - 1)


__all__ = ["DecodeClock"]
