"""Which sampler serves a call: greedy, transformers' order, or one with processors in the step."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged.engine.batch import BatchRun
from torch_paged.engine.sampler import GreedySampler, HfOrderSampler, Sampler
from torch_paged.engine.token_history import TokenHistory
from torch_paged.generate.transforms import Blueprint, Shape, blueprint
from torch_paged.ops.argmax import argmax
from torch_paged.patches import seams

# A window of ids is compared at every column: past this, that is no longer small beside a step.
_MAX_HISTORY = 1 << 22
_MAX_KEPT = 8
_LEAST_CAPACITY = 256


class ProcessedSampler:
    """Processors in their order, then the maximum or one multinomial over the live rows.

    It owns the static tensors that its captured graphs read, so it is kept for later calls.
    """

    any_rows = False

    def __init__(
        self,
        blueprints: Sequence[Blueprint],
        shape: Shape,
        capacity: int,
        key: Hashable,
        *,
        draws: bool,
    ) -> None:
        self.key = key
        self.draws = draws
        self._transforms = [build(shape) for _, build in blueprints]
        self._history = TokenHistory(shape.num_rows, capacity, shape.device)

    def start(self, processors: Sequence[Any], prompt_ids: Tensor, run: BatchRun) -> None:
        """Begin a batch whose prompts are `prompt_ids` [num_rows, width]."""
        self._history.start(prompt_ids, run.state, run.rows.index)
        for transform, processor in zip(self._transforms, processors, strict=True):
            transform.start(processor, prompt_ids)

    def __call__(self, logits: Tensor) -> Tensor:
        self._history.observe()
        scores = logits.to(dtype=torch.float32, copy=True)
        for transform in self._transforms:
            scores = transform(scores, self._history)
        if not self.draws:
            return argmax(scores)
        probs = torch.softmax(scores, dim=-1)
        return torch.multinomial(probs, num_samples=1).squeeze(1)


class SamplerShelf:
    """Samplers with state, the least recently used ones given up."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Sampler] = OrderedDict()
        self._serials = itertools.count()

    def take(
        self, blueprints: Sequence[Blueprint], shape: Shape, num_tokens: int, *, draws: bool
    ) -> ProcessedSampler:
        """Return a sampler of this make, for sequences of up to `num_tokens` columns."""
        capacity = max(_LEAST_CAPACITY, 1 << (num_tokens - 1).bit_length())
        sizes = (shape.num_rows, shape.vocab_size, shape.device, capacity)
        name = (*sizes, draws, *(key for key, _ in blueprints))

        def build(key: Hashable) -> ProcessedSampler:
            return ProcessedSampler(blueprints, shape, capacity, key, draws=draws)

        sampler = self.keep(name, build)
        assert isinstance(sampler, ProcessedSampler)
        return sampler

    def keep(self, name: Hashable, build: Callable[[Hashable], Sampler]) -> Sampler:
        """Return the sampler of this name, built with a key of its own if there is none."""
        sampler = self._kept.pop(name, None)
        if sampler is None:
            # A graph of a sampler that was given up must never be found again.
            sampler = build(("processed", next(self._serials)))
        self._kept[name] = sampler
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return sampler

    def clear(self) -> None:
        """Give all of them up."""
        self._kept.clear()


def unknown_processors(processors: Sequence[Any], vocab_size: int) -> list[str]:
    """Name the processors that are not known in the step."""
    return [type(p).__name__ for p in processors if blueprint(p, vocab_size) is None]


def is_long(num_rows: int, num_tokens: int) -> bool:
    """Say whether ids of this many rows and columns are too many to look back at in the step."""
    return num_rows * num_tokens > _MAX_HISTORY


def looks_back(processors: Sequence[Any]) -> bool:
    """Say whether any processor is more than a function of the scores."""
    return any(type(p) not in seams.SCORE_WARPERS for p in processors)


def make_sampler(
    shelf: SamplerShelf,
    processors: Sequence[Any],
    prompt_ids: Tensor,
    run: BatchRun,
    num_tokens: int,
    *,
    do_sample: bool,
) -> Sampler:
    """Return the sampler of a batch that has been prefilled.

    Args:
        processors: all known in the step.
        num_tokens: columns of the longest sequence, prompt included.
    """
    if not processors and not do_sample:
        return GreedySampler()
    blueprints = []
    for processor in processors:
        made = blueprint(processor, run.vocab_size)
        assert made is not None, "decide() lets none through that is not known"
        blueprints.append(made)
    if not looks_back(processors):
        # These never look at the ids.
        transforms = [lambda scores, warper=warper: warper(None, scores) for warper in processors]
        return HfOrderSampler(transforms, tuple(key for key, _ in blueprints), draws=do_sample)
    shape = Shape(prompt_ids.shape[0], run.vocab_size, prompt_ids.device)
    sampler = shelf.take(blueprints, shape, num_tokens, draws=do_sample)
    sampler.start(processors, prompt_ids, run)
    return sampler


__all__ = [
    "ProcessedSampler",
    "SamplerShelf",
    "is_long",
    "looks_back",
    "make_sampler",
    "unknown_processors",
]
