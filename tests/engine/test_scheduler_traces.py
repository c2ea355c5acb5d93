"""Random traces of arrivals, cancellations and ends, in pools that are too small."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import ONE_KIND, LayerKind
from torch_paged.cache.prefix import PrefixCache
from torch_paged.engine.request import Request
from torch_paged.engine.scheduler import Scheduler

sys.path.append(str(Path(__file__).parent))

from simulated_engine import HostBlocks, SimulatedEngine  # noqa: E402

MAX_MODEL_LEN = 40
TRACE = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def requests(draw: st.DrawFn, request_id: int) -> Request:
    # Few distinct prompts, so that prefixes meet; some without ids, some that never fit.
    length = draw(st.integers(1, 14)) if draw(st.integers(0, 15)) else MAX_MODEL_LEN
    prompt = None if draw(st.integers(0, 9)) == 9 else [draw(st.integers(0, 1))] * length
    return Request(
        request_id,
        prompt,
        draw(st.integers(1, 24)),
        num_prompt_tokens=length,
        priority=draw(st.integers(-2, 2)),
        cache_salt=draw(st.sampled_from([b"", b"other"])),
    )


# One kind of layers and several, with one block table and several, windows of all sizes.
LAYOUTS = [
    ONE_KIND,
    ONE_KIND,
    (LayerKind(1),),
    (LayerKind(3),),
    (LayerKind(6, 0, 2),),
    (LayerKind(), LayerKind(5, 1)),
    (LayerKind(), LayerKind(2, 1, 3), LayerKind(9, 4)),
]


def most_blocks(engine: SimulatedEngine, num_tokens: int, max_chunk: int) -> int:
    """Return how many blocks a request of `num_tokens` may need at a time, alone in the pool."""
    whole, total = -(-num_tokens // engine.block_size), 0
    for kind in engine.kinds:
        touched = -(-(kind.window - 1 + max_chunk) // engine.block_size) + 1
        total += kind.num_tables * (min(whole, touched) if kind.window else whole)
    return total


@st.composite
def engines(
    draw: st.DrawFn, *, swaps: bool = True, beside: SimulatedEngine | None = None
) -> tuple[SimulatedEngine, HostBlocks | None, int]:
    """Draw an engine, in the same pool as the one that it runs `beside`."""
    if beside is None:
        block_size = draw(st.sampled_from([1, 2, 4]))
        kinds = draw(st.sampled_from(LAYOUTS))
        num_tables = sum(kind.num_tables for kind in kinds)
        allocator = BlockAllocator(draw(st.integers(1, 48)) * num_tables // block_size + 1)
    else:
        block_size, kinds, allocator = beside.block_size, beside.kinds, beside.allocator
    max_chunk = draw(st.integers(1, 20))
    prefix_caching = draw(st.booleans()) and beside is None
    host = HostBlocks(draw(st.integers(0, 12))) if swaps and draw(st.booleans()) else None
    scheduler = Scheduler(
        allocator,
        block_size=block_size,
        kinds=kinds,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=max_chunk,
        max_model_len=MAX_MODEL_LEN,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        aging_steps=draw(st.sampled_from([1, 8, 256])),
        enable_prefix_caching=prefix_caching,
        prefix_cache=PrefixCache(allocator) if prefix_caching else None,
        reserve=draw(st.integers(0, 2)),
        swap_space=host,
    )
    engine = SimulatedEngine(
        scheduler,
        allocator,
        block_size=block_size,
        kinds=kinds,
        lag=draw(st.sampled_from([0, 1, 4])),
        vocab_size=draw(st.sampled_from([8, 1 << 20])),
        eos=draw(st.sampled_from([None, 3])),
    )
    return engine, host, max_chunk


@TRACE
@given(st.data())
def test_random_trace_gives_every_request_its_own_tokens(data: st.DataObject) -> None:
    engine, host, max_chunk = data.draw(engines())
    cancelled: set[object] = set()
    for _ in range(data.draw(st.integers(0, 60))):
        for _ in range(data.draw(st.integers(0, 2))):
            engine.add(data.draw(requests(len(engine.requests))))
        alive = [i for i, r in engine.requests.items() if not r.is_finished]
        if alive and data.draw(st.integers(0, 7)) == 7:
            cancelled.add(request_id := data.draw(st.sampled_from(alive)))
            engine.cancel(request_id)
        if not engine.scheduler.is_idle:
            engine.step(decode=data.draw(st.integers(0, 4)) > 0)
    engine.run()
    assert_only_too_large_requests_failed(engine, cancelled, max_chunk)
    assert engine.allocator.num_free == engine.allocator.num_blocks
    assert host is None or len(set(host.free)) == len(host.free)


def assert_only_too_large_requests_failed(
    engine: SimulatedEngine, cancelled: set[object], max_chunk: int
) -> None:
    for request_id, request in engine.requests.items():
        expected = engine.expected(request) if request.error is None else []
        reason = engine.reasons[request_id]
        if request_id in cancelled:
            assert reason == "cancelled"
            assert request.output_ids == expected[: len(request.output_ids)]
        elif reason == "error":
            # Only what cannot fit, alone in the pool, may fail.
            most = request.num_prompt_tokens + max(request.num_output_tokens, 1)
            needed = most_blocks(engine, most, max_chunk)
            assert most >= MAX_MODEL_LEN or needed > engine.allocator.num_blocks
            assert request.error
        else:
            assert request.output_ids == expected


@TRACE
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    max_new_tokens=st.integers(2, 40),
    steps_ahead=st.integers(1, 9),
    first_blocks=st.integers(0, 8),
    kinds=st.sampled_from(LAYOUTS),
)
def test_closed_batch_runs_ahead_in_a_pool_that_grows(
    lengths: list[int],
    max_new_tokens: int,
    steps_ahead: int,
    first_blocks: int,
    kinds: tuple[LayerKind, ...],
) -> None:
    allocator = BlockAllocator(first_blocks)

    def make_room(num_blocks: int) -> bool:
        allocator.grow(allocator.num_blocks + num_blocks)
        return True

    scheduler = Scheduler(
        allocator,
        block_size=4,
        kinds=kinds,
        max_num_seqs=len(lengths),
        max_num_batched_tokens=8,
        max_model_len=60,
        preempt=False,
        make_room=make_room,
    )
    engine = SimulatedEngine(scheduler, allocator, block_size=4, kinds=kinds)
    for i, length in enumerate(lengths):
        engine.add(Request(i, None, max_new_tokens, num_prompt_tokens=length))
    while scheduler.num_waiting or any(r.decode_since < 0 for r in engine.requests.values()):
        engine.step(decode=False)
    assert [r.slot for r in engine.requests.values()] == list(range(len(lengths)))
    engine.step()
    for start in range(0, max_new_tokens - 2, steps_ahead):
        engine.write_updates(scheduler.ensure_decode_blocks(steps_ahead))
        for _ in range(min(steps_ahead, max_new_tokens - 2 - start)):
            engine.in_flight.append(engine.decode_rows())
            scheduler.advance(1)
            engine.check()
    engine.run()
    for request in engine.requests.values():
        assert request.output_ids == engine.expected(request)
    assert scheduler.num_preemptions == 0


@TRACE
@given(st.data())
def test_two_schedulers_of_one_pool_give_every_request_its_own_tokens(data: st.DataObject) -> None:
    first, _, max_chunk = data.draw(engines(swaps=False))
    second, _, other_chunk = data.draw(engines(swaps=False, beside=first))
    second.cache = first.cache
    pair = (first, second)

    def check() -> None:
        holders = Counter(i for e in pair for r in e.requests.values() for i in r.block_ids)
        for block in range(first.allocator.num_blocks):
            assert first.allocator.refcount(block) == holders[block]
        for engine in pair:
            engine.scheduler.check_integrity()

    for engine in pair:
        engine.check = check  # type: ignore[method-assign]
        for i in range(data.draw(st.integers(0, 5))):
            engine.add(data.draw(requests(i)))
    orders = itertools.cycle([*data.draw(st.lists(st.integers(0, 1), max_size=12)), 0, 1])
    for _ in range(5000):
        busy = [engine for engine in pair if not engine.scheduler.is_idle]
        if not busy:
            break
        # At times one engine alone for a while, but never for ever.
        order = next(orders)
        busy[order % len(busy)].step()
    for engine, chunk in zip(pair, (max_chunk, other_chunk), strict=True):
        assert engine.scheduler.is_idle, "nobody gets on"
        engine.deliver(0)
        assert_only_too_large_requests_failed(engine, set(), chunk)
    assert first.allocator.num_free == first.allocator.num_blocks
