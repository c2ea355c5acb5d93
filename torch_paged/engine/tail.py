"""The end of a serving step, logits to recorded tokens, with every parameter read by slot."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from torch_paged.decoder.state import SlotState
from torch_paged.engine.sampling_state import SamplingState
from torch_paged.ops.argmax import argmax
from torch_paged.ops.min_tokens import apply_min_tokens
from torch_paged.ops.penalties import (
    apply_repetition_penalty,
    apply_suppress_mask,
    mark_seen,
)
from torch_paged.ops.record_tokens import record_tokens
from torch_paged.ops.sample import sample, sample_with_scores
from torch_paged.ops.token_logprobs import token_logprobs
from torch_paged.ops.top_logprobs import top_logprobs


class ServingTail:
    """Edit, choose, record, append; rows do not influence each other.

    Args:
        edits: some row's logits are edited (penalty, minimum length, suppressed tokens).
        samples: some row draws; without, all rows take the largest logit.
        logprobs: some row reports log-probabilities.
        num_tops: most likely tokens that are reported of each row.
        processed: what is reported is what tokens are chosen by: edited logits over temperature,
            without the tokens that top-k, top-p and min-p leave out.
    """

    def __init__(
        self,
        state: SlotState,
        sampling: SamplingState,
        *,
        edits: bool,
        samples: bool,
        logprobs: bool,
        num_tops: int = 0,
        processed: bool = False,
    ) -> None:
        self.key: Hashable = ("tail", edits, samples, logprobs, num_tops, processed)
        self._state = state
        self._sampling = sampling
        self._edits = edits
        self._samples = samples
        self._logprobs = logprobs
        self.num_tops = num_tops
        self._processed = processed

    def __call__(self, logits: Tensor, slots: Tensor) -> None:
        state, sampling = self._state, self._sampling
        tokens, scores = self._choose(logits, slots)
        reported = scores if self._processed else logits
        logprobs = token_logprobs(reported, tokens) if self._logprobs else None
        if self.num_tops:
            sampling.tops.record(top_logprobs(reported, self.num_tops), slots)
        record_tokens(logits, tokens, slots, logprobs, state.failed, state.token_logprobs)
        state.advance(tokens, slots)
        if self._edits:
            mark_seen(sampling.seen, slots, tokens)

    def _choose(self, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens, and the scores that they were chosen by if these are reported."""
        state, sampling = self._state, self._sampling
        scores = self._edited(logits, slots) if self._edits else logits
        if not self._samples:
            return argmax(scores), scores
        parameters = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.seeds,
            state.num_generated,
        )
        if self._processed and self._logprobs:
            return sample_with_scores(scores, slots, *parameters)
        return sample(scores, slots, *parameters), scores

    def _edited(self, logits: Tensor, slots: Tensor) -> Tensor:
        state, sampling = self._state, self._sampling
        # In float32 and in the order of transformers; the unedited logits are still needed.
        scores = logits.to(torch.float32, copy=True)
        apply_repetition_penalty(scores, sampling.seen, slots, sampling.repetition_penalty)
        apply_min_tokens(
            scores, slots, state.num_generated, sampling.min_new_tokens, state.eos_ids
        )
        apply_suppress_mask(scores, sampling.suppressed, slots)
        return scores


__all__ = ["ServingTail"]
