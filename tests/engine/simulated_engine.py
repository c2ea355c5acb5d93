"""An engine without a model, which runs what a scheduler hands out on a cache of tokens.

The next token is a hash of all tokens found in the cache, read through the block table. So a
block that is wrong, stale, overwritten or missing gives a wrong token, or none.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.prefix import PrefixCache
from torch_paged.engine.request import Request, RequestStatus
from torch_paged.engine.scheduler import ScheduledStep, Scheduler


def next_token(ids: Sequence[int], vocab_size: int) -> int:
    """Return the token that follows `ids`."""
    return zlib.crc32(repr(list(ids)).encode()) % vocab_size


@dataclass
class Row:
    request: Request
    context_len: int
    last_token: int


class SimulatedEngine:
    """Launches steps and learns of their tokens `lag` steps late.

    Args:
        eos: token that ends a request, None for none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        allocator: BlockAllocator,
        *,
        block_size: int,
        lag: int = 0,
        vocab_size: int = 1 << 20,
        eos: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.allocator = allocator
        self.block_size = block_size
        self.lag = lag
        self.vocab_size = vocab_size
        self.eos = eos
        self.requests: dict[Hashable, Request] = {}
        self.limits: dict[Hashable, int] = {}
        self.stopped_early: set[Hashable] = set()  # saw an end token, or was cancelled
        self.reasons: dict[Hashable, str | None] = {}
        self.cache: dict[int, dict[int, int]] = {}  # block -> offset -> token
        self.host: dict[int, dict[int, int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.rows: dict[int, Row] = {}  # decoding, by slot
        self.prefilled: dict[Hashable, Row] = {}
        self.in_flight: deque[list[tuple[Request, int]]] = deque()
        self.num_computed = 0

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.scheduler.add(request)
        return request

    def cancel(self, request_id: Hashable) -> None:
        self.stopped_early.add(request_id)
        self.scheduler.cancel(request_id)
        self.check()

    def step(self, *, decode: bool = True) -> ScheduledStep:
        """Schedule and launch one step, then look at tokens that are old enough."""
        step = self.scheduler.schedule(decode=decode)
        self.check()
        self.launch(step, decode=decode)
        for request in step.finished:
            assert request.request_id not in self.reasons, "a request must end once"
            self.reasons[request.request_id] = request.finish_reason
        # A request that is prefilled again needs the tokens that are in flight.
        self.deliver(0 if step.preempted else self.lag)
        self.check()
        return step

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if self.scheduler.is_idle:
                self.deliver(0)
                return
            step = self.step()
            assert step.num_decoding or step.prefills or step.finished or step.preempted, "stuck"
        raise AssertionError(f"not idle after {max_steps} steps")

    def launch(self, step: ScheduledStep, *, decode: bool = True) -> None:
        for copy in step.swap_outs:
            for device, host in zip(copy.device_blocks, copy.host_blocks, strict=True):
                self.host[host] = dict(self.cache[device])
        for copy in step.swap_ins:
            for device, host in zip(copy.device_blocks, copy.host_blocks, strict=True):
                self.cache[device] = dict(self.host[host])
        self.write_updates(step.block_updates)
        for slot in step.stopped:
            del self.rows[slot]
        for request in step.started:
            assert request.slot is not None and request.slot not in self.rows
            self.rows[request.slot] = self.prefilled.pop(request.request_id)
        assert step.num_decoding == (len(self.rows) if decode else 0)
        samples = self.decode_rows() if decode else []
        samples += [sample for chunk in step.prefills for sample in self.prefill(*chunk)]
        self.in_flight.append(samples)

    def write_updates(self, updates: Sequence[tuple[int, int, tuple[int, ...]]]) -> None:
        entries = [(u[0], u[1] + i) for u in updates for i in range(len(u[2]))]
        assert len(set(entries)) == len(entries), "the order of equal indices is not defined"
        for slot, first, block_ids in updates:
            table = self.tables.setdefault(slot, [])
            del table[first:]
            assert len(table) == first
            table += block_ids

    def decode_rows(self) -> list[tuple[Request, int]]:
        samples = []
        for row in self.rows.values():
            block = row.request.block_ids[row.context_len // self.block_size]
            assert self.allocator.refcount(block) == 1, "a shared block must not be written"
            self.write(row.request, row.context_len, row.last_token)
            row.context_len += 1
            row.last_token = self.sample(row.request, row.context_len)
            samples.append((row.request, row.last_token))
        return samples

    def prefill(
        self, request: Request, start: int, length: int, is_last: bool
    ) -> list[tuple[Request, int]]:
        # Blocks that others compute in this step may be shared already, but only before `start`.
        assert length > 0 and start >= request.num_cached_tokens
        tokens = [*self.prompt(request), *request.output_ids]
        for position in range(start, start + length):
            self.write(request, position, tokens[position])
        self.num_computed += length
        if not is_last:
            return []
        assert start + length == len(tokens)
        token = self.sample(request, start + length)
        self.prefilled[request.request_id] = Row(request, start + length, token)
        return [(request, token)]

    def write(self, request: Request, position: int, token: int) -> None:
        assert request.slot is not None
        block = self.tables[request.slot][position // self.block_size]
        assert block in request.block_ids
        self.cache.setdefault(block, {})[position % self.block_size] = token

    def sample(self, request: Request, context_len: int) -> int:
        assert request.slot is not None
        table = self.tables[request.slot]
        found = [
            self.cache[table[i // self.block_size]][i % self.block_size]
            for i in range(context_len)
        ]
        return next_token(found, self.vocab_size)

    def deliver(self, lag: int) -> None:
        while len(self.in_flight) > lag:
            for request, token in self.in_flight.popleft():
                if request.request_id in self.stopped_early:
                    continue
                request.output_ids.append(token)
                if token == self.eos:
                    self.stopped_early.add(request.request_id)
                    self.scheduler.finish(request.request_id, "stop")

    def prompt(self, request: Request) -> list[int]:
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        return [7] * request.num_prompt_tokens

    def expected(self, request: Request) -> list[int]:
        """What the request generates when it has the engine for itself."""
        ids = self.prompt(request)
        while len(ids) < request.num_prompt_tokens + request.max_new_tokens:
            ids.append(next_token(ids, self.vocab_size))
            if ids[-1] == self.eos:
                break
        return ids[request.num_prompt_tokens :]

    def check(self) -> None:
        """Check that blocks and slots have exactly the holders that the requests say."""
        self.scheduler.check_integrity()
        holders: Counter[int] = Counter()
        slots = []
        for request in self.requests.values():
            holders.update(request.block_ids)
            if request.status is RequestStatus.RUNNING:
                slots.append(request.slot)
        for block in range(self.allocator.num_blocks):
            assert self.allocator.refcount(block) == holders[block]
        assert len(set(slots)) == len(slots) == self.scheduler.num_running


def make_engine(
    num_blocks: int,
    *,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    prefix_caching: bool = False,
    lag: int = 0,
    eos: int | None = None,
    **options: Any,
) -> SimulatedEngine:
    allocator = BlockAllocator(num_blocks)
    scheduler = Scheduler(
        allocator,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=prefix_caching,
        prefix_cache=PrefixCache(allocator) if prefix_caching else None,
        **options,
    )
    return SimulatedEngine(scheduler, allocator, block_size=block_size, lag=lag, eos=eos)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [seed * 1000 + i for i in range(length)]


def assert_all_as_alone(engine: SimulatedEngine) -> None:
    for request in engine.requests.values():
        assert request.output_ids == engine.expected(request), request.request_id


class HostBlocks:
    """A swap space of a few host blocks, which declines when they are out."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.num_taken = 0

    def take(self, request: Request, num_blocks: int) -> Sequence[int] | None:
        if num_blocks > len(self.free):
            return None
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        self.num_taken += num_blocks
        return taken

    def give_back(self, host_blocks: Sequence[int]) -> None:
        assert not set(host_blocks) & set(self.free)
        self.free += host_blocks
