"""What the engine needs of a step; `decoder.step.DecoderStep` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torch_paged.cache.pool import LayerShape
from torch_paged.decoder.inputs import Binding, StepInputs


class StepModel(Protocol):
    """A model that computes logits from slot state and a paged cache."""

    @property
    def layer_shapes(self) -> Sequence[LayerShape]: ...

    @property
    def layer_windows(self) -> Sequence[int]:
        """Of each layer: a query at index i sees tokens from i - window + 1 on; 0 for all."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def storage_key(self) -> tuple[object, ...]:
        """Equal for two runs that may share a captured graph."""
        ...

    @property
    def variant(self) -> int:
        """Of the same parameters, what the model makes of them: its adapters' state, numbered.

        Graphs of one variant stay while another runs.
        """
        ...

    @property
    def has_spans(self) -> bool:
        """Say whether keys depend on the length of the sequence, see `StepInputs.spans`."""
        ...

    def first_floor(self, span: Tensor) -> Tensor:
        """Return the least length, int64 [], that a batch of prompts up to `span` counts with."""
        ...

    def remember_spans(self, first: Tensor, last: Tensor) -> None:
        """Leave in the model what forwards over lengths from `first` to `last` leave there."""
        ...

    def bind(self, binding: Binding) -> None:
        """Use these state and cache tensors from now on."""
        ...

    def unbind(self) -> None:
        """Forget the binding and every tensor that it kept alive."""
        ...

    def refresh(self) -> bool:
        """Notice parameters that moved since the last run; say whether any did."""
        ...

    def tensors(self) -> Sequence[Tensor]:
        """Return the parameters and buffers that a step reads."""
        ...

    def prefill(self, inputs: StepInputs) -> Tensor:
        """Return logits [len(last_index), vocab_size] of the tokens that `last_index` names."""
        ...

    def decode(self, slots: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size]; writes the cache, not the slot state."""
        ...
