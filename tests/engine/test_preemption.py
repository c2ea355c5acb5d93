"""What happens when the blocks run out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import ONE_KIND
from torch_paged.engine.patience import MAX_YIELDS, Patience
from torch_paged.engine.request import Request, RequestStatus
from torch_paged.engine.request_blocks import RequestBlocks
from torch_paged.engine.slot_pool import SlotPool
from torch_paged.errors import OutOfBlocks

sys.path.append(str(Path(__file__).parent))

from simulated_engine import HostBlocks, assert_all_as_alone, make_engine, prompt  # noqa: E402


def test_lack_of_blocks_raises_without_preemption_and_may_be_retried() -> None:
    engine = make_engine(4, preempt=False, reserve=0)
    for name in "ab":
        engine.add(Request(name, prompt(7, ord(name)), 20))
    engine.step()
    with pytest.raises(OutOfBlocks):
        for _ in range(5):
            engine.step()
    with pytest.raises(OutOfBlocks):
        engine.scheduler.ensure_decode_blocks(8)
    engine.allocator.grow(32)
    engine.write_updates(engine.scheduler.ensure_decode_blocks(8))
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert_all_as_alone(engine)


def test_blocks_given_before_a_failure_are_withdrawn_from_a_row_that_leaves() -> None:
    engine = make_engine(5, preempt=False, reserve=0, max_num_seqs=2)
    for name in "ab":
        engine.add(Request(name, prompt(8, ord(name)), 20))
    engine.step()
    with pytest.raises(OutOfBlocks):
        engine.step()
    given = engine.requests["a"].block_ids[2:]
    assert len(given) == 1
    engine.cancel("a")
    engine.add(Request("c", prompt(8), 1))
    updates = engine.step().block_updates
    assert [(u.slot, u.first_index) for u in updates] == [(1, 2), (0, 0)]
    engine.allocator.grow(16)
    engine.run()
    del engine.requests["a"]
    assert_all_as_alone(engine)


def test_room_is_asked_for_before_anyone_waits_or_is_preempted() -> None:
    asked = []

    def make_room(num_blocks: int) -> bool:
        asked.append(num_blocks)
        engine.allocator.grow(engine.allocator.num_blocks + num_blocks)
        return True

    engine = make_engine(0, make_room=make_room, reserve=0)
    for name in "ab":
        engine.add(Request(name, prompt(9), 8))
    engine.step()
    assert asked == [3, 3] and engine.scheduler.num_running == 2
    engine.run()
    assert engine.scheduler.num_preemptions == 0 and engine.allocator.num_blocks == 8
    assert_all_as_alone(engine)


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_requests_neither_lose_nor_double_tokens(lag: int, prefix_caching: bool) -> None:
    lengths = (5, 9, 16, 17, 31, 40)
    num_blocks = int(2.5 * (40 + 40) / 16)
    engine = make_engine(
        num_blocks,
        block_size=16,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        prefix_caching=prefix_caching,
        reserve=0,
        lag=lag,
    )
    for length in lengths:
        engine.add(Request(length, prompt(length, length), 40))
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert all(len(r.output_ids) == 40 for r in engine.requests.values())
    assert_all_as_alone(engine)


def test_last_to_arrive_is_preempted_and_comes_back_first() -> None:
    engine = make_engine(6, reserve=0, max_num_seqs=3)
    for name in "abc":
        engine.add(Request(name, prompt(7, ord(name)), 12))
    engine.add(Request("d", prompt(3), 2))
    while not (step := engine.step()).preempted:
        pass
    assert [r.request_id for r in step.preempted] == ["c"]
    preempted = step.preempted[0]
    assert preempted.status is RequestStatus.PREEMPTED and preempted.slot is None
    assert engine.scheduler.num_waiting == 2
    while preempted.slot is None:
        assert engine.requests["d"].slot is None
        step = engine.step()
    chunk = step.prefills[0]
    assert chunk.request is preempted and chunk.start == 0 and chunk.length > 7
    engine.run()
    assert_all_as_alone(engine)


def test_lowest_priority_is_preempted() -> None:
    engine = make_engine(6, reserve=0, policy="priority")
    for name, priority in (("low", 5), ("high", 0), ("mid", 1)):
        engine.add(Request(name, prompt(7, priority), 12, priority=priority))
    while not (step := engine.step()).preempted:
        pass
    assert [r.request_id for r in step.preempted] == ["low"]
    engine.run()
    assert_all_as_alone(engine)


def test_nobody_is_admitted_into_the_reserve_of_running_rows() -> None:
    engine = make_engine(4, reserve=1)
    engine.add(Request("a", prompt(8), 4))
    engine.add(Request("b", prompt(8, 1), 4))
    engine.step()
    assert engine.scheduler.num_running == 1
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert_all_as_alone(engine)


@pytest.mark.parametrize("num_host_blocks, swapped", [(20, True), (1, False)])
def test_swapped_request_computes_only_its_newest_token_again(
    num_host_blocks: int, swapped: bool
) -> None:
    host = HostBlocks(num_host_blocks)
    engine = make_engine(6, reserve=0, swap_space=host)
    for name in "ab":
        engine.add(Request(name, prompt(7, ord(name)), 14))
    swap_ins = 0
    while not engine.scheduler.is_idle:
        step = engine.step()
        swap_ins += len(step.swap_ins)
        for copy in step.swap_ins:
            chunk = next(c for c in step.prefills if c.request is copy.request)
            assert chunk.length == 1 and chunk.start == copy.request.num_cached_tokens
    assert engine.scheduler.num_preemptions > 0
    assert (swap_ins > 0) == (host.num_taken > 0) == swapped
    assert engine.num_computed == 14 + swap_ins if swapped else engine.num_computed > 14
    assert len(host.free) == num_host_blocks
    assert_all_as_alone(engine)


def test_cancelled_swapped_request_gives_its_host_blocks_back() -> None:
    host = HostBlocks(8)
    engine = make_engine(6, reserve=0, swap_space=host)
    for name in "ab":
        engine.add(Request(name, prompt(7, ord(name)), 14))
    while not engine.step().swap_outs:
        pass
    assert len(host.free) < 8
    engine.cancel("b")
    assert len(host.free) == 8
    engine.run()
    assert engine.requests["a"].output_ids == engine.expected(engine.requests["a"])


def test_blocks_that_others_keep_are_not_brought_in_a_second_time() -> None:
    host = HostBlocks(20)
    engine = make_engine(8, reserve=0, swap_space=host, prefix_caching=True)
    for name in "ab":
        engine.add(Request(name, prompt(13) + [ord(name)], 14))
    outs, ins = [], []
    while not engine.scheduler.is_idle:
        step = engine.step()
        outs += [len(copy.host_blocks) for copy in step.swap_outs]
        ins += [len(copy.host_blocks) for copy in step.swap_ins]
    # Three full blocks of the prompt are those of "a".
    assert len(outs) == len(ins) == 1 and 0 < ins[0] <= outs[0] - 3
    assert len(host.free) == 20
    assert_all_as_alone(engine)


@pytest.mark.parametrize("num_host_blocks", [0, 8], ids=["recomputed", "swapped"])
def test_request_preempted_while_it_prefills_keeps_what_was_swapped(num_host_blocks: int) -> None:
    host = HostBlocks(num_host_blocks)
    engine = make_engine(8, reserve=0, max_num_batched_tokens=4, swap_space=host)
    engine.add(Request("row", prompt(4), 20))
    engine.step()
    late = engine.add(Request("late", prompt(23, 1), 3))
    computed = 0
    while not (step := engine.step()).preempted:
        computed = late.num_computed_tokens
    assert step.preempted == (late,) and 0 < computed < 20
    assert late.num_computed_tokens == (computed if num_host_blocks else 0)
    assert host.num_taken == (-(-computed // 4) if num_host_blocks else 0)
    engine.run()
    assert late.num_output_tokens == 3
    assert_all_as_alone(engine)


class Clock:
    """A time that goes on by 50 ms with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.05
        return self.now


