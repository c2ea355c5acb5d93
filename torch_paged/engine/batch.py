"""A closed batch: rows that start together and step together, as `generate()` needs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_paged.decoder.inputs import StepInputs
from torch_paged.decoder.state import RowStart, to_device
from torch_paged.engine.core import EngineCore
from torch_paged.engine.reports import StepResult, make_reports
from torch_paged.engine.request import Request
from torch_paged.engine.runner import Rows, make_rows
from torch_paged.engine.sampler import Sampler
from torch_paged.engine.scheduler import BlockUpdate, Scheduler

# Decode steps for which blocks are handed out at a time.
_STEPS_AHEAD = 64
_MAX_INT32 = 2**31 - 1

Deliver = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Prompts without their padding, one after the other, on the model's device.

    Attributes:
        lengths: tokens of each row, at least 1.
        ids: [num_tokens] int64, or None where `embeddings` [num_tokens, hidden_size] is given.
        positions: [num_tokens] int32 rotary positions.
        last_positions: [num_rows] rotary position of each row's last token.
    """

    lengths: tuple[int, ...]
    ids: Tensor | None
    embeddings: Tensor | None
    positions: Tensor
    last_positions: Tensor


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When rows end: after `max_new_tokens`, or with one of `eos_ids`, then filled with pad."""

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    pad_token: int = -1


class BatchRun:
    """Prefill and decode one closed batch. Use as a context manager: leaving frees the blocks.

    Args:
        lag: decode steps launched ahead of the newest result the host has seen.
    """

    def __init__(
        self, core: EngineCore, prompts: PackedPrompts, limits: BatchLimits, lag: int
    ) -> None:
        self._core = core
        self._prompts = prompts
        self._limits = limits
        self._lag = lag
        num_rows = len(prompts.lengths)
        longest = max(prompts.lengths) + limits.max_new_tokens
        core.prepare(num_rows, max(prompts.lengths) + _STEPS_AHEAD, len(limits.eos_ids))
        self._scheduler = Scheduler(
            core.allocator,
            block_size=core.config.block_size,
            max_num_seqs=num_rows,
            # All prompts in one step; `_prefill_chunks` cuts it to what memory allows.
            max_num_batched_tokens=sum(prompts.lengths) + num_rows,
            max_model_len=longest,
            reserve=0,
            preempt=False,
            make_room=core.make_room,
            slots=core.slots,
        )
        self._launched = 0
        self._blocks_until = 0
        self._chunks: list[Tensor] = []
        self._rows: Rows | None = None

    def __enter__(self) -> BatchRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for row in range(len(self._prompts.lengths)):
            self._scheduler.finish(row, "cancelled" if exc_info[0] else "length")

    @property
    def rows(self) -> Rows:
        assert self._rows is not None, "prefill() comes first"
        return self._rows

    def prefill(self) -> Tensor:
        """Compute the prompts; returns logits [num_rows, vocab_size] of their last tokens."""
        prompts, limits = self._prompts, self._limits
        for row, length in enumerate(prompts.lengths):
            self._scheduler.add(
                Request(row, None, limits.max_new_tokens, num_prompt_tokens=length)
            )
        scheduled = self._scheduler.schedule()
        requests = [chunk.request for chunk in scheduled.prefills]
        slots = [request.slot for request in requests if request.slot is not None]
        if len(slots) != len(prompts.lengths):
            problems = [r.error for r in scheduled.finished if r.error]
            raise torch.OutOfMemoryError(
                f"the KV cache has no room for {len(prompts.lengths)} prompts of "
                f"{sum(prompts.lengths)} tokens: {'; '.join(problems) or 'out of blocks'}; "
                "raise kv_cache_memory or generate for fewer rows at once"
            )
        core = self._core
        max_new = min(limits.max_new_tokens, _MAX_INT32)
        core.runner()
        core.state.write_blocks(scheduled.block_updates)
        self._rows = make_rows(slots, core.device)
        logits = self._prefill_chunks(requests)
        core.state.start_rows(
            [
                RowStart(slot, length, max_new, limits.eos_ids, limits.pad_token)
                for slot, length in zip(slots, prompts.lengths, strict=True)
            ],
            prompts.last_positions,
        )
        return logits

    def _prefill_chunks(self, requests: Sequence[Request]) -> Tensor:
        budget = self._core.config.max_num_batched_tokens
        logits: list[Tensor] = []
        group: list[tuple[int, int, int]] = []  # (row, start, length)
        used = 0
        for row, length in enumerate(self._prompts.lengths):
            start = 0
            while start < length:
                part = min(length - start, budget - used)
                group.append((row, start, part))
                used += part
                start += part
                if used == budget:
                    logits += self._prefill_group(requests, group)
                    group, used = [], 0
        if group:
            logits += self._prefill_group(requests, group)
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _prefill_group(
        self, requests: Sequence[Request], group: Sequence[tuple[int, int, int]]
    ) -> list[Tensor]:
        """Run one packed forward; returns the logits of the rows whose prompt ends in it."""
        core, prompts = self._core, self._prompts
        slots = [self.rows.slots[row] for row, _, _ in group]
        starts = [start for _, start, _ in group]
        firsts = _starts(prompts.lengths)
        lo = firsts[group[0][0]] + group[0][1]
        bounds = _starts([length for _, _, length in group])
        hi = lo + bounds[-1]
        block_ids = [requests[row].block_ids for row, _, _ in group]
        rows = len(group)
        # One transfer; the parts are views of it.
        packed = to_device(
            torch.cat(
                [
                    torch.tensor([*slots, *starts, *bounds, *(b - 1 for b in bounds[1:])]),
                    _slot_mapping(group, block_ids, core.config.block_size),
                ]
            ),
            core.device,
        )
        index, prefix, cu_seqlens, last, mapping = packed.split(
            [rows, rows, rows + 1, rows, hi - lo]
        )
        core.state.set_prefix(index, prefix)
        inputs = StepInputs(
            slots=index.to(torch.int32),
            ids=None if prompts.ids is None else prompts.ids[lo:hi],
            embeddings=None if prompts.embeddings is None else prompts.embeddings[lo:hi],
            positions=prompts.positions[lo:hi],
            cu_seqlens=cu_seqlens.to(torch.int32),
            slot_mapping=mapping,
            last_index=last,
            max_query_len=max(length for _, _, length in group),
        )
        out = core.runner().prefill(inputs)
        ended = [
            i
            for i, (row, start, length) in enumerate(group)
            if start + length == prompts.lengths[row]
        ]
        # Only the first piece of a group can continue a prompt, and only the last can stop short.
        if not ended:
            return []
        # The next group may replay the graph whose static output this is.
        return [out[ended[0] : ended[-1] + 1].clone()]

    def first_tokens(self, logits: Tensor, sampler: Sampler) -> None:
        """Sample each row's first token from the prefill's logits."""
        self.commit(sampler(logits))

    def commit(self, tokens: Tensor) -> None:
        """Append tokens [num_rows] chosen by the caller from the logits of the newest step."""
        self._core.state.advance(tokens, self.rows.index)
        self._count_step()

    def next_logits(self, *, captured: bool = True) -> Tensor:
        """Run the forward of the next step; logits [num_rows, vocab_size], until the next call."""
        self._ensure_blocks()
        runner = self._core.runner() if captured else self._core.eager_runner()
        self._scheduler.advance(1)
        return runner.logits(self.rows)

    def run(self, logits: Tensor, sampler: Sampler, deliver: Deliver | None = None) -> int:
        """Sample and decode until every row has ended; returns the number of steps kept.

        Steps launched past the end are dropped, and the generator that the sampler draws from is
        left as if they had not been launched.

        Args:
            logits: of the prefill.
            deliver: called with each step's tokens [num_rows] on the host, in order.
        """
        limit = self._limits.max_new_tokens
        index = self.rows.index if deliver is not None else None
        reports = make_reports(self._core.state, index, self._lag)
        draws = _DrawHistory(self._core.device, self._lag) if sampler.draws else None
        watched = deliver is not None or bool(self._limits.eos_ids)
        started = time.perf_counter()
        self.first_tokens(logits, sampler)
        self._after_launch(reports.post if watched else None, draws)
        confirmed = 0
        while True:
            while self._launched < limit and self._launched - confirmed <= self._lag:
                self.launch(sampler)
                self._after_launch(reports.post if watched else None, draws)
            if confirmed == self._launched:
                break
            result = reports.wait(confirmed) if watched else StepResult(1, None)
            confirmed += 1
            if deliver is not None and result.tokens is not None:
                deliver(result.tokens)
            if result.num_unfinished == 0:
                break
        if draws is not None and confirmed < self._launched:
            draws.rewind(self._launched - confirmed)
        self._core.counters.seconds += time.perf_counter() - started
        return confirmed

    def launch(self, sampler: Sampler) -> None:
        """Launch one whole step; nothing waits for it."""
        self._ensure_blocks()
        self._core.runner().decode(self.rows, sampler)
        self._scheduler.advance(1)
        self._count_step()

    def _after_launch(self, post: Callable[[], None] | None, draws: _DrawHistory | None) -> None:
        if post is not None:
            post()
        if draws is not None:
            draws.note()

    def _ensure_blocks(self) -> None:
        if self._launched < self._blocks_until:
            return
        updates: Sequence[BlockUpdate] = self._scheduler.ensure_decode_blocks(_STEPS_AHEAD)
        self._core.ensure_columns(max(self._prompts.lengths) + self._launched + _STEPS_AHEAD)
        self._core.state.write_blocks(updates)
        self._blocks_until = self._launched + _STEPS_AHEAD

    def _count_step(self) -> None:
        self._launched += 1
        counters = self._core.counters
        counters.steps += 1
        counters.tokens += len(self.rows)
        ring = self._core.state.ring
        if self._launched % ring == 0:
            self._chunks.append(self._ring_rows(ring))

    def _ring_rows(self, count: int) -> Tensor:
        return self._core.state.output[:count].index_select(1, self.rows.index.long())

    def gather_kv(self, layer: int, num_steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Copy out the keys and values of each row: [num_kv_heads, num_tokens, head_dim] each.

        Args:
            num_steps: steps kept; the token of the last one is not in the cache yet.
        """
        pool, size = self._core.pool, self._core.config.block_size
        keys, values = pool.keys[layer], pool.values[layer]
        out: tuple[list[Tensor], list[Tensor]] = ([], [])
        for slot, length in zip(self.rows.slots, self._prompts.lengths, strict=True):
            num_tokens = length + num_steps - 1
            blocks = self._core.state.block_table[slot, : -(-num_tokens // size)].long()
            for cache, rows in zip((keys, values), out, strict=True):
                # [blocks, heads, size, dim] -> [heads, tokens, dim]
                rows.append(cache[blocks].transpose(0, 1).flatten(1, 2)[:, :num_tokens])
        return out

    def tokens(self, num_steps: int) -> Tensor:
        """Return the sampled tokens [num_rows, num_steps] int64 of the first `num_steps` steps."""
        tail = self._launched % self._core.state.ring
        parts = [*self._chunks, self._ring_rows(tail)] if tail else self._chunks
        return torch.cat(parts)[:num_steps].T.contiguous()


class _DrawHistory:
    """States of the device's default generator after the newest steps."""

    def __init__(self, device: torch.device, lag: int) -> None:
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        else:
            self._generator = torch.default_generator
        self._states: deque[Tensor] = deque(maxlen=lag + 2)

    def note(self) -> None:
        self._states.append(self._generator.get_state())

    def rewind(self, num_steps: int) -> None:
        """Put the generator back to where it stood `num_steps` steps ago."""
        self._generator.set_state(self._states[-1 - num_steps])


def _starts(lengths: Sequence[int]) -> list[int]:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def _slot_mapping(
    group: Sequence[tuple[int, int, int]],
    block_ids: Sequence[Sequence[int]],
    block_size: int,
) -> Tensor:
    """Return the flat cache index [num_tokens] int64 of every token of the group."""
    parts = []
    for (_, start, length), blocks in zip(group, block_ids, strict=True):
        index = torch.arange(start, start + length)
        block = torch.tensor(blocks)[index // block_size]
        parts.append(block * block_size + index % block_size)
    return torch.cat(parts)
