"""The requests on one accelerated model: handed in from any thread, served by whoever steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torch_paged.engine.engine import ServingEngine
from torch_paged.engine.job import Job
from torch_paged.engine.output import RequestOutput
from torch_paged.engine.request import FinishReason
from torch_paged.engine.uninterrupted import uninterrupted
from torch_paged.errors import TorchPagedError, UnsupportedModelError
from torch_paged.generate.images import refuse_images
from torch_paged.generate.jobs import make_jobs
from torch_paged.generate.registry import disabled, find_session
from torch_paged.generate.request_params import Merge, RememberedMerge, resolve_params
from torch_paged.generate.session import Session
from torch_paged.generate.stepping import Mailbox, Pauses, Stepper, on_device
from torch_paged.generate.values import hashable, prompt_list
from torch_paged.log import logger
from torch_paged.patches import seams

# Seconds that the engine's own thread waits for the model before it looks whether to stop.
_PATIENCE = 0.05
# Seconds between two steps that find nothing to run until other users of the pool have moved.
_PAUSE = 0.0005


class Service:
    """What the doors of continuous batching share; `Engine` is the one for everybody.

    Args:
        target: an accelerated model.
        host_bytes: host memory for preempted requests; None: what the model's `Config` says.

    Attributes:
        pauses: who keeps it from stepping.

    Raises:
        UnsupportedModelError: neither tier fits the model.
    """

    def __init__(self, target: nn.Module, host_bytes: int | None = None) -> None:
        self.target = target
        self._host_bytes = host_bytes
        self._closed = self._is_stepping = False
        self._mutex = threading.Lock()  # guards what submit and cancel share with a step
        self._counter = itertools.count()
        self._live: dict[Hashable, Hashable] = {}  # sequence -> request, until its end is reported
        self._sequences: dict[Hashable, set[Hashable]] = {}  # request -> its live sequences
        self._inbox: deque[Job | _Cancel] = deque()
        self._entering: Job | _Cancel | None = None  # first in the inbox, on its way to the engine
        self._mailboxes: list[Mailbox] = []
        self._unread: list[RequestOutput] = []  # by the last listener, who left early
        self.pauses = Pauses()
        self._on_stop: list[Callable[[], None]] = []
        self._merge = RememberedMerge(seams.merge_generation_config)
        self._idle = threading.Event()
        self._idle.set()
        self._engine: ServingEngine | None = None
        self._process = os.getpid()
        # Dropped in mid-work, it has the next user of the core give back what it held.
        self._held: list[ServingEngine] = []
        weakref.finalize(self, _orphan, self._held).atexit = False
        self._stepper = Stepper(self._advance_alone, self._has_work)
        session = self.session()
        self._lock = session.lock  # of the session that served last
        self._random = random.Random(session.config.seed)
        with on_device(session):
            self._serving(session)

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and its end was reported."""
        return not self._live

    @property
    def is_open(self) -> bool:
        """Whether requests may be added: not after `close`, nor after the model was restored."""
        own = self._process == os.getpid()  # not the parent's
        return own and not self._closed and find_session(self.target) is not None

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that steps, None if it does not run."""
        return self._stepper.thread

    @property
    def engine(self) -> ServingEngine:
        """The loop that served last."""
        assert self._engine is not None
        return self._engine

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    def has(self, request_id: Hashable) -> bool:
        """Say whether a request or a sequence of this id has not ended."""
        return request_id in self._live or request_id in self._sequences

    def describe(self) -> str:
        """Return how busy it is, for a progress bar."""
        running, core = self.engine.num_running, self.engine.core
        waiting = max(len(self._live) - running, 0)
        used = core.num_used / max(core.num_blocks, 1) if core.is_prepared else 0.0
        return f"{running} running, {waiting} waiting, KV {used:.0%}"

    def start(self) -> None:
        """Step in a thread of its own whenever there is work."""
        self.session()
        self._stepper.start()

    def stop(self) -> None:
        """End that thread; what is left waits for someone to step."""
        self._stepper.stop()
        with self._mutex:
            told = list(self._on_stop)
        for tell in told:
            tell()

    @contextlib.contextmanager
    def stepping(self, on_stop: Callable[[], None]) -> Iterator[None]:
        """Within the block the thread runs; `on_stop` is called if somebody stops it."""
        with self._mutex:
            self._on_stop.append(on_stop)
        try:
            self.start()
            yield
        finally:
            with self._mutex:
                self._on_stop.remove(on_stop)

    def cancel(self, request_id: Hashable) -> None:
        """End a request with all its sequences, or one of these, as "cancelled".

        Raises:
            KeyError: there is no such request, or its end has been reported.
            TypeError: it can be no request's id, as it has no hash.
            TorchPagedError: this is closed.
        """
        self._check_process()
        hashable("request_id", request_id)
        with self._mutex:
            self._check_open()
            names = self._sequences.get(request_id)
            if names is None and request_id in self._live:
                names = {request_id}
            if names is None:
                raise KeyError(
                    f"request_id {request_id!r} is not running: it never was here, or it has "
                    "ended; a request that may have ended meanwhile is cancelled within try"
                )
            self._inbox.extend(_Cancel(name) for name in names)
        self._stepper.notify()

    def cancel_all(self, why: str) -> None:
        """End all requests as "cancelled", with `why` as their error."""
        with self._mutex:
            self._inbox.extend(_Cancel(name, why) for name in self._live)
        self._stepper.notify()

    def submit(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        generation_config: Any,
        request_id: Hashable,
        overrides: dict[str, Any],
        *,
        private: bool = False,
        streams: bool = True,
        shares_prefix: bool = True,
        outgrows: bool = False,
        merge: Merge | None = None,
    ) -> list[Hashable]:
        """Add a request as `Engine.add_request` does; return the ids of its sequences.

        Args:
            private: outputs go to ``on_output`` alone.
            streams: ``on_output`` hears of new tokens, not only of the end.
            shares_prefix: its prompt may share blocks with other requests.
            outgrows: go on past `max_position_embeddings` where positions have no end.
            merge: how `generation_config` and overrides become one config; None: as `generate()`.
        """
        session = self.session()
        ids = prompt_list(prompt_ids, self.target)
        hashable("request_id", request_id)
        refuse_images(self.target, ids, overrides)
        params = resolve_params(
            self.target,
            len(ids),
            generation_config,
            overrides,
            self._draw_seed,
            merge or self._merge,
        )
        number = next(self._counter)
        if request_id is None:
            request_id = f"req_{number}"
            while self.has(request_id):  # somebody has chosen it
                request_id = f"req_{next(self._counter)}"
        jobs = make_jobs(
            session,
            ids,
            params,
            request_id,
            private=private,
            streams=streams,
            shares_prefix=shares_prefix,
            outgrows=outgrows,
            salt=b"request %d" % number,
        )
        return self._post(request_id, jobs)

    def _post(self, request_id: Hashable, jobs: list[Job]) -> list[Hashable]:
        """Put the sequences of a request into the inbox, all or none; return their ids."""
        names = [job.request.request_id for job in jobs]
        has_begun = False
        try:
            with self._mutex:
                self._check_open()
                for name in names:
                    if self.has(name):
                        raise ValueError(f"request_id {name!r} is in use; choose another, or None")
                has_begun = True
                self._inbox.extend(jobs)
                self._live.update(dict.fromkeys(names, request_id))
                self._sequences[request_id] = set(names)
                self._idle.clear()
            self._stepper.notify()
            return names
        except BaseException:  # an interrupt: nobody may know that the request is here
            if has_begun:
                self._take_back(request_id, jobs)
            raise

    def _take_back(self, request_id: Hashable, jobs: list[Job]) -> None:
        """Undo `_post` as far as it came; what another thread has taken meanwhile is cancelled."""
        with self._mutex:
            names = [job.request.request_id for job in jobs]
            if all(job in self._inbox and job is not self._entering for job in jobs):
                for job, name in zip(jobs, names, strict=True):
                    self._inbox.remove(job)
                    self._live.pop(name, None)
                self._sequences.pop(request_id, None)
                if not self._live:
                    self._idle.set()
            else:
                self._inbox.extend(_Cancel(name) for name in names if name in self._live)

    def wait_until_idle(self, timeout: float | None = None) -> bool:
        """Wait until others have brought all requests to their end; say whether they have."""
        return self._idle.wait(timeout)

    def stream(self, *, tokens: bool) -> Iterator[RequestOutput]:
        """Step until no request is left; yield outputs, without `tokens` the last ones alone.

        The next one begins with what it has not yielded when it is closed, if nobody else listens.
        """
        self.session()
        with self._listening(tokens=tokens) as mailbox:
            while True:
                if (output := mailbox.take()) is not None:
                    yield output
                elif not self._live:
                    # What another thread has brought to its end meanwhile.
                    yield from mailbox.drain()
                    return
                else:
                    self.advance(tokens=tokens)

    def advance(self, *, tokens: bool) -> list[RequestOutput]:
        """Take one step; return the outputs, without `tokens` those of ended requests alone."""
        outputs = self._advance(tokens=tokens)
        self._let_others_move()
        return outputs

    def _let_others_move(self) -> None:
        """Where they hold what we wait for, leave them the model's lock for a moment."""
        if self.engine.is_starved:
            time.sleep(_PAUSE)

    def _advance(self, *, tokens: bool) -> list[RequestOutput]:
        while True:
            self.pauses.wait()
            with on_device(self.session()):
                if not self.pauses.hold_here:
                    return self._step(tokens=tokens)

    def _step(self, *, tokens: bool) -> list[RequestOutput]:
        session = self.session()  # accelerate() may have run while we waited
        if self._is_stepping:
            raise TorchPagedError("step, stream and run must not be called from a callback")
        try:
            self._is_stepping = True
            engine = self._serving(session)
            self._empty_inbox(engine)
            engine.step()
        finally:
            self._is_stepping = False
        wanted = tokens or any(mailbox.tokens for mailbox in self._mailboxes)
        with uninterrupted:
            outputs, ended = engine.take_outputs(tokens=wanted)
            self._deliver(outputs, ended)
        return outputs

    def weights_changed(self) -> None:
        """Drop cached prefixes."""
        session = self.session()
        with on_device(session):
            self._serving(session).weights_changed()

    def close(self) -> None:
        """Cancel what is left; harmless when repeated."""
        if self._process != os.getpid():
            self._closed = True  # its locks and its thread are the parent's
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True  # from here on nothing is added
        self._stepper.stop()
        self._end_all("cancelled", "the engine was closed")

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` if slots, blocks and counters contradict each other."""
        with self.session().lock:
            self.engine.check_integrity()

    def session(self) -> Session:
        """Return the session of the model.

        Raises:
            TorchPagedError: this is closed, or the model was restored.
        """
        self._check_open()
        self._check_process()
        session = find_session(self.target)
        if session is None and disabled():
            raise TorchPagedError(
                "an engine needs an accelerated model, and TORCH_PAGED_DISABLE is set, so "
                "accelerate() does nothing; unset it"
            )
        if session is None:
            raise TorchPagedError(
                "the engine's model is not accelerated any more (torch_paged.restore was called); "
                "make a new engine"
            )
        return session

    def _check_open(self) -> None:
        if self._closed:
            raise TorchPagedError("the engine is closed; make a new one")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise TorchPagedError(
                "the engine belongs to the process that made it, and this one was forked from it; "
                "make the engine after the fork"
            )

    def _draw_seed(self) -> int:
        with self._mutex:
            return self._random.getrandbits(64)

    @contextlib.contextmanager
    def _listening(self, *, tokens: bool) -> Iterator[Mailbox]:
        mailbox = Mailbox(tokens=tokens)
        with self._mutex:
            mailbox.put(self._unread)
            self._unread = []
            self._mailboxes.append(mailbox)
        try:
            yield mailbox
        finally:
            with self._mutex:
                self._mailboxes.remove(mailbox)
                if not self._mailboxes:
                    self._unread = mailbox.drain()

    def _serving(self, session: Session) -> ServingEngine:
        """Return the loop over the session's core; unfinished jobs move along to a new one."""
        self._lock = session.lock
        if self._engine is None or self._engine.is_idle:
            session.reread_if_changed()
        if self._engine is not None and self._engine.core is session.core:
            return self._engine
        reasons = session.reasons if session.decide_tier() == "eager" else []
        reason = "; ".join(reasons) or session.self_test_reason()
        if reason or session.core is None:
            raise UnsupportedModelError(
                f"{type(self.target).__name__} cannot be served by an engine: {reason}; call "
                "model.generate() instead"
            )
        old, self._engine = self._engine, ServingEngine(session.core, self._host_bytes)
        self._held[:] = [self._engine]
        for job in [] if old is None else old.abandon():
            self._engine.add(job)
        return self._engine

    def _has_work(self) -> bool:
        return bool(self._live)

    def _advance_alone(self) -> None:
        """Take a step that must not raise: nobody is there to catch it."""
        if not self.pauses.wait(_PATIENCE):
            return
        lock = self._model_lock()
        # Whoever holds the model may be waiting for this thread to end.
        if not lock.acquire(timeout=_PATIENCE):
            return
        try:
            with on_device(self.session()):
                if not self.pauses.hold_here:
                    self._step(tokens=False)
        except Exception as error:
            if not self._closed:
                logger.exception("a step of the engine failed")
                self._end_all("error", f"{type(error).__name__}: {error}")
        finally:
            lock.release()
        self._let_others_move()

    def _model_lock(self) -> threading.RLock:
        session = find_session(self.target)
        return self._lock if session is None else session.lock

    def _empty_inbox(self, engine: ServingEngine) -> None:
        # What an interrupt breaks off stays first in the inbox; to do it twice does no harm.
        while True:
            with self._mutex:
                if not self._inbox:
                    return
                self._entering = item = self._inbox[0]
            if isinstance(item, Job):
                engine.add(item)
            else:
                engine.cancel(item.request_id, item.why)
            with self._mutex:
                # A callback may have closed this, and emptied the inbox.
                if self._inbox and self._inbox[0] is item:
                    self._inbox.popleft()
                self._entering = None

    def _deliver(self, outputs: list[RequestOutput], ended: list[Hashable]) -> None:
        if not (outputs or ended):
            return
        with self._mutex:
            for mailbox in self._mailboxes:
                mailbox.put(outputs)
            for name in ended:
                request_id = self._live.pop(name)
                sequences = self._sequences[request_id]
                sequences.discard(name)
                if not sequences:
                    del self._sequences[request_id]
            if not self._live:
                self._idle.set()

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        """End every request for one reason."""
        with self._model_lock():
            with self._mutex:
                waiting = [item for item in self._inbox if isinstance(item, Job)]
                self._inbox.clear()
            self.engine.end_all(waiting, reason, error)
            with uninterrupted:
                self._deliver(*self.engine.take_outputs(tokens=False))


def _orphan(held: list[ServingEngine]) -> None:
    # A finalizer runs anywhere, also within a step: so it only leaves word.
    for engine in held:
        engine.core.orphans.append(engine.abandon)


class _Cancel:
    """A request to cancel a sequence."""

    __slots__ = ("request_id", "why")

    def __init__(self, request_id: Hashable, why: str | None = None) -> None:
        self.request_id = request_id
        self.why = why


__all__ = ["Service"]
