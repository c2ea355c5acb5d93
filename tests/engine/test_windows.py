"""Requests keep what their windows show: in prefill and decode, shared, preempted and failed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torch_paged.cache.layout import LayerKind
from torch_paged.engine.request import Request
from torch_paged.errors import TorchPagedError

sys.path.append(str(Path(__file__).parent))

from simulated_engine import (  # noqa: E402
    HostBlocks,
    SimulatedEngine,
    assert_all_as_alone,
    make_engine,
    prompt,
)

SLIDING = (LayerKind(6),)
HYBRID = (LayerKind(), LayerKind(6, 1, 2))


def held(engine: SimulatedEngine, name: object = "a") -> list[tuple[int, int]]:
    """Return the columns that a request holds, by kind."""
    return [(blocks.first, blocks.end) for blocks in engine.requests[name].blocks]


def test_long_prompt_takes_a_chunk_and_a_window_at_a_time() -> None:
    # Chunks of 8 tokens behind 5 of a window touch at most 5 blocks of 4.
    engine = make_engine(5, kinds=SLIDING, max_num_batched_tokens=8)
    engine.add(Request("a", prompt(100), 30))
    most = 0
    while not engine.scheduler.is_idle:
        engine.step()
        most = max(most, engine.allocator.num_live)
    assert_all_as_alone(engine)
    assert most == 5 and engine.scheduler.num_preemptions == 0


def test_prompt_too_long_for_a_pool_of_one_window_fails_alone() -> None:
    engine = make_engine(4, kinds=SLIDING, max_num_batched_tokens=8)
    request = engine.add(Request("a", prompt(100), 30))
    engine.add(Request("b", prompt(8), 30))
    engine.run()
    assert request.error is not None and "needs 5 KV blocks and the pool has 4" in request.error
    assert engine.requests["b"].output_ids == engine.expected(engine.requests["b"])


@pytest.mark.parametrize("lag", [0, 4])
def test_decoding_row_holds_its_window(lag: int) -> None:
    engine = make_engine(12, kinds=SLIDING, lag=lag)
    engine.add(Request("a", prompt(30), 100))
    engine.step()
    assert held(engine) == [(0, 8)]
    engine.step()
    # The query at index 30 sees 25 .. 30.
    assert held(engine) == [(6, 8)]
    most = 0
    while not engine.scheduler.is_idle:
        engine.step()
        most = max(most, engine.allocator.num_live)
    engine.run()
    assert most == 3
    assert_all_as_alone(engine)


def test_only_the_kind_with_a_window_gives_back() -> None:
    engine = make_engine(40, kinds=HYBRID)
    engine.add(Request("a", prompt(10), 41))
    for _ in range(40):
        engine.step()
    # 49 tokens: all 13 columns of one table, those of the last 6 tokens of the two others.
    assert held(engine) == [(0, 13), (10, 13)]
    assert engine.allocator.num_live == 13 + 2 * 3
    engine.run()
    assert_all_as_alone(engine)


def test_given_back_blocks_serve_others_in_the_same_step() -> None:
    engine = make_engine(8, kinds=SLIDING, reserve=0, max_num_batched_tokens=64)
    engine.add(Request("a", prompt(24), 20))
    engine.step()
    freed = set(engine.requests["a"].block_ids[:4])
    engine.add(Request("b", prompt(20, 1), 20))
    engine.step()
    assert freed & set(engine.requests["b"].block_ids)
    engine.run()
    assert_all_as_alone(engine)


def test_prefix_needs_the_last_window_alone() -> None:
    engine = make_engine(16, kinds=SLIDING, prefix_caching=True)
    engine.add(Request("a", prompt(33), 2))
    engine.run()
    # Of its prompt the blocks of tokens 0 .. 15 are lost.
    engine.allocator.evict(0)
    keys = engine.requests["a"].block_keys[:4]
    for key in keys:
        (block,) = engine.scheduler._prefixes._cache.lookup([key])
        engine.allocator.set_findable(block, False)
    request = engine.add(Request("b", prompt(40), 4))
    step = engine.step()
    # The query at 32 sees 27 .. 32: columns 6 and 7.
    assert [(c.start, c.length) for c in step.prefills] == [(32, 8)]
    assert held(engine, "b") == [(6, 10)]
    engine.run()
    assert request.num_cached_tokens == 32
    assert_all_as_alone(engine)


@pytest.mark.parametrize(
    ("kinds", "lost", "found"),
    [(SLIDING, 7, 28), (SLIDING, 6, 24), (SLIDING, 5, 32), (SLIDING, 0, 32), (HYBRID, 7, 28)],
    ids=str,
)
@pytest.mark.parametrize("table", ["first", "last"])
def test_hit_ends_before_a_block_that_its_window_misses(
    kinds: tuple[LayerKind, ...], lost: int, found: int, table: str
) -> None:
    engine = make_engine(60, kinds=kinds, prefix_caching=True, max_num_batched_tokens=256)
    engine.add(Request("a", prompt(33), 2))
    engine.run()
    number = 0 if table == "first" else sum(kind.num_tables for kind in kinds) - 1
    key = engine.requests["a"].block_keys[lost]
    mark = number.to_bytes(2, "little") if number else b""
    (block,) = engine.scheduler._prefixes._cache.lookup([key + mark])
    engine.allocator.set_findable(block, False)
    request = engine.add(Request("b", prompt(40), 4))
    engine.run()
    assert request.num_cached_tokens == found
    assert_all_as_alone(engine)


def test_full_kind_needs_every_block_of_a_prefix() -> None:
    engine = make_engine(60, kinds=HYBRID, prefix_caching=True)
    engine.add(Request("a", prompt(33), 2))
    engine.run()
    (block,) = engine.scheduler._prefixes._cache.lookup(engine.requests["a"].block_keys[2:3])
    engine.allocator.set_findable(block, False)
    request = engine.add(Request("b", prompt(40), 4))
    engine.run()
    assert request.num_cached_tokens == 8
    assert_all_as_alone(engine)


def test_row_gives_back_the_prefix_that_it_shares() -> None:
    engine = make_engine(40, kinds=SLIDING, prefix_caching=True)
    for name in "ab":
        engine.add(Request(name, prompt(18), 40))
    engine.step()
    shared = set(engine.requests["a"].block_ids) & set(engine.requests["b"].block_ids)
    assert shared
    for _ in range(20):
        engine.step()
    assert not shared & set(engine.requests["a"].block_ids + engine.requests["b"].block_ids)
    engine.run()
    assert_all_as_alone(engine)


def test_blocks_that_a_failed_request_gave_back_are_not_found() -> None:
    engine = make_engine(40, kinds=SLIDING, prefix_caching=True, max_num_batched_tokens=8)
    engine.add(Request("a", prompt(33), 20))
    for _ in range(8):
        engine.step()
    assert held(engine)[0][0] > 0
    engine.scheduler.finish("a", "error", "the logits are NaN")
    request = engine.add(Request("b", prompt(33), 2))
    engine.run()
    assert request.num_cached_tokens == 0
    assert len(engine.scheduler._prefixes._cache) > 0


@pytest.mark.parametrize("kinds", [SLIDING, HYBRID], ids=["sliding", "hybrid"])
@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["recomputed", "swapped"])
def test_preempted_row_goes_on_from_its_window(
    kinds: tuple[LayerKind, ...], num_host_blocks: int
) -> None:
    host = HostBlocks(num_host_blocks)
    full = sum(kind.num_tables for kind in kinds if not kind.window)
    engine = make_engine(
        7 + 14 * full, kinds=kinds, reserve=0, max_num_batched_tokens=8, swap_space=host
    )
    for i, name in enumerate("abc"):
        engine.add(Request(name, prompt(3, i), 40, priority=i))
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    if num_host_blocks:
        # Of each preempted row what its window shows is kept, in the kinds that have one.
        assert 0 < host.num_taken and len(host.free) == num_host_blocks
    assert_all_as_alone(engine)
    assert engine.allocator.num_live == 0


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_cancelled_request_gives_everything_back(when: str) -> None:
    engine = make_engine(20, kinds=HYBRID, max_num_batched_tokens=8)
    engine.add(Request("a", prompt(23), 20))
    for _ in range(2 if when == "prefill" else 10):
        engine.step()
    assert engine.allocator.num_live
    engine.cancel("a")
    assert engine.allocator.num_live == 0
    engine.run()


def test_block_that_a_window_still_shows_is_missed() -> None:
    engine = make_engine(20, kinds=SLIDING)
    engine.add(Request("a", prompt(30), 40))
    for _ in range(3):
        engine.step()
    engine.allocator.free(engine.requests["a"].blocks[0].drop_before(7))
    with pytest.raises(TorchPagedError, match="lost blocks that its window shows"):
        engine.scheduler.check_integrity()
