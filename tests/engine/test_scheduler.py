"""Admission, order of service, steps and growth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.engine.request import Request, RequestStatus
from torch_paged.engine.scheduler import BlockUpdate, ScheduledStep, Scheduler
from torch_paged.errors import TorchPagedError

sys.path.append(str(Path(__file__).parent))

from simulated_engine import SimulatedEngine, assert_all_as_alone, make_engine, prompt  # noqa: E402


def test_request_prefills_then_decodes_to_its_limit() -> None:
    engine = make_engine(8)
    request = engine.add(Request("a", prompt(5), 4))
    step = engine.step()
    assert [tuple(c)[1:] for c in step.prefills] == [(0, 5, True)]
    assert step.block_updates == (BlockUpdate(0, 0, (0, 1)),)
    assert step.started == () and step.num_decoding == 0
    step = engine.step()
    assert step.started == (request,) and step.num_decoding == 1 and step.prefills == ()
    steady = engine.step()
    assert steady.num_decoding == 1 and not steady.started and not steady.block_updates
    assert engine.step().num_decoding == 1
    # All four tokens are scheduled, and the scheduler knows without being told.
    last = engine.step()
    assert last.stopped == (0,) and last.finished == (request,) and last.num_decoding == 0
    assert request.finish_reason == "length" and len(request.output_ids) == 4
    assert engine.scheduler.is_idle and engine.scheduler.kv_blocks_used == 0
    assert_all_as_alone(engine)


def test_single_token_needs_no_decode_step() -> None:
    engine = make_engine(8)
    request = engine.add(Request("a", prompt(8), 1))
    assert engine.step().prefills[0].is_last
    step = engine.step()
    assert step.started == step.stopped == () and step.finished == (request,)
    assert_all_as_alone(engine)


def test_prompt_known_by_its_length_alone_is_scheduled() -> None:
    engine = make_engine(8, prefix_caching=True)
    engine.add(Request("a", None, 6, num_prompt_tokens=9))
    engine.run()
    assert_all_as_alone(engine)


def test_smallest_free_slot_is_taken_first() -> None:
    engine = make_engine(32, max_num_seqs=3)
    for name in "abcd":
        engine.add(Request(name, prompt(3), 40))
    engine.step()
    slots = {n: r.slot for n, r in engine.requests.items()}
    assert slots == {"a": 0, "b": 1, "c": 2, "d": None}
    engine.cancel("c")
    engine.cancel("b")
    engine.step()
    assert engine.requests["d"].slot == 1


def test_prompts_share_what_decoding_rows_leave_of_the_budget() -> None:
    engine = make_engine(64, max_num_batched_tokens=8)
    engine.add(Request("a", prompt(3), 30))
    engine.step()
    engine.add(Request("b", prompt(10, 1), 5))
    engine.add(Request("c", prompt(5, 2), 5))
    chunks = []
    for _ in range(3):
        step = engine.step()
        assert step.num_decoding + sum(c.length for c in step.prefills) <= 8
        chunks.append(
            [(c.request.request_id, c.start, c.length, c.is_last) for c in step.prefills]
        )
    assert chunks == [
        [("b", 0, 7, False)],
        [("b", 7, 3, True), ("c", 0, 4, False)],
        [("c", 4, 1, True)],
    ]
    engine.run()
    assert_all_as_alone(engine)


def test_prefill_goes_on_when_decoding_rows_fill_the_budget() -> None:
    engine = make_engine(64, max_num_batched_tokens=2, max_num_seqs=4)
    for name in "abcd":
        engine.add(Request(name, prompt(6, ord(name)), 50))
    engine.run(max_steps=150)
    assert_all_as_alone(engine)


def test_step_without_decode_leaves_rows_in_place() -> None:
    engine = make_engine(64, max_num_batched_tokens=8)
    first = engine.add(Request("a", prompt(4), 6))
    second = engine.add(Request("b", prompt(20, 1), 6))
    while second.decode_since < 0:
        step = engine.step(decode=False)
        assert step.num_decoding == 0 and step.started == ()
    assert engine.scheduler.num_computed_tokens(first) == 4
    assert engine.step().started == (first, second)
    engine.run()
    assert_all_as_alone(engine)


@pytest.mark.parametrize("new_tokens", [1, 16, 17])
@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 48])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_pool_of_exactly_the_tokens_of_a_request_is_enough(
    length: int, new_tokens: int, prefix_caching: bool
) -> None:
    num_blocks = -(-(length + new_tokens) // 16)
    engine = make_engine(num_blocks, block_size=16, prefix_caching=prefix_caching)
    for name in ("first", "again"):
        most = 0
        request = engine.add(Request(name, prompt(length), new_tokens))
        while not engine.scheduler.is_idle:
            engine.step()
            most = max(most, engine.scheduler.kv_blocks_used)
        # The last token is never fed back.
        assert most == -(-(length + new_tokens - 1) // 16)
    # A prompt found in full leaves its last block to run.
    assert request.num_cached_tokens == (length - 1) // 16 * 16 * prefix_caching
    assert set(engine.reasons.values()) == {"length"}
    assert engine.scheduler.num_preemptions == 0
    assert_all_as_alone(engine)


def test_row_grows_from_one_block_by_a_block_at_a_time() -> None:
    engine = make_engine(19, block_size=16)
    request = engine.add(Request("a", prompt(3), 300))
    updates = []
    while not engine.scheduler.is_idle:
        updates += engine.step().block_updates
    assert [(u.slot, u.first_index, len(u.block_ids)) for u in updates] == [
        (0, i, 1) for i in range(19)
    ]
    assert len(request.output_ids) == 300
    assert_all_as_alone(engine)


def test_blocks_ahead_stop_at_the_limit_of_a_row() -> None:
    engine = make_engine(64)
    short = engine.add(Request("a", prompt(4), 3))
    long = engine.add(Request("b", prompt(4), 60))
    engine.step()
    updates = engine.scheduler.ensure_decode_blocks(30)
    engine.write_updates(updates)
    assert len(short.block_ids) == -(-(4 + 2) // 4) and len(long.block_ids) == -(-(4 + 30) // 4)
    assert all(not engine.step().block_updates for _ in range(32))
    assert engine.step().block_updates == (BlockUpdate(1, 9, (long.block_ids[9],)),)
    engine.run()
    assert_all_as_alone(engine)


def test_large_request_is_not_overtaken_by_a_stream_of_small_ones() -> None:
    engine = make_engine(10)
    engine.add(Request("first", prompt(4), 30))
    engine.step()
    large = engine.add(Request("large", prompt(36), 2))
    for i in range(60):
        engine.add(Request(i, prompt(1, i), 3))
        engine.step()
        if large.is_finished:
            break
        if large.slot is None:
            assert all(r.slot is None for r in engine.requests.values() if r.arrival > 1)
    assert large.finish_reason == "length"
    engine.run()
    assert_all_as_alone(engine)


@pytest.mark.parametrize("aging_steps, served", [(4, True), (1_000_000, False)])
def test_waiting_outweighs_priority_in_time(aging_steps: int, served: bool) -> None:
    engine = make_engine(8, max_num_seqs=1, policy="priority", aging_steps=aging_steps)
    engine.add(Request("running", prompt(3), 2))
    engine.step()
    low = engine.add(Request("low", prompt(3), 2, priority=10))
    for i in range(120):
        engine.add(Request(i, prompt(3, i), 2, priority=0))
        engine.step()
    assert low.is_finished == served


def test_smaller_priority_goes_first() -> None:
    engine = make_engine(8, max_num_seqs=1, policy="priority")
    for name, priority in (("late", 1), ("first", -3), ("second", 0), ("third", 0)):
        engine.add(Request(name, prompt(3), 2, priority=priority))
    engine.run()
    assert list(engine.reasons) == ["first", "second", "third", "late"]


@pytest.mark.parametrize("option", [{"policy": "lifo"}, {"enable_prefix_caching": True}])
def test_wrong_option_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="policy|prefix_cache"):
        Scheduler(
            BlockAllocator(4),
            block_size=4,
            max_num_seqs=1,
            max_num_batched_tokens=8,
            max_model_len=16,
            **option,
        )


def schedule_counting_lines(scheduler: Scheduler) -> tuple[ScheduledStep, int]:
    count = 0

    def trace(frame: object, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        step = scheduler.schedule()
    finally:
        sys.settrace(previous)
    return step, count


@pytest.mark.parametrize("waiting", [0, 20])
def test_steady_step_costs_the_same_for_one_row_and_for_many(waiting: int) -> None:
    costs = []
    for num_rows in (1, 256):
        engine = make_engine(
            num_rows * 2 + 3, block_size=16, max_num_seqs=300, max_num_batched_tokens=4096
        )
        for i in range(num_rows):
            engine.add(Request(i, prompt(8), 100))
        for i in range(waiting):
            # They find a slot, but the reserve of the running rows keeps the blocks from them.
            engine.add(Request(num_rows + i, prompt(16 * 3 + 1), 4))
        scheduler = engine.scheduler
        scheduler.schedule()
        assert scheduler.num_running == num_rows and scheduler.num_waiting == waiting
        scheduler.schedule()
        for _ in range(3):
            step, num_lines = schedule_counting_lines(scheduler)
            assert step.num_decoding == num_rows
            costs.append(num_lines)
    assert len(set(costs)) == 1


def corrupt_slot(engine: SimulatedEngine) -> None:
    engine.requests["b"].slot = engine.requests["a"].slot


def corrupt_blocks(engine: SimulatedEngine) -> None:
    engine.requests["b"].blocks = engine.requests["a"].blocks


def corrupt_length(engine: SimulatedEngine) -> None:
    engine.scheduler.advance(20)


def corrupt_status(engine: SimulatedEngine) -> None:
    engine.requests["a"].status = RequestStatus.WAITING


@pytest.mark.parametrize("corrupt", [corrupt_slot, corrupt_blocks, corrupt_length, corrupt_status])
def test_check_integrity_finds(corrupt: Callable[[SimulatedEngine], None]) -> None:
    engine = make_engine(16)
    for name in "ab":
        engine.add(Request(name, prompt(3), 30))
    engine.step()
    engine.step()
    corrupt(engine)
    with pytest.raises(TorchPagedError, match="inconsistent|held twice"):
        engine.scheduler.check_integrity()
