"""How the tokens of one request are chosen and when it stops, resolved and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Says, from prompt and output, whether a request stops with its newest token.
StopCheck = Callable[[Sequence[int], Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one sequence; the defaults are greedy decoding without edits of the logits.

    Attributes:
        max_new_tokens: at least 1.
        min_new_tokens: no end token before that many tokens.
        eos_ids: tokens that end the sequence.
        temperature: 0 is greedy.
        top_k: 0 filters nothing.
        top_p: 1 filters nothing.
        min_p: 0 filters nothing.
        seed: of the sequence's random numbers, any 64 bits.
        repetition_penalty: 1 changes nothing.
        suppressed: tokens that are never chosen.
        logprobs: report the log-probability of each token, by the model's unedited logits.
        top_logprobs: report so many of the most likely tokens in the place of each, too.
        prompt_logprobs: report the log-probabilities of the prompt's tokens.
        prompt_logprobs_start: from this index on, at least 1.
        prompt_top_logprobs: and so many of the most likely tokens in the place of each.
        stop_check: asked on the host after each token.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    suppressed: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    prompt_logprobs_start: int = 1
    prompt_top_logprobs: int = 0
    stop_check: StopCheck | None = None

    @property
    def samples(self) -> bool:
        """Whether its tokens are drawn."""
        return self.temperature > 0

    @property
    def edits(self) -> bool:
        """Whether its logits are edited before a token is chosen."""
        return (
            self.repetition_penalty != 1.0
            or (self.min_new_tokens > 0 and bool(self.eos_ids))
            or bool(self.suppressed)
        )


__all__ = ["SamplingParams", "StopCheck"]