def test_slots_that_others_hold_are_waited_for_while_these_move() -> None:
    slots, launched = SlotPool(1), [0]
    engine = make_engine(8, slots=slots, now=Clock(), progress=lambda: launched[0])
    slot = slots.take()
    engine.add(Request("a", prompt(7), 4))
    for _ in range(1000):
        launched[0] += 1
        step = engine.step()
        assert engine.scheduler.is_starved and not step.finished
    slots.give_back(slot)
    engine.run()
    assert not engine.scheduler.is_starved
    assert_all_as_alone(engine)

    slots.take()
    names = "bcd"
    for name in names:
        engine.add(Request(name, prompt(7), 4))
    num_steps = 0
    while not engine.scheduler.is_idle:
        engine.step()
        num_steps += 1
    # Whoever comes behind the first does not wait as long again.
    assert 30 / 0.05 <= num_steps <= 30 / 0.05 + 6
    for name in names:
        assert "other users of the model hold all 1 slots" in (engine.requests[name].error or "")


def test_time_in_which_nobody_looked_is_not_held_against_others() -> None:
    times = iter(range(0, 1_000_000, 1000))
    engine = make_engine(8, now=lambda: float(next(times)))
    blocks = engine.allocator.allocate(7)
    engine.add(Request("a", prompt(7), 4))
    for _ in range(500):
        assert not engine.scheduler.schedule().finished
    engine.allocator.free(blocks)
    engine.run()
    assert_all_as_alone(engine)


