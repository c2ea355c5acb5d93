"""transformers' manager of continuous batching, with our engine under it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch_paged.engine.job import OnOutput
from torch_paged.engine.output import RequestOutput
from torch_paged.errors import TorchPagedError
from torch_paged.generate.offload_space import wanted_host_bytes
from torch_paged.generate.request_params import RememberedMerge
from torch_paged.generate.service import Service
from torch_paged.log import logger, warn_once
from torch_paged.patches import seams

_UNLIMITED = 1 << 40
# Seconds after which a wait for the last request looks whether anybody still runs them.
_PATIENCE = 0.05


class EngineManager(seams.ContinuousBatchingManager):
    """The manager's interface over an `Engine`; attention and mode of the model stay as they are.

    Each request may have limits, end tokens and sampling of its own: `add_request` takes any field
    of GenerationConfig, ``seed``, ``priority`` and ``deadline``. What `generation_config` leaves
    unset has no effect, as in transformers' manager.
    """

    def __init__(
        self, model: Any, generation_config: Any, continuous_batching_config: Any
    ) -> None:
        # Not the base's: it would switch attention, and load what it needs for its own loop.
        self.model = model
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config
        self.num_return_sequences = generation_config.num_return_sequences or 1
        self.background_thread_status = seams.BackgroundThreadStatus()
        self.output_router = seams.OutputRouter()
        self.batch_processor = None
        self.warmed_up = False
        self.is_tp_driver = True
        self._service = Service(model, wanted_host_bytes(model, continuous_batching_config))
        self._merge = RememberedMerge(seams.override_generation_config)
        self._lock = threading.Lock()
        self._num_named = 0
        self._accepts = True
        self._ending = threading.Lock()  # so that what ends one session leaves the next alone
        self._num_starts = 0

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A kept manager is an attribute of the model: copies and pickles of that have none.
        return type(None), ()

    @property
    def service(self) -> Service:
        """What serves the requests."""
        return self._service

    @property
    def is_usable(self) -> bool:
        """Whether it may be kept for another session."""
        return self._service.is_open

    @property
    def _generation_thread(self) -> threading.Thread | None:
        # The base's iterators ask for it.
        return self._service.thread

    def is_running(self) -> bool:
        return self._service.thread is not None

    def warmup(self) -> None:
        self.warmed_up = True

    def start(self) -> None:
        with self._ending:
            self._num_starts += 1
            self._accepts = True
            self.background_thread_status.clear()
            self._service.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Let what is left finish, or cancel it with `hard_stop`, and end the thread.

        Raises:
            RuntimeError: this thread is within `pause`, where nothing can finish.
        """
        if self._service.thread is None:
            logger.warning("the continuous batching manager does not run: nothing to stop")
            return
        if self._service.pauses.held_here:
            raise RuntimeError(
                "stop() was called within pause(), where no request can finish; leave the block "
                "first"
            )
        self._accepts = False
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self
        if hard_stop:
            self._service.cancel_all("the manager was stopped before the request had ended")
        finish = partial(self._finish, self._num_starts, timeout)
        # A callback of a request is called by the thread that it would wait for.
        if block and threading.current_thread() is not self._service.thread:
            finish()
        else:
            threading.Thread(target=finish, name="torch_paged stop", daemon=True).start()

    def _finish(self, num_starts: int, timeout: float | None) -> None:
        """End the thread once all requests have ended, unless it was started anew meanwhile."""
        ends = None if timeout is None else time.monotonic() + timeout
        while not self._service.wait_until_idle(_PATIENCE):
            if self._num_starts != num_starts or self._service.thread is None:
                return
            if ends is not None and time.monotonic() >= ends:
                what = "requests are left after %s s; the engine goes on with them"
                logger.warning(what, timeout)
                return
        with self._ending:
            if self._num_starts == num_starts:
                self._service.stop()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        thread = self._service.thread
        if thread is not None:
            thread.join(timeout)

    def destroy(self) -> None:
        self._service.close()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let no step run within the block, e.g. to write to the weights; requests stay.

        Several threads may be within one at the same time.

        Raises:
            RuntimeError: the manager does not run.
        """
        if not self.is_running():
            raise RuntimeError("cannot pause a continuous batching manager that does not run")
        with self._service.pauses.paused(self._service.session().lock):
            yield

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: Any = None,
        **overrides: Any,
    ) -> str | None:
        """Put a request in line; None if the manager is stopping."""
        if not self._accepts:
            warn_once("the continuous batching manager is stopping: a request was dropped")
            return None
        if request_id is None:
            request_id = self._names(1)[0]
        if max_new_tokens is not None:
            overrides["max_new_tokens"] = max_new_tokens
        if eos_token_id is not None:
            overrides["eos_token_id"] = eos_token_id
        overrides["on_output"] = _Deliveries(self.output_router, streaming, record_timestamps)
        streams = streaming or record_timestamps
        self._submit(
            input_ids,
            request_id,
            overrides,
            private=True,
            streams=streams,
            config=self.generation_config,
        )
        return request_id

    def add_requests(
        self,
        inputs: list[Any],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **overrides: Any,
    ) -> list[str]:
        names = self._names(len(inputs))
        for name, input_ids in zip(names, inputs, strict=True):
            self.add_request(
                input_ids,
                name,
                max_new_tokens,
                streaming=streaming,
                record_timestamps=record_timestamps,
                **overrides,
            )
        return names

    def submit_all(
        self,
        inputs: list[Any],
        config: Any,
        overrides: dict[str, Any],
        on_output: OnOutput | None,
    ) -> list[str]:
        """Put requests in line whose outputs the engine's streams yield; all, or none.

        Args:
            config: in the place of the manager's own `generation_config`.
        """
        names = self._names(len(inputs))
        overrides = {**overrides, "on_output": on_output}
        try:
            for name, input_ids in zip(names, inputs, strict=True):
                self._submit(
                    input_ids, name, dict(overrides), private=False, streams=True, config=config
                )
        except BaseException:
            for name in names:
                self.cancel_request(name)
            raise
        return names

    def cancel_request(self, request_id: str) -> None:
        """End a request; as under transformers' own manager there will be no result of it."""
        with contextlib.suppress(KeyError, TorchPagedError):  # it has ended
            self._service.cancel(request_id)

    def _submit(
        self,
        input_ids: Any,
        name: str,
        overrides: dict[str, Any],
        *,
        private: bool,
        streams: bool,
        config: Any,
    ) -> None:
        batching = self.continuous_batching_config
        if config.max_new_tokens is None and config.max_length is None:
            if not overrides.keys() & {"max_new_tokens", "max_length"}:
                overrides["max_new_tokens"] = _UNLIMITED
        overrides.setdefault("logprobs", bool(batching.return_logprobs))
        self._service.submit(
            input_ids,
            config,
            name,
            overrides,
            private=private,
            streams=streams,
            shares_prefix=bool(batching.allow_block_sharing),
            outgrows=True,
            merge=self._merge,
        )

    def _names(self, count: int) -> list[str]:
        """Return ids that nobody uses."""
        names: list[str] = []
        with self._lock:
            while len(names) < count:
                name = f"req_{self._num_named}"
                self._num_named += 1
                if not self._service.has(name):
                    names.append(name)
        return names


