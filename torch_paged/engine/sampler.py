"""Samplers: logits [num_rows, vocab_size] to tokens [num_rows] int64, without host work."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torch_paged.ops.argmax import argmax

ScoreTransform = Callable[[Tensor], Tensor]


class Sampler(Protocol):
    """One way to choose tokens.

    Attributes:
        key: equal for samplers that may share a captured graph.
        any_rows: rows do not influence each other, so bucket padding is harmless and the sampler
            may be captured in one graph with the step. Otherwise it sees exactly the live rows.
        draws: it draws from the device's default generator.
    """

    key: Hashable
    any_rows: bool
    draws: bool

    def __call__(self, logits: Tensor) -> Tensor: ...


class GreedySampler:
    """The first index of the maximum."""

    key: Hashable = "greedy"
    any_rows = True
    draws = False

    def __call__(self, logits: Tensor) -> Tensor:
        return argmax(logits)


class HfOrderSampler:
    """Score transforms, softmax and one multinomial over the live rows, as transformers draws.

    Args:
        transforms: functions of float32 scores [num_rows, vocab_size], without state.
        key: identifies the transforms and their parameters.
        draws: False takes the maximum instead.
    """

    any_rows = False

    def __init__(
        self, transforms: Sequence[ScoreTransform], key: Hashable, *, draws: bool = True
    ) -> None:
        self.key: Hashable = ("hf", draws, key)
        self.draws = draws
        self._transforms = tuple(transforms)

    def __call__(self, logits: Tensor) -> Tensor:
        scores = logits.to(dtype=torch.float32, copy=True)
        for transform in self._transforms:
            scores = transform(scores)
        if not self.draws:
            return argmax(scores)
        probs = torch.softmax(scores, dim=-1)
        return torch.multinomial(probs, num_samples=1).squeeze(1)
