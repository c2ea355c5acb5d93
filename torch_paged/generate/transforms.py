"""Processors of transformers as functions of static tensors: equal scores, no look at the host.

Each class is built from the parameters of a processor that may not change within a captured graph;
`start` loads the others, and the prompts, before a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_paged.engine.token_history import TokenHistory
from torch_paged.patches import seams
from torch_paged.patches.seams import logits_process


class Transform(Protocol):
    """A processor in the step."""

    def start(self, processor: Any, prompt_ids: Tensor) -> None:
        """Begin a batch of these prompts [num_rows, width] with the numbers of `processor`."""
        ...

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor: ...


class Shape:
    """What transforms are built for: rows, vocabulary and device."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.device = device

    def number(self) -> Tensor:
        """Make one static integer."""
        with torch.inference_mode(False):
            return torch.zeros(1, dtype=torch.int64, device=self.device)

    def mask(self, ids: Sequence[int]) -> Tensor:
        """Make a mask [vocab_size] of these ids; others than those of the vocabulary are void."""
        with torch.inference_mode(False):
            known = [i for i in ids if 0 <= i < self.vocab_size]
            mask = torch.zeros(self.vocab_size, dtype=torch.bool, device="cpu")
            mask[known] = True
            return mask.to(self.device)


class ScoresOnly:
    """A processor that never looks at the ids, itself."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def start(self, processor: Any, prompt_ids: Tensor) -> None: ...

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        out: Tensor = self._processor(None, scores)
        return out


class Suppressed:
    """Ids that are never chosen."""

    def __init__(self, shape: Shape, ids: Sequence[int]) -> None:
        self._mask = shape.mask(ids)

    def start(self, processor: Any, prompt_ids: Tensor) -> None: ...

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        return torch.where(self._mask, -math.inf, scores)


class SuppressedBelow(Suppressed):
    """Ids that are not chosen until a row has some length."""

    def __init__(self, shape: Shape, ids: Sequence[int]) -> None:
        super().__init__(shape, ids)
        self._until = shape.number()

    def start(self, processor: Any, prompt_ids: Tensor) -> None:
        if type(processor) is logits_process.MinLengthLogitsProcessor:
            self._until.fill_(processor.min_length)
        else:
            self._until.fill_(processor.prompt_length_to_skip + processor.min_new_tokens)

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        return torch.where(self._mask & (history.length < self._until), -math.inf, scores)


class SuppressedAt(Suppressed):
    """Ids that are not chosen at one length."""

    def __init__(self, shape: Shape, ids: Sequence[int]) -> None:
        super().__init__(shape, ids)
        self._at = shape.number()

    def start(self, processor: Any, prompt_ids: Tensor) -> None:
        self._at.fill_(int(processor.begin_index))

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        return torch.where(self._mask & (history.length == self._at), -math.inf, scores)


class ForcedAt:
    """Ids that alone are chosen at one length."""

    def __init__(self, shape: Shape, ids: Sequence[int]) -> None:
        with torch.inference_mode(False):
            forced = torch.full((shape.vocab_size,), -math.inf, dtype=torch.float32, device="cpu")
            forced[list(ids)] = 0
            self._forced = forced.to(shape.device)
        self._at = shape.number()

    def start(self, processor: Any, prompt_ids: Tensor) -> None:
        is_begin = type(processor) is logits_process.ForcedBOSTokenLogitsProcessor
        self._at.fill_(1 if is_begin else int(processor.max_length) - 1)

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        return torch.where(history.length == self._at, self._forced, scores)


class RepetitionPenalty:
    """Ids that a row has are made less likely."""

    def __init__(self, shape: Shape, penalty: float) -> None:
        self._penalty = penalty
        with torch.inference_mode(False):
            # One more column for what belongs nowhere.
            self._seen = torch.zeros(
                (shape.num_rows, shape.vocab_size + 1), dtype=torch.bool, device=shape.device
            )
            self._ignored = torch.zeros(shape.num_rows, dtype=torch.int64, device=shape.device)

    def start(self, processor: Any, prompt_ids: Tensor) -> None:
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):
            self._ignored.copy_(ignored)
        else:
            self._ignored.fill_(ignored or 0)
        nowhere = self._seen.shape[1] - 1
        columns = torch.arange(prompt_ids.shape[1], device=prompt_ids.device)
        ids = prompt_ids.masked_fill(columns < self._ignored[:, None], nowhere)
        self._seen.zero_().scatter_(1, ids.clamp(max=nowhere), True)

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        nowhere = self._seen.shape[1] - 1
        counts = history.is_later & (history.length - 1 >= self._ignored)
        token = torch.where(counts, history.token, nowhere).clamp(max=nowhere)
        self._seen.scatter_(1, token[:, None], True)
        penalised = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(self._seen[:, :-1], penalised, scores)


class NoRepeatedNgrams:
    """Ids that would complete a sequence of `size` ids that the row has."""

    def __init__(self, shape: Shape, size: int) -> None:
        self._size = size

    def start(self, processor: Any, prompt_ids: Tensor) -> None: ...

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        size, vocab_size = self._size, scores.shape[1]
        if history.capacity < size:
            return scores
        windows = history.ids[:, : history.capacity].unfold(1, size, 1)
        matches = (windows[..., :-1] == history.tail(size - 1)[:, None]).all(-1)
        starts = torch.arange(windows.shape[1], device=scores.device)
        matches &= starts + size <= history.length
        last = windows[..., -1].clamp(max=vocab_size)
        banned = torch.zeros(
            (scores.shape[0], vocab_size + 1), dtype=torch.bool, device=scores.device
        )
        banned.scatter_(1, torch.where(matches, last, vocab_size), True)
        return scores.masked_fill(banned[:, :-1], -math.inf)


class SequenceBias:
    """A bias for ids, some only behind a prefix."""

    def __init__(self, shape: Shape, biases: Sequence[tuple[tuple[int, ...], float]]) -> None:
        groups: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for ids, bias in biases:
            groups.setdefault(len(ids), []).append((ids, bias))
        with torch.inference_mode(False):
            single = torch.zeros(shape.vocab_size, dtype=torch.float32, device="cpu")
            for ids, bias in groups.pop(1, []):
                single[ids[0]] = bias
            self._single = single.to(shape.device)
            # (prefixes [n, length], last ids [n], biases [n]) for each length
            self._groups = [
                (
                    torch.tensor([ids[:-1] for ids, _ in group], device=shape.device),
                    torch.tensor([ids[-1] for ids, _ in group], device=shape.device),
                    torch.tensor(
                        [bias for _, bias in group], dtype=torch.float32, device=shape.device
                    ),
                )
                for group in groups.values()
            ]
        self._margin = seams.sequence_bias_margin()

    def start(self, processor: Any, prompt_ids: Tensor) -> None: ...

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        bias = self._single.repeat(scores.shape[0], 1)
        for prefixes, last, values in self._groups:
            length = prefixes.shape[1]
            matches = (history.tail(length)[:, None] == prefixes).all(-1)
            matches &= history.length >= length + self._margin
            bias.index_add_(1, last, torch.where(matches, values, 0.0))
        return scores + bias


Build = Callable[[Shape], Transform]
Blueprint = tuple[Hashable, Build]


def blueprint(processor: Any, vocab_size: int) -> Blueprint | None:
    """Return the key of a processor's transform and how to build it; None: not known."""
    kind = type(processor)
    if kind in seams.SCORE_WARPERS:
        numbers = tuple(getattr(processor, name) for name in seams.SCORE_WARPERS[kind])
        return (kind, *numbers), lambda shape: ScoresOnly(processor)
    if kind is logits_process.RepetitionPenaltyLogitsProcessor:
        penalty = processor.penalty
        return (kind, penalty), lambda shape: RepetitionPenalty(shape, penalty)
    if kind is logits_process.NoRepeatNGramLogitsProcessor:
        size = processor.ngram_size
        return (kind, size), lambda shape: NoRepeatedNgrams(shape, size)
    if kind in (
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
    ):
        biases = tuple((tuple(ids), bias) for ids, bias in processor.sequence_bias.items())
        if any(not ids or max(ids) >= vocab_size for ids, _ in biases):
            return None  # transformers has something to say about it
        return (kind, biases), lambda shape: SequenceBias(shape, biases)
    if kind not in _BY_IDS:
        return None
    name, transform = _BY_IDS[kind]
    try:
        ids = _ids(getattr(processor, name))
    except (TypeError, ValueError):
        return None  # no ids: what transformers makes of it is its own
    if transform is ForcedAt and any(i >= vocab_size for i in ids):
        return None
    return (kind, ids), lambda shape: transform(shape, ids)


# The attribute that holds the ids, and the transform.
_BY_IDS: dict[type, tuple[str, Callable[[Shape, Sequence[int]], Transform]]] = {
    logits_process.SuppressTokensLogitsProcessor: ("suppress_tokens", Suppressed),
    logits_process.SuppressTokensAtBeginLogitsProcessor: ("begin_suppress_tokens", SuppressedAt),
    logits_process.MinLengthLogitsProcessor: ("eos_token_id", SuppressedBelow),
    logits_process.MinNewTokensLengthLogitsProcessor: ("eos_token_id", SuppressedBelow),
    logits_process.ForcedBOSTokenLogitsProcessor: ("bos_token_id", ForcedAt),
    logits_process.ForcedEOSTokenLogitsProcessor: ("eos_token_id", ForcedAt),
}


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        value = value.reshape(-1).tolist()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


__all__ = ["Blueprint", "Shape", "Transform", "blueprint"]