class _Deliveries:
    """Hands the outputs of one request, and of its further sequences, to the router."""

    def __init__(self, router: Any, streaming: bool, record_timestamps: bool) -> None:
        self._router = router
        self._streaming = streaming
        self._timestamps: dict[object, list[float]] | None = {} if record_timestamps else None
        self._created = time.perf_counter()

    def __call__(self, output: RequestOutput) -> None:
        now = time.perf_counter()
        timestamps = None
        if self._timestamps is not None:
            timestamps = self._timestamps.setdefault(output.request_id, [])
            timestamps += [now] * len(output.new_token_ids)
        if was_cancelled(output) or not (self._streaming or output.finished):
            return
        self._router.deliver(to_generation_output(output, self._created, timestamps))


def was_cancelled(output: RequestOutput) -> bool:
    """Say whether somebody cancelled the request by its id: transformers then has no result.

    What a deadline, a hard stop or the end of the manager cancels has one, that says why.
    """
    return output.finish_reason == "cancelled" and not output.error


def to_generation_output(
    output: RequestOutput, created: float, timestamps: list[float] | None = None
) -> Any:
    """Return transformers' record of an output; `created` as `time.perf_counter()` has it."""
    failed = output.finish_reason in ("cancelled", "error")
    status = seams.BatchingStatus.DECODING
    if output.finished:
        status = seams.BatchingStatus.FAILED if failed else seams.BatchingStatus.FINISHED
    return seams.GenerationOutput(
        request_id=output.request_id,
        prompt_ids=list(output.prompt_ids or ()),
        generated_tokens=list(output.token_ids),
        logprobs=list(output.logprobs or ()),
        error=(output.error or output.finish_reason) if failed else None,
        status=status,
        created_time=created,
        lifespan=(created, time.perf_counter() if output.finished else -1),
        timestamps=None if timestamps is None else list(timestamps),
    )


__all__ = ["EngineManager", "to_generation_output", "was_cancelled"]
