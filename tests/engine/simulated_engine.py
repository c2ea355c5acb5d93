"""An engine without a model, which runs what a scheduler hands out on a cache of tokens.

A cache entry stands for the token and all before it, and for the block table that it belongs to.
The next token is a hash of all entries that the layers can see, read through the block tables. So
a block that is wrong, stale, overwritten or missing gives a wrong token, or none.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import ONE_KIND, LayerKind
from torch_paged.cache.prefix import PrefixCache
from torch_paged.engine.held_blocks import holder_of
from torch_paged.engine.request import Request, RequestStatus
from torch_paged.engine.scheduler import BlockUpdate, ScheduledStep, Scheduler


def history(ids: Sequence[int], before: int = 0) -> list[int]:
    """Return for each token a number that stands for it and for all before it."""
    numbers = []
    for token in ids:
        before = zlib.crc32(repr((before, token)).encode())
        numbers.append(before)
    return numbers


def entry(table: int, number: int) -> int:
    """Return what a layer of a block table keeps for a token."""
    return zlib.crc32(repr((table, number)).encode())


@dataclass
class Row:
    request: Request
    context_len: int
    last_token: int
    history: int  # of the tokens in the cache


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
        kinds: Sequence[LayerKind] = ONE_KIND,
        lag: int = 0,
        vocab_size: int = 1 << 20,
        eos: int | None = None,
    ) -> None:
        self.kinds = kinds
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
        self.tables: dict[tuple[int, int], dict[int, int]] = {}  # (table, slot) -> columns
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

    def write_updates(self, updates: Sequence[BlockUpdate]) -> None:
        entries = [(u[0], u[1] + i, u[3]) for u in updates for i in range(len(u[2]))]
        assert len(set(entries)) == len(entries), "the order of equal indices is not defined"
        for slot, first, block_ids, table in updates:
            row = self.tables.setdefault((table, slot), {})
            row.update(enumerate(block_ids, first))

    def decode_rows(self) -> list[tuple[Request, int]]:
        samples = []
        for row in self.rows.values():
            (row.history,) = history([row.last_token], row.history)
            for block in self.write(row.request, row.context_len, row.history):
                assert self.allocator.refcount(block) == 1, "a shared block must not be written"
            row.last_token = self.sample(row.request, row.context_len)
            row.context_len += 1
            samples.append((row.request, row.last_token))
        return samples

    def prefill(
        self, request: Request, start: int, length: int, is_last: bool
    ) -> list[tuple[Request, int]]:
        # Blocks that others compute in this step may be shared already, but only before `start`.
        assert length > 0 and start >= request.num_cached_tokens
        tokens = [*self.prompt(request), *request.output_ids]
        numbers = history(tokens)
        for position in range(start, start + length):
            self.write(request, position, numbers[position])
        self.num_computed += length
        # Every token looks at the cache, and would hand on what is wrong there.
        for position in range(start, start + length):
            token = self.sample(request, position)
            assert token == self.token_after(tokens[: position + 1])
        if not is_last:
            return []
        assert start + length == len(tokens)
        self.prefilled[request.request_id] = Row(request, start + length, token, numbers[-1])
        return [(request, token)]

    def write(self, request: Request, position: int, number: int) -> list[int]:
        """Write a token to all tables; return the blocks written."""
        assert request.slot is not None
        column, offset = divmod(position, self.block_size)
        blocks = []
        for table in range(sum(kind.num_tables for kind in self.kinds)):
            block = self.tables[table, request.slot][column]
            held = holder_of(request.blocks, table)
            assert block in held.columns(column, column + 1)
            self.cache.setdefault(block, {})[offset] = entry(table, number)
            blocks.append(block)
        return blocks

    def sample(self, request: Request, position: int) -> int:
        """Return the token behind the one at `position`, from what this one sees."""
        assert request.slot is not None
        found = []
        for kind in self.kinds:
            first = max(0, position - kind.window + 1) if kind.window else 0
            for table in range(kind.first_table, kind.first_table + kind.num_tables):
                row = self.tables[table, request.slot]
                found += [
                    self.cache[row[i // self.block_size]][i % self.block_size]
                    for i in range(first, position + 1)
                ]
        return zlib.crc32(repr(found).encode()) % self.vocab_size

    def token_after(self, ids: Sequence[int]) -> int:
        """Return the token that follows `ids` when nothing is wrong."""
        numbers, found = history(ids), []
        for kind in self.kinds:
            for table in range(kind.first_table, kind.first_table + kind.num_tables):
                found += [entry(table, number) for number in numbers[-kind.window :]]
        return zlib.crc32(repr(found).encode()) % self.vocab_size

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
            ids.append(self.token_after(ids))
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
    kinds: Sequence[LayerKind] = ONE_KIND,
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
        kinds=kinds,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=prefix_caching,
        prefix_cache=PrefixCache(allocator) if prefix_caching else None,
        **options,
    )
    return SimulatedEngine(
        scheduler, allocator, block_size=block_size, kinds=kinds, lag=lag, eos=eos
    )


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