def test_a_request_that_gave_way_comes_back_as_soon_as_others_give_blocks_back() -> None:
    engine = make_engine(6, reserve=0)
    engine.check = engine.scheduler.check_integrity  # type: ignore[method-assign]
    engine.add(Request("a", prompt(7), 12))
    engine.step()
    blocks = engine.allocator.allocate(4)
    while not engine.step().preempted:
        pass
    assert engine.allocator.num_free == 2
    for _ in range(3):
        engine.step()
        assert engine.scheduler.is_starved
    engine.allocator.free(blocks)
    assert len(engine.step().prefills) == 1
    engine.run()
    assert_all_as_alone(engine)


def test_a_waiting_request_starts_beside_a_running_one_when_others_give_blocks_back() -> None:
    engine = make_engine(8, reserve=0)
    engine.check = engine.scheduler.check_integrity  # type: ignore[method-assign]
    blocks = engine.allocator.allocate(4)
    engine.add(Request("a", prompt(4), 9))
    engine.add(Request("b", prompt(16, 1), 2))
    engine.step()
    assert engine.scheduler.num_running == 1
    engine.allocator.free(blocks)
    engine.step()
    assert engine.scheduler.num_running == 2
    engine.run()
    assert_all_as_alone(engine)


def test_a_prompt_does_not_give_way_for_ever() -> None:
    allocator = BlockAllocator(4)
    blocks = RequestBlocks(allocator, 4, ONE_KIND, 64, None)
    patience = Patience(allocator, SlotPool(1), blocks, lambda: None, Clock())
    request = Request("a", prompt(7), 4)
    allocator.allocate(2)
    for _ in range(MAX_YIELDS):
        assert patience.refusal(request, 3) is None
    assert f"gave way to other users of the model {MAX_YIELDS} times" in str(
        patience.refusal(request, 3)
    )
    # What decodes has had a token since.
    request.num_yields, request.decode_since = 0, 7
    for _ in range(2 * MAX_YIELDS):
        assert patience.refusal(request, 3) is None
    assert "needs 5 KV blocks and the pool has 4" in str(patience.refusal(request, 5))
