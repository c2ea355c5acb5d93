"""Log-probabilities beyond one number a token: kept as arrays, made into Python when read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from torch_paged.engine.params import SamplingParams
from torch_paged.ops.token_logprobs import token_logprobs
from torch_paged.ops.top_logprobs import top_logprobs

_T = TypeVar("_T")
_FIRST_CAPACITY = 16

TopLogprobs = list[tuple[int, float]]


class _View(Sequence[_T]):
    """A sequence whose items are made when they are read; equal to a list of the same items."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        self._length = length

    def _item(self, index: int) -> _T:
        raise NotImplementedError

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        if isinstance(index, slice):
            return [self._item(i) for i in range(self._length)[index]]
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of range for {self._length} items")
        return self._item(index if index >= 0 else index + self._length)

    def __iter__(self) -> Iterator[_T]:
        return map(self._item, range(self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, tuple, _View)):
            return NotImplemented
        return len(other) == self._length and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[_T]]]:
        return list, (list(self),)


class TopView(_View[TopLogprobs]):
    """The most likely tokens of the first positions of a history, likeliest first."""

    __slots__ = ("_words",)

    def __init__(self, words: Any, length: int) -> None:
        super().__init__(length)
        self._words = words

    def _item(self, index: int) -> TopLogprobs:
        return _pairs(self._words[index])


