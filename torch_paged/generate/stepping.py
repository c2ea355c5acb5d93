"""Who listens to an engine, and the thread that steps where nobody else does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch

from torch_paged.engine.output import RequestOutput
from torch_paged.generate.session import Session


class Mailbox:
    """Outputs for one listener, in order.

    Args:
        tokens: it wants an output for new tokens, not only for ends.
    """

    def __init__(self, *, tokens: bool) -> None:
        self.tokens = tokens
        self.outputs: deque[RequestOutput] = deque()

    def put(self, outputs: Iterable[RequestOutput]) -> None:
        """Deliver outputs."""
        self.outputs.extend(out for out in outputs if self.tokens or out.finished)

    def drain(self) -> list[RequestOutput]:
        """Take what is there."""
        taken = []
        while self.outputs:
            taken.append(self.outputs.popleft())
        return taken


class Stepper:
    """A thread that calls `advance` while there is work, and sleeps while there is none.

    Args:
        advance: takes one step; must not raise.
        has_work: whether another step is due.
    """

    def __init__(self, advance: Callable[[], None], has_work: Callable[[], bool]) -> None:
        self._advance = advance
        self._has_work = has_work
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, None if it does not run."""
        thread = self._thread
        return thread if thread is not None and thread.is_alive() else None

    def start(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if self.thread is not None:
                return
            self._stopping = False
            self._thread = threading.Thread(
                target=self._run, name="torch_paged engine", daemon=True
            )
            self._thread.start()

    def notify(self) -> None:
        """Say that there may be work."""
        self._changed.set()

    def stop(self) -> None:
        """End the thread and wait for it; a call from the thread itself does not wait."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopping = True
        self._changed.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._stopping:
            if not self._has_work():
                self._changed.wait()
                self._changed.clear()
                continue
            self._advance()
            # Locks are not fair: give others a chance to take the model's.
            time.sleep(0)


@contextlib.contextmanager
def on_device(session: Session) -> Iterator[None]:
    """Hold the model's lock, on its device, in order behind the last call, without gradients."""
    with session.lock, torch.no_grad():
        step = session.step
        if step is None or step.device.type != "cuda":
            yield
            return
        with torch.cuda.device(step.device):
            session.enter_stream()
            yield


__all__ = ["Mailbox", "Stepper", "on_device"]
