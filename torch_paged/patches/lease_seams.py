"""Layers of a `DynamicCache` whose keys and values are elsewhere until somebody looks at them.

Such a layer is an ordinary `DynamicLayer` with another class for the time being: what reads or
writes its tensors finds them made, and it is a `DynamicLayer` again. What needs the length alone
does not.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_TENSORS = ("keys", "values")
# What a lent layer has in its dictionary besides what a DynamicLayer has.
_LENDER, _NUMBER, _COLUMNS = "_lender", "_lent_layer", "_lent_columns"


class Lender(Protocol):
    """What makes the tensors of lent layers."""

    @property
    def num_columns(self) -> int:
        """Columns of keys and values."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether it has materialised."""
        ...

    def materialise(self) -> None:
        """Call `settle` for every layer that is lent by this."""
        ...

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Keep others from materialising within the block."""
        ...

    def copy(self) -> Lender:
        """Return a lender of the same contents, without layers."""
        ...

    def register(self, layer: LentLayer) -> None:
        """Take in a layer."""
        ...

    def state_shapes(self, layer: int, num_columns: int) -> tuple[torch.Size, torch.Size]:
        """Return the shapes of keys and values of a layer."""
        ...


def _own(layer: Any) -> dict[str, Any]:
    """Return what an object itself has, to be written as well."""
    own: dict[str, Any] = getattr(layer, "__dict__", {})
    return own


class LentLayer(DynamicLayer):
    """A `DynamicLayer` without tensors."""

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            materialise(self)
            return _own(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _TENSORS:
            materialise(self)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        materialise(self)
        object.__delattr__(self, name)

    def __repr__(self) -> str:
        return DynamicLayer.__name__

    def __reduce_ex__(self, protocol: Any) -> Any:
        materialise(self)
        return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        lender: Lender | None = _own(self).get(_LENDER)
        if lender is not None:
            with lender.turn():
                if is_lent(self) and (copied := _copy_of(lender, memo)) is not None:
                    layer: LentLayer = LentLayer.__new__(LentLayer)
                    state = {k: v for k, v in _own(self).items() if k != _LENDER}
                    _own(layer).update(copy.deepcopy(state, memo), **{_LENDER: copied})
                    copied.register(layer)
                    return layer
        materialise(self)
        return copy.deepcopy(self, memo)

    def get_seq_length(self) -> int:
        columns = _own(self).get(_COLUMNS)
        return DynamicLayer.get_seq_length(self) if columns is None else int(columns)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        lender: Lender | None = _own(self).get(_LENDER)
        count = args[0] if len(args) == 1 and not kwargs else kwargs.get("tokens_to_remove")
        if lender is not None and type(count) is int:
            with lender.turn():
                columns = _own(self).get(_COLUMNS)
                if columns is not None and -columns < count <= 0:
                    _own(self)[_COLUMNS] = columns + count
                    return
        materialise(self)
        self.crop(*args, **kwargs)


def _copy_of(lender: Lender, memo: dict[int, Any]) -> Lender | None:
    """Return the lender of what is being copied, None if it has materialised meanwhile."""
    copied: Lender | None = memo.get(id(lender))
    if copied is None:
        memo[id(lender)] = copied = lender.copy()
        # The memo goes by ids, so it must keep the objects.
        memo.setdefault(id(memo), []).append(lender)
    return None if copied.is_over else copied


def lend(cache: DynamicCache, numbers: Sequence[int], lender: Lender, example: Tensor) -> None:
    """Turn layers of a cache into lent ones; they must be plain, and hold what the lender has.

    Args:
        numbers: of the layers; the first becomes layer 0 of the lender, and so on.
        example: an empty tensor of the dtype and on the device of keys and values.
    """
    template = DynamicLayer()
    template.lazy_initialization(example, example)
    state = {name: value for name, value in _own(template).items() if name not in _TENSORS}
    for ours, number in enumerate(numbers):
        layer = cache.layers[number]
        own = _own(layer)
        own.update(state)
        own.update({_LENDER: lender, _NUMBER: ours, _COLUMNS: lender.num_columns})
        for name in _TENSORS:
            own.pop(name, None)
        layer.__class__ = LentLayer
        lender.register(layer)


def add_layers(cache: DynamicCache, numbers: Sequence[int]) -> bool:
    """Make the layers of these numbers; say whether all of them keep all keys and values."""
    while len(cache.layers) <= max(numbers):
        if cache.layer_class_to_replicate is not DynamicLayer:
            return False
        cache.layers.append(DynamicLayer())
    return all(is_plain_layer(cache.layers[number]) for number in numbers)


def settle(layer: LentLayer, keys: Tensor, values: Tensor) -> None:
    """Give a lent layer its tensors; from here on it is a `DynamicLayer` like any other."""
    own = _own(layer)
    own["keys"], own["values"] = keys, values
    for name in (_COLUMNS, _NUMBER, _LENDER):
        own.pop(name, None)
    layer.__class__ = DynamicLayer


def is_lent(layer: Any) -> bool:
    """Say whether the tensors of a layer are elsewhere."""
    return type(layer) is LentLayer and _LENDER in _own(layer)


def lent_place(layer: LentLayer) -> tuple[int, int]:
    """Return the number that the lender knows a layer by, and its columns."""
    own = _own(layer)
    return own[_NUMBER], own[_COLUMNS]


def materialise(layer: Any) -> None:
    """Make the tensors of a layer, and of those that are lent with it."""
    lender = _own(layer).get(_LENDER)
    if lender is not None:
        lender.materialise()


def lender(layer: Any) -> Any:
    """Return who lends a layer, or None."""
    return _own(layer).get(_LENDER)


def lender_of(cache: Any, numbers: Sequence[int]) -> Any:
    """Return who lends layers of a cache, if one lends all of these in this order, else None."""
    layers = cache.layers
    if not numbers or len(layers) != len(numbers) or not all(map(is_lent, layers)):
        return None
    lender = _own(layers[numbers[0]])[_LENDER]
    columns = _own(layers[numbers[0]])[_COLUMNS]
    for ours, number in enumerate(numbers):
        own = _own(layers[number])
        if own[_LENDER] is not lender or (own[_NUMBER], own[_COLUMNS]) != (ours, columns):
            return None
    return lender


def lenders(cache: Any) -> list[Any]:
    """Return those who lend any layer of a cache."""
    found = [_own(layer).get(_LENDER) for layer in getattr(cache, "layers", ())]
    return list({id(lender): lender for lender in found if lender is not None}.values())


def is_plain_layer(layer: Any) -> bool:
    """Say whether a layer keeps all keys and values, here or elsewhere."""
    return type(layer) is DynamicLayer or type(layer) is LentLayer


def state_shapes(layer: Any) -> tuple[Any, Any]:
    """Return the shapes of keys and values, None without them; nothing is made for that."""
    own = _own(layer)
    lender: Lender | None = own.get(_LENDER)
    if lender is not None:
        number, columns = own.get(_NUMBER), own.get(_COLUMNS)
        if number is not None and columns is not None:
            return lender.state_shapes(number, columns)
    keys, values = layer.keys, layer.values
    return (None if keys is None else keys.shape, None if values is None else values.shape)


__all__ = [
    "Lender",
    "LentLayer",
    "add_layers",
    "is_lent",
    "is_plain_layer",
    "lend",
    "lender",
    "lender_of",
    "lenders",
    "lent_place",
    "materialise",
    "settle",
    "state_shapes",
]
