"""How requests end: at limits, by tokens, cancelled, expired, or because they cannot run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_paged.engine.request import Request, RequestStatus

sys.path.append(str(Path(__file__).parent))

from simulated_engine import SimulatedEngine, assert_all_as_alone, make_engine, prompt  # noqa: E402


def test_request_over_the_model_length_fails_alone() -> None:
    engine = make_engine(64, max_model_len=20)
    too_long = engine.add(Request("long", prompt(20), 4))
    cut = engine.add(Request("cut", prompt(17), 40))
    engine.run()
    assert engine.reasons == {"long": "error", "cut": "length"}
    assert "max_model_len=20" in str(too_long.error)
    assert cut.max_new_tokens == len(cut.output_ids) == 3
    assert_all_as_alone_but(engine, "long")


def test_request_over_the_pool_fails_alone_without_delay() -> None:
    engine = make_engine(4)
    engine.add(Request("a", prompt(3), 10))
    engine.step()
    huge = engine.add(Request("huge", prompt(20), 4))
    engine.add(Request("b", prompt(3, 1), 4))
    assert engine.step().finished == (huge,)
    assert huge.finish_reason == "error" and "5 KV blocks" in str(huge.error)
    assert engine.requests["b"].slot is not None
    engine.run()
    assert_all_as_alone_but(engine, "huge")


def test_request_does_not_wait_for_ever_for_blocks_of_somebody_who_stands_still() -> None:
    ticks = itertools.count()
    engine = make_engine(4, now=lambda: next(ticks) * 0.04)
    engine.allocator.allocate(3)
    request = Request("a", prompt(8), 4)
    engine.scheduler.add(request)
    steps = [engine.scheduler.schedule() for _ in range(800)]
    (end,) = [step for step in steps if step.finished]
    assert end.finished == (request,) and 740 <= steps.index(end) <= 760
    assert request.finish_reason == "error" and engine.scheduler.is_idle
    assert "needs 2 KV blocks; other users of the model hold 3 of the pool's 4" in str(
        request.error
    )


def test_row_that_outgrows_the_whole_pool_keeps_its_output() -> None:
    engine = make_engine(4)
    row = engine.add(Request("a", prompt(3), 100))
    engine.add(Request("b", prompt(3, 1), 4))
    engine.run()
    assert engine.reasons == {"b": "length", "a": "error"}
    assert "pool has 4" in str(row.error)
    full = 4 * 4 + 1 - 3
    assert row.output_ids == engine.expected(row)[:full]
    assert_all_as_alone_but(engine, "a")


def assert_all_as_alone_but(engine: SimulatedEngine, name: str) -> None:
    del engine.requests[name]
    assert_all_as_alone(engine)


def cancel_waiting(engine: SimulatedEngine) -> str:
    return "waiting"


def cancel_prefilling(engine: SimulatedEngine) -> str:
    engine.add(Request("prefilling", prompt(30), 4))
    engine.cancel("other")
    engine.cancel("waiting")
    engine.step()
    assert engine.requests["prefilling"].slot is not None
    return "prefilling"


def cancel_before_first_decode(engine: SimulatedEngine) -> str:
    engine.cancel("other")
    assert engine.step().prefills[0].is_last
    return "waiting"


def cancel_decoding(engine: SimulatedEngine) -> str:
    return "other"


def cancel_preempted(engine: SimulatedEngine) -> str:
    while engine.requests["other"].status is not RequestStatus.PREEMPTED:
        engine.step()
    return "other"


@pytest.mark.parametrize(
    "reach",
    [
        cancel_waiting,
        cancel_prefilling,
        cancel_before_first_decode,
        cancel_decoding,
        cancel_preempted,
    ],
)
def test_cancelled_anywhere_it_is_reported_once_and_leaves_nothing(
    reach: Callable[[SimulatedEngine], str],
) -> None:
    engine = make_engine(10, max_num_seqs=2, max_num_batched_tokens=16, reserve=0)
    engine.add(Request("row", prompt(3), 30))
    engine.add(Request("other", prompt(3, 1), 30))
    engine.add(Request("waiting", prompt(3, 2), 5))
    for _ in range(3):
        engine.step()
    name = reach(engine)
    engine.cancel(name)
    assert engine.requests[name].block_ids == [] and engine.requests[name].slot is None
    assert [r.request_id for r in engine.step().finished].count(name) == 1
    with pytest.raises(KeyError):
        engine.scheduler.cancel(name)
    engine.run()
    assert engine.reasons[name] == "cancelled" and engine.reasons["row"] == "length"
    for request in engine.requests.values():
        assert request.output_ids == engine.expected(request)[: len(request.output_ids)]
    assert engine.scheduler.kv_blocks_used == 0


def test_deadline_cancels_waiting_and_running_requests() -> None:
    seconds = [0.0]
    engine = make_engine(16, max_num_seqs=2, now=lambda: seconds[0])
    engine.add(Request("running", prompt(3), 50, deadline=5.0))
    engine.add(Request("free", prompt(3), 8))
    engine.add(Request("waiting", prompt(3), 50, deadline=2.0))
    engine.step()
    seconds[0] = 2.0
    assert [r.request_id for r in engine.step().finished] == ["waiting"]
    seconds[0] = 6.0
    assert [r.request_id for r in engine.step().finished] == ["running"]
    engine.run()
    assert engine.reasons == {"waiting": "cancelled", "running": "cancelled", "free": "length"}
    assert "deadline" in str(engine.requests["running"].error)


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_end_token_learnt_late_ends_the_row(lag: int) -> None:
    engine = make_engine(32, lag=lag)
    reference = engine.add(Request("a", prompt(6), 30))
    engine.run()
    engine.eos = reference.output_ids[5]
    request = engine.add(Request("b", prompt(6), 30))
    engine.run()
    assert engine.reasons["b"] == "stop"
    assert request.output_ids == reference.output_ids[:6]
    assert request.num_output_tokens == 6 + lag


def test_finish_after_the_end_has_no_effect() -> None:
    engine = make_engine(8)
    request = engine.add(Request("a", prompt(3), 2))
    engine.run()
    engine.scheduler.finish("a", "stop")
    assert request.finish_reason == "length" and engine.scheduler.is_idle


def test_id_in_use_and_used_request_are_refused() -> None:
    engine = make_engine(8)
    request = engine.add(Request("a", prompt(3), 2))
    with pytest.raises(ValueError, match="'a'"):
        engine.scheduler.add(Request("a", prompt(3), 2))
    engine.run()
    with pytest.raises(ValueError, match="added before"):
        engine.scheduler.add(request)
    # An id may be used again once its request has ended.
    engine.scheduler.add(Request("a", prompt(3), 2))


def test_id_used_again_is_not_ended_by_what_was_planned_for_its_predecessor() -> None:
    seconds = [0.0]
    engine = make_engine(8, now=lambda: seconds[0])
    engine.add(Request("a", prompt(3), 4, deadline=1.0))
    # The first decode of both falls on the same step.
    engine.scheduler.schedule(decode=False)
    engine.scheduler.cancel("a")
    successor = Request("a", prompt(3), 20)
    engine.scheduler.add(successor)
    engine.scheduler.schedule(decode=False)
    seconds[0] = 2.0
    steps = [engine.scheduler.schedule() for _ in range(20)]
    assert [step.num_decoding for step in steps] == [1] * 19 + [0]
    assert successor.finish_reason == "length" and successor.num_output_tokens == 20


def test_finish_with_an_error_keeps_the_reason() -> None:
    engine = make_engine(8)
    request = engine.add(Request("a", prompt(3), 9))
    engine.step()
    engine.scheduler.finish("a", "error", "the logits are NaN")
    assert engine.step().finished == (request,)
    assert (request.finish_reason, request.error) == ("error", "the logits are NaN")
