"""`Config`: every setting of an accelerated model, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

_BLOCK_SIZES = (8, 16, 32)
_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ON_UNSUPPORTED = ("fallback", "raise")
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
MIN_CACHE_BYTES = 1 << 20
_MAX_LAG = 64
# Each sequence has a row in the tensors of the state, of some 10 KB and its block table.
_MAX_NUM_SEQS = 1 << 16
MAX_MODEL_LEN = 1 << 24
# A larger number was meant in another unit.
_MAX_OFFLOAD_GIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of an accelerated model; immutable, checked on construction.

    Attributes:
        block_size: tokens in one block of the KV cache: 8, 16 or 32.
        max_num_seqs: sequences that decode together, at most 65536; further ones wait for a slot.
        max_num_batched_tokens: tokens in one step that has prompts in it, those of decoding rows
            included; longer prompts are cut up.
        max_model_len: longest sequence of an `Engine`, prompt included, at most 16777216; None
            takes the model's own limit. `generate()` keeps the limits of its own arguments.
        kv_cache_memory: limit of the KV cache: bytes (int), or a fraction (float in (0, 1]) of the
            GPU's memory, on a CPU of the memory available when the cache is made; None leaves
            `gpu_memory_utilization` as the only limit.
        gpu_memory_utilization: the KV cache stops growing when this fraction of the GPU's memory
            is in use, by anyone. Without a GPU it has no effect.
        cpu_offload_space: GiB of host memory for the keys and values of requests that an `Engine`
            preempts, taken as needed, pinned beside a GPU; less where the machine has not as much.
            0: they are computed again. Requests of models that keep a state always are.
        batch_buckets: batch sizes for which a step is captured, increasing, e.g. ``(1, 2, 4, 8)``;
            a batch runs in the next larger one. None: a built-in ladder up to `max_num_seqs`.
        cuda_graphs: replay decode steps as CUDA graphs; off, the same steps are launched one
            kernel at a time. Without a GPU it has no effect.
        enable_prefix_caching: let sequences share the blocks of a common prefix.
        kv_cache_dtype: "auto" (the model's), or the name of what that must be, "float32",
            "bfloat16" or "float16"; a torch dtype is taken as well. A model of another dtype is
            left to Hugging Face.
        seed: seed of an `Engine`'s random numbers; None draws one. `generate()` keeps torch's.
        verify: compare the logits of the fused path with the model's own, once per device and
            dtype, before the first accelerated call.
        on_unsupported: "fallback" runs Hugging Face's own code where ours does not apply and
            logs the reason; "raise" raises `UnsupportedModelError` or `UnsupportedFeatureError`.
        logprobs_mode: "raw_logprobs" reports log-probabilities of an `Engine` by the model's own
            logits, "processed_logprobs" by what tokens are drawn from: after penalties and
            temperature, of the tokens that top-k, top-p and min-p keep. Those of prompts are raw.
        lag: decode steps that the host may launch ahead of the newest result it has seen.
    """

    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    kv_cache_memory: int | float | None = None
    gpu_memory_utilization: float = 0.9
    cpu_offload_space: float = 0.0
    batch_buckets: Sequence[int] | None = None
    cuda_graphs: bool = True
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    seed: int | None = None
    verify: bool = True
    on_unsupported: Literal["fallback", "raise"] = "fallback"
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    lag: int = 4

    def __post_init__(self) -> None:
        self._set("block_size", _block_size(self.block_size))
        self._set("max_num_seqs", _count("max_num_seqs", self.max_num_seqs, _MAX_NUM_SEQS))
        self._set(
            "max_num_batched_tokens", _count("max_num_batched_tokens", self.max_num_batched_tokens)
        )
        if self.max_model_len is not None:
            self._set("max_model_len", _count("max_model_len", self.max_model_len, MAX_MODEL_LEN))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, minimum=0, maximum=(1 << 64) - 1))
        self._set("lag", _integer("lag", self.lag, minimum=0, maximum=_MAX_LAG))
        for name in ("cuda_graphs", "enable_prefix_caching", "verify"):
            _check_bool(name, getattr(self, name))
        self._set(
            "gpu_memory_utilization",
            _fraction("gpu_memory_utilization", self.gpu_memory_utilization, "e.g. 0.9"),
        )
        self._set("cpu_offload_space", _offload_space(self.cpu_offload_space))
        self._set("kv_cache_memory", _cache_limit(self.kv_cache_memory))
        self._set("batch_buckets", _buckets(self.batch_buckets, self.max_num_seqs))
        # A torch.dtype prints as "torch.float16"; taken by its text, so that torch stays out.
        if self.kv_cache_dtype is not None:
            self._set("kv_cache_dtype", str(self.kv_cache_dtype).removeprefix("torch."))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, _CACHE_DTYPES)
        _check_choice("on_unsupported", self.on_unsupported, _ON_UNSUPPORTED)
        _check_choice("logprobs_mode", self.logprobs_mode, _LOGPROBS_MODES)

    @property
    def host_bytes(self) -> int:
        """`cpu_offload_space` in bytes."""
        return int(self.cpu_offload_space * (1 << 30))

    def replace(self, **overrides: object) -> Config:
        """Return a copy with some fields changed, checked anew.

        Raises:
            TypeError: a name is not a field of `Config`; the message has the nearest names.
        """
        _check_names(overrides)
        return dataclasses.replace(self, **overrides)  # type: ignore[arg-type]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _check_names(given: Iterable[str]) -> None:
    names = [field.name for field in dataclasses.fields(Config)]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else "see help(Config)."
            raise TypeError(
                f"Config has no field {name!r}; {hint} Its fields are {', '.join(names)}"
            )


