"""Log-probabilities of prompts: which tokens of a chunk are scored, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_paged.engine.job import Job
from torch_paged.engine.scores import PromptScores
from torch_paged.engine.step import PrefillChunk

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


class ChunkScores:
    """Takes what the logits of the scored tokens of some chunks say to the prompts of these.

    Args:
        scored: of each chunk, how many tokens are skipped, and then scored.

    Attributes:
        count: most likely tokens that some chunk asks for.
    """

    def __init__(self, chunks: Sequence[PrefillChunk], scored: Sequence[tuple[int, int]]) -> None:
        self.count = max(_count(c) for c, (_, num) in zip(chunks, scored, strict=True) if num)
        self._spans = list(zip(chunks, scored, strict=True))

    def take(self, words: Tensor) -> None:
        """Take words [num_scored, 1 + n, 2] int32, n at least `count`; nothing waits for them."""
        parts = _to_host(words).split([num for _, (_, num) in self._spans])
        for (chunk, (skipped, _)), part in zip(self._spans, parts, strict=True):
            scores = _scores(chunk)
            if scores is not None and len(part):
                scores.add(chunk.start + skipped, part)


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
    host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True, device="cpu")
    return host.copy_(words, non_blocking=True)


__all__ = ["ChunkScores", "cut_scored", "num_scored", "scored_span"]
