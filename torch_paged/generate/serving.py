"""`Engine`: continuous batching over the weights of a model in memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torch_paged.config import Config
from torch_paged.engine.engine import ServingEngine
from torch_paged.engine.job import Job
from torch_paged.engine.output import RequestOutput
from torch_paged.engine.request import Request
from torch_paged.errors import TorchPagedError, UnsupportedModelError
from torch_paged.generate.accelerate import accelerate, restore, unwrap
from torch_paged.generate.registry import find_session
from torch_paged.generate.request_params import prompt_list, resolve_params
from torch_paged.generate.session import Session
from torch_paged.generate.stepping import Mailbox, Stepper, on_device

logger = logging.getLogger("torch_paged")


class Engine:
    """Serve many requests at once on one model, each with limits and sampling of its own.

    Requests may be added and cancelled at any time, from any thread and from callbacks. Whoever
    calls `step`, `stream` or `run` makes progress for all. Random numbers belong to a request:
    its tokens do not depend on what runs beside it. The model stays usable: `generate()` may be
    called between two steps, and both share the KV cache. Dropout is off, whatever mode the model
    is in.

    Args:
        model: as for `accelerate`; it is accelerated if it is not, and restored by `close` then.
        config: applied to the model, also if it is accelerated already; None keeps its own.
        overrides: fields of `Config` to change.

    Raises:
        UnsupportedModelError: neither tier fits the model.
    """

    def __init__(
        self, model: nn.Module, config: Config | None = None, **overrides: object
    ) -> None:
        self._target = unwrap(model)
        session = find_session(self._target)
        self._owns_model = session is None
        if session is None or config is not None or overrides:
            before = None if session is None else session.config
            accelerate(self._target, config or before, **overrides)
        self._closed = self._is_stepping = False
        self._mutex = threading.Lock()  # guards what add_request and cancel share with a step
        self._counter = itertools.count()
        self._live: dict[Hashable, Hashable] = {}  # sequence -> request, until its end is reported
        self._sequences: dict[Hashable, set[Hashable]] = {}  # request -> its live sequences
        self._inbox: deque[Job | _Cancel] = deque()
        self._mailboxes: list[Mailbox] = []
        self._engine: ServingEngine | None = None
        self._stepper = Stepper(self._advance_alone, self._has_work)
        session = self._session()
        self._random = random.Random(session.config.seed)
        try:
            with on_device(session):
                self._serving(session)
        except UnsupportedModelError:
            self.close()
            raise

    def add_request(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        generation_config: Any = None,
        *,
        request_id: Hashable = None,
        **overrides: Any,
    ) -> Hashable:
        """Put a request in line and return its id.

        Args:
            prompt_ids: token ids, as a list or a tensor [num_tokens] or [1, num_tokens].
            generation_config: as for `generate()`; fields that nobody set come from the model's.
            request_id: None draws one. With ``num_return_sequences=n`` the first sequence has this
                id, the others ``f"{request_id}__child#{i}"`` for i from 0 to n - 2.
            overrides: fields of GenerationConfig, and: ``seed``; ``priority``, smaller first;
                ``deadline`` in seconds from now, after which the request is cancelled;
                ``logprobs=True``; ``stop_token_ids`` besides the end tokens; ``tokenizer`` for
                ``stop_strings``; ``on_output``, called with each `RequestOutput` of the request.

        Raises:
            TypeError: a name or a type is wrong.
            ValueError: a value is out of range, or the id is in use.
            UnsupportedFeatureError: a field asks for what an engine does not do.
        """
        return self._submit(prompt_ids, generation_config, request_id, overrides)

    def cancel(self, request_id: Hashable) -> None:
        """End a request with all its sequences, or one of these, as "cancelled".

        Raises:
            KeyError: there is no such request, or its end has been reported.
        """
        with self._mutex:
            if request_id not in self._live:
                raise KeyError(request_id)
            for name in sorted(self._sequences.get(request_id, {request_id}), key=str):
                self._inbox.append(_Cancel(name))
        self._stepper.notify()

    def step(self) -> list[RequestOutput]:
        """Launch one step; return an output of each request with new tokens, or an end.

        A token is reported up to `Config.lag` steps after the one that computed it.
        """
        return self._advance(tokens=True)

    def stream(self) -> Iterator[RequestOutput]:
        """Step until no request is left; yield every output from now on.

        Several threads may stream at the same time: each gets all outputs.
        """
        self._session()
        with self._listening(tokens=True) as mailbox:
            while self._has_work():
                self._advance(tokens=True)
                yield from mailbox.drain()
            yield from mailbox.drain()

    def run(self) -> dict[Hashable, RequestOutput]:
        """Step until no request is left; return the last output of each that ended meanwhile."""
        self._session()
        with self._listening(tokens=False) as mailbox:
            while self._has_work():
                self._advance(tokens=False)
            return {out.request_id: out for out in mailbox.drain()}

    async def generate_async(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        generation_config: Any = None,
        *,
        request_id: Hashable = None,
        **overrides: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Add a request and yield its outputs; a thread of the engine's own steps meanwhile.

        Leaving the loop early, or cancelling the task, cancels the request.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[RequestOutput] = asyncio.Queue()
        if "on_output" in overrides:
            raise TypeError("generate_async yields the outputs; leave on_output out")

        def forward(output: RequestOutput) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, output)

        overrides["on_output"] = forward
        self.start()
        name = self._submit(prompt_ids, generation_config, request_id, overrides, private=True)
        with self._mutex:
            left = set(self._sequences.get(name, {name}))
        try:
            while left:
                output = await arrived.get()
                if output.finished:
                    left.discard(output.request_id)
                yield output
        finally:
            for sequence in left:
                with contextlib.suppress(KeyError):
                    self.cancel(sequence)

    def start(self) -> None:
        """Step in a thread of the engine's own whenever there is work, until `close`."""
        self._session()
        self._stepper.start()

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and its end was reported."""
        return not self._has_work()

    @property
    def num_running(self) -> int:
        """Sequences that have a slot now."""
        return 0 if self._engine is None else self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot, or prefill."""
        return max(len(self._live) - self.num_running, 0)

    @property
    def num_preemptions(self) -> int:
        """How often a running sequence was sent back in line for lack of KV blocks."""
        return 0 if self._engine is None else self._engine.num_preemptions

    def weights_changed(self) -> None:
        """Say that parameters were written: cached prefixes are dropped."""
        session = self._session()
        with on_device(session):
            self._serving(session).weights_changed()

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` if slots, blocks and counters contradict each other."""
        with self._session().lock:
            if self._engine is not None:
                self._engine.check_integrity()

    def close(self) -> None:
        """Cancel what is left and give everything back; harmless when repeated."""
        if self._closed:
            return
        self._stepper.stop()
        self._closed = True
        session = find_session(self._target)
        with contextlib.nullcontext() if session is None else session.lock:
            self._end_all("cancelled", None)
        if self._owns_model and session is not None:
            restore(self._target)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        generation_config: Any,
        request_id: Hashable,
        overrides: dict[str, Any],
        *,
        private: bool = False,
    ) -> Hashable:
        session = self._session()
        ids = prompt_list(prompt_ids, self._target)
        params = resolve_params(
            self._target, len(ids), generation_config, overrides, self._draw_seed
        )
        number = next(self._counter)
        if request_id is None:
            request_id = f"req_{number}"
        # Without prefix caching only the samples of one prompt share its blocks.
        salt = b"" if session.config.enable_prefix_caching else b"request %d" % number
        jobs = []
        for index, sample in enumerate(params.samples):
            name = request_id if index == 0 else f"{request_id}__child#{index - 1}"
            request = Request(
                name,
                ids,
                sample.max_new_tokens,
                priority=params.priority,
                deadline=params.deadline,
                cache_salt=salt,
            )
            logprobs: list[float] | None = [] if sample.logprobs else None
            jobs.append(Job(request, sample, params.on_output, private, logprobs))
        names = [job.request.request_id for job in jobs]
        with self._mutex:
            for name in names:
                if name in self._live:
                    raise ValueError(f"request_id {name!r} is in use; choose another, or None")
            self._live.update(dict.fromkeys(names, request_id))
            self._sequences[request_id] = set(names)
            self._inbox.extend(jobs)
        self._stepper.notify()
        return request_id

    def _draw_seed(self) -> int:
        with self._mutex:
            return self._random.getrandbits(64)

    def _session(self) -> Session:
        if self._closed:
            raise TorchPagedError("the engine is closed; make a new one")
        session = find_session(self._target)
        if session is None:
            raise TorchPagedError(
                "the engine's model is not accelerated any more (torch_paged.restore was called); "
                "make a new engine"
            )
        return session

    def _has_work(self) -> bool:
        return bool(self._live)

    @contextlib.contextmanager
    def _listening(self, *, tokens: bool) -> Iterator[Mailbox]:
        mailbox = Mailbox(tokens=tokens)
        with self._mutex:
            self._mailboxes.append(mailbox)
        try:
            yield mailbox
        finally:
            with self._mutex:
                self._mailboxes.remove(mailbox)

    def _serving(self, session: Session) -> ServingEngine:
        """Return the loop over the session's core; unfinished jobs move along to a new one."""
        if self._engine is None or self._engine.is_idle:
            session.reread_if_changed()
        if self._engine is not None and self._engine.core is session.core:
            return self._engine
        reasons = session.reasons if session.decide_tier() == "eager" else []
        reason = "; ".join(reasons) or session.self_test_reason()
        if reason or session.core is None:
            raise UnsupportedModelError(
                f"{type(self._target).__name__} cannot be served by an engine: {reason}; call "
                "model.generate() instead"
            )
        old, self._engine = self._engine, ServingEngine(session.core)
        for job in [] if old is None else old.abandon():
            self._engine.add(job)
        return self._engine

    def _advance(self, *, tokens: bool) -> list[RequestOutput]:
        session = self._session()
        with on_device(session):
            if self._is_stepping:
                raise TorchPagedError("step, stream and run must not be called from a callback")
            self._is_stepping = True
            try:
                engine = self._serving(session)
                self._empty_inbox(engine)
                engine.step()
            finally:
                self._is_stepping = False
            wanted = tokens or any(mailbox.tokens for mailbox in self._mailboxes)
            outputs, ended = engine.take_outputs(tokens=wanted)
            self._deliver(outputs, ended)
        return outputs

    def _advance_alone(self) -> None:
        """Take a step that must not raise: nobody is there to catch it."""
        try:
            self._advance(tokens=False)
        except Exception as error:
            if not self._closed:
                logger.exception("a step of the engine failed")
                self._end_all("error", f"{type(error).__name__}: {error}")

    def _empty_inbox(self, engine: ServingEngine) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Job):
                engine.add(item)
            else:
                engine.cancel(item.request_id)

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

    def _end_all(self, reason: Any, error: str | None) -> None:
        """End every request for one reason."""
        engine = self._engine
        waiting = [item for item in self._inbox if isinstance(item, Job)]
        self._inbox.clear()
        if engine is not None:
            engine.end_all(waiting, reason, error)
            self._deliver(*engine.take_outputs(tokens=False))


class _Cancel:
    """A request to cancel a sequence."""

    __slots__ = ("request_id",)

    def __init__(self, request_id: Hashable) -> None:
        self.request_id = request_id


__all__ = ["Engine"]
