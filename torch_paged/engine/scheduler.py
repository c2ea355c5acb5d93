"""Continuous batching: which tokens are computed in which step, in which slots and blocks.

The scheduler never sees a token and never waits for one. It knows how many steps it has handed
out, so it knows how long every row is, when a row needs a block and when it reaches its length
limit. Only an early end has to be reported to it (`finish`), and may be reported late. A call of
`schedule` costs time for what changes, not for what runs.

Slots and blocks are handed on as soon as the last step that uses them is scheduled. That is safe
because steps are launched in order on one stream.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Literal

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.prefix import PrefixCache
from torch_paged.engine.decode_clock import DecodeClock
from torch_paged.engine.prefix_reuse import PrefixReuse
from torch_paged.engine.request import FinishReason, Request, RequestStatus
from torch_paged.engine.slot_pool import SlotPool
from torch_paged.engine.step import BlockUpdate, PrefillChunk, ScheduledStep, StepDraft
from torch_paged.engine.swap import SwapCopy, SwapSpace
from torch_paged.engine.waiting_line import WaitingLine
from torch_paged.errors import TorchPagedError


class Scheduler:
    """Admit requests into slots and blocks, and cut their work into steps.

    * Decoding rows decode in every step. Prompts, in chunks, share the tokens that these leave of
      `max_num_batched_tokens`, at least one, in order of admission.
    * Requests are admitted in order of arrival or of priority. The first in line is not overtaken:
      whoever comes after it waits until it has the slot and the blocks for all its tokens.
    * A row without a block for its next token takes the blocks of the last in line. Those of its
      tokens that are out stay out; they are computed again, or swapped in, behind its prompt.
    * A request that fits in no way ends alone, as "error".

    Args:
        allocator: the blocks of the KV pool; the scheduler need not be their only user.
        max_num_seqs: most requests that run together.
        max_num_batched_tokens: tokens in one step, those of decoding rows included.
        max_model_len: longest sequence, prompt included.
        policy: "fcfs", or "priority": smaller `Request.priority` first. One level of priority is
            worth `aging_steps` steps of waiting, so nobody waits for ever.
        prefix_cache: used if `enable_prefix_caching`.
        reserve: blocks left free for each running request when another one is admitted.
        preempt: False raises `OutOfBlocks` instead; the call may be repeated, nothing is lost.
        swap_space: asked before a preempted request's KV is dropped.
        make_room: asked for that many more blocks before anyone is preempted or kept waiting;
            grows the allocator and returns True, or returns False at once.
        slots: where running requests take their slots, others may too; None: a pool of its own.
        learn: called before the blocks of a running request are given up, to bring its
            `output_ids` up to date with what is known.
        now: the time in seconds, for deadlines.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Literal["fcfs", "priority"] = "fcfs",
        aging_steps: int = 256,
        enable_prefix_caching: bool = False,
        prefix_cache: PrefixCache | None = None,
        reserve: int = 1,
        preempt: bool = True,
        swap_space: SwapSpace | None = None,
        make_room: Callable[[int], bool] | None = None,
        slots: SlotPool | None = None,
        learn: Callable[[Request], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if enable_prefix_caching and prefix_cache is None:
            raise ValueError("enable_prefix_caching needs a prefix_cache, got None; pass one")
        self.num_preemptions = 0
        self._allocator = allocator
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._reserve = reserve
        self._preempt = preempt
        self._swap_space = swap_space
        self._make_room = make_room
        self._learn = learn
        self._now = now

        self._clock = DecodeClock(block_size)
        self._line = WaitingLine(policy, aging_steps)
        cache = prefix_cache if enable_prefix_caching else None
        self._prefixes = PrefixReuse(cache, allocator, block_size)
        self._requests: dict[Hashable, Request] = {}  # all that have not ended
        self._prefilling: dict[Hashable, Request] = {}  # in order of admission
        self._slots = SlotPool(max_num_seqs) if slots is None else slots
        self.num_running = 0  # requests with a slot, prefilling or decoding
        # Heap of (seconds, arrival, id); an entry may outlive its request by a long time.
        self._deadlines: list[tuple[float, int, Hashable]] = []
        self._draft = StepDraft()

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, the preempted ones among them."""
        return len(self._requests) - self.num_running

    @property
    def kv_blocks_used(self) -> int:
        """Blocks of the pool that somebody holds."""
        return self._allocator.num_live

    @property
    def is_idle(self) -> bool:
        """Whether `schedule` has nothing to run and nothing to report."""
        return not (self._requests or self._draft.finished or self._draft.stopped)

    def add(self, request: Request) -> None:
        """Put a new request in line.

        Raises:
            ValueError: its id is in use, or it has been here before.
        """
        if request.request_id in self._requests or request.arrival >= 0:
            raise ValueError(
                f"request_id {request.request_id!r} is in use, or its Request was added before; "
                "add a new Request under a new id"
            )
        self._line.arrive(request, self._clock.step)
        self._requests[request.request_id] = request
        tokens_left = self._max_model_len - request.num_prompt_tokens
        if tokens_left < 1:
            why = (
                f"a prompt of {request.num_prompt_tokens} tokens leaves no room for a new one in "
                f"max_model_len={self._max_model_len}; shorten it or raise max_model_len"
            )
            self._end(request, "error", why)
            return
        request.max_new_tokens = min(request.max_new_tokens, tokens_left)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.arrival, request.request_id))
        self._line.join(request)

    def cancel(self, request_id: Hashable) -> None:
        """End a request wherever it stands; the next step reports it.

        Raises:
            KeyError: there is no such request, or it has ended.
        """
        self._end(self._requests[request_id], "cancelled")

    def finish(self, request_id: Hashable, reason: FinishReason, error: str | None = None) -> None:
        """End a request whose tokens say so; no effect if it has ended already."""
        if request_id in self._requests:
            self._end(self._requests[request_id], reason, error)

    def recompute(self, request_id: Hashable) -> None:
        """Send a request back in line whose prefill of the newest step could not run."""
        request = self._requests[request_id]
        # A token that was to be sampled behind it has been counted.
        request.num_output_tokens -= request_id in self._draft.started
        self._preempt_request(request, trusted=False)

    def schedule(self, *, decode: bool = True) -> ScheduledStep:
        """Return the next step, which counts as launched: launch it before the next call.

        With ``decode=False`` it is a step of prefills only, and decoding rows stand still.

        Raises:
            OutOfBlocks: only with ``preempt=False``.
        """
        self._expire()
        for request in self._clock.ended_rows():
            self._end(request, "length")
        if decode and not self._grow_at_once():
            self._grow_rows(1, preempt=self._preempt)
        num_decoding = len(self._clock.rows) if decode else 0
        prefills = self._plan_prefills(max(1, self._max_num_batched_tokens - num_decoding))
        step = self._draft.take(num_decoding, prefills, decode=decode)
        self._clock.step += decode
        for chunk in prefills:
            if chunk.is_last:
                chunk.request.num_output_tokens += 1
                self._draft.started[chunk.request.request_id] = chunk.request
                self._clock.start(chunk.request)
        return step

    def ensure_decode_blocks(self, num_tokens_ahead: int) -> tuple[BlockUpdate, ...]:
        """Give every decoding row the blocks for its next tokens, up to its length limit.

        The next `num_tokens_ahead` steps then update no block of these rows. Nobody is preempted.

        Raises:
            OutOfBlocks: not all rows got theirs; what was given comes with the next updates.
        """
        self._grow_rows(num_tokens_ahead, preempt=False)
        return self._draft.take_block_updates()

    def advance(self, num_steps: int) -> None:
        """Count decode steps of the present rows that were launched without `schedule`."""
        self._clock.step += num_steps

    def num_computed_tokens(self, request: Request) -> int:
        """Tokens of a request whose KV is in the cache after all steps scheduled so far."""
        return request.num_computed_tokens + self._clock.num_decoded(request)

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` if slots, blocks and counters contradict each other."""
        self._allocator.check_integrity()
        requests = self._requests.values()
        self._slots.check_integrity([r.slot for r in requests if r.slot is not None])
        problems: list[str] = []
        for request in requests:
            name, running = request.request_id, request.status is RequestStatus.RUNNING
            places = (name in self._prefilling) + (name in self._clock.rows)
            if {request.slot is not None, bool(request.block_ids), places} != {running}:
                problems.append(f"{name!r} is {request.status.value}, but in {places} places")
            spare = len(request.block_ids) * self._block_size - request.max_kv_tokens
            left = request.max_kv_tokens - self.num_computed_tokens(request)
            if running and not -left <= spare < self._block_size:
                problems.append(f"{name!r} has {len(request.block_ids)} blocks")
        if self.num_running != len(self._prefilling) + len(self._clock.rows):
            problems.append(f"num_running is {self.num_running}")
        holders = Counter(chain.from_iterable(request.block_ids for request in requests))
        for block, count in holders.items():
            if self._allocator.refcount(block) < count:
                problems.append(f"block {block} has more holders than owners: {count}")
        if problems:
            raise TorchPagedError("scheduler is inconsistent: " + "; ".join(problems))

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._now():
            _, arrival, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.arrival == arrival:
                self._end(request, "cancelled", "its deadline has passed")

    def _plan_prefills(self, budget: int) -> tuple[PrefillChunk, ...]:
        chunks: list[PrefillChunk] = []
        for request in chain(list(self._prefilling.values()), self._admissions()):
            start = request.num_computed_tokens
            length = min(budget, request.num_tokens - start)
            is_last = start + length == request.num_tokens
            chunks.append(PrefillChunk(request, start, length, is_last))
            request.num_computed_tokens += length
            self._prefixes.register(request, start + length, since=start)
            if is_last:
                del self._prefilling[request.request_id]
            budget -= length
            if budget == 0:
                break
        return tuple(chunks)

    def _admissions(self) -> Iterator[Request]:
        """Admit requests, one whenever asked, until the first in line does not fit.

        None in a step that preempts: it would take the blocks that the others will need.
        """
        while not (self._line.head_waits or self._draft.preempted):
            if self.num_running == self._max_num_seqs or not self._slots.num_free:
                return
            request = self._line.first()
            if request is None:
                return
            if not self._admit(request):
                self._line.head_waits = True
            elif request.slot is not None:
                self._line.remove_first()
                yield request

    def _admit(self, request: Request) -> bool:
        """Settle the first in line: it runs, or ends because it never can. False: it waits."""
        needed = self._num_blocks(request.num_tokens)
        found = [] if request.host_block_ids else self._prefixes.acquire(request)
        fresh = self._take(needed - len(found), keep=self._reserve * self.num_running)
        if fresh is None:
            self._allocator.free(found)
            if needed <= self._allocator.num_blocks and self.num_running:
                return False
            self._end(request, "error", self._too_large(needed))
            return True
        request.status = RequestStatus.RUNNING
        request.slot = self._slots.take()
        self.num_running += 1
        request.block_ids = found + fresh
        if request.host_block_ids:
            device_blocks = tuple(fresh[: len(request.host_block_ids)])
            self._draft.swap_ins.append(SwapCopy(request, device_blocks, request.host_block_ids))
            self._give_back_swapped(request)
        else:
            request.num_computed_tokens = len(found) * self._block_size
        request.num_cached_tokens = request.num_computed_tokens
        self._prefilling[request.request_id] = request
        self._draft.block_updates.append(BlockUpdate(request.slot, 0, tuple(request.block_ids)))
        return True

    def _grow_at_once(self) -> bool:
        """Give every row whose blocks are full one more, if that many are free."""
        due = list(self._clock.rows_to_grow(1))
        blocks = self._take(len(due))
        for index, request in enumerate(due):
            if blocks is not None:
                assert request.slot is not None
                update = BlockUpdate(request.slot, len(request.block_ids), (blocks[index],))
                self._draft.block_updates.append(update)
                request.block_ids.append(blocks[index])
            self._clock.watch_blocks(request)
        return blocks is not None

    def _grow_rows(self, num_steps: int, *, preempt: bool) -> None:
        for request in self._clock.rows_to_grow(num_steps):
            try:
                self._grow(request, num_steps, preempt)
            finally:
                if request.decode_since >= 0:
                    self._clock.watch_blocks(request)

    def _grow(self, request: Request, num_steps: int, preempt: bool) -> None:
        """Give a row the blocks for `num_steps` more tokens, or take its slot away."""
        assert request.slot is not None
        tokens = min(self.num_computed_tokens(request) + num_steps, request.max_kv_tokens)
        first = len(request.block_ids)
        count = self._num_blocks(tokens) - first
        while (blocks := self._take(count)) is None:
            if not preempt:
                self._allocator.allocate(count)  # raises OutOfBlocks
            running = chain(self._prefilling.values(), self._clock.rows.values())
            victim = max(running, key=lambda r: (r.rank, r.arrival))
            if self.num_running == 1:
                self._end(request, "error", self._too_large(first + count))
            else:
                self._preempt_request(victim)
            if victim is request:
                return
        request.block_ids += blocks
        self._draft.block_updates.append(BlockUpdate(request.slot, first, tuple(blocks)))

    def _preempt_request(self, request: Request, *, trusted: bool = True) -> None:
        blocks = request.block_ids
        self._vacate(request, trusted=trusted)
        filled = tuple(blocks[: self._num_blocks(request.num_computed_tokens)])
        host = None
        if self._swap_space is not None and filled and trusted:
            host = self._swap_space.take(request, len(filled))
        if host is not None:
            request.host_block_ids = tuple(host)
            self._draft.swap_outs.append(SwapCopy(request, filled, request.host_block_ids))
        else:
            request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self._draft.preempted.append(request)
        self._line.join(request)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.slot is not None:
            self._vacate(request, trusted=reason != "error")
        if request.host_block_ids:
            self._give_back_swapped(request)
        self._line.head_waits = False
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.error = reason, error
        del self._requests[request.request_id]
        self._draft.finished.append(request)

    def _vacate(self, request: Request, *, trusted: bool) -> None:
        """Take its slot and blocks from a running request; others may find `trusted` ones."""
        assert request.slot is not None
        self._draft.withdraw(request)
        if self._learn is not None:
            self._learn(request)
        if request.decode_since >= 0:
            self._clock.stop(request)
        else:
            del self._prefilling[request.request_id]
        if trusted:
            self._prefixes.register(request, request.num_computed_tokens)
        else:
            self._prefixes.forget(request)
        self._slots.give_back(request.slot)
        self.num_running -= 1
        self._allocator.free(request.block_ids)
        request.slot, request.block_ids = None, []

    def _give_back_swapped(self, request: Request) -> None:
        assert self._swap_space is not None
        self._swap_space.give_back(request.host_block_ids)
        request.host_block_ids = ()

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _take(self, count: int, *, keep: int = 0) -> list[int] | None:
        """Allocate `count` blocks if `keep` more than these are free, or can be made."""
        missing = count + keep - self._allocator.num_free
        if missing > 0 and not (self._make_room is not None and self._make_room(missing)):
            return None
        return self._allocator.allocate(count)

    def _too_large(self, num_blocks: int) -> str:
        return (
            f"the request needs {num_blocks} KV blocks and the pool has "
            f"{self._allocator.num_blocks}; raise kv_cache_memory or shorten the request"
        )


__all__ = ["BlockUpdate", "PrefillChunk", "ScheduledStep", "Scheduler"]
