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
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Literal

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import ONE_KIND, LayerKind
from torch_paged.cache.prefix import PrefixCache
from torch_paged.engine.deadlines import Deadlines
from torch_paged.engine.decode_clock import DecodeClock
from torch_paged.engine.integrity import check_requests
from torch_paged.engine.patience import Patience
from torch_paged.engine.prefix_reuse import PrefixReuse
from torch_paged.engine.request import FinishReason, Request, RequestStatus
from torch_paged.engine.request_blocks import RequestBlocks
from torch_paged.engine.slot_pool import SlotPool
from torch_paged.engine.step import BlockUpdate, PrefillChunk, ScheduledStep, StepDraft
from torch_paged.engine.swap import Swaps, SwapSpace
from torch_paged.engine.waiting_line import WaitingLine


class Scheduler:
    """Admit requests into slots and blocks, and cut their work into steps.

    * Decoding rows decode in every step. Prompts, in chunks, share the tokens that these leave of
      `max_num_batched_tokens`, at least one, in order of admission.
    * Requests are admitted in order of arrival or of priority. The first in line is not overtaken:
      whoever comes after it waits until it has the slot and the blocks for all its tokens.
    * A row without a block for its next tokens takes the blocks of the last in line. Those of
      the loser's tokens that are out stay out; they are computed again, or swapped in, behind its
      prompt.
    * What has left the windows of a kind of layers is given back, while a prompt is computed too.
    * A request that fits in no way ends alone, as "error".
    * Where the blocks or slots that are missing are held by other users of them, the last one that
      runs gives its own up, and whoever is first in line waits. It ends as "error" when nobody
      moves for `PATIENCE` seconds, neither we nor they, e.g. where another engine of the same
      thread is not stepped; and so does a prompt that gave way `MAX_YIELDS` times.

    Args:
        allocator: the blocks of the KV pool; the scheduler need not be their only user.
        kinds: of the layers; a request has blocks for each of them.
        max_num_seqs: most requests that run together.
        max_num_batched_tokens: tokens in one step, those of decoding rows included.
        max_model_len: longest sequence, prompt included.
        policy: "fcfs", or "priority": smaller `Request.priority` first. One level of priority is
            worth `aging_steps` steps of waiting, so nobody waits for ever.
        prefix_cache: used if `enable_prefix_caching`.
        cuts_prompts: compute a prompt in chunks where the budget ends within it; False: whole, and
            the step takes as many tokens more.
        reserve: columns of blocks left free for each running request when another is admitted.
        preempt: False raises `OutOfBlocks` instead; the call may be repeated, nothing is lost.
        swap_space: asked before a preempted request's KV is dropped.
        make_room: asked for that many more blocks before anyone is preempted or kept waiting;
            grows the allocator and returns True, or returns False at once.
        slots: where running requests take their slots, others may too; None: a pool of its own.
        learn: called before the blocks of a running request are given up, to bring its
            `output_ids` up to date with what is known.
        progress: changes whenever a user of the blocks launches something.
        now: the time in seconds, for deadlines and patience.

    Attributes:
        is_starved: others hold what the newest step would have needed to run anything.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        kinds: Sequence[LayerKind] = ONE_KIND,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Literal["fcfs", "priority"] = "fcfs",
        aging_steps: int = 256,
        enable_prefix_caching: bool = False,
        prefix_cache: PrefixCache | None = None,
        cuts_prompts: bool = True,
        reserve: int = 1,
        preempt: bool = True,
        swap_space: SwapSpace | None = None,
        make_room: Callable[[int], bool] | None = None,
        slots: SlotPool | None = None,
        learn: Callable[[Request], None] | None = None,
        progress: Callable[[], object] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if enable_prefix_caching and prefix_cache is None:
            raise ValueError("enable_prefix_caching needs a prefix_cache, got None; pass one")
        self.num_preemptions = 0
        self.is_starved = False
        self._allocator = allocator
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._preempt = preempt
        self._swaps = Swaps(swap_space)
        self._learn = learn
        self._now = now

        self._clock = DecodeClock(block_size)
        self._line = WaitingLine(policy, aging_steps)
        self._cuts_prompts = cuts_prompts
        max_chunk = max(1, max_num_batched_tokens if cuts_prompts else max_model_len)
        self._blocks = RequestBlocks(allocator, block_size, kinds, max_chunk, make_room)
        self._reserve = reserve * self._blocks.num_tables
        cache = prefix_cache if enable_prefix_caching else None
        self._prefixes = PrefixReuse(cache, allocator, block_size, kinds)
        self._requests: dict[Hashable, Request] = {}  # all that have not ended
        self._prefilling: dict[Hashable, Request] = {}  # in order of admission
        self._prefilled: list[Request] = []  # in the last step, behind windows
        self._slots = SlotPool(max_num_seqs) if slots is None else slots
        self._patience = Patience(allocator, self._slots, self._blocks, progress, now)
        self.num_running = 0  # requests with a slot, prefilling or decoding
        self._deadlines = Deadlines()
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
        self._blocks.open(request)
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
        self._deadlines.watch(request)
        self._line.join(request)

    def raise_max_model_len(self, num_tokens: int) -> None:
        """Let requests that are added from now on become longer."""
        self._max_model_len = num_tokens
        if not self._cuts_prompts:
            self._blocks.max_chunk = num_tokens

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
        for request in self._deadlines.passed(self._now, self._requests):
            self._end(request, "cancelled", "its deadline has passed")
        for request in self._clock.ended_rows():
            self._end(request, "length")
        if not self.num_running or self._allocator.num_free > self._line.num_free_before:
            self._line.head_waits = False  # others than us may have given blocks back
        if decode and not self._grow_at_once(1):
            self._grow_rows(1, preempt=self._preempt)
        num_decoding = len(self._clock.rows) if decode else 0
        budget = max(1, self._max_num_batched_tokens - num_decoding)
        if self._blocks.has_window:
            self._move_windows(budget)
            num_decoding = len(self._clock.rows) if decode else 0  # fewer, if it preempted
        prefills = self._plan_prefills(budget)
        step = self._draft.take(num_decoding, prefills, decode=decode)
        self._clock.step += decode
        for chunk in prefills:
            if chunk.is_last:
                chunk.request.num_output_tokens += 1
                chunk.request.num_yields = 0
                self._draft.started[chunk.request.request_id] = chunk.request
                self._clock.start(chunk.request)
                if self._blocks.has_window:
                    self._prefilled.append(chunk.request)
        self.is_starved = bool(self._requests) and not (self.num_running or step.preempted)
        if self.is_starved:
            self._wait_for_others()
        return step

    def ensure_decode_blocks(self, num_tokens_ahead: int) -> tuple[BlockUpdate, ...]:
        """Give every decoding row the blocks for its next tokens, up to its length limit.

        The next `num_tokens_ahead` steps then update no block of these rows. Nobody is preempted.

        Raises:
            OutOfBlocks: not all rows got theirs; what was given comes with the next updates.
        """
        if not self._grow_at_once(num_tokens_ahead):
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
        check_requests(requests, self._prefilling, self._clock, self._blocks, self.num_running)

    def _wait_for_others(self) -> None:
        head = self._line.first()
        error = None if head is None else self._patience.end_of(head)
        if head is not None and error is not None:
            self._end(head, "error", error)

    def _move_windows(self, budget: int) -> None:
        """Give prompts that go on the blocks of their next chunks, and take what is behind."""
        for request in self._prefilled:
            if request.decode_since >= 0:
                self._blocks.drop_behind(request, self.num_computed_tokens(request))
            self._line.head_waits = False
        self._prefilled.clear()
        for request in list(self._prefilling.values()):
            if budget == 0:
                return
            if request.slot is None:  # preempted meanwhile
                continue
            start = request.num_computed_tokens
            length = min(budget, request.num_tokens - start)
            self._blocks.drop_behind(request, start)
            self._grow(request, start + length, self._preempt)
            budget -= length

    def _plan_prefills(self, budget: int) -> tuple[PrefillChunk, ...]:
        chunks: list[PrefillChunk] = []
        for request in chain(list(self._prefilling.values()), self._admissions()):
            start = request.num_computed_tokens
            length = request.num_tokens - start
            if self._cuts_prompts:
                length = min(length, budget)
            if self._blocks.has_window:
                # Whoever was preempted above has left more of the budget than was counted on.
                length = min(length, self._blocks.num_covered(request) - start)
                if length <= 0:
                    continue
            is_last = start + length == request.num_tokens
            chunks.append(PrefillChunk(request, start, length, is_last))
            request.num_computed_tokens += length
            self._prefixes.register(request, start + length, since=start)
            if is_last:
                del self._prefilling[request.request_id]
            budget -= length
            if budget <= 0:
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
                self._line.num_free_before = self._allocator.num_free
            elif request.slot is not None:
                self._line.remove_first()
                yield request

    def _admit(self, request: Request) -> bool:
        """Settle the first in line: it runs, or ends because it never can. False: it waits."""
        swapped = bool(request.host_block_ids)
        found = 0 if swapped else self._prefixes.acquire(request)
        shared = self._prefixes.reacquire(request) if swapped else frozenset()
        needed = self._blocks.num_first(request)
        if not self._blocks.admit(request, keep=self._reserve * self.num_running):
            self._blocks.close(request)
            if not swapped:
                self._blocks.open(request)
            if (self.num_running or self._allocator.num_live) and self._blocks.fit(needed):
                return False
            self._end(request, "error", self._blocks.too_large(needed))
            return True
        request.status = RequestStatus.RUNNING
        request.slot = self._slots.take()
        self.num_running += 1
        if swapped:
            copy = self._swaps.bring_in(request, self._blocks.filled(request), shared)
            if copy is not None:
                self._draft.swap_ins.append(copy)
        else:
            request.num_computed_tokens = found
        request.num_cached_tokens = request.num_computed_tokens
        self._prefilling[request.request_id] = request
        self._draft.block_updates += self._blocks.table_rows(request)
        return True

    def _grow_at_once(self, num_steps: int) -> bool:
        """Give every row the blocks of its next steps, if that many are free for all of them."""
        due = self._clock.tokens_to_hold(num_steps)
        if not due:
            return True
        for request, _ in due if self._blocks.has_window else ():
            self._blocks.drop_behind(request, self.num_computed_tokens(request))
        updates = self._blocks.grow_all(due)
        if updates is None:
            for request, _ in due:
                self._clock.watch_blocks(request)
            return False
        self._draft.block_updates += updates
        for request, num_tokens in due:
            self._clock.watch_tokens(request, self._blocks.whole(num_tokens))
        return True

    def _grow_rows(self, num_steps: int, *, preempt: bool) -> None:
        for request in self._clock.rows_to_grow(num_steps):
            tokens = self.num_computed_tokens(request)
            self._blocks.drop_behind(request, tokens)
            try:
                self._grow(request, min(tokens + num_steps, request.max_kv_tokens), preempt)
            finally:
                if request.decode_since >= 0:
                    self._clock.watch_blocks(request)

    def _grow(self, request: Request, num_tokens: int, preempt: bool) -> None:
        """Give a request the blocks for `num_tokens` tokens in all, or take its slot away."""
        while (updates := self._blocks.grow(request, num_tokens)) is None:
            count = self._blocks.num_missing(request, num_tokens)
            if not preempt:
                self._allocator.allocate(count)  # raises OutOfBlocks
            running = chain(self._prefilling.values(), self._clock.rows.values())
            victim = max(running, key=lambda r: (r.rank, r.arrival))
            needed = len(request.block_ids) + count
            error = self._patience.refusal(request, needed) if self.num_running == 1 else None
            if error is None:
                self._preempt_request(victim)
            else:
                self._end(request, "error", error)
            if victim is request:
                return
        self._draft.block_updates += updates

    def _preempt_request(self, request: Request, *, trusted: bool = True) -> None:
        filled = self._vacate(request, trusted=trusted)
        copy = self._swaps.take_out(request, filled) if trusted else None
        if copy is not None:
            self._draft.swap_outs.append(copy)
        else:
            request.num_computed_tokens = 0
            self._blocks.open(request)
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self._draft.preempted.append(request)
        self._line.join(request)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if request.slot is not None:
            self._vacate(request, trusted=reason != "error")
        self._swaps.drop(request)
        self._line.head_waits = False
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.error = reason, error
        del self._requests[request.request_id]
        self._draft.finished.append(request)

    def _vacate(self, request: Request, *, trusted: bool) -> tuple[int, ...]:
        """Take its slot and blocks from a running request; others may find `trusted` ones.

        Returns the blocks that its next token would read.
        """
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
        request.slot = None
        return self._blocks.close(request)


__all__ = ["BlockUpdate", "PrefillChunk", "ScheduledStep", "Scheduler"]
