"""Log-probabilities of prompts: which tokens of a chunk are scored, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_paged.engine.job import Job
from torch_paged.engine.runner import Score
from torch_paged.engine.scores import PromptScores, pack_scores
from torch_paged.engine.step import PrefillChunk
from torch_paged.ops.token_logprobs import token_logprobs
from torch_paged.ops.top_logprobs import top_logprobs

# Most bytes of logits that one launch computes for scores: 1024 tokens at 128k words in bfloat16.
_LOGITS_BYTES = 256 << 20


def scored_span(chunk: PrefillChunk) -> tuple[int, int]:
    """Return how many of the first tokens of a chunk are skipped, and how many then scored."""
    scores = _scores(chunk)
    if scores is None or scores.is_settled:
        return 0, 0
    return scores.span(chunk.start, chunk.length)


def num_scored(chunk: PrefillChunk) -> int:
    """Return how many tokens of a chunk are scored."""
    return scored_span(chunk)[1]


def cut_scored(
    chunks: Sequence[PrefillChunk], row_bytes: int, max_bytes: int | None = None
) -> Iterator[list[PrefillChunk]]:
    """Cut chunks and share them out, in order, so that the scored logits of each part fit.

    Args:
        row_bytes: size of the logits of one token.
        max_bytes: None for a limit that suits most devices.
    """
    limit = max((_LOGITS_BYTES if max_bytes is None else max_bytes) // row_bytes, 1)
    part: list[PrefillChunk] = []
    left = limit
    for whole in chunks:
        rest: PrefillChunk | None = whole
        while rest is not None:
            if part and num_scored(rest) > left:
                yield part
                part, left = [], limit
            chunk, rest = _cut(rest, limit)
            part.append(chunk)
            left -= num_scored(chunk)
    if part:
        yield part


def score_chunks(
    chunks: Sequence[PrefillChunk], scored: Sequence[tuple[int, int]], targets: Tensor
) -> Score:
    """Return what turns the logits of the scored tokens into scores of the chunks' prompts.

    Args:
        scored: of each chunk, how many tokens are skipped, and then scored.
        targets: [num_scored] int64, the tokens that follow.
    """
    count = max(_count(chunk) for chunk, (_, num) in zip(chunks, scored, strict=True) if num)

    def score(logits: Tensor) -> None:
        top = top_logprobs(logits, count) if count else None
        words = _to_host(pack_scores(token_logprobs(logits, targets), top))
        parts = words.split([num for _, num in scored])
        for chunk, (skipped, _), part in zip(chunks, scored, parts, strict=True):
            scores = _scores(chunk)
            if scores is not None and len(part):
                scores.add(chunk.start + skipped, part)

    return score


def _cut(chunk: PrefillChunk, limit: int) -> tuple[PrefillChunk, PrefillChunk | None]:
    """Return a chunk with at most `limit` scored tokens, and what is left of it."""
    skipped, count = scored_span(chunk)
    if count <= limit:
        return chunk, None
    cut = skipped + limit
    first = PrefillChunk(chunk.request, chunk.start, cut, False)
    start, length = chunk.start + cut, chunk.length - cut
    return first, PrefillChunk(chunk.request, start, length, chunk.is_last)


def _scores(chunk: PrefillChunk) -> PromptScores | None:
    job = chunk.request.payload
    return job.prompt_scores if isinstance(job, Job) else None


def _count(chunk: PrefillChunk) -> int:
    scores = _scores(chunk)
    return 0 if scores is None else scores.count


def _to_host(words: Tensor) -> Tensor:
    """Copy to the host without waiting."""
    if not words.is_cuda:
        return words
    host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
    return host.copy_(words, non_blocking=True)


__all__ = ["cut_scored", "num_scored", "score_chunks", "scored_span"]
