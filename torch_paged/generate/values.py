"""Arguments of a request as plain Python values, or an error with their name."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Set
from typing import Any

# More than any vocabulary has and than any sequence can be long; top_k is held in 32 bits.
_UNREACHED = (1 << 31) - 1


def plain(value: Any, name: str = "value") -> Any:
    """Return scalars and arrays of numpy and torch as numbers and lists.

    Raises:
        TypeError: it has no values, as a tensor on the meta device.
    """
    if not hasattr(value, "tolist"):
        return value
    try:
        return value.tolist()
    except NotImplementedError as error:
        kind = type(value).__name__
        raise TypeError(
            f"{name} must have values, got a {kind} without ({error}); pass plain numbers"
        ) from None


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """Return an integer of any library as an int.

    Raises:
        TypeError: it is none.
        ValueError: it is less than `minimum`.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r}; pass e.g. {name}=16")
    given = operator.index(value)
    if minimum is not None and given < minimum:
        raise ValueError(
            f"{name} must be at least {minimum}, got {given}; pass e.g. {name}={max(minimum, 16)}"
        )
    return given


def count(name: str, value: Any, minimum: int | None = None) -> int:
    """Return an integer as one that the state of a sequence can hold and none reaches."""
    return min(integer(name, value, minimum), _UNREACHED)


def number(name: str, value: Any, example: float, what: str = "a number") -> float:
    """Return a number of any library as a float.

    Raises:
        TypeError: it is none; a truth value or a text that reads as a number is none either.
    """
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be {what}, got {value!r}; pass e.g. {name}={example}"
        ) from None


def fraction(name: str, value: Any, example: float) -> float:
    """Return a number between 0 and 1."""
    share = number(name, value, example)
    if not 0.0 <= share <= 1.0:
        raise ValueError(
            f"{name} must be between 0 and 1, got {value}; pass e.g. {name}={example}"
        )
    return share


def seconds(name: str, value: Any) -> float:
    """Return a time in seconds; an infinite one never comes."""
    time = number(name, value, 30.0, "a number of seconds")
    if math.isnan(time):
        raise ValueError(f"{name} must be a number of seconds, got nan; pass e.g. {name}=30.0")
    return time


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return token ids given as one, several or a tensor; those of no vocabulary mean none."""
    value = plain(value, name)
    if value is None:
        return ()
    values = list(value) if isinstance(value, Iterable) else [value]
    if any(isinstance(v, bool) or not hasattr(type(v), "__index__") for v in values):
        raise TypeError(
            f"{name} must be a token id or several, got {value!r}; pass e.g. {name}=[2]"
        )
    return tuple(token for v in values if 0 <= (token := operator.index(v)) < _UNREACHED)


def hashable(name: str, value: Any) -> Hashable:
    """Return what may be a key."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} must be hashable, got {value!r}; pass e.g. a string") from None
    key: Hashable = value
    return key


def prompt_list(prompt_ids: Any, model: Any, name: str = "prompt_ids") -> list[int]:
    """Return the prompt as a list of ids that the embedding has."""
    values = _items(prompt_ids, name)
    if not values:
        raise ValueError(
            f"{name} must have at least 1 token, got 0; begin an empty text with "
            "tokenizer.bos_token_id"
        )
    try:
        if bool in set(map(type, values)):
            raise TypeError
        ids = list(map(operator.index, values))
    except TypeError:
        remedy = "pass tokenizer(text).input_ids"
        if isinstance(values[0], Iterable) and not isinstance(values[0], str):
            remedy = "add each prompt with a call of its own"
        more = ", ..." if len(values) > 3 else ""
        some = ", ".join(map(repr, values[:3])) + more
        raise TypeError(f"{name} must be integers, got [{some}]; {remedy}") from None
    vocab_size = model.get_input_embeddings().weight.shape[0]
    smallest, largest = min(ids), max(ids)
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"{name} must be in [0, {vocab_size}), got {smallest} to {largest}; use the "
            "model's own tokenizer"
        )
    return ids


def _items(prompt_ids: Any, name: str) -> list[Any]:
    """Return the items of a prompt, whatever they are."""
    told = f"{name} must be token ids, got"
    if isinstance(prompt_ids, str):
        raise TypeError(f"{told} a string; pass tokenizer(text).input_ids")
    if prompt_ids is None:
        raise TypeError(f"{told} None; pass tokenizer(text).input_ids")
    if isinstance(prompt_ids, Mapping):
        raise TypeError(f"{told} a {type(prompt_ids).__name__}; pass its input_ids")
    if isinstance(prompt_ids, Set):
        raise TypeError(f"{told} a {type(prompt_ids).__name__}, which has no order; pass a list")
    if hasattr(prompt_ids, "shape") and hasattr(prompt_ids, "tolist"):
        if len(prompt_ids.shape) == 2 and prompt_ids.shape[0] == 1:
            prompt_ids = prompt_ids[0]
        if len(prompt_ids.shape) != 1:
            raise ValueError(
                f"{name} must be one prompt, [num_tokens], got {list(prompt_ids.shape)}; add "
                "each prompt with a call of its own, without padding"
            )
        prompt_ids = plain(prompt_ids, name)
    if not isinstance(prompt_ids, Iterable):
        raise TypeError(
            f"{told} {prompt_ids!r} of type {type(prompt_ids).__name__}; pass a list, e.g. "
            f"[{prompt_ids!r}]"
        )
    return list(prompt_ids)


def batch_list(inputs: Any, model: Any) -> list[list[int]]:
    """Return the prompts of a batch as lists of ids."""
    expected = "inputs must be a list of prompts, each a list of token ids, got"
    if isinstance(inputs, str):
        raise TypeError(f"{expected} {inputs!r}; pass [tokenizer(text).input_ids]")
    if isinstance(inputs, Mapping):
        raise TypeError(f"{expected} a {type(inputs).__name__}; pass its input_ids, unpadded")
    if not isinstance(inputs, Iterable):
        raise TypeError(f"{expected} {inputs!r}; pass e.g. tokenizer(texts).input_ids")
    prompts = enumerate(plain(inputs, "inputs"))
    return [prompt_list(ids, model, f"inputs[{i}]") for i, ids in prompts]


__all__ = [
    "batch_list",
    "count",
    "fraction",
    "hashable",
    "integer",
    "number",
    "plain",
    "prompt_list",
    "seconds",
    "token_ids",
]
