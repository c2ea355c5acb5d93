"""Where transformers looks up the attention of a model, and how a block of code gets another."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def eager_attention(model: Any) -> contextlib.AbstractContextManager[None]:
    """Run the model with eager attention: sdpa drops softcaps, so it is no reference.

    Falcon with ALiBi keeps its own: eager attention adds the biases twice, sdpa once.
    """
    if getattr(model.config, "model_type", "") == "falcon" and model.config.alibi:
        return contextlib.nullcontext()
    return switch_attention(model, "eager")


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Register an attention function; without a mask function of that name none is built."""
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, function)


def foreign_attention_reason(config: Any) -> str:
    """Say whether attention by a text config is one that somebody else registered, or "".

    What is registered under a name of transformers' own counts as its own.
    """
    name = config._attn_implementation
    if name in ("eager", "sdpa", "flex_attention") or str(name).startswith("flash_attention"):
        return ""
    function = ALL_ATTENTION_FUNCTIONS[name] if name in ALL_ATTENTION_FUNCTIONS else None
    if isinstance(function, functools.partial):  # over kernels of the hub
        function = function.func
    package = (getattr(function, "__module__", None) or "transformers").partition(".")[0]
    if package in ("transformers", "torch_paged"):
        return ""
    return f"its attention, {name!r}, is none of transformers' own"


def register_masks(name: str, function: Callable[..., Any]) -> None:
    """Register the mask function that goes with an attention function."""
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, function)


# Attention that models use in this context (thread or task), where it is not their config's.
_ATTENTION_HERE: ContextVar[str | None] = ContextVar("torch_paged_attention", default=None)
_OWN_ATTENTION: Any = PreTrainedConfig.__dict__["_attn_implementation"]
_attention_lock = threading.Lock()
_attention_users = 0


def _read_attention(config: PreTrainedConfig) -> Any:
    return _ATTENTION_HERE.get() or _OWN_ATTENTION.fget(config)


def _count_attention_readers(change: int) -> None:
    """Keep our reading of the property in place for as long as anyone is within a block."""
    global _attention_users
    with _attention_lock:
        _attention_users += change
        reads = property(_read_attention, _OWN_ATTENTION.fset) if _attention_users else None
        PreTrainedConfig._attn_implementation = reads or _OWN_ATTENTION


def _brings_attention(cls: type) -> bool:
    owners = [c for c in cls.__mro__ if "_attn_implementation" in vars(c)]
    return owners[0] is not PreTrainedConfig


@contextlib.contextmanager
def switch_attention(model: Any, name: str) -> Iterator[None]:
    """Have every config name `name` as its attention, in this thread or task only.

    Configs are shared between models and threads, and some forwards copy theirs, so the value
    that they hold is not touched: within the block the property reads a context variable first.
    Nothing but the forward of `model` belongs into the block. A config class that brings the
    property itself (hrm_text) does not read the variable, so there the value is written.
    """
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    written = [
        (config, config._attn_implementation)
        for config in configs.values()
        if _brings_attention(type(config))
    ]
    token = _ATTENTION_HERE.set(name)
    _count_attention_readers(1)
    try:
        for config, _ in written:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, own in written:
            config._attn_implementation_internal = own
        _count_attention_readers(-1)
        _ATTENTION_HERE.reset(token)


__all__ = [
    "eager_attention",
    "foreign_attention_reason",
    "register_attention",
    "register_masks",
    "switch_attention",
]
