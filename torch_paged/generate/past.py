"""A cache passed in: how much of the prompt it has, its way into blocks, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.batch import BatchRun, Keeps
from torch_paged.engine.core import EngineCore
from torch_paged.engine.packed_prompts import CachedKV
from torch_paged.generate.leased_cache import CacheLease
from torch_paged.patches import seams
from torch_paged.patches.patched_step import PatchedStep

LayerStates = Callable[[Any, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a call's full attention mask.

    Attributes:
        num_past: those that the cache has.
        num_new: those to be run.
        real: [num_rows, num_past + num_new] on the model's device; None where all are.
        lease: has those of the cache in blocks that the run goes on from; None: they are copied.
    """

    num_past: int
    num_new: int
    real: Tensor | None
    lease: CacheLease | None = None

    @property
    def cached_index(self) -> Tensor | None:
        """Flat indices of the real columns that the cache has."""
        return _flat(self.real, 0, self.num_past)

    @property
    def new_index(self) -> Tensor | None:
        """Flat indices of the real columns to be run, counted among these."""
        return _flat(self.real, self.num_past, None)


def text_positions(positions: Tensor | None) -> Tensor | None:
    """Return positions [rows, columns] of those of a call.

    Models that read images have one for each of time, height and width, which are equal in text.
    """
    return positions if positions is None or positions.dim() != 3 else positions[-1]


def full_width(mask: Tensor | None, config: Any, positions: Tensor | None) -> int | None:
    """Return the columns of the full attention mask of a call, if anything tells them."""
    if mask is not None:
        return mask.shape[1]
    width = seams.dropped_mask_width(config)
    if width is None and positions is not None:
        width = positions.shape[1]
    return width


def num_past_columns(cache: Any) -> int:
    """Return how many columns a plain dynamic cache that the caller passed in has."""
    if cache is None or not seams.cache_is_user_defined(cache):
        return 0
    return seams.cache_length(cache)


def past_reasons(
    cache: Any, shapes: Any, num_rows: int, num_ids: int, width: int | None, has_window: bool
) -> list[str]:
    """Say why a cache with something in it cannot be read into blocks.

    Args:
        shapes: of the layers of our step.
        num_ids: columns of input_ids.
        width: of the full attention mask.
    """
    past = num_past_columns(cache)
    if has_window:
        return ["a cache was passed in, and a layer has a sliding window"]
    if not seams.has_plain_layers(cache, num_rows, shapes):
        return ["a cache was passed in whose layers are not those of the model and the batch"]
    if width not in (num_ids, past + num_ids) or (width == num_ids and past >= num_ids):
        return ["the cache that was passed in does not fit input_ids and attention_mask"]
    return []


def wanted_kv(cache: Any, returned: bool, core: EngineCore) -> Keeps:
    """Say what a run has to keep for the cache of its call.

    Args:
        returned: the cache is part of the call's result.
    """
    if cache is None or not (returned or seams.cache_is_user_defined(cache)):
        return "nothing"
    return "windows" if seams.forgets_behind_windows(cache, core.layout.windows) else "all"


def cached_kv(cache: Any, columns: Columns, states: LayerStates = seams.layer_states) -> CachedKV:
    """Return the reader of the real columns of a cache, layer by layer.

    Args:
        states: gives keys and values of a layer of `cache`.
    """
    index = columns.cached_index

    def packed(states: Tensor) -> Tensor:
        # [rows, heads, columns, dim] -> [tokens, heads, dim]
        tokens = states.detach().transpose(1, 2).flatten(0, 1)
        return tokens if index is None else tokens.index_select(0, index)

    def read(layer: int) -> tuple[Tensor, Tensor]:
        keys, values = states(cache, layer)
        return packed(keys), packed(values)

    return read


def fill_cache(
    cache: Any,
    run: BatchRun,
    columns: Columns,
    num_steps: int,
    step: DecoderStep | PatchedStep,
) -> None:
    """Append what a run computed to the call's cache, each token in its column."""
    dtype, repeats = step.dtype, step.cache_repeats
    num_rows, num_columns = len(run.rows), columns.num_new + num_steps - 1
    if not num_columns:
        return
    index = None
    if columns.real is not None:
        ran = columns.real[:, columns.num_past :]
        more = ran.new_ones((num_rows, num_steps - 1))
        index = _flat(torch.cat([ran, more], dim=1), 0, None)

    def in_columns(rows: list[Tensor]) -> Tensor:
        tokens = torch.cat([row.transpose(0, 1) for row in rows]).to(dtype)
        if repeats > 1:
            tokens = tokens.repeat_interleave(repeats, dim=1)
        shape = (num_rows, num_columns, *tokens.shape[1:])
        if index is not None:
            padded = tokens.new_zeros((num_rows * num_columns, *tokens.shape[1:]))
            tokens = padded.index_copy_(0, index, tokens)
        return tokens.reshape(shape).transpose(1, 2).contiguous()

    for layer, number in enumerate(step.cache_layers):
        keys, values = run.gather_kv(layer, num_steps)
        cache.update(in_columns(keys), in_columns(values), number)
    step.fill_states(cache, run.rows.index)


def _flat(real: Tensor | None, start: int, stop: int | None) -> Tensor | None:
    return None if real is None else real[:, start:stop].reshape(-1).nonzero().squeeze(1)


__all__ = [
    "Columns",
    "cached_kv",
    "fill_cache",
    "full_width",
    "num_past_columns",
    "past_reasons",
    "text_positions",
    "wanted_kv",
]
