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
    def keeps_state(self) -> bool:
        """Whether layers keep a state by slot besides keys and values.

        Prompts are then computed whole and each from its first token, and what goes on from a row
        in another slot needs `copy_states`.
        """
        ...

    @property
    def layer_flops(self) -> float:
        """Operations that one token takes in a layer, about; 0 where that is not known."""
        ...

    @property
    def max_positions(self) -> int:
        """Positions are below this; 0 where there is no end."""
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

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Let slots `targets` [n] go on from the states that `sources` [n] have now."""
        ...

    def prefill(self, inputs: StepInputs) -> Tensor:
        """Return logits [len(last_index), vocab_size] of the tokens that `last_index` names."""
        ...

    def extend(self, inputs: StepInputs) -> Tensor:
        """Do the same for a few tokens behind cached ones, in about the time of a decode step."""
        ...

    def decode(self, slots: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size]; writes the cache, not the slot state."""
        ...
