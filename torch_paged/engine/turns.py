"""Whose turn it is with one model: a lock between threads, and an order between streams."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator

import torch


class Turns:
    """Shared by all that touch the slots, the blocks and the pool of one model.

    Attributes:
        lock: re-entrant, because a step may call the model again.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._last_stream: torch.cuda.Stream | None = None
        _TURNS.add(self)

    def enter_stream(self, device: torch.device) -> None:
        """Order what follows behind the last turn when the caller's stream has changed."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Hold the lock, on the device, in order behind the last turn."""
        with self.lock:
            if device.type != "cuda":
                yield
                return
            with torch.cuda.device(device):
                self.enter_stream(device)
                yield


_TURNS: weakref.WeakSet[Turns] = weakref.WeakSet()


def _reset_locks() -> None:
    # A lock held by another thread at the time of the fork would stay held for ever.
    for turns in list(_TURNS):
        turns.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_locks)


__all__ = ["Turns"]
