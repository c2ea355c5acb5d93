"""Beginnings and ends of an engine: dropped, stopped and closed ones leave nobody waiting."""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torch_paged
from torch_paged.config import Config
from torch_paged.errors import OutOfBlocks, TorchPagedError

sys.path.append(str(Path(__file__).parent))

from serving_case import Answers, core_of, ids_of, make_engine, small_model  # noqa: E402


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that a thread is about to do."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(what)


@pytest.mark.parametrize("busy", [False, True])
def test_a_started_engine_that_is_dropped_ends_its_thread_and_frees_the_model(busy: bool) -> None:
    model = copy.deepcopy(small_model())
    engine = torch_paged.Engine(model)
    engine.start()
    thread = engine._service.thread
    assert thread is not None
    if busy:
        engine.add_request(ids_of(9, 9), max_new_tokens=100)
    gone = weakref.ref(model)
    del engine, model
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    gc.collect()
    assert gone() is None


def test_dropping_needs_no_collector() -> None:
    engine = make_engine(small_model())
    engine.start()
    service = weakref.ref(engine._service)
    thread = engine._service.thread
    assert thread is not None
    gc.disable()
    try:
        del engine
        thread.join(20)
        assert not thread.is_alive() and service() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("verb", ["stop", "close", "restore"])
def test_asynchronous_consumers_do_not_wait_for_an_engine_that_ended(verb: str) -> None:
    async def main() -> None:
        engine = make_engine(small_model(), lag=1)
        model = engine._target
        arrived = asyncio.Event()

        async def consume() -> list[torch_paged.RequestOutput]:
            outputs = []
            async for out in engine.generate_async(ids_of(9, 9), max_new_tokens=110):
                outputs.append(out)
                arrived.set()
            return outputs

        held = slow_steps(engine)
        task = asyncio.create_task(consume())
        await asyncio.wait_for(arrived.wait(), 20)
        held.set()
        if verb == "restore":
            torch_paged.restore(model)
        else:
            await asyncio.to_thread(getattr(engine, verb))
        if verb == "stop":
            with pytest.raises(TorchPagedError, match="stopped.*start"):
                await asyncio.wait_for(task, 20)
            # Its request was cancelled, and the engine goes on.
            outputs = await asyncio.to_thread(engine.run)
            assert {out.finish_reason for out in outputs.values()} <= {"cancelled"}
            assert engine.is_idle
        else:
            outputs = await asyncio.wait_for(task, 20)
            assert outputs[-1].finish_reason in ("cancelled", "error")
        engine.close()

    asyncio.run(main())


def slow_steps(engine: torch_paged.Engine) -> threading.Event:
    """Make steps wait a little until the event is set, so that a request lasts that long."""
    core, done = core_of(engine), threading.Event()
    decode = core.step.decode

    def slow(slots: Any) -> Any:
        done.wait(0.05)
        return decode(slots)

    core.step.decode = slow
    return done


def test_asynchronous_generation_after_the_end_is_refused() -> None:
    async def main() -> None:
        engine = make_engine(small_model())
        engine.close()
        with pytest.raises(TorchPagedError, match="closed"):
            async for _ in engine.generate_async(ids_of(9, 9), max_new_tokens=3):
                pass

    asyncio.run(main())


def test_a_stopped_engine_serves_asynchronous_consumers_again(answers: Answers) -> None:
    async def main() -> list[int]:
        with make_engine(small_model()) as engine:
            engine.start()
            engine.stop()
            outputs = [out async for out in engine.generate_async(ids_of(9, 9), max_new_tokens=5)]
            return list(outputs[-1].token_ids)

    assert asyncio.run(main()) == answers(ids_of(9, 9), 5)


def test_a_request_added_while_the_engine_closes_is_refused_or_ended() -> None:
    for _ in range(10):
        engine = make_engine(small_model(), verify=False)
        engine.start()
        ended: list[Any] = []
        names: list[Any] = []
        begun = threading.Event()

        def add(
            engine: torch_paged.Engine = engine,
            names: list[Any] = names,
            ended: list[Any] = ended,
            begun: threading.Event = begun,
        ) -> None:
            def on_output(out: torch_paged.RequestOutput) -> None:
                if out.finished:
                    ended.append(out.request_id)

            try:
                while True:
                    names.append(engine.add_request([3], max_new_tokens=1, on_output=on_output))
                    begun.set()
            except TorchPagedError as error:
                assert "closed" in str(error)

        adder = threading.Thread(target=add, daemon=True)
        adder.start()
        assert begun.wait(20)
        engine.close()
        adder.join(20)
        assert not adder.is_alive()
        assert sorted(ended) == sorted(names)
        assert engine.is_idle


def test_a_close_between_the_checks_of_a_request_refuses_it() -> None:
    engine = make_engine(small_model())
    service = engine._service
    draw = service._draw_seed

    def closing() -> int:
        engine.close()
        return draw()

    service._draw_seed = closing  # type: ignore[method-assign]
    with pytest.raises(TorchPagedError, match="closed"):
        engine.add_request([3], max_new_tokens=1)
    assert engine.is_idle


def test_a_request_that_comes_while_all_others_fail_is_not_lost() -> None:
    with make_engine(small_model(), verify=False) as engine:
        service = engine._service
        late: list[Any] = []
        thread = threading.Thread(
            target=lambda: late.append(engine.add_request([3, 4], max_new_tokens=2))
        )

        class Inbox(deque[Any]):
            def clear(self) -> None:
                # Between looking at what is there and dropping it.
                thread.start()
                thread.join(0.3)
                super().clear()

        service._inbox = Inbox()
        engine.add_request([3], max_new_tokens=1)
        service._end_all("error", "on purpose")
        thread.join(20)
        assert engine.is_idle is False, "the request was dropped with the others"
        service._inbox = deque(service._inbox)
        outputs = engine.run()
        assert outputs[late[0]].finish_reason == "length"


