"""The doors of continuous batching that stand in for those of transformers' mixin."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch_paged.engine.output import RequestOutput
from torch_paged.errors import UnsupportedFeatureError
from torch_paged.generate.decide import opted_out
from torch_paged.generate.images import refuse_images
from torch_paged.generate.manager import EngineManager, to_generation_output, was_cancelled
from torch_paged.generate.registry import find_session
from torch_paged.generate.request_params import OWN_NAMES, check_config, resolve_params
from torch_paged.generate.sample import fall_back
from torch_paged.generate.session import Session
from torch_paged.generate.values import batch_list
from torch_paged.log import logger, warn_once
from torch_paged.patches import seams

_FALLING_BACK = threading.local()


def init_continuous_batching(
    self: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """Return a manager over our engine for an accelerated model, else transformers' own."""

    def original() -> Any:
        return seams.BATCHING_SEAMS["init_continuous_batching"].original(
            self,
            generation_config=generation_config,
            continuous_batching_config=continuous_batching_config,
            workload_hints=workload_hints,
        )

    session = find_session(self)
    if session is None or getattr(_FALLING_BACK, "active", False):
        return original()
    reasons = _reasons(self, session, generation_config)
    if reasons:
        return fall_back(session, reasons, original)
    return _manager(self, generation_config, continuous_batching_config)


def generate_batch(
    self: Any,
    inputs: list[Any],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, Any]:
    """Generate for many prompts; on an accelerated model any field of GenerationConfig counts."""

    def original() -> Any:
        with _falling_back():
            return seams.BATCHING_SEAMS["generate_batch"].original(
                self,
                inputs,
                generation_config=generation_config,
                continuous_batching_config=continuous_batching_config,
                record_timestamps=record_timestamps,
                progress_bar=progress_bar,
                persistent_manager=persistent_manager,
                warmup=warmup,
                **kwargs,
            )

    session = find_session(self)
    if session is None:
        return original()
    refuse_images(self, (), kwargs)
    overrides = _known(self, kwargs)
    reasons = _reasons(self, session, generation_config, overrides)
    if reasons:
        return fall_back(session, reasons, original)
    inputs = batch_list(inputs, self)
    if not inputs:
        return {}
    manager = _manager(self, generation_config, continuous_batching_config)
    try:
        config = manager.generation_config if generation_config is None else generation_config
        return _run(manager, inputs, config, overrides, record_timestamps, progress_bar)
    finally:
        if persistent_manager:
            self._cached_continuous_batching_manager = manager
        elif manager is not getattr(self, "_cached_continuous_batching_manager", None):
            manager.destroy()


def _run(
    manager: EngineManager,
    inputs: list[Any],
    config: Any,
    overrides: dict[str, Any],
    record_timestamps: bool,
    progress_bar: bool,
) -> dict[str, Any]:
    """Step in this thread until every request has ended."""
    service = manager.service
    created = time.perf_counter()
    timestamps: dict[Any, list[float]] = {}

    def on_output(output: RequestOutput) -> None:
        times = timestamps.setdefault(output.request_id, [])
        times += [time.perf_counter()] * len(output.new_token_ids)

    names = manager.submit_all(
        inputs, config, overrides, on_output=on_output if record_timestamps else None
    )
    count = overrides.get("num_return_sequences") or config.num_return_sequences or 1
    # As transformers orders them: further sequences, then the one that has the request's id.
    wanted = [
        sequence
        for name in names
        for sequence in [*(f"{name}__child#{i}" for i in range(count - 1)), name]
    ]
    left, results, num_tokens = set(wanted), {}, 0
    try:
        with seams.progress_bar(len(wanted), disable=not progress_bar) as bar:
            for output in service.stream(tokens=False):
                if output.request_id not in left:
                    continue
                left.discard(output.request_id)
                bar.update(1)
                if was_cancelled(output):
                    continue
                results[output.request_id] = to_generation_output(
                    output, created, timestamps.get(output.request_id)
                )
                num_tokens += len(output.token_ids)
                speed = num_tokens / (time.perf_counter() - created)
                bar.set_postfix_str(f"{speed:,.0f} tokens/s, {service.describe()}", refresh=False)
    finally:
        for name in left:
            manager.cancel_request(name)
    failed = [name for name, result in results.items() if result.error is not None]
    if failed:
        logger.error("%d requests failed: %s", len(failed), ", ".join(failed[:8]))
    if missing := [name for name in wanted if name not in results]:
        logger.error("%d requests were cancelled: %s", len(missing), ", ".join(missing[:8]))
    return {name: results[name] for name in wanted if name in results}


def drop_cached_manager(model: Any) -> None:
    """End a persistent manager of ours, so that transformers' own comes next."""
    cached = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(cached, EngineManager):
        cached.destroy()
        del model._cached_continuous_batching_manager


def _manager(model: Any, generation_config: Any, batching_config: Any) -> EngineManager:
    cached = getattr(model, "_cached_continuous_batching_manager", None)
    if isinstance(cached, EngineManager) and cached.is_usable:
        return cached
    config = model.generation_config if generation_config is None else generation_config
    if batching_config is None:
        batching_config = seams.default_batching_config(config)
    return EngineManager(model, config, batching_config)


def _reasons(
    model: Any, session: Session, config: Any, overrides: dict[str, Any] | None = None
) -> list[str]:
    """Say why transformers' own manager has to serve, or return nothing."""
    check_config(config)
    config = model.generation_config if config is None else config
    if reasons := opted_out(config):
        return reasons
    with session.lock:
        session.reread_if_changed()
        if session.decide_tier() == "eager":
            return list(session.reasons)
        if reason := session.self_test_reason():
            return [reason]
        if session.step is not None and session.step.recomputes(1, 1 << 62):
            return ["longrope computes a sequence anew on its way past its limit"]
    # Limits and stop strings belong to requests; the rest is settled here.
    config = copy.deepcopy(config)
    config.max_length = config.stop_strings = None
    fields = {
        k: v for k, v in (overrides or {}).items() if k not in ("max_length", "stop_strings")
    }
    try:
        resolve_params(model, 1, config, fields, lambda: 0, seams.override_generation_config)
    except UnsupportedFeatureError as error:
        return [str(error)]
    return []


def _known(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out what transformers would ignore in silence, aloud."""
    known = {}
    for name, value in kwargs.items():
        if name in OWN_NAMES or hasattr(model.generation_config, name):
            known[name] = value
        else:
            warn_once(f"generate_batch() ignores {name}: it is no field of GenerationConfig")
    return known


@contextlib.contextmanager
def _falling_back() -> Iterator[None]:
    """Let transformers' own methods, within this block, get a manager of their own."""
    before = getattr(_FALLING_BACK, "active", False)
    _FALLING_BACK.active = True
    try:
        yield
    finally:
        _FALLING_BACK.active = before


BATCHING_METHODS: dict[str, Callable[..., Any]] = {
    "init_continuous_batching": init_continuous_batching,
    "generate_batch": generate_batch,
}
