"""Two runners over one state: every launch of a step goes through one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torch_paged.decoder.inputs import put_decoding
from torch_paged.decoder.state import SlotState
from torch_paged.decoder.transfer import upload
from torch_paged.engine.extend import CapturedExtension, Extension, extend_eagerly
from torch_paged.engine.prefill import CapturedPrefill
from torch_paged.engine.prompt_graphs import PromptGraphs, Score, Tail
from torch_paged.engine.prompt_inputs import PromptInputs
from torch_paged.engine.protocols import StepModel
from torch_paged.engine.sampler import Sampler
from torch_paged.engine.scores import scored_words
from torch_paged.graphs.buckets import pick_bucket, split_batch
from torch_paged.graphs.capture import GraphCache
from torch_paged.ops.paged_attention.config import ALIKE_TOKENS, cares_for_lengths, rows_alike


@dataclass(frozen=True, slots=True)
class Rows:
    """The live rows of a step: their slots, on the host and as [num_rows] int32 on the device.

    Attributes:
        alike: whether they are of like length, as `ALIKE_TOKENS` has it.
    """

    slots: tuple[int, ...]
    index: Tensor
    alike: bool = False

    def __len__(self) -> int:
        return len(self.slots)


class Runner(Protocol):
    """Launches steps; nothing here waits for the device."""

    def prefill(self, inputs: PromptInputs) -> Tensor:
        """Run packed prompts; logits [num_rows, vocab_size], valid until the next launch."""
        ...

    def decode(self, rows: Rows, sampler: Sampler) -> None:
        """Run one whole step of `rows`: forward, sample, advance."""
        ...

    def serve(self, rows: Rows, tail: Tail) -> None:
        """Run one whole step of `rows`, whose tail treats each row for itself."""
        ...

    def serve_prefill(
        self, inputs: PromptInputs, tail: Tail | None, score: Score | None = None
    ) -> None:
        """Run packed chunks and rows that decode beside them, then the end of both.

        If it raises, no row has got a token.

        Args:
            tail: None where no row samples a token.
            score: of the tokens that `last_index` has behind those of the rows.
        """
        ...

    def logits(self, rows: Rows) -> Tensor:
        """Run the forward of one step; logits [num_rows, vocab_size], valid until the next."""
        ...

    def extend(self, extension: Extension) -> Tensor:
        """Run several tokens of one row; logits [num_tokens, vocab_size], until the next launch.

        What is chosen from the last of them is appended by `advance`.
        """
        ...


def make_rows(slots: Sequence[int], lengths: Collection[int], device: torch.device) -> Rows:
    """Put the slots of a batch on the device.

    Args:
        lengths: tokens of each row, or those less one number that is the same for all.
    """
    (index,) = upload([np.array(slots, dtype=np.int32)], device)
    alike = max(lengths) - min(lengths) <= ALIKE_TOKENS
    return Rows(tuple(slots), index, alike)


class EagerRunner:
    """Launches the ops of a step one by one, on any device."""

    def __init__(self, step: StepModel, state: SlotState) -> None:
        self._step = step
        self._state = state

    def prefill(self, inputs: PromptInputs) -> Tensor:
        return self._step.prefill(inputs.on_device(self._state.device).inputs)

    def decode(self, rows: Rows, sampler: Sampler) -> None:
        self._state.advance(sampler(self.logits(rows)), rows.index)

    def serve(self, rows: Rows, tail: Tail) -> None:
        tail(self.logits(rows), rows.index)

    def serve_prefill(
        self, inputs: PromptInputs, tail: Tail | None, score: Score | None = None
    ) -> None:
        there, ends, targets = inputs.on_device(self._state.device)
        put_decoding(self._state, there)
        logits = self._step.prefill(there)
        if score is not None:
            scored = logits[-targets.shape[0] :]
            score.take(scored_words(scored, targets, score.count))
        if tail is not None:
            tail(logits[: ends.shape[0]], ends)

    def logits(self, rows: Rows) -> Tensor:
        with rows_alike(rows.alike):
            return self._step.decode(rows.index)

    def extend(self, extension: Extension) -> Tensor:
        return extend_eagerly(self._step, self._state, extension)


class CapturedRunner:
    """Replays a step as one CUDA graph per batch bucket, captured on first use.

    A sampler that must see exactly the live rows is a graph of its own, behind the one of the
    forward; so is the joint sampler of a batch above the largest bucket. What cannot be captured
    is launched op by op.
    """

    def __init__(
        self,
        step: StepModel,
        state: SlotState,
        graphs: GraphCache[Tensor | None],
        buckets: Sequence[int],
    ) -> None:
        self._step = step
        self._state = state
        self._graphs = graphs
        self._eager = EagerRunner(step, state)
        self._buckets = tuple(buckets)
        with torch.inference_mode(False):
            # Slots of the bucket rows, read by the graphs; padding rows stay -1.
            self._static = {
                size: torch.full((size,), -1, dtype=torch.int32, device=state.device)
                for size in self._buckets
            }
        self._prefill = CapturedPrefill(step, state.device, graphs)
        self._prompt_graphs = PromptGraphs(step, state, graphs)
        self._extend = CapturedExtension(step, state, graphs)
        self._loaded: dict[int, tuple[int, ...]] = {}
        self._exact: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        # Buckets that are two graphs: rows of like length have another attention.
        self._two_graphs = {
            size
            for size in self._buckets
            for shape in step.layer_shapes
            if cares_for_lengths(step.device, step.dtype, size, shape.num_kv_heads, shape.head_dim)
        }

    def prefill(self, inputs: PromptInputs) -> Tensor:
        # The padding tokens of a bucket would go into the states.
        run = self._eager.prefill if self._step.keeps_state else self._prefill
        return run(inputs)

    def decode(self, rows: Rows, sampler: Sampler) -> None:
        bucket = pick_bucket(len(rows), self._buckets)
        if bucket is None or not sampler.any_rows:
            self._sample(self.logits(rows), rows, sampler)
            return
        slots, state, step = self._static[bucket], self._state, self._step
        alike = rows.alike and bucket in self._two_graphs

        def whole_step() -> None:
            with rows_alike(alike):
                logits = step.decode(slots)
            state.advance(sampler(logits), slots)

        key = ("step", bucket, sampler.key, step.variant, alike)
        if not self._is_captured("a decode step", key, bucket, whole_step):
            self._eager.decode(rows, sampler)
            return
        self._load(bucket, rows)
        self._graphs.replay(key)

    def serve(self, rows: Rows, tail: Tail) -> None:
        start = 0
        for part in split_batch(len(rows), self._buckets):
            stop = start + part
            piece = Rows(rows.slots[start:stop], rows.index[start:stop], rows.alike)
            self._serve_part(piece, tail)
            start = stop

    def serve_prefill(
        self, inputs: PromptInputs, tail: Tail | None, score: Score | None = None
    ) -> None:
        # The padding tokens of a bucket would go into states.
        if self._step.keeps_state or not self._prompt_graphs.run(inputs, tail, score):
            self._eager.serve_prefill(inputs, tail, score)

    def _serve_part(self, rows: Rows, tail: Tail) -> None:
        bucket = pick_bucket(len(rows), self._buckets)
        assert bucket is not None
        static, step = self._static[bucket], self._step
        alike = rows.alike and bucket in self._two_graphs

        def whole_step() -> None:
            with rows_alike(alike):
                logits = step.decode(static)
            tail(logits, static)

        key = ("serve", bucket, tail.key, step.variant, alike)
        if not self._is_captured("a decode step", key, bucket, whole_step):
            self._eager.serve(rows, tail)
            return
        self._load(bucket, rows)
        self._graphs.replay(key)

    def logits(self, rows: Rows) -> Tensor:
        parts = split_batch(len(rows), self._buckets)
        if len(parts) == 1:
            return self._bucket_logits(rows)
        start, out = 0, []
        for part in parts:
            stop = start + part
            # The next piece may replay the same graph, so its static output is copied.
            piece = Rows(rows.slots[start:stop], rows.index[start:stop], rows.alike)
            out.append(self._bucket_logits(piece).clone())
            start = stop
        return torch.cat(out)

    def extend(self, extension: Extension) -> Tensor:
        return self._extend(extension)

    def _bucket_logits(self, rows: Rows) -> Tensor:
        bucket = pick_bucket(len(rows), self._buckets)
        assert bucket is not None
        static, step = self._static[bucket], self._step
        alike = rows.alike and bucket in self._two_graphs

        def forward() -> Tensor:
            with rows_alike(alike):
                return step.decode(static)

        key = ("logits", bucket, step.variant, alike)
        if not self._is_captured("a decode step", key, bucket, forward):
            return self._eager.logits(rows)
        self._load(bucket, rows)
        logits = self._graphs.replay(key)
        assert logits is not None
        return logits[: len(rows)]

    def _is_captured(
        self, kind: str, key: Hashable, bucket: int, step: Callable[[], Tensor | None]
    ) -> bool:
        """Have the graph of a step over the static slots of a bucket, if it can be had."""
        if key in self._graphs:
            return True
        if not self._graphs.may_capture(kind, key):
            return False
        # Padding rows write nothing, so the warm-up of a step over them is harmless.
        self._unload(bucket)
        return self._graphs.prepare(kind, key, step, warmup=step)

    def _sample(self, logits: Tensor, rows: Rows, sampler: Sampler) -> None:
        """Sample and advance the live rows in a graph that reads the static logits."""
        num_rows = len(rows)
        if num_rows > self._buckets[-1]:
            # Concatenated pieces have no static address.
            self._state.advance(sampler(logits), rows.index)
            return
        state = self._state
        slots = self._exact_slots(rows)

        def sample() -> None:
            state.advance(sampler(logits), slots)

        key = ("sample", num_rows, logits.data_ptr(), sampler.key)
        kind = "the choice of tokens"
        if self._graphs.prepare(kind, key, sample, warmup=lambda: sampler(logits)):
            self._graphs.replay(key)
        else:
            state.advance(sampler(logits), rows.index)

    def _exact_slots(self, rows: Rows) -> Tensor:
        """Return the static slots [num_rows] that sampling graphs of this many rows read."""
        loaded, static = self._exact.get(len(rows), ((), None))
        if static is None:
            with torch.inference_mode(False):
                static = torch.empty(len(rows), dtype=torch.int32, device=self._state.device)
        if loaded != rows.slots:
            static.copy_(rows.index)
            self._exact[len(rows)] = (rows.slots, static)
        return static

    def _load(self, bucket: int, rows: Rows) -> None:
        if self._loaded.get(bucket) == rows.slots:
            return
        static = self._static[bucket]
        static[: len(rows)].copy_(rows.index)
        if len(rows) < bucket:
            static[len(rows) :].fill_(-1)
        self._loaded[bucket] = rows.slots

    def _unload(self, bucket: int) -> None:
        self._static[bucket].fill_(-1)
        self._loaded.pop(bucket, None)
