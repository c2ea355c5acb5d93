"""A request as the engine sees it: parameters, tokens reported so far, the row that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from torch_paged.engine.output import RequestOutput
from torch_paged.engine.params import SamplingParams
from torch_paged.engine.request import FinishReason, Request
from torch_paged.engine.runner import Rows
from torch_paged.engine.scores import PromptScores, TopHistory

_NEVER = 1 << 62

OnOutput = Callable[[RequestOutput], None]


@dataclass(slots=True, eq=False)
class Job:
    """One sequence in the engine.

    Attributes:
        request: what the scheduler knows of it; a new one if it starts again.
        on_output: called with each new output, from the thread that steps; with the last one
            alone if not `streams`.
        private: its outputs go to `on_output` alone.
        prompt_scores: of the prompt's tokens, where asked for.
        outgrows: it may become longer than `EngineCore.max_model_len`.
        logprobs: of the request's `output_ids`, where asked for.
        tops: the most likely tokens in the places of these, where asked for.
        num_reported: tokens that the outputs so far had; `num_called` those of `on_output`.
        row: where it decodes; None while it waits or prefills.
        finish_reason: set when it has ended and all its tokens are here.
    """

    request: Request
    params: SamplingParams
    on_output: OnOutput | None = None
    private: bool = False
    streams: bool = True
    prompt_scores: PromptScores | None = field(default=None, repr=False)
    outgrows: bool = False
    logprobs: list[float] | None = field(default=None, init=False, repr=False)
    tops: TopHistory | None = field(default=None, init=False, repr=False)
    num_reported: int = 0
    num_called: int = 0
    row: Row | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if self.params.logprobs:
            self.logprobs = []
        if self.params.top_logprobs:
            self.tops = TopHistory(self.params.top_logprobs)

    @property
    def is_watched(self) -> bool:
        """Whether something on the host looks at each of its tokens."""
        hears = self.on_output is not None and self.streams
        return hears or self.params.stop_check is not None

    def output(self, *, since: int) -> RequestOutput:
        """Describe the job; its first `since` tokens have been reported."""
        return RequestOutput.of(
            self.request,
            since=since,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs,
            tops=self.tops,
            prompt_scores=self.prompt_scores,
        )


@dataclass(slots=True, eq=False)
class Row:
    """One decoding period of a job: from the end of its prefill until it ends or is preempted.

    A row samples one token in each step from its first to its last.

    Attributes:
        output_ids: those of the job's request.
        next_step: the first step whose token its request does not have yet.
        next_watched: the first step whose token no check has seen, where some check looks at all.
        last_step: its last step, where known.
        is_done: it has no tokens left to learn.
        is_plain: all that anybody wants of it is its tokens.
    """

    job: Job
    output_ids: list[int]
    slot: int
    next_step: int
    next_watched: int
    last_step: int = _NEVER
    is_done: bool = False
    is_plain: bool = True


class Batch(NamedTuple):
    """The rows that decode in a step: the same object while nothing changes.

    Attributes:
        rows: in order of their start, as their ends are reported.
        slots: [num_rows] int64, theirs, on the host.
        on_device: the same slots as the runner takes them, those of the longest rows first.
    """

    rows: tuple[Row, ...]
    slots: Tensor
    on_device: Rows


class StepRecord(NamedTuple):
    """A launched step whose report is on its way.

    Attributes:
        started: rows whose prefill ended in it.
        num_tops: most likely tokens that it reports of each row.
    """

    step: int
    batch: Batch | None
    started: tuple[Row, ...]
    num_tops: int = 0


__all__ = ["Batch", "Job", "OnOutput", "Row", "StepRecord"]
