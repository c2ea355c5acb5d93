"""Who listens to an engine, and the thread that steps where nobody else does."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import Counter
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
        self._lock = threading.Lock()
        self._outputs: list[RequestOutput] = []

    def put(self, outputs: Iterable[RequestOutput]) -> None:
        """Deliver outputs."""
        if not self.tokens:
            outputs = [out for out in outputs if out.finished]
        with self._lock:
            self._outputs += outputs

    def take(self) -> RequestOutput | None:
        """Take the first of what is there."""
        with self._lock:
            return self._outputs.pop(0) if self._outputs else None

    def drain(self) -> list[RequestOutput]:
        """Take what is there."""
        with self._lock:
            taken, self._outputs = self._outputs, []
        return taken


class Stepper:
    """A thread that calls `advance` while there is work, and sleeps while there is none.

    It ends with the object whose methods these are, which it does not keep alive.

    Args:
        advance: takes one step; must not raise.
        has_work: whether another step is due.
    """

    def __init__(self, advance: Callable[[], None], has_work: Callable[[], bool]) -> None:
        self._advance = weakref.WeakMethod(advance)
        self._has_work = weakref.WeakMethod(has_work)
        self._lock = threading.Lock()
        self._alarm: _Alarm | None = None
        self._thread: threading.Thread | None = None

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
            alarm = self._alarm = _Alarm()
            advance, has_work = self._advance(), self._has_work()
            assert advance is not None and has_work is not None
            self._thread = threading.Thread(
                target=_step_along,
                args=(alarm, weakref.WeakMethod(advance), weakref.WeakMethod(has_work, alarm)),
                name="torch_paged engine",
                daemon=True,
            )
            self._thread.start()

    def notify(self) -> None:
        """Say that there may be work."""
        alarm = self._alarm
        if alarm is not None:
            alarm()

    def stop(self) -> None:
        """End the thread and wait for it; a call from the thread itself does not wait."""
        with self._lock:
            thread, self._thread = self._thread, None
            alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.stops = True
            alarm()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


class Pauses:
    """Who keeps others from stepping; several threads may at the same time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: Counter[int] = Counter()  # by the thread that began them

    @property
    def held_here(self) -> bool:
        """Whether this thread is within a pause."""
        return threading.get_ident() in self._held

    @property
    def hold_here(self) -> bool:
        """Whether this thread must not step, for others pause."""
        return bool(self._held) and not self.held_here

    @contextlib.contextmanager
    def paused(self, lock: threading.RLock) -> Iterator[None]:
        """Keep other threads from stepping; begins between two steps, which `lock` guards."""
        thread = threading.get_ident()  # another one may leave the block
        # Whoever takes the lock from here on sees the pause; who has it now need not wait for it.
        with lock, self._changed:
            self._held[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._held[thread] -= 1
                self._held += Counter()  # without those at zero
                self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until this thread may step; say whether it may."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.hold_here, timeout)


class _Alarm:
    """Wakes a thread; may ring anywhere, also from a finalizer in that thread."""

    def __init__(self) -> None:
        self.stops = False
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self, _: object = None) -> None:
        self._rings.put(None)

    def wait(self) -> None:
        """Sleep until it rings, or has rung since it was heard last."""
        self._rings.get()
        self.hear()

    def hear(self) -> None:
        """Forget the rings so far."""
        while not self._rings.empty():
            self._rings.get()


def _step_along(
    alarm: _Alarm,
    advance: weakref.WeakMethod[Callable[[], None]],
    has_work: weakref.WeakMethod[Callable[[], bool]],
) -> None:
    while not alarm.stops:
        alarm.hear()
        ask, go = has_work(), advance()
        if ask is None or go is None:
            return
        works = ask()
        if works:
            go()
        del ask, go
        if works:
            # Locks are not fair: give others a chance to take the model's.
            time.sleep(0)
        else:
            alarm.wait()


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


__all__ = ["Mailbox", "Pauses", "Stepper", "on_device"]
