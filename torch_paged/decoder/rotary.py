"""Rotary tables whose frequencies follow the length: what a batch hands over to the next one.

Hugging Face's dynamic NTK remembers, in its module, the longest length since it was last short,
and keeps the frequencies of that length until it is short again. A batch of ours starts from what
the module remembers and leaves there what Hugging Face would have left.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_paged.decoder.spec import DecoderSpec, RotaryChange, RotarySpec
from torch_paged.ops.rotary_by_span import dynamic_frequencies


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """Return the table [rotary_dim / 2] as float32, as transformers reads it."""
    return getattr(spec.ref.module, spec.buffer).detach().float()


def long_frequencies(spec: RotarySpec, like: Tensor) -> Tensor | None:
    """Return the frequencies past the limit, None where a formula gives them."""
    assert spec.change is not None
    return _constant(spec.change.long, like.device) if spec.change.long else None


@functools.cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    # Kept: graphs outlive the plans that they were captured from.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def changes_with_length(spec: DecoderSpec) -> bool:
    """Say whether any table depends on the length of the sequence."""
    return any(rotary.change is not None for rotary in spec.rotaries)


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
    tables = [(r.ref.module, r.change) for r in spec.rotaries if r.change is not None]
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
    for rotary in spec.rotaries:
        if rotary.change is not None and not rotary.change.long:
            yield rotary, rotary.change


def _reached(rotary: RotarySpec, change: RotaryChange, device: torch.device) -> Tensor:
    # An int at first; Hugging Face's own forward leaves a tensor.
    return torch.as_tensor(getattr(rotary.ref.module, change.memory), device=device)
