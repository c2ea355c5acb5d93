"""What a scheduled step puts on the device: rows that come and go, prefills, the decode graph."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from torch_paged.decoder.state import RowStart
from torch_paged.engine.core import EngineCore
from torch_paged.engine.job import Batch, Job, Row
from torch_paged.engine.packed_prompts import int64_tensor
from torch_paged.engine.packing import pack_chunks
from torch_paged.engine.params import SamplingParams
from torch_paged.engine.request import Request
from torch_paged.engine.runner import make_rows
from torch_paged.engine.sampling_state import SamplingStart
from torch_paged.engine.scoring import ChunkScores, cut_scored, num_scored, scored_span
from torch_paged.engine.step import PrefillChunk, ScheduledStep
from torch_paged.engine.tail import ServingTail
from torch_paged.engine.top_log import TOP_SIZES, top_size

_MAX_INT32 = 2**31 - 1


class StepLauncher:
    """Launches the steps of one decode state; nothing here waits for the device.

    Args:
        jobs: those with a row, by request id; decoding rows are taken over from them.
    """

    def __init__(self, core: EngineCore, jobs: Mapping[Hashable, Job]) -> None:
        self._core = core
        self._jobs = jobs
        self._rows: dict[int, Row] = {}  # decoding rows by slot, in order of their start
        self._head_starts: dict[int, int] = {}  # `Request.head_start` of each
        self._needs: Counter[str] = Counter()  # what of the tail how many of them need
        self._batch: Batch | None = None
        self._tails: dict[tuple[bool, bool, bool, int], ServingTail] = {}
        # Most likely tokens that the step launched last reports of each row.
        self.num_tops = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows that decode."""
        return tuple(self._rows.values())

    def rebind(self) -> None:
        """The state of the core is a larger one: the same rows in other tensors."""
        self._tails.clear()

    def update(self, scheduled: ScheduledStep) -> None:
        """Write new blocks, and let rows stop and start."""
        self._core.state.write_blocks(scheduled.block_updates)
        self.num_tops = 0
        for slot in scheduled.stopped:
            self._needs.subtract(_needs(self._rows.pop(slot).job.params))
            del self._head_starts[slot]
        for request in scheduled.started:
            row = self._jobs[request.request_id].row
            assert row is not None
            self._rows[row.slot] = row
            self._head_starts[row.slot] = request.head_start
            self._needs.update(_needs(row.job.params))
        if scheduled.stopped or scheduled.started:
            self._batch = None

    def decode(self) -> Batch:
        """Launch one token of every row."""
        batch = self._rows_now()
        self._core.runner().serve(batch.on_device, self._tail(self._needs))
        return batch

    def mixes(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Whether chunks can share a forward with the rows that decode."""
        step = self._core.step
        if step.keeps_state or step.has_spans:
            return False  # such prompts run row by row, or with frequencies of their own
        return bool(self._rows) and not any(num_scored(chunk) for chunk in chunks)

    def mixed(self, chunks: Sequence[PrefillChunk]) -> Batch:
        """Launch one token of every row, and chunks of prompts, in one forward.

        If it raises, no row has got a token.
        """
        batch = self._rows_now()
        self._prefill(chunks, (), batch)
        return batch

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Launch chunks of prompts, and the first token of those that end."""
        if not any(num_scored(chunk) for chunk in chunks):
            self._prefill(chunks, ())
            return
        step = self._core.step
        if step.keeps_state:
            groups = [[chunk] for chunk in chunks]
        else:
            groups = list(cut_scored(chunks, step.vocab_size * step.dtype.itemsize))
        for group in groups:
            self._prefill(group, [scored_span(chunk) for chunk in group])

    def _prefill(
        self,
        chunks: Sequence[PrefillChunk],
        scored: Sequence[tuple[int, int]],
        batch: Batch | None = None,
    ) -> None:
        core = self._core
        size, num_tables = core.config.block_size, core.layout.num_tables
        decoding = () if batch is None else batch.on_device.slots
        inputs = pack_chunks(
            chunks, size, num_tables, scored, decoding, has_spans=core.step.has_spans
        )
        score = ChunkScores(chunks, scored) if len(inputs.targets) else None
        ending = [chunk.request for chunk in chunks if chunk.is_last]
        runner = core.runner()
        core.state.set_prefix(inputs.piece_slots, [chunk.start for chunk in chunks])
        needs = self._needs.copy() if decoding else Counter()
        if ending:
            starts = [_row_start(request) for request in ending]
            # Each row has frequencies as if it were alone: it leads by nothing.
            last = [chunk.start + chunk.length - 1 for chunk in chunks if chunk.is_last]
            core.state.start_rows(starts, last)
            core.sampling.start_rows([_sampling_start(request) for request in ending])
            for request in ending:
                needs.update(_needs(_params(request)))
        tail = self._tail(needs) if ending or decoding else None
        runner.serve_prefill(inputs, tail, score)

    def _rows_now(self) -> Batch:
        if self._batch is None:
            # The longest rows first: attention has a program a row, started in this order, and a
            # long one that started late would run on alone, the rest of the device idle. All rows
            # grow by a token a step, so the order holds until rows come or go.
            starts = self._head_starts
            longest_first = sorted(starts, key=starts.__getitem__, reverse=True)
            self._batch = Batch(
                tuple(self._rows.values()),
                int64_tensor(array("q", self._rows)),
                make_rows(longest_first, starts.values(), self._core.device),
            )
        return self._batch

    def _tail(self, needs: Counter[str]) -> ServingTail:
        num_tops = max((size for size in TOP_SIZES if needs[f"top {size}"] > 0), default=0)
        self.num_tops = max(self.num_tops, num_tops)
        key = (needs["edits"] > 0, needs["samples"] > 0, needs["logprobs"] > 0, num_tops)
        tail = self._tails.get(key)
        if tail is None:
            core, (edits, samples, logprobs, num_tops) = self._core, key
            tail = self._tails[key] = ServingTail(
                core.state,
                core.sampling,
                edits=edits,
                samples=samples,
                logprobs=logprobs,
                num_tops=num_tops,
                processed=core.config.logprobs_mode == "processed_logprobs",
            )
        return tail


def _params(request: Request) -> SamplingParams:
    assert isinstance(request.payload, Job)
    return request.payload.params


def _needs(params: SamplingParams) -> list[str]:
    needs = (
        ("edits", params.edits),
        ("samples", params.samples),
        ("logprobs", params.logprobs),
        (f"top {top_size(params.top_logprobs)}", params.top_logprobs > 0),
    )
    return [name for name, needed in needs if needed]


def _row_start(request: Request) -> RowStart:
    assert request.slot is not None
    # The token that this prefill samples is counted already.
    num_generated = request.num_output_tokens - 1
    return RowStart(
        request.slot,
        request.num_prompt_tokens + num_generated,
        min(request.max_new_tokens, _MAX_INT32),
        _params(request).eos_ids,
        -1,
        num_generated,
    )


def _sampling_start(request: Request) -> SamplingStart:
    assert request.slot is not None
    params = _params(request)
    ids: Sequence[int] = ()
    if params.repetition_penalty != 1.0:
        ids = [*(request.prompt_ids or ()), *request.output_ids]
    return SamplingStart(request.slot, params, ids)


__all__ = ["StepLauncher"]
