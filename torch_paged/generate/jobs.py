"""The sequences of one request, as the engine takes them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch_paged.config import MAX_MODEL_LEN
from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.job import Job
from torch_paged.engine.request import Request
from torch_paged.engine.scores import PromptScores
from torch_paged.errors import UnsupportedFeatureError
from torch_paged.generate.request_params import RequestParams
from torch_paged.generate.session import Session
from torch_paged.log import warn_once


def make_jobs(
    session: Session,
    prompt: Sequence[int],
    params: RequestParams,
    request_id: Hashable,
    *,
    private: bool,
    streams: bool,
    shares_prefix: bool,
    outgrows: bool,
    salt: bytes,
) -> list[Job]:
    """Return the job of each sequence; the first is named as the request.

    Args:
        private, streams, shares_prefix, outgrows: as `Service.submit` has them.
        salt: keeps the blocks of a prompt that shares none apart from those of all others.

    Raises:
        UnsupportedFeatureError: the sequences may pass a length at which rotary factors change
            for all of their tokens.
    """
    longest = max(sample.max_new_tokens for sample in params.samples)
    if session.step is not None and session.step.recomputes(len(prompt), longest):
        raise UnsupportedFeatureError(
            f"{len(prompt)} tokens and up to {longest} more pass the length at which longrope "
            "computes the whole sequence anew, which an engine does not do; pass a smaller "
            "max_new_tokens, or call model.generate()"
        )
    outgrows = outgrows and _may_outgrow(session, len(prompt) + longest)
    # A prompt is scored as it is computed: what others have computed of that does not help.
    scores = PromptScores.of(len(prompt), params.samples[0])
    not_scored = None if scores is None else scores.first - 1
    # Without prefix caching only the samples of one prompt share its blocks.
    shares_prefix &= session.config.enable_prefix_caching and not_scored != 0
    # Keys of equal tokens differ with the length of the prompt.
    shares_prefix &= session.step is None or not session.step.has_spans
    jobs: list[Job] = []
    for index, sample in enumerate(params.samples):
        request = Request(
            request_id if index == 0 else f"{request_id}__child#{index - 1}",
            prompt,
            sample.max_new_tokens,
            priority=params.priority,
            deadline=params.deadline,
            cache_salt=b"" if shares_prefix else salt,
            max_cached_tokens=not_scored if shares_prefix else None,
        )
        jobs.append(Job(request, sample, params.on_output, private, streams, scores, outgrows))
    return jobs


def _may_outgrow(session: Session, num_tokens: int) -> bool:
    """Say whether sequences may pass the model's limit as under transformers' own manager.

    That one never looks at it. We do where the positions of the model end, or where only its
    forward knows whether they do. A request without any limit ends there, too: it may have no end.
    """
    core, step = session.core, session.step
    if core is None or session.config.max_model_len is not None:
        return False
    if isinstance(step, DecoderStep) and not step.max_positions:
        return True
    if core.max_model_len < num_tokens <= MAX_MODEL_LEN:
        warn_once(
            f"generate_batch() ends sequences at {core.max_model_len} tokens: the model's "
            "positions end there, or are its own forward's affair; lower max_new_tokens, or pass "
            "Config(max_model_len=...) where the model can go on"
        )
    return False


__all__ = ["make_jobs"]
