"""What a caller learns of a request: tokens so far, and how it ended."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar, overload

from torch_paged.engine.request import FinishReason, Request
from torch_paged.engine.scores import PromptScores, TopHistory, TopLogprobs

_T = TypeVar("_T")


class PrefixView(Sequence[_T]):
    """The first `length` items of a list that only ever grows at its end, without a copy.

    Equal to any list, tuple or view of the same items; a slice is a list.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[_T], length: int | None = None) -> None:
        self._items = items
        self._length = len(items) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        if isinstance(index, slice):
            span = range(self._length)[index]
            if span.step == 1:
                return self._items[span.start : span.stop]
            return [self._items[i] for i in span]
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of range for {self._length} items")
        return self._items[index if index >= 0 else index + self._length]

    def __iter__(self) -> Iterator[_T]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, tuple, PrefixView)):
            return NotImplemented
        return len(other) == self._length and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request at one moment; later tokens do not change it.

    Attributes:
        prompt_ids: None where the prompt was given as embeddings.
        token_ids: all tokens generated so far, a view.
        new_token_ids: those that the last output of this request did not have.
        finish_reason: "stop" (an end token or criterion), "length", "cancelled" (also by its
            deadline) or "error"; None until it is finished.
        logprobs: of `token_ids`, where asked for.
        error: why it was cancelled or failed, where there is more to say.
        top_logprobs: for each of `token_ids` the most likely tokens in its place, likeliest first,
            each with its log-probability, where asked for.
        prompt_logprobs: of `prompt_ids`, where asked for, from the first output with a token on;
            None for the first one.
        prompt_top_logprobs: for each of `prompt_ids` what `top_logprobs` is for `token_ids`.
    """

    request_id: Hashable
    prompt_ids: Sequence[int] | None
    token_ids: Sequence[int]
    new_token_ids: Sequence[int]
    finished: bool
    finish_reason: FinishReason | None = None
    logprobs: Sequence[float] | None = None
    error: str | None = None
    top_logprobs: Sequence[TopLogprobs] | None = None
    prompt_logprobs: Sequence[float | None] | None = None
    prompt_top_logprobs: Sequence[TopLogprobs | None] | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        since: int,
        finish_reason: FinishReason | None = None,
        logprobs: list[float] | None = None,
        tops: TopHistory | None = None,
        prompt_scores: PromptScores | None = None,
    ) -> RequestOutput:
        """Describe a request whose first `since` tokens have been reported.

        The scheduler ends a request when its last step is scheduled; pass `finish_reason` when
        its last token is here.
        """
        return cls(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            token_ids=PrefixView(request.output_ids),
            new_token_ids=request.output_ids[since:],
            finished=finish_reason is not None,
            finish_reason=finish_reason,
            logprobs=None if logprobs is None else PrefixView(logprobs),
            error=None if finish_reason is None else request.error,
            top_logprobs=None if tops is None else tops.view(),
            prompt_logprobs=None if prompt_scores is None else prompt_scores.logprobs(),
            prompt_top_logprobs=None if prompt_scores is None else prompt_scores.tops(),
        )


class RunningOutput(RequestOutput):
    """The output of a request that goes on, of whose fields those are made that are read.

    Making the record above takes 2 us, and there is one of these for each token that is streamed.
    """

    __slots__ = (
        "_count",
        "_items",
        "_logprob_items",
        "_name",
        "_prompt",
        "_prompt_scores",
        "_since",
        "_tops",
    )
    # Fields have no setters here either. Both, or setting a slot takes five times as long.
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__
    finished = False
    finish_reason = None
    error = None

    def __init__(
        self,
        name: Hashable,
        prompt: Sequence[int] | None,
        items: list[int],
        since: int,
        count: int,
        logprobs: list[float] | None,
        tops: TopHistory | None = None,
        prompt_scores: PromptScores | None = None,
    ) -> None:
        self._name = name
        self._prompt = prompt
        self._items = items
        self._since = since
        self._count = count
        self._logprob_items = logprobs
        self._tops = tops
        self._prompt_scores = prompt_scores

    def __reduce__(self) -> tuple[type[RequestOutput], tuple[object, ...]]:
        values = (getattr(self, field.name) for field in fields(RequestOutput))
        return RequestOutput, tuple(list(v) if isinstance(v, PrefixView) else v for v in values)

    @property
    def request_id(self) -> Hashable:
        return self._name

    @property
    def prompt_ids(self) -> Sequence[int] | None:
        return self._prompt

    @property
    def token_ids(self) -> Sequence[int]:
        return PrefixView(self._items, self._count)

    @property
    def new_token_ids(self) -> Sequence[int]:
        return self._items[self._since : self._count]

    @property
    def logprobs(self) -> Sequence[float] | None:
        items = self._logprob_items
        return None if items is None else PrefixView(items, self._count)

    @property
    def top_logprobs(self) -> Sequence[TopLogprobs] | None:
        tops = self._tops
        return None if tops is None else tops.view(self._count)

    @property
    def prompt_logprobs(self) -> Sequence[float | None] | None:
        scores = self._prompt_scores
        return None if scores is None else scores.logprobs()

    @property
    def prompt_top_logprobs(self) -> Sequence[TopLogprobs | None] | None:
        scores = self._prompt_scores
        return None if scores is None else scores.tops()


# It is a `RequestOutput` for everybody who looks at one.
RunningOutput.__name__ = RunningOutput.__qualname__ = "RequestOutput"


__all__ = ["PrefixView", "RequestOutput", "RunningOutput"]
