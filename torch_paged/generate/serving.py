"""`Engine`: continuous batching over the weights of a model in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torch_paged.config import Config
from torch_paged.engine.output import RequestOutput
from torch_paged.errors import TorchPagedError, UnsupportedModelError
from torch_paged.generate.accelerate import accelerate, check_config, restore, unwrap
from torch_paged.generate.registry import find_session
from torch_paged.generate.service import Service


class Engine:
    """Serve many requests at once on one model, each with limits and sampling of its own.

    Requests may be added and cancelled at any time, from any thread and from callbacks. Whoever
    calls `step`, `stream` or `run` makes progress for all. Random numbers belong to a request:
    its tokens do not depend on what runs beside it. The model stays usable: `generate()` may be
    called between two steps, and both share the KV cache. Dropout is off, whatever mode the model
    is in.

    Engines of one model share its KV cache, too. A request for which it has no blocks while others
    than this engine hold some waits until these come back, or gives its own up meanwhile. It ends
    as "error" if the cache could never hold it, or when nobody has launched a step or given a
    block back for 30 seconds: `run` and `stream` wait so long for another engine that holds the
    blocks and is not stepped by another thread. Two engines of one thread are stepped in turns, or
    one is run to its end before the other gets requests.

    Args:
        model: as for `accelerate`; it is accelerated if it is not, and restored by `close` then.
        config: applied to the model, also if it is accelerated already; None keeps its own. KV
            cache and graphs are made anew only if `block_size`, `kv_cache_memory`,
            `gpu_memory_utilization`, `kv_cache_dtype`, `batch_buckets` or `cuda_graphs` change.
        overrides: fields of `Config` to change.

    Raises:
        UnsupportedModelError: neither tier fits the model, or an adapter of PEFT takes part in
            `generate()` only (prompt and prefix tuning, activated LoRA).
    """

    def __init__(
        self, model: nn.Module, config: Config | None = None, **overrides: object
    ) -> None:
        self._target = unwrap(model)
        _refuse_methods_of_generate(model)
        session = find_session(self._target)
        self._owns_model = session is None
        if session is None:
            accelerate(self._target, config, **overrides)
        elif config is not None or overrides:
            check_config(config)
            wanted = (config or session.config).replace(**overrides)
            if not session.reconfigure(wanted):
                accelerate(self._target, wanted)
        try:
            self._service = Service(self._target)
        except BaseException:
            if self._owns_model:
                restore(self._target)
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
            prompt_ids: token ids, as a list, or a tensor or array [num_tokens] or [1, num_tokens].
            generation_config: as for `generate()`; fields that nobody set come from the model's.
            request_id: None draws one. With ``num_return_sequences=n`` the first sequence has this
                id, the others ``f"{request_id}__child#{i}"`` for i from 0 to n - 2.
            overrides: fields of GenerationConfig, and: ``seed``; ``priority``, smaller first;
                ``deadline`` in seconds from now, after which the request is cancelled;
                ``logprobs=True`` for the log-probability of each token, or how many of the most
                likely tokens to report with it, up to 20; ``prompt_logprobs``, the same for the
                prompt, or for its tokens from index ``prompt_logprobs_start`` on;
                ``stop_token_ids`` besides the end tokens; ``tokenizer`` for ``stop_strings``;
                ``on_output``, called with each `RequestOutput` of the request.

        Raises:
            TypeError: a name or a type is wrong.
            ValueError: a value is out of range, or the id is in use.
            UnsupportedFeatureError: a field asks for what an engine does not do.
        """
        return self._service.submit(prompt_ids, generation_config, request_id, overrides)[0]

    def cancel(self, request_id: Hashable) -> None:
        """End a request with all its sequences, or one of these, as "cancelled".

        Raises:
            KeyError: there is no such request, or its end has been reported.
            TorchPagedError: the engine is closed.
        """
        self._service.cancel(request_id)

    def step(self) -> list[RequestOutput]:
        """Launch one step; return an output of each request with new tokens, or an end.

        A token is reported up to `Config.lag` steps after the one that computed it.
        """
        return self._service.advance(tokens=True)

    def stream(self, *, tokens: bool = True) -> Iterator[RequestOutput]:
        """Step until no request is left; yield every output from now on.

        Several threads may stream at the same time: each gets all outputs.

        Args:
            tokens: False yields the last output of each request alone.
        """
        return self._service.stream(tokens=tokens)

    def run(self) -> dict[Hashable, RequestOutput]:
        """Step until no request is left; return the last output of each that ended meanwhile."""
        return {out.request_id: out for out in self.stream(tokens=False)}

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

        Raises:
            TorchPagedError: the engine is closed, or `stop` was called meanwhile.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        if "on_output" in overrides:
            raise TypeError("generate_async yields the outputs; leave on_output out")

        def forward(output: RequestOutput | None = None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(arrived.put_nowait, output)

        overrides["on_output"] = forward
        service = self._service
        with service.stepping(on_stop=forward):
            left = set(
                service.submit(prompt_ids, generation_config, request_id, overrides, private=True)
            )
            try:
                while left:
                    output = await arrived.get()
                    if output is None:
                        raise TorchPagedError(
                            "the engine was stopped while generate_async waited for tokens; let "
                            "it end before stop(), use paused() to write to the weights, or call "
                            "generate_async again, which starts the engine"
                        )
                    if output.finished:
                        left.discard(output.request_id)
                    yield output
            finally:
                for sequence in left:
                    with contextlib.suppress(KeyError, TorchPagedError):
                        self.cancel(sequence)

    def start(self) -> None:
        """Step in a thread of the engine's own whenever there is work, until `stop` or `close`."""
        self._service.start()

    def stop(self) -> None:
        """End the engine's own thread; requests that are left wait for someone to step.

        Those of `generate_async` raise `TorchPagedError` where they are waited for.
        """
        self._service.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let nobody step within the block, e.g. to write to the weights."""
        with self._service.session().lock:
            yield

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended and its end was reported."""
        return self._service.is_idle

    @property
    def num_running(self) -> int:
        """Sequences that have a slot now."""
        return self._service.engine.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""
        return max(self._service.num_live - self.num_running, 0)

    @property
    def num_preemptions(self) -> int:
        """How often a running sequence was sent back in line for lack of KV blocks."""
        return self._service.engine.num_preemptions

    def weights_changed(self) -> None:
        """Say that parameters were written: cached prefixes are dropped."""
        self._service.weights_changed()

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` if slots, blocks and counters contradict each other."""
        self._service.check_integrity()

    def close(self) -> None:
        """Cancel what is left; harmless when repeated.

        A model that the engine accelerated is restored. One that was accelerated before keeps its
        KV cache and graphs for the next call; `release` gives them back.
        """
        self._service.close()
        if self._owns_model:
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


def _refuse_methods_of_generate(model: Any) -> None:
    """Refuse a PEFT wrapper whose adapter is applied by the wrapper's own `generate()`."""
    if not hasattr(type(model), "active_peft_config"):
        return
    config = model.active_peft_config
    if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModelError(
            f"adapter {model.active_adapter!r} ({config.peft_type}) is applied by PEFT's own "
            "generate(), which an Engine does not call; use model.generate(), or an adapter that "
            "lives in the layers, such as LoRA"
        )


__all__ = ["Engine"]