_set_fields = Config.__init__


@functools.wraps(_set_fields)
def _set_known_fields(self: Config, *args: object, **fields: object) -> None:
    """Say which field is nearest, which the constructor of a dataclass does not."""
    if args:
        raise TypeError(
            f"Config takes its fields by name, got {args!r}; pass e.g. Config(block_size=16)"
        )
    _check_names(fields)
    _set_fields(self, **fields)  # type: ignore[arg-type]


Config.__init__ = _set_known_fields  # type: ignore[method-assign]


def _value_error(name: str, expected: str, got: object, remedy: str) -> ValueError:
    return ValueError(f"Config.{name} must be {expected}, got {got!r}; {remedy}")


def _type_error(name: str, expected: str, got: object, remedy: str) -> TypeError:
    return TypeError(
        f"Config.{name} must be {expected}, got {got!r} of type {type(got).__name__}; {remedy}"
    )


def _default(name: str) -> object:
    return Config.__dataclass_fields__[name].default


def _index(value: object) -> int | None:
    """Return an integer of any library as an int; None for anything else, arrays among it."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # a tensor on the meta device has no value
        return None


def _integer(name: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    number = _index(value)
    if number is None:
        example = _as_number(value)
        if example is None or example < minimum or (maximum is not None and example > maximum):
            default = _default(name)
            example = default if isinstance(default, int) else max(minimum, 4)
        raise _type_error(name, "an integer", value, f"pass e.g. {name}={example}")
    if number < minimum or (maximum is not None and number > maximum):
        upper = "" if maximum is None else f" and at most {maximum}"
        remedy = f"the default is {_default(name)}"
        raise _value_error(name, f"at least {minimum}{upper}", number, remedy)
    return number


def _as_number(value: object) -> int | None:
    """Return the integer that somebody may have meant."""
    try:
        return int(float(value)) if isinstance(value, (str, float)) else None
    except (ValueError, OverflowError):
        return None


def _count(name: str, value: object, maximum: int | None = None) -> int:
    return _integer(name, value, minimum=1, maximum=maximum)


def _block_size(value: object) -> int:
    number = _index(value)
    if number is None:
        meant = _as_number(value)
        size = meant if meant in _BLOCK_SIZES else _default("block_size")
        raise _type_error(
            "block_size", "an integer, 8, 16 or 32", value, f"pass block_size={size}"
        )
    if number not in _BLOCK_SIZES:
        raise _value_error("block_size", "8, 16 or 32", number, "16 is the default")
    return number


def _fraction(name: str, value: object, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _type_error(name, "a fraction in (0, 1]", value, remedy)
    share = float(value)
    if not 0.0 < share <= 1.0:
        raise _value_error(name, "a fraction in (0, 1]", value, remedy)
    return share


def _offload_space(value: object) -> float:
    remedy = "write 4.0 for 4 GiB, 0 to have preempted requests computed again"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _type_error("cpu_offload_space", "a number of GiB", value, remedy)
    space = float(value)
    if not 0.0 <= space <= _MAX_OFFLOAD_GIB:
        expected = f"a number of GiB, at least 0 and at most {_MAX_OFFLOAD_GIB}"
        raise _value_error("cpu_offload_space", expected, value, remedy)
    return space


def _cache_limit(value: object) -> int | float | None:
    if value is None:
        return None
    if isinstance(value, Real) and not isinstance(value, Integral):
        return _fraction("kv_cache_memory", value, "a number of bytes must be an int")
    remedy = "write 1.0 for all of the memory, 4 << 30 for 4 GiB"
    number = _index(value)
    if number is None:
        expected = "bytes as an int, or a fraction as a float"
        raise _type_error("kv_cache_memory", expected, value, remedy)
    if number < MIN_CACHE_BYTES:
        expected = f"at least {MIN_CACHE_BYTES} bytes as an int, or a fraction as a float"
        raise _value_error("kv_cache_memory", expected, number, remedy)
    return number


def _buckets(value: object, max_num_seqs: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    expected, remedy = "increasing integers, batch sizes", "pass e.g. batch_buckets=(1, 2, 4, 8)"
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        sizes: tuple[object, ...] = tuple(value)  # type: ignore[arg-type]
    except TypeError:  # a tensor without dimensions is an Iterable, and raises this
        raise _type_error("batch_buckets", expected, value, remedy) from None
    if any(_index(size) is None for size in sizes):
        raise _type_error("batch_buckets", expected, value, remedy)
    buckets = tuple(_integer("batch_buckets", size, minimum=1) for size in sizes)
    if not buckets or any(a >= b for a, b in zip(buckets, buckets[1:], strict=False)):
        raise _value_error("batch_buckets", expected, buckets, remedy)
    if buckets[-1] > max_num_seqs:
        raise _value_error(
            "batch_buckets",
            f"at most max_num_seqs={max_num_seqs}",
            buckets,
            f"pass max_num_seqs={buckets[-1]} or drop the larger sizes",
        )
    return buckets


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        scalar = value is None or isinstance(value, (int, float, str))
        meant = bool(value) if scalar else _default(name)
        raise _type_error(name, "True or False", value, f"pass {name}={meant}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else f"{choices[0]!r} is the default"
        raise _value_error(name, "one of " + ", ".join(map(repr, choices)), value, remedy)


__all__ = ["Config"]
