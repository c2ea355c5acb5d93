"""Rotary tables whose frequencies follow the length: what a batch hands over to the next one.

Hugging Face's dynamic NTK remembers, in its module, the longest length since it was last short,
and keeps the frequencies of that length until it is short again. A batch of ours starts from what
the module remembers and leaves there what Hugging Face would have left.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_paged.decoder.spec import DecoderSpec, RotaryChange, RotarySpec
from torch_paged.ops.rotary_by_span import dynamic_frequencies

# Tables that plans read besides the buffers themselves: graphs hold their addresses, and outlive
# the plans that they were captured from.
_tables: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()


def _table(module: nn.Module, name: str, source: Tensor) -> Tensor:
    """Return what `source` holds as float32, for one module and name always at one place."""
    tables = _tables.setdefault(module, {})
    table = tables.get(name)
    # Made under inference_mode, it could not be written outside of it.
    with torch.inference_mode(False):
        if table is None or table.shape != source.shape or table.device != source.device:
            table = tables[name] = torch.empty_like(source, dtype=torch.float32)
        return table.copy_(source)


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """Return the table [rotary_dim / 2] as float32, contiguous, as transformers reads it."""
    source = getattr(spec.ref.module, spec.buffer).detach()
    if source.dtype == torch.float32 and source.is_contiguous():
        return source
    return _table(spec.ref.module, spec.buffer, source)


def long_frequencies(spec: RotarySpec, like: Tensor) -> Tensor | None:
    """Return the frequencies past the limit, None where a formula gives them."""
    assert spec.change is not None
    return constant(spec.change.long, like.device) if spec.change.long else None


@functools.cache
def constant(
    values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `values` as a tensor, for one device and dtype always the same."""
    # Kept: graphs outlive the plans that they were captured from.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def changes_with_length(spec: DecoderSpec) -> bool:
    """Say whether any table depends on the length of the sequence."""
    return any(changing_rotaries(spec))


def changing_rotaries(spec: DecoderSpec) -> Iterator[tuple[RotarySpec, RotaryChange]]:
    """Yield the tables that depend on the length, and how."""
    for rotary in spec.rotaries:
        if isinstance(rotary, RotarySpec) and rotary.change is not None:
            yield rotary, rotary.change


def first_floor(spec: DecoderSpec, span: Tensor) -> Tensor:
    """Return the least span that the tokens of a new batch are counted with, int64 [].

    Args:
        span: longest prompt of the batch.
    """
    for rotary, change in _dynamic(spec):
        reached = _reached(rotary, change, span.device)
        return torch.where(span < change.limit, 0, reached)
    return torch.zeros_like(span)


def remember(spec: DecoderSpec, first: Tensor, last: Tensor) -> None:
    """Leave in the modules what forwards over lengths from `first` to `last` leave there."""
    # Tensors of inference_mode would spoil a later forward in training.
    with torch.inference_mode(False), torch.no_grad():
        for rotary, change in _dynamic(spec):
            reached = _reached(rotary, change, last.device)
            least = torch.where(first < change.limit, change.limit, reached)
            longest = torch.maximum(least, last)
            short, formula = inverse_frequencies(rotary), (change.base, change.factor)
            grown = dynamic_frequencies(longest[None], short, change.limit, *formula)[0]
            module: Any = rotary.ref.module
            setattr(module, change.memory, longest)
            frequencies = torch.where(longest > change.limit, grown, short)
            module.register_buffer(change.live, frequencies, persistent=False)


@contextlib.contextmanager
def preserved(spec: DecoderSpec) -> Iterator[None]:
    """Put back what calls within the block leave in the rotary modules."""
    tables: list[tuple[Any, RotaryChange]]
    tables = [(rotary.ref.module, change) for rotary, change in changing_rotaries(spec)]
    # Some versions write the live table in place.
    before = [(getattr(m, c.live).clone(), getattr(m, c.memory, None)) for m, c in tables]
    try:
        yield
    finally:
        for (module, change), (table, reached) in zip(tables, before, strict=True):
            module.register_buffer(change.live, table, persistent=False)
            if change.memory:
                setattr(module, change.memory, reached)


def _dynamic(spec: DecoderSpec) -> Iterator[tuple[RotarySpec, RotaryChange]]:
    for rotary, change in changing_rotaries(spec):
        if not change.long:
            yield rotary, change


def _reached(rotary: RotarySpec, change: RotaryChange, device: torch.device) -> Tensor:
    reached = getattr(rotary.ref.module, change.memory)
    if isinstance(reached, Tensor):  # as Hugging Face's own forward leaves it
        return reached.to(device)
    return torch.full((), reached, dtype=torch.int64, device=device)
