"""The public verbs: accelerate, restore, explain, stats, release."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from torch_paged.config import Config
from torch_paged.errors import UnsupportedModelError
from torch_paged.generate.batching import drop_cached_manager
from torch_paged.generate.logprobs import TokenLogprobs
from torch_paged.generate.methods import DECODING_METHODS
from torch_paged.generate.registry import (
    add_session,
    disabled,
    find_session,
    remove_session,
    turns_of,
)
from torch_paged.generate.session import Session
from torch_paged.log import warn_once
from torch_paged.patches import seams
from torch_paged.report import Report, Stats

Model = TypeVar("Model", bound=nn.Module)

# Attributes under which wrappers keep the model they wrap.
_WRAPPED = ("_orig_mod", "module", "base_model", "model")


def accelerate(model: Model, config: Config | None = None, **overrides: object) -> Model:
    """Make `model.generate()` decode through a paged cache and captured steps.

    The same object comes back; its weights, modules and class stay as they are. Calling it again
    reconfigures the model. What our step cannot serve runs Hugging Face's own code; `explain()`
    says why.

    Args:
        model: a causal LM of transformers, or a DDP, FSDP, torch.compile or PEFT wrapper of one.
        config: defaults to `Config()`.
        overrides: fields of `Config` to change, e.g. ``max_num_seqs=64``.

    Raises:
        TypeError: `model` is not a transformers model, or a name is not a field of `Config`.
        ValueError: a value of `Config` is out of its range.
        UnsupportedModelError: with ``on_unsupported="raise"``, if neither tier fits the model.
    """
    check_config(config)
    config = (config or Config()).replace(**overrides)
    target = unwrap(model)
    if disabled():
        warn_once("TORCH_PAGED_DISABLE is set: accelerate() does nothing")
        return model
    # Another thread may be in the middle of a call.
    with turns_of(target).lock:
        _begin_session(target, config)
    return model


def _begin_session(target: nn.Module, config: Config) -> None:
    """Read the model under a configuration, in the place of the session that it has."""
    session = Session(target, config)
    if config.on_unsupported == "raise" and session.decide_tier() == "eager":
        raise UnsupportedModelError(
            f"{type(target).__name__} cannot be accelerated: {'; '.join(session.reasons)}; "
            "pass on_unsupported='fallback' to run Hugging Face's own code"
        )
    old = find_session(target)
    if old is None:
        for seam, replacement in _patches():
            seam.install(replacement)
        # One use of the seams per model, given back by restore() or by the model's end.
        _FINALIZERS[target] = weakref.finalize(target, _uninstall)
    else:
        old.release()
        session.logprobs = old.logprobs
    add_session(target, session)


def check_config(config: object) -> None:
    """Raise `TypeError` for what is neither None nor a `Config`."""
    if config is not None and not isinstance(config, Config):
        raise TypeError(
            f"config must be a torch_paged.Config, got {type(config).__name__}; "
            "pass fields by name instead, e.g. accelerate(model, max_num_seqs=64)"
        )


def _uninstall() -> None:
    for seam, _ in _patches():
        seam.uninstall()


def _patches() -> list[tuple[seams.MethodSeam, Callable[..., Any]]]:
    # Not at the top: an engine, which accelerates its model, is behind these doors.
    from torch_paged.generate.batching import BATCHING_METHODS

    patches = [(seams.DECODING_SEAMS[name], method) for name, method in DECODING_METHODS.items()]
    return patches + [(seams.BATCHING_SEAMS[name], m) for name, m in BATCHING_METHODS.items()]


_FINALIZERS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: the model's generate is Hugging Face's again, and all memory is back.

    Does nothing for a model that is not accelerated.
    """
    target = unwrap(model)
    session = find_session(target)
    if session is None:
        return
    # First: what cannot be copied out for lack of memory leaves everything as it is.
    session.revoke_leases()
    remove_session(target)
    drop_cached_manager(target)
    session.release()
    _FINALIZERS.pop(target)()


@contextlib.contextmanager
def accelerated(
    model: Model, config: Config | None = None, **overrides: object
) -> Iterator[Model]:
    """Accelerate `model` within a with block and restore it afterwards."""
    yield_model = accelerate(model, config, **overrides)
    try:
        yield yield_model
    finally:
        restore(model)


@contextlib.contextmanager
def recorded_logprobs(model: nn.Module) -> Iterator[TokenLogprobs]:
    """Record the log-probabilities of the tokens that `model.generate()` samples in the block.

    The object keeps those of the newest call. They are computed within the step: nothing waits for
    them, and no logits are kept.

    Raises:
        ValueError: the model is not accelerated, or is being recorded already.
    """
    session = _session(model, "recorded_logprobs")
    with session.lock:
        if session.logprobs is not None:
            raise ValueError(
                "torch_paged.recorded_logprobs(model) is in force already; use the object of the "
                "outer block"
            )
        record = session.logprobs = TokenLogprobs()
    try:
        yield record
    finally:
        current = find_session(unwrap(model))
        if current is not None:
            current.logprobs = None


def is_accelerated(model: nn.Module) -> bool:
    """Say whether `accelerate` is in force for this model."""
    return find_session(unwrap(model)) is not None


def explain(model: nn.Module) -> Report:
    """Return how the model runs, and how its last call ran; `str()` of it is a table."""
    return _session(model, "explain").report()


def stats(model: nn.Module) -> Stats:
    """Return counters of tokens, memory, graphs and fallbacks since `accelerate`."""
    return _session(model, "stats").stats()


def release(model: nn.Module) -> None:
    """Give the KV pool and the graphs back to the device; the next call takes them again."""
    _session(model, "release").release()


def weights_changed(model: nn.Module) -> None:
    """Say that parameters were written in place: cached prefixes are stale.

    Within one call of `generate` nothing is reused from before, so only an `Engine` with prefix
    caching has anything to drop.
    """
    session = _session(model, "weights_changed")
    with session.lock:
        if session.core is not None and session.core.has_prefixes:
            session.core.prefixes.reset()


def _session(model: nn.Module, verb: str) -> Session:
    session = find_session(unwrap(model))
    if session is None:
        if disabled():
            raise ValueError(
                f"torch_paged.{verb}(model) needs an accelerated model, and TORCH_PAGED_DISABLE "
                "is set, so accelerate() does nothing; unset it"
            )
        raise ValueError(
            f"torch_paged.{verb}(model) needs an accelerated model, got a "
            f"{type(model).__name__} that is not; call torch_paged.accelerate(model) first"
        )
    return session


def unwrap(model: object) -> nn.Module:
    """Return the transformers model inside the known wrappers."""
    inner, seen = model, 0
    while isinstance(inner, nn.Module) and not seams.is_pretrained_model(inner) and seen < 8:
        # Wrappers forward attributes to what they wrap, so only their own children count.
        children = inner._modules
        found = next((children[name] for name in _WRAPPED if children.get(name) is not None), None)
        if found is None:
            break
        inner, seen = found, seen + 1
    if not seams.is_pretrained_model(inner) or not isinstance(inner, nn.Module):
        raise TypeError(
            f"model must be a causal LM of transformers (PreTrainedModel), got "
            f"{type(model).__name__}; load it with AutoModelForCausalLM.from_pretrained, or pass "
            "the model inside your wrapper"
        )
    if not seams.can_generate(inner):
        raise TypeError(
            f"model must be able to generate, got {type(inner).__name__} without a language "
            "modelling head; pass the ...ForCausalLM model"
        )
    return inner
