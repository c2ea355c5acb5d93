"""A closed batch: rows that start together and step together, as `generate()` needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from torch_paged.decoder.state import RowStart, SlotState
from torch_paged.decoder.transfer import to_device
from torch_paged.engine.core import EngineCore
from torch_paged.engine.draw_history import DrawHistory
from torch_paged.engine.kv_transfer import copy_pairs, gather_kv, load_kv
from torch_paged.engine.leased_blocks import LeasedBlocks
from torch_paged.engine.out_of_memory import no_room_for
from torch_paged.engine.packed_prompts import BatchLimits, PackedPrompts
from torch_paged.engine.prompt_groups import Piece, cut_prompts, group_inputs
from torch_paged.engine.reports import StepResult, make_reports
from torch_paged.engine.row_blocks import RowBlocks
from torch_paged.engine.runner import Rows, Runner, make_rows
from torch_paged.engine.sampler import Sampler
from torch_paged.engine.step import BlockUpdate
from torch_paged.errors import OutOfBlocks

# Decode steps for which blocks are handed out at a time.
_STEPS_AHEAD = 64
_MAX_INT32 = 2**31 - 1

Deliver = Callable[[Tensor], None]
# What of the keys and values is wanted when the run has ended: with "windows", of layers that have
# one, what it shows.
Keeps = Literal["nothing", "windows", "all"]


class BatchRun:
    """Prefill and decode one closed batch. Use as a context manager: leaving frees the blocks.

    Rows of one prompt share its full blocks.

    Args:
        lag: decode steps launched ahead of the newest result the host has seen.
        steps_ahead: decode steps for which blocks are handed out at a time.
        keeps: what `gather_kv` will be asked for.
    """

    def __init__(
        self,
        core: EngineCore,
        prompts: PackedPrompts,
        limits: BatchLimits,
        lag: int,
        *,
        steps_ahead: int = _STEPS_AHEAD,
        keeps: Keeps = "nothing",
    ) -> None:
        self._core = core
        self._prompts = prompts
        self._limits = limits
        self._lag = lag
        self._steps_ahead = steps_ahead
        num_prompts = len(prompts.lengths)
        self._sources = prompts.rows or tuple(range(num_prompts))
        self._cached = prompts.cached or (0,) * num_prompts
        # Tokens in the cache of each row when decoding begins.
        self._lengths = [prompts.lengths[prompt] for prompt in self._sources]
        core.prepare(len(self._sources), max(self._lengths) + _STEPS_AHEAD, len(limits.eos_ids))
        self._blocks = RowBlocks(
            core.allocator,
            core.slots,
            core.config.block_size,
            core.make_room_beyond,
            core.layout.kinds,
        )
        self.keeps = keeps
        self._drops = self._blocks.has_window and keeps != "all" and not any(self._cached)
        # Steps launched past the end move the windows too far.
        self._drop_late = 0 if keeps == "nothing" else lag + 1
        self._launched = 0
        self._blocks_until = 0
        self._chunks: list[Tensor] = []
        self._rows: Rows | None = None
        # Where keys depend on lengths, as Hugging Face takes them of the whole batch: the longest
        # prompt, int64 []; the least length to count with, likewise; steps kept of those launched.
        self._first_span: Tensor | None = None
        self._floor: Tensor | int = 0
        self._kept: int | None = None
        self._fed = 0  # forwards of the caller's own loop

    def __enter__(self) -> BatchRun:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._blocks.close()
        if self._first_span is not None:
            # Forwards behind the prompt: a token that is not fed any more has none.
            steps = self._fed if self._kept is None else max(self._kept - 1, 0)
            last = self._first_span + steps
            self._core.step.remember_spans(self._first_span, last)

    @property
    def rows(self) -> Rows:
        assert self._rows is not None, "prefill() comes first"
        return self._rows

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._core.step.vocab_size

    @property
    def state(self) -> SlotState:
        """The state that the rows are in."""
        return self._core.state

    def prefill(self, *, captured: bool = True) -> Tensor:
        """Compute the prompts; returns logits [num_rows, vocab_size] of their last tokens.

        Args:
            captured: padded to a size that graphs have, by one if there is one.
        """
        core, prompts, limits = self._core, self._prompts, self._limits
        num_prompts, sources = len(prompts.lengths), self._sources
        self._blocks.open(len(sources))
        first_rows = [sources.index(prompt) for prompt in range(num_prompts)]
        own = [0] * len(sources)
        for prompt, row in enumerate(first_rows):
            own[row] = prompts.lengths[prompt]
        tokens = sum(prompts.lengths)
        with no_room_for(f"{num_prompts} prompt{'s'[: num_prompts > 1]} of {tokens} tokens"):
            if prompts.held is not None:
                copy_pairs(core, self._blocks.adopt(prompts.held, self._cached))
            # Where there is a window, chunk by chunk.
            updates = self._blocks.grow(own, windowed=False if self._drops else None)
            if prompts.held is not None:
                updates = self._blocks.all_updates()
        core.runner()
        core.state.write_blocks(updates)
        self._rows = make_rows(self._blocks.slots, self._lengths, core.device)
        if prompts.cached_kv is not None:
            held = [self._blocks.held[row] for row in first_rows]
            load_kv(core, prompts.cached_kv, self._cached, held)
        if core.step.has_spans:
            self._first_span = prompts.positions.max().long() + 1
            self._floor = core.step.first_floor(self._first_span)
        logits = prompts.logits
        if logits is None:
            logits = self._prefill_chunks(first_rows, captured)
        last_positions = prompts.last_positions
        if len(sources) != num_prompts or prompts.rows is not None:
            self._share([first_rows[prompt] for prompt in sources])
            index = to_device(torch.tensor(sources, device="cpu"), core.device)
            logits = logits.index_select(0, index)
            last_positions = last_positions.index_select(0, index)
        max_new = min(limits.max_new_tokens, _MAX_INT32)
        core.state.start_rows(
            [
                RowStart(slot, length, max_new, limits.eos_ids, limits.pad_token)
                for slot, length in zip(self._blocks.slots, self._lengths, strict=True)
            ],
            last_positions,
            0 if self._first_span is None else self._first_span - 1 - last_positions,
            self._floor,
        )
        return logits

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row go on from what row `sources[row]` has in the cache, as beams do."""
        self._share(sources)

    def _share(self, sources: Sequence[int]) -> None:
        lengths = [length + self._launched for length in self._lengths]
        before = self._core.num_blocks
        with no_room_for(self._told(max(lengths))):
            updates, copies = self._blocks.reorder(sources, lengths)
        if self._core.num_blocks != before:
            self._core.runner()
        self._core.state.write_blocks(updates)
        copy_pairs(self._core, copies)
        if self._core.step.keeps_state:
            slots = self._blocks.slots
            pairs = torch.tensor([[slots[source] for source in sources], slots], device="cpu")
            self._core.step.copy_states(*to_device(pairs, self._core.device))

    def _prefill_chunks(self, first_rows: Sequence[int], captured: bool) -> Tensor:
        prompts, budget = self._prompts, self._core.config.max_num_batched_tokens
        if self._core.step.keeps_state:
            budget = sum(prompts.lengths)
        logits: list[Tensor] = []
        for group in cut_prompts(prompts.lengths, self._cached, budget):
            logits += self._prefill_group(first_rows, group, captured)
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _prefill_group(
        self, first_rows: Sequence[int], group: Sequence[Piece], captured: bool
    ) -> list[Tensor]:
        """Run one packed forward; returns the logits of the rows whose prompt ends in it."""
        prompts = self._prompts
        if self._drops:
            self._move_windows(first_rows, group)
        rows = [first_rows[prompt] for prompt, _, _ in group]
        span = None
        if self._first_span is not None:
            span = torch.maximum(self._first_span, torch.as_tensor(self._floor))
        inputs = group_inputs(
            self._core,
            prompts,
            self._cached,
            group,
            [self.rows.slots[row] for row in rows],
            [self._blocks.held[row] for row in rows],
            span,
        )
        out = self._runner(captured).prefill(inputs)
        ended = [
            i
            for i, (prompt, start, length) in enumerate(group)
            if start + length == prompts.lengths[prompt]
        ]
        if not ended:
            return []
        # The next group may replay the graph whose static output this is.
        return [out[ended[0] : ended[-1] + 1].clone()]

    def _move_windows(self, first_rows: Sequence[int], group: Sequence[Piece]) -> None:
        """Before a group runs, give its rows blocks up to its end, and drop what is behind."""
        begins, ends = [0] * len(self._sources), [0] * len(self._sources)
        for prompt in range(group[0][0]):
            begins[first_rows[prompt]] = self._prompts.lengths[prompt]
        for prompt, start, length in group:
            begins[first_rows[prompt]] = start
            ends[first_rows[prompt]] = start + length
        self._blocks.drop_behind(begins)
        with no_room_for(self._told(max(ends))):
            updates = self._blocks.grow(ends, windowed=True)
        self._core.state.write_blocks(updates)

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
        self._fed += 1
        return self._runner(captured).logits(self.rows)

    def _runner(self, captured: bool) -> Runner:
        return self._core.runner() if captured else self._core.eager_runner()

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
        draws = DrawHistory(self._core.device, self._lag) if sampler.draws else None
        watched = deliver is not None or bool(self._limits.eos_ids)
        started = time.perf_counter()
        self.first_tokens(logits, sampler)
        self._after_launch(reports.post if watched else None, draws)
        confirmed = 0
        try:
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
        finally:  # a streamer may raise
            if draws is not None and 0 < confirmed < self._launched:
                draws.rewind(self._launched - confirmed)
        self._core.counters.seconds += time.perf_counter() - started
        self._kept = confirmed
        return confirmed

    def launch(self, sampler: Sampler) -> None:
        """Launch one whole step; nothing waits for it."""
        self._ensure_blocks()
        self._core.runner().decode(self.rows, sampler)
        self._count_step()

    def _after_launch(self, post: Callable[[], None] | None, draws: DrawHistory | None) -> None:
        if post is not None:
            post()
        if draws is not None:
            draws.note()

    def _ensure_blocks(self) -> None:
        if self._launched < self._blocks_until:
            return
        if self._drops:
            # In front of the next launch: those in flight may still read it, in order.
            newest = self._launched - 1 - self._drop_late
            self._blocks.drop_behind([max(length + newest, 0) for length in self._lengths])
        steps = min(self._launched + self._steps_ahead, self._limits.max_new_tokens - 1)
        try:
            updates = self._grow(steps)
        except OutOfBlocks:
            # The rows may end before they need all of these.
            steps = self._launched + 1
            updates = self._grow(steps)
        self._core.ensure_columns(max(self._lengths) + steps)
        self._core.state.write_blocks(updates)
        self._blocks_until = steps

    def _grow(self, steps: int) -> tuple[BlockUpdate, ...]:
        """Give the rows blocks for so many steps in all."""
        with no_room_for(self._told(max(self._lengths) + steps)):
            return self._blocks.grow([length + steps for length in self._lengths])

    def _told(self, num_tokens: int) -> str:
        rows = len(self._sources)
        return f"{rows} row{'s'[: rows > 1]} of up to {num_tokens} tokens"

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

        What was in a cache before the run is left out; what the run did not keep is undefined.

        Args:
            num_steps: steps kept; the token of the last one is not in the cache yet.
        """
        assert self.keeps != "nothing", "a run whose keys and values are wanted is told so"
        rows = [
            (slot, self._cached[source], length + num_steps - 1)
            for slot, source, length in zip(
                self.rows.slots, self._sources, self._lengths, strict=True
            )
        ]
        return gather_kv(self._core, layer, rows)

    def lease_blocks(self, num_steps: int) -> LeasedBlocks:
        """Hand over what `gather_kv` would copy out, with what was there before; the run is over.

        Whoever calls this frees the blocks.
        """
        assert self.keeps != "nothing" and not self._drops
        lengths = [length + num_steps - 1 for length in self._lengths]
        held = self._blocks.hand_over(lengths)
        return LeasedBlocks.of_core(self._core, held, lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row's prompt."""
        return tuple(self._lengths)

    @property
    def cached(self) -> tuple[int, ...]:
        """Of these, how many were in a cache before the run."""
        return tuple(self._cached[prompt] for prompt in self._sources)

    def tokens(self, num_steps: int) -> Tensor:
        """Return the sampled tokens [num_rows, num_steps] int64 of the first `num_steps` steps."""
        tail = self._launched % self._core.state.ring
        parts = [*self._chunks, self._ring_rows(tail)] if tail else self._chunks
        return torch.cat(parts)[:num_steps].T.contiguous()


__all__ = ["BatchLimits", "BatchRun", "PackedPrompts"]
