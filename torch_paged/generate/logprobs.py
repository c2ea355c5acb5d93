"""Log-probabilities of the tokens that `generate()` samples, kept as the step computes them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged.engine.batch import BatchRun
from torch_paged.engine.token_history import TokenHistory
from torch_paged.errors import TorchPagedError
from torch_paged.generate.samplers import SamplerShelf, looks_back
from torch_paged.generate.transforms import Blueprint, Shape, blueprint
from torch_paged.ops.argmax import argmax
from torch_paged.ops.token_logprobs import token_logprobs
from torch_paged.patches import seams

_LEAST_STEPS = 64
_LEAST_CAPACITY = 256


class TokenLogprobs:
    """What the newest call of `generate()` drew its tokens from.

    All are float32 [num_rows, num_new_tokens], and 0 behind the end of a row.

    Attributes:
        raw: log-probability of each sampled token by the model's own logits.
        processed: the same by what it was drawn from: after penalties and temperature, among the
            tokens that top-k, top-p and other filters keep.
        kept: probability, after penalties and temperature, of all tokens that the filters keep;
            ``processed + kept.log()`` is the log-probability without the filters.

    Raises:
        TorchPagedError: on reading, where there was no call, or one that does not record.
    """

    def __init__(self) -> None:
        self._values: tuple[Tensor, Tensor, Tensor] | None = None
        self._missing = "generate() was not called"

    @property
    def raw(self) -> Tensor:
        return self._read()[0]

    @property
    def processed(self) -> Tensor:
        return self._read()[1]

    @property
    def kept(self) -> Tensor:
        return self._read()[2]

    def _read(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._values is None:
            raise TorchPagedError(
                f"no log-probabilities were recorded: {self._missing}; greedy decoding and "
                "sampling on the accelerated path leave some, see torch_paged.explain(model)"
            )
        return self._values

    def take(self, values: Tensor) -> None:
        """Keep values [num_steps, 3, num_rows] of a call."""
        raw, processed, kept = values.permute(1, 2, 0).contiguous().unbind()
        self._values = (raw, processed, kept)

    def miss(self, why: str) -> None:
        """Say why the newest call left nothing."""
        self._values, self._missing = None, why


class RecordingSampler:
    """Processors in their order, the choice of tokens, and what it came from.

    Args:
        num_steps: most steps of a call.
        capacity: columns of the longest sequence.
        num_unfiltered: transforms in front of the first filter.
    """

    any_rows = False

    def __init__(
        self,
        blueprints: Sequence[Blueprint],
        shape: Shape,
        num_steps: int,
        capacity: int,
        key: Hashable,
        *,
        draws: bool,
        watches_ids: bool,
        num_unfiltered: int,
    ) -> None:
        self.key = key
        self.draws = draws
        self._transforms = [build(shape) for _, build in blueprints]
        self._num_unfiltered = num_unfiltered
        self._watches_ids = watches_ids
        self._history = TokenHistory(shape.num_rows, capacity, shape.device)
        with torch.inference_mode(False):
            self._record = torch.zeros(
                (num_steps, 3, shape.num_rows), dtype=torch.float32, device=shape.device
            )
            self._slots = torch.zeros(shape.num_rows, dtype=torch.int32, device=shape.device)
        self._counts = self._finished = self._slots

    def start(self, processors: Sequence[Any], prompt_ids: Tensor, run: BatchRun) -> None:
        """Begin a batch whose prompts are `prompt_ids` [num_rows, width]."""
        self._counts, self._finished = run.state.num_generated, run.state.finished
        self._slots.copy_(run.rows.index)
        if self._watches_ids:
            self._history.start(prompt_ids, run.state, run.rows.index)
        for transform, processor in zip(self._transforms, processors, strict=True):
            transform.start(processor, prompt_ids)

    def __call__(self, logits: Tensor) -> Tensor:
        if self._watches_ids:
            self._history.observe()
        scores = logits.to(dtype=torch.float32, copy=True)
        for transform in self._transforms[: self._num_unfiltered]:
            scores = transform(scores, self._history)
        unfiltered = scores  # no transform of ours writes to what it is given
        for transform in self._transforms[self._num_unfiltered :]:
            scores = transform(scores, self._history)
        if self.draws:
            probs = torch.softmax(scores, dim=-1)
            tokens = torch.multinomial(probs, num_samples=1).squeeze(1)
        else:
            tokens = argmax(scores)
        values = chosen_from(logits, unfiltered, scores, tokens)
        values = values.masked_fill(self._finished.index_select(0, self._slots), 0.0)
        at = self._counts.index_select(0, self._slots[:1]).long()
        self._record.index_copy_(0, at, values[None])
        return tokens

    def values(self, num_steps: int) -> Tensor:
        """Return what the first steps recorded, [num_steps, 3, num_rows]."""
        return self._record[:num_steps].clone()


def chosen_from(logits: Tensor, unfiltered: Tensor, scores: Tensor, tokens: Tensor) -> Tensor:
    """Return raw and processed log-probabilities and the kept probability, [3, num_rows].

    Args:
        logits: [num_rows, vocab_size], as all others, of the model.
        unfiltered: scores in front of the first filter.
        scores: that tokens [num_rows] were chosen by; -inf where they are left out.
    """
    kept = torch.softmax(unfiltered, dim=-1).masked_fill(scores == -torch.inf, 0.0).sum(-1)
    raw, processed = token_logprobs(logits, tokens), token_logprobs(scores, tokens)
    return torch.stack([raw, processed, kept])


def num_unfiltered(processors: Sequence[Any]) -> int:
    """Return how many processors come before the first that leaves unlikely tokens out."""
    found = (i for i, p in enumerate(processors) if isinstance(p, seams.SCORE_FILTERS))
    return next(found, len(processors))


class WatchedProcessors:
    """Processors that run between the steps, and what the tokens chosen by them came from."""

    def __init__(self, processors: Any) -> None:
        count = num_unfiltered(processors)
        self._before = seams.LogitsProcessorList(processors[:count])
        self._filters = seams.LogitsProcessorList(processors[count:])
        self._unfiltered: Tensor | None = None
        self._values: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = self._before(input_ids, scores)
        self._unfiltered = scores.clone()
        out: Tensor = self._filters(input_ids, scores)
        return out

    def note(self, logits: Tensor, scores: Tensor, tokens: Tensor, unfinished: Tensor) -> None:
        """Take in the tokens of a step, chosen by `scores`, of rows that are `unfinished`."""
        assert self._unfiltered is not None
        values = chosen_from(
            logits.to(scores.device), self._unfiltered, scores, tokens.to(torch.int64)
        )
        self._values.append(values.masked_fill(unfinished == 0, 0.0))

    def values(self) -> Tensor:
        """Return [num_steps, 3, num_rows]."""
        return torch.stack(self._values)


def take_recording_sampler(
    shelf: SamplerShelf,
    processors: Sequence[Any],
    prompt_ids: Tensor,
    run: BatchRun,
    max_new_tokens: int,
    *,
    do_sample: bool,
) -> RecordingSampler:
    """Return a sampler that records, for a batch that has been prefilled.

    Args:
        processors: all known in the step.
    """
    blueprints = []
    for processor in processors:
        made = blueprint(processor, run.vocab_size)
        assert made is not None, "decide() lets none through that is not known"
        blueprints.append(made)
    shape = Shape(prompt_ids.shape[0], run.vocab_size, prompt_ids.device)
    watches_ids, first = looks_back(processors), num_unfiltered(processors)
    num_steps = max(_LEAST_STEPS, 1 << (max_new_tokens - 1).bit_length())
    capacity = _LEAST_CAPACITY
    if watches_ids:
        width = prompt_ids.shape[1] + max_new_tokens
        capacity = max(capacity, 1 << (width - 1).bit_length())
    sizes = (shape.num_rows, shape.vocab_size, shape.device, num_steps, capacity)

    def build(key: Hashable) -> RecordingSampler:
        return RecordingSampler(
            blueprints,
            shape,
            num_steps,
            capacity,
            key,
            draws=do_sample,
            watches_ids=watches_ids,
            num_unfiltered=first,
        )

    name = ("recording", *sizes, do_sample, *(key for key, _ in blueprints))
    sampler = shelf.keep(name, build)
    assert isinstance(sampler, RecordingSampler)
    sampler.start(processors, prompt_ids, run)
    return sampler


__all__ = [
    "RecordingSampler",
    "TokenLogprobs",
    "WatchedProcessors",
    "chosen_from",
    "num_unfiltered",
    "take_recording_sampler",
]
