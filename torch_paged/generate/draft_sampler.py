"""The sampler of drafts: it keeps what scores each token was drawn from, and how likely it was."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged.engine.row_run import RowRun
from torch_paged.engine.token_history import TokenHistory
from torch_paged.generate.samplers import SamplerShelf, looks_back
from torch_paged.generate.transforms import Blueprint, Shape, blueprint
from torch_paged.ops.argmax import argmax

_LEAST_DEPTH = 8
_LEAST_CAPACITY = 256


class DraftSampler:
    """Processors in their order, then the maximum or one multinomial, for a single row.

    It owns the static tensors that its captured graphs read and write, so it is kept for later
    rounds and calls.

    Args:
        depth: most tokens of a draft.
        capacity: columns of the longest sequence.
        watches_ids: whether any processor looks at the ids.

    Attributes:
        scores: [depth, vocab_size] float32, of each token of the newest draft.
    """

    any_rows = False

    def __init__(
        self,
        blueprints: Sequence[Blueprint],
        shape: Shape,
        depth: int,
        capacity: int,
        key: Hashable,
        *,
        draws: bool,
        watches_ids: bool,
    ) -> None:
        self.key = key
        self.draws = draws
        self._transforms = [build(shape) for _, build in blueprints]
        self._history = TokenHistory(1, capacity, shape.device)
        self._watches_ids = watches_ids
        on_gpu = shape.device.type == "cuda"
        with torch.inference_mode(False):
            self.scores = torch.zeros(
                (depth, shape.vocab_size), dtype=torch.float32, device=shape.device
            )
            # [depth, 2]: a token, and its probability among the scores.
            self._record = torch.zeros((depth, 2), dtype=torch.float64, device=shape.device)
            self._slots = torch.zeros(1, dtype=torch.int32, device=shape.device)
            self._seen = self._record
            if on_gpu:
                self._seen = torch.zeros(
                    (depth, 2), dtype=torch.float64, pin_memory=True, device="cpu"
                )
        self._events = [torch.cuda.Event() for _ in range(depth)] if on_gpu else []
        self._counts = self._slots  # where the state counts the tokens of a draft

    def start(self, processors: Sequence[Any], ids: Tensor, run: RowRun) -> None:
        """Begin a draft behind ids [1, width]."""
        self._counts = run.state.num_generated
        self._slots.copy_(run.rows.index)
        if self._watches_ids:
            self._history.start(ids, run.state, run.rows.index)
        for transform, processor in zip(self._transforms, processors, strict=True):
            transform.start(processor, ids)

    def __call__(self, logits: Tensor) -> Tensor:
        if self._watches_ids:
            self._history.observe()
        scores = logits.to(dtype=torch.float32, copy=True)
        for transform in self._transforms:
            scores = transform(scores, self._history)
        probs = torch.softmax(scores, dim=-1)
        if self.draws:
            tokens = torch.multinomial(probs, num_samples=1).squeeze(1)
        else:
            tokens = argmax(scores)
        at = self._counts.index_select(0, self._slots).long()
        confidence = probs.gather(1, tokens[:, None]).squeeze(1)
        self.scores.index_copy_(0, at, scores)
        self._record.index_copy_(0, at, torch.stack([tokens.double(), confidence.double()], 1))
        return tokens

    def post(self, index: int) -> None:
        """Ask for a token of the draft that was just launched."""
        if self._events:
            self._seen[index].copy_(self._record[index], non_blocking=True)
            self._events[index].record()

    def wait(self, index: int) -> tuple[int, float]:
        """Return a token that was asked for and its probability."""
        if self._events:
            self._events[index].synchronize()
        token, confidence = self._seen[index].tolist()
        return int(token), confidence

    def tokens(self, count: int) -> Tensor:
        """Return the first tokens of the draft, [count] int64 on the device."""
        return self._record[:count, 0].long()


def take_draft_sampler(
    shelf: SamplerShelf,
    processors: Sequence[Any],
    shape: Shape,
    num_columns: int,
    max_tokens: int,
    *,
    draws: bool,
) -> DraftSampler | None:
    """Return a sampler for drafts of up to `max_tokens`; None if a processor is not known.

    Args:
        num_columns: ids that there may be, with those of the draft.
    """
    blueprints = []
    for processor in processors:
        made = blueprint(processor, shape.vocab_size)
        if made is None:
            return None
        blueprints.append(made)
    watches_ids = looks_back(processors)
    depth = max(_LEAST_DEPTH, 1 << (max_tokens - 1).bit_length())
    capacity = _LEAST_CAPACITY
    if watches_ids:
        capacity = max(capacity, 1 << (num_columns - 1).bit_length())
    name = ("draft", shape.vocab_size, shape.device, depth, capacity, draws)

    def build(key: Hashable) -> DraftSampler:
        return DraftSampler(
            blueprints, shape, depth, capacity, key, draws=draws, watches_ids=watches_ids
        )

    sampler = shelf.keep((*name, *(key for key, _ in blueprints)), build)
    assert isinstance(sampler, DraftSampler)
    return sampler


__all__ = ["DraftSampler", "take_draft_sampler"]