def test_failing_alone_waits_for_whoever_steps() -> None:
    """The error path of the engine's own thread touches the books only under the model's lock."""
    with make_engine(small_model()) as engine:
        service = engine._service
        engine.add_request([3], max_new_tokens=50)
        with engine.paused():
            thread = threading.Thread(target=service._end_all, args=("error", "on purpose"))
            thread.start()
            thread.join(0.2)
            assert thread.is_alive() and not engine.is_idle
        thread.join(20)
        assert not thread.is_alive() and engine.is_idle


@pytest.mark.parametrize("verb", ["stop", "close"])
def test_an_engine_may_be_ended_by_whoever_holds_the_model(verb: str) -> None:
    engine = make_engine(small_model())
    engine.start()
    engine.add_request(ids_of(9, 9), max_new_tokens=110)
    done = threading.Event()

    def end() -> None:
        with engine.paused():
            time.sleep(0.1)  # the engine's thread is waiting for the model by now
            getattr(engine, verb)()
        done.set()

    threading.Thread(target=end, daemon=True).start()
    assert done.wait(20), "a thread waits for one that waits for it"
    engine.close()


_SOFT: dict[str, Any] = {"max_num_seqs": 3, "lag": 1, "seed": 7, "max_num_batched_tokens": 9}


@pytest.mark.parametrize("fields", [{}, {"block_size": 8}, _SOFT], ids=["none", "same", "soft"])
def test_an_engine_takes_over_what_an_accelerated_model_has(
    answers: Answers, fields: dict[str, Any]
) -> None:
    model = torch_paged.accelerate(copy.deepcopy(small_model()), block_size=8, max_num_seqs=4)
    ids = ids_of(25, 25)
    with torch_paged.Engine(model) as engine:
        engine.add_request(ids, max_new_tokens=12, request_id=0)
        assert engine.run()[0].token_ids == answers(ids, 12)
        core, allocator = core_of(engine), core_of(engine).allocator
        assert allocator.num_cached >= 3
    with torch_paged.Engine(model, **fields) as engine:
        assert core_of(engine) is core and core.allocator is allocator
        config = engine._service.session().config
        assert config == core.config == Config(**{"block_size": 8, "max_num_seqs": 4, **fields})
        scheduled = []
        for i in range(4):
            engine.add_request(ids, max_new_tokens=12, request_id=i)
        while not engine.is_idle:
            engine.step()
            engine.check_integrity()
            scheduled.append(engine._service.engine.num_running)
        assert max(scheduled) == config.max_num_seqs
        engine.add_request(ids, max_new_tokens=12, request_id="again")
        assert engine.run()["again"].token_ids == answers(ids, 12)
    assert torch_paged.is_accelerated(model)


@pytest.mark.parametrize(
    "fields", [{"block_size": 32}, {"kv_cache_memory": 1 << 22}, {"cuda_graphs": False}], ids=str
)
def test_an_engine_makes_anew_what_its_settings_change(
    answers: Answers, fields: dict[str, Any]
) -> None:
    model = torch_paged.accelerate(copy.deepcopy(small_model()), lag=2)
    ids = ids_of(25, 25)
    with torch_paged.Engine(model) as first:
        core = core_of(first)
        first.add_request(ids, max_new_tokens=30, request_id=0)
        first.step()
        with torch_paged.Engine(model, **fields) as second:
            assert core_of(second) is not core and not core.is_prepared
            assert second._service.session().config == Config(lag=2, **fields)
            second.add_request(ids, max_new_tokens=12, request_id=1)
            assert second.run()[1].token_ids == answers(ids, 12)
        # What ran on the old cache goes on, on the new one.
        assert first.run()[0].token_ids == answers(ids, 30)
    with pytest.raises(TypeError, match=r"config must be a torch_paged\.Config, got dict"):
        torch_paged.Engine(model, {"lag": 1})  # type: ignore[arg-type]


def test_cancelling_on_a_closed_engine_says_that_it_is_closed() -> None:
    engine = make_engine(small_model())
    name = engine.add_request(ids_of(9, 9), max_new_tokens=20)
    engine.close()
    with pytest.raises(TorchPagedError, match="closed"):
        engine.cancel(name)


@pytest.fixture
def core() -> Iterator[Any]:
    with make_engine(small_model()) as engine:
        core = core_of(engine)
        core.prepare(1, 1, 1)
        yield core


def test_making_room_reports_what_is_no_lack_of_memory(core: Any) -> None:
    def out_of_blocks(num_blocks: int) -> bool:
        raise OutOfBlocks("no memory")

    def broken(num_blocks: int) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    core.pool.grow = out_of_blocks
    assert core.make_room(1) is False
    core.pool.grow = broken
    with pytest.raises(RuntimeError, match="illegal memory access"):
        core.make_room(1)


def test_a_host_without_memory_has_no_room(core: Any) -> None:
    before = core.num_blocks
    assert core.make_room(1 << 44) is False
    assert core.num_blocks == before
    assert core.make_room(1) is True


def test_released_graphs_begin_anew_with_counting_moves(core: Any) -> None:
    core._moves_in_a_row = 3
    core.release()
    assert core._moves_in_a_row == 0
