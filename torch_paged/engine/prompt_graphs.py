"""Steps of an engine with prompts in them as CUDA graphs: forward, choice of tokens and all.

Decoding rows share the forward of the chunks, which reads the weights anyway. On an H200 32 rows
take 4.2 ms at 8B in a step of their own, and 0.8 ms next to a chunk of 528 tokens. What that is
worth by arithmetic (`python -m benchmarks.mixing`: the work of `benchmarks.ragged`, output tokens
a second, budgets of 512 / 8,192 tokens a step):

=========  ===============  ===============  ===============
in flight  8B               1B               0.6B
=========  ===============  ===============  ===============
8          +3.7% / +2.4%    +3.6% / +2.4%    +3.0% / +2.0%
32         +8.6% / +4.2%    +9.4% / +4.7%    +7.3% / +3.9%
128        +11.1% / +4.5%   +17.5% / +7.1%   +14.0% / +6.1%
512        +9.4% / +1.7%    +21.2% / +4.1%   +17.2% / +4.6%
256, once  +9.6% / +0.4%    +15.3% / +0.7%   +12.2% / +0.6%
=========  ===============  ===============  ===============

The 99th percentile between two tokens falls by 17 to 23% with up to 32 in flight and 512 tokens.
Where all requests are there at the start, all prompts run in the first steps: a small budget then
costs more than it saves (8B: 8,529 tokens a second with 512, 9,064 with 8,192). Past some 140 rows
8B is bound by arithmetic in a decode step, too, and a forward shared saves little.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_paged.decoder.inputs import put_decoding
from torch_paged.decoder.state import SlotState
from torch_paged.engine.large_prompts import (
    LARGE_TOKEN_BUCKETS,
    large_token_buckets,
    most_large_padding,
)
from torch_paged.engine.prompt_inputs import PromptInputs, Room, StaticInputs
from torch_paged.engine.protocols import StepModel
from torch_paged.engine.scores import scored_words
from torch_paged.engine.top_log import top_size
from torch_paged.graphs.buckets import pick_bucket
from torch_paged.graphs.capture import GraphCache

# Of the chunks' tokens.
_TOKENS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536)
_TOKEN_BUCKETS = (*_TOKENS, 1792, 2048)
# Chunks that a step has room for, by its tokens: few where admissions come in ones and twos, as a
# row of logits is made for each.
_CHUNKS = ((512, 8), (2048, 30), (max(LARGE_TOKEN_BUCKETS), 126))
# Few sizes of decoding rows, since each comes with every size of chunks.
_DECODING_BUCKETS = (8, 16, 32, 64, 128, 256)
_LARGE_DECODING = 256
# A graph saves launches, which take the host some 0.3 ms a layer and are behind the device's back
# most of the time; its padding takes the device time. So many operations of padding in a layer,
# 0.05 ms of an H200, are worth a graph.
_PADDING_FLOPS = 3e10
# A capture takes the host as long as launching a step op by op some eight times does (at 28 layers
# 70 ms), and all requests wait meanwhile: a size is captured once it has been met so often.
_MEETINGS = 4
_KIND = "a prefill"
# Logits of scored tokens stay in the graphs' pool: 256 tokens at 128k words in bfloat16.
_SCORED_BYTES = 64 << 20


class Tail(Protocol):
    """What follows the logits of a step: choose, record and append each row's token.

    Attributes:
        key: equal for tails that may share a captured graph.
    """

    key: Hashable

    def __call__(self, logits: Tensor, slots: Tensor) -> None:
        """Treat logits [num_rows, vocab_size] of `slots` [num_rows] int32, -1 for padding."""
        ...


class Score(Protocol):
    """What becomes of the logits of scored tokens.

    Attributes:
        count: most likely tokens that are reported of each.
    """

    count: int

    def take(self, words: Tensor) -> None:
        """Take what `scored_words` makes of them, with at least `count` likeliest tokens."""
        ...


class _Size(NamedTuple):
    """What of a step a graph has room for; `tops` is -1 where no tokens are scored."""

    tokens: int
    decoding: int
    tops: int

    @property
    def chunks(self) -> int:
        return next(chunks for tokens, chunks in _CHUNKS if self.tokens <= tokens)

    @property
    def room(self) -> Room:
        scored = self.tokens if self.tops >= 0 else 0
        return Room(self.tokens, self.chunks, self.decoding, scored)


class PromptGraphs:
    """Runs a step in the next larger bucket of chunk tokens and of decoding rows.

    A bucket is captured when it is met for the fourth time: a shape that comes seldom is not worth
    a capture, and runs in a larger one that is there. Padding tokens belong to no row and are
    written nowhere; what is computed for them stays in their own rows of the activations.
    """

    def __init__(
        self, step: StepModel, state: SlotState, graphs: GraphCache[Tensor | None]
    ) -> None:
        self._step = step
        self._state = state
        self._graphs = graphs
        flops = step.layer_flops
        most = state.max_num_seqs
        self._decoding_buckets = (*(n for n in _DECODING_BUCKETS if n < most), most)
        self._token_buckets = (*_TOKEN_BUCKETS, *large_token_buckets(flops))
        self._max_padding = _PADDING_FLOPS / max(flops, 1.0)
        self._max_large_padding = most_large_padding(flops)
        self._max_scored = _SCORED_BYTES // (step.vocab_size * step.dtype.itemsize)
        self._static: dict[_Size, StaticInputs] = {}
        self._met: Counter[_Size] = Counter()

    def run(self, inputs: PromptInputs, tail: Tail | None, score: Score | None = None) -> bool:
        """Run a step; False where it has no graph: then nothing was done."""
        sizes = self._sizes(inputs, score)
        size = next(sizes, None)
        if size is not None:
            self._met[size] += 1
            if self._met[size] < _MEETINGS:
                size = next((n for n in sizes if self._key(n, tail) in self._graphs), None)
        if size is None:
            return False
        key = self._key(size, tail)
        static = self._prepared(key, inputs, size, tail)
        if static is None:
            return False
        static.load(inputs)
        words = self._graphs.replay(key)
        if score is not None:
            assert words is not None
            # The next replay writes there.
            score.take(words[: len(inputs.targets)].clone())
        return True

    def _key(self, size: _Size, tail: Tail | None) -> Hashable:
        return ("serve prefill", self._step.variant, *size, None if tail is None else tail.key)

    def _prepared(
        self, key: Hashable, inputs: PromptInputs, size: _Size, tail: Tail | None
    ) -> StaticInputs | None:
        """Return what the graph of a key reads, None where there is no graph."""
        if not self._graphs.may_capture(_KIND, key):
            return None
        static = self._static.get(size)
        if static is None:
            try:
                static = StaticInputs(
                    size.room,
                    len(inputs.slot_mappings),
                    self._state.device,
                    has_spans=inputs.spans is not None,
                    tokens_on_host=True,
                )
            except torch.OutOfMemoryError as error:
                self._graphs.refuse(_KIND, key, error)
                return None
            self._static[size] = static
        return static if self._prepare(key, static, size, tail) else None

    def _prepare(
        self, key: Hashable, static: StaticInputs, size: _Size, tail: Tail | None
    ) -> bool:
        if key in self._graphs:
            return True

        num_rows = static.ends.shape[0]

        def whole_step() -> Tensor | None:
            put_decoding(self._state, static.inputs)
            logits = self._step.prefill(static.inputs)
            words = None
            if size.tops >= 0:
                words = scored_words(logits[num_rows:], static.targets, size.tops)
            if tail is not None:
                tail(logits[:num_rows], static.ends)
            return words

        # It appends tokens, so it warms up on padding rows alone.
        static.ends.fill_(-1)
        static.inputs.slots.fill_(-1)
        for mapping in static.inputs.slot_mappings:
            mapping.fill_(-1)
        return self._graphs.prepare(_KIND, key, whole_step, warmup=whole_step)

    def _sizes(self, inputs: PromptInputs, score: Score | None) -> Iterator[_Size]:
        """Yield what has room for a step, ascending, as long as a graph is worth the padding."""
        if inputs.ids is None:
            return
        decoding, num_tokens = inputs.num_decoding, inputs.num_tokens
        tops = -1 if score is None else top_size(score.count)
        most_rows = self._decoding_buckets[-1]
        for tokens in self._token_buckets[bisect_left(self._token_buckets, num_tokens) :]:
            is_large = tokens > _TOKEN_BUCKETS[-1]
            # Next to so many tokens, rows of padding cost little.
            least = min(_LARGE_DECODING, most_rows) if is_large else decoding
            rows = pick_bucket(max(decoding, least), self._decoding_buckets) if decoding else 0
            limit = self._max_large_padding if is_large else self._max_padding
            if rows is None or tokens - num_tokens + rows - decoding > limit:
                return
            if score is not None and tokens > self._max_scored:
                return
            size = _Size(tokens, rows, tops)
            if inputs.num_pieces <= size.chunks:
                yield size


__all__: Sequence[str] = ["PromptGraphs", "Score", "Tail"]
