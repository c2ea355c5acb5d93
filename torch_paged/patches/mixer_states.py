"""State that layers keep besides keys and values: of convolutions, recurrences, linear attention.

It lives in tensors by slot, as the slot state does. A step hands a model the states of its rows in
a cache of transformers' own layers and takes them back when the forward is done, so a mixer does
to them just what it does in Hugging Face's `generate()`. Padding rows share the last row of the
tensors, which nobody reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.state_seams import StateCache, put_state


class _Part(NamedTuple):
    """One state tensor of one layer, as a row of it looks."""

    layer: int
    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class MixerStates:
    """The states of all layers, by slot.

    Args:
        config: the text config of the model.
        probed: a cache that a short forward of one row has filled.

    Raises:
        SpecRefusal: a layer that should keep a state there did not.
    """

    def __init__(self, config: Any, probed: StateCache) -> None:
        self._config = config
        self._parts = [
            _Part(layer, kind, index, tuple(state.shape[1:]), state.dtype)
            for layer, kind, index, state in probed.states()
        ]
        keeping = {part.layer for part in self._parts}
        for layer in probed.state_layers:
            if layer not in keeping:
                raise SpecRefusal(f"layer {layer} keeps its state outside the cache")
        self._tensors: list[Tensor] = []

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Have room for `num_slots`; the states of slots that there were stay."""
        old = self._tensors
        if old and old[0].shape[0] == num_slots + 1:
            return
        # Made under inference_mode, they could not be written outside of it.
        with torch.inference_mode(False):
            self._tensors = [
                torch.zeros(num_slots + 1, *part.shape, dtype=part.dtype, device=device)
                for part in self._parts
            ]
        for before, after in zip(old, self._tensors, strict=False):
            kept = min(before.shape[0] - 1, num_slots)
            after[:kept].copy_(before[:kept])

    def free(self) -> None:
        self._tensors = []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def begin(self) -> StateCache:
        """Return a cache for rows that begin."""
        return StateCache(self._config)

    def load(self, slots: Tensor) -> StateCache:
        """Return a cache with the states of `slots` [num_rows] int32, -1 for padding rows."""
        cache, index = self.begin(), self._rows(slots)
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            put_state(cache, part.layer, part.kind, part.number, tensor.index_select(0, index))
        return cache

    def store(self, cache: StateCache, slots: Tensor) -> None:
        """Keep what a forward left in a cache as the states of `slots`."""
        index = self._rows(slots)
        states = {(layer, kind, i): state for layer, kind, i, state in cache.states()}
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            tensor.index_copy_(0, index, states[part.layer, part.kind, part.number])

    def fill(self, cache: Any, slots: Tensor) -> None:
        """Put copies of the states of `slots` into a cache of `generate()`."""
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            states = tensor.index_select(0, slots.long())
            put_state(cache, part.layer, part.kind, part.number, states)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Let slots `targets` [n] go on from what `sources` [n] hold now; both may overlap."""
        for tensor in self._tensors:
            tensor.index_copy_(0, targets.long(), tensor.index_select(0, sources.long()))

    def _rows(self, slots: Tensor) -> Tensor:
        spare = self._tensors[0].shape[0] - 1
        return torch.where(slots < 0, spare, slots).long()


__all__ = ["MixerStates"]
