"""Work that Ctrl-C does not break off: books of several parts that must agree."""

from __future__ import annotations

# Its wrappers in `signal` take 4 us each to make members of enumerations.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType
from typing import Any


class _Uninterrupted:
    """Within the block SIGINT waits for its end. Blocks may be nested.

    Only the main thread is ever interrupted; elsewhere, and where the handler is not Python's, the
    block does nothing. For short work on the host: nobody can break off what hangs in there.
    """

    def __init__(self) -> None:
        # All written by the main thread alone.
        self._depth = 0
        self._handler: Any = None  # in force outside
        self._came: list[FrameType | None] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._depth:
            handler = _signal.getsignal(_signal.SIGINT)
            self._handler = handler if callable(handler) else None
            if self._handler is not None:
                _signal.signal(_signal.SIGINT, self._note)
        # Last: an interrupt may have kept it from coming so far.
        self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, came = self._handler, self._came
        self._handler, self._came = None, []
        _signal.signal(_signal.SIGINT, handler)
        if came:
            handler(int(_signal.SIGINT), came[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(frame)


uninterrupted = _Uninterrupted()

__all__ = ["uninterrupted"]