class TopHistory:
    """The most likely tokens of the positions of one sequence, which only ever grows.

    Args:
        count: most tokens of a position.
    """

    __slots__ = ("_length", "_words", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._length = 0
        # [capacity, count, 2] int32: a token and the bits of its log-probability.
        self._words = _array(_FIRST_CAPACITY, count, 2)

    def extend(self, words: Any) -> None:
        """Add an array [num_positions, count, 2]."""
        length = self._length + len(words)
        if length > len(self._words):
            # Views hold on to the array that they were made for.
            larger = _array(max(length, 2 * len(self._words)), self.count, 2)
            larger[: self._length] = self._words[: self._length]
            self._words = larger
        self._words[self._length : length] = words
        self._length = length

    def view(self, length: int | None = None) -> TopView:
        """Show the first `length` positions, by default all that are here now."""
        return TopView(self._words, self._length if length is None else length)


class PromptScores:
    """Log-probabilities of the tokens of a prompt, gathered chunk by chunk.

    Several sequences of one prompt share an object; what is computed twice is the same.

    Args:
        count: most likely tokens that are reported of each position, too.
        first: the first token that is scored; at least 1, since nothing says how likely the first
            one of the prompt is.
    """

    def __init__(self, num_tokens: int, count: int, first: int = 1) -> None:
        self.count = count
        self.first = first
        # The logits of a position score the token behind it: these positions are needed.
        self._start, self._stop = first - 1, num_tokens - 1
        self._pieces: list[tuple[int, Tensor]] = []
        self._logprobs: Any = None  # [num_scored] float32
        self._words: Any = None  # [num_scored, count, 2] int32

    @classmethod
    def of(cls, num_tokens: int, params: SamplingParams) -> PromptScores | None:
        """Return an empty object for a prompt of so many tokens, None if nobody asks for it."""
        if not params.prompt_logprobs:
            return None
        return cls(num_tokens, params.prompt_top_logprobs, params.prompt_logprobs_start)

    @property
    def is_settled(self) -> bool:
        """Whether all numbers are here."""
        return self._logprobs is not None

    def span(self, start: int, length: int) -> tuple[int, int]:
        """Of `length` positions from `start` on, how many are skipped, and then scored."""
        begin = max(start, self._start)
        count = min(start + length, self._stop) - begin
        return (begin - start, count) if count > 0 else (0, 0)

    def num_scored(self, start: int, length: int) -> int:
        """Of `length` positions from `start` on, how many are scored."""
        return self.span(start, length)[1]

    def add(self, start: int, words: Tensor) -> None:
        """Take what the logits of positions from `start` on say of the tokens that follow these.

        Args:
            words: [num_positions, 1 + n, 2] int32 as `pack_scores` has them, on the host; it may
                be on its way there.
        """
        self._pieces.append((start, words))

    def settle(self) -> None:
        """Keep the numbers, once those of a whole prompt were added; no effect when done.

        All of the first sequence whose whole prompt was computed have arrived.
        """
        if self.is_settled:
            return
        words = _array(self._stop - self._start, 1 + self.count, 2)
        covered = self._start
        for start, piece in self._pieces:
            if covered == self._stop:
                break  # the rest is of another sequence, and may be on its way
            if start > covered:
                return
            values = piece.numpy()
            at = start - self._start
            words[at : at + len(values)] = values[:, : 1 + self.count]
            covered = max(covered, start + len(values))
        if covered == self._stop:
            self._words = words[:, 1:]
            self._logprobs = words[:, 0, 1].view("float32")
            self._pieces.clear()

    def logprobs(self) -> Sequence[float | None] | None:
        """Show the log-probability of each token; None before all are here."""
        return PromptLogprobsView(self._logprobs, self.first) if self.is_settled else None

    def tops(self) -> Sequence[TopLogprobs | None] | None:
        """Show the most likely tokens in the place of each; None if nobody asked."""
        return PromptTopView(self._words, self.first) if self.is_settled and self.count else None


class PromptLogprobsView(_View["float | None"]):
    """Log-probabilities of a prompt's tokens, None of those that were not scored."""

    __slots__ = ("_first", "_values")

    def __init__(self, values: Any, first: int) -> None:
        super().__init__(first + len(values))
        self._values = values
        self._first = first

    def _item(self, index: int) -> float | None:
        return float(self._values[index - self._first]) if index >= self._first else None

    def __iter__(self) -> Iterator[float | None]:
        yield from (None,) * self._first
        yield from self._values.tolist()


class PromptTopView(_View["TopLogprobs | None"]):
    """The most likely tokens in the places of a prompt's tokens that were scored."""

    __slots__ = ("_first", "_words")

    def __init__(self, words: Any, first: int) -> None:
        super().__init__(first + len(words))
        self._words = words
        self._first = first

    def _item(self, index: int) -> TopLogprobs | None:
        return _pairs(self._words[index - self._first]) if index >= self._first else None


def scored_words(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    """Return what logits [num_rows, vocab_size] say of `targets` [num_rows] int64.

    Words as `pack_scores` has them, with the `count` likeliest tokens.
    """
    top = top_logprobs(logits, count) if count else None
    return pack_scores(token_logprobs(logits, targets), top)


def pack_scores(logprobs: Tensor, top: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return words [num_rows, 1 + n, 2] int32: of the row's own token, then of the likeliest n.

    A word is a token, -1 for the row's own, and the bits of its log-probability.

    Args:
        logprobs: [num_rows] float32 of the rows' own tokens.
        top: ids int32 and log-probabilities float32 [num_rows, n] of the likeliest, or None.
    """
    values = logprobs[:, None]
    ids = torch.full_like(values, -1, dtype=torch.int32)
    if top is not None:
        ids, values = torch.cat([ids, top[0]], dim=1), torch.cat([values, top[1]], dim=1)
    return torch.stack([ids, values.view(torch.int32)], dim=2)


def _array(*shape: int) -> Any:
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch.int32, device="cpu").numpy()


def _pairs(words: Any) -> TopLogprobs:
    """Return the tokens and log-probabilities of words [count, 2], without the empty ones."""
    values = words[:, 1].view("float32").tolist()
    pairs = zip(words[:, 0].tolist(), values, strict=True)
    return [(token, value) for token, value in pairs if token >= 0]


__all__ = [
    "PromptScores",
    "TopHistory",
    "TopLogprobs",
    "TopView",
    "pack_scores",
    "scored_words",
]
