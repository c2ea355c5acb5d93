"""Many threads and tasks on one engine: nothing is lost, swapped or stuck."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_paged

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    core_of,
    ids_of,
    make_engine,
    small_model,
)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


def in_threads(functions: list[Callable[[], None]]) -> None:
    """Run functions in threads of their own and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_eight_readers_each_hear_everything(answers: Answers) -> None:
    with make_engine(small_model(), lag=2) as engine:
        barrier = threading.Barrier(8)
        heard: list[dict[Any, list[int]]] = [{} for _ in range(8)]

        def reader(i: int) -> None:
            stream = engine.stream()
            if i == 0:
                for n in range(8):
                    engine.add_request(ids_of(9, n), max_new_tokens=12, request_id=n)
            barrier.wait()
            for out in stream:
                heard[i].setdefault(out.request_id, []).extend(out.new_token_ids)

        in_threads([lambda i=i: reader(i) for i in range(8)])
        assert_all_free(engine)
    expected = {n: answers(ids_of(9, n), 12) for n in range(8)}
    for i in range(8):
        for n, tokens in heard[i].items():
            # A reader that came late hears the rest.
            assert tokens and tokens == expected[n][len(expected[n]) - len(tokens) :]
    assert any(tokens == expected for tokens in heard)


def test_threads_add_cancel_and_run(answers: Answers) -> None:
    with make_engine(small_model(), max_num_seqs=3) as engine:
        results: dict[Any, Any] = {}

        def client(i: int) -> None:
            for k in range(4):
                name = (i, k)
                engine.add_request(ids_of(9, i), max_new_tokens=6 + k, request_id=name)
                if k == 3:
                    try:
                        engine.cancel(name)
                    except KeyError:
                        pass
                results.update(engine.run())

        in_threads([lambda i=i: client(i) for i in range(4)])
        assert set(results) == {(i, k) for i in range(4) for k in range(4)}
        for (i, k), out in results.items():
            tokens = answers(ids_of(9, i), 6 + k)
            assert out.token_ids == tokens[: len(out.token_ids)]
            assert out.finish_reason == "cancelled" or out.token_ids == tokens
            assert k == 3 or out.finish_reason == "length"
        assert_all_free(engine)


@pytest.mark.parametrize("stream_too", [False, True])
def test_an_engine_that_steps_by_itself(answers: Answers, stream_too: bool) -> None:
    with make_engine(small_model()) as engine:
        ended = threading.Event()
        outputs: list[torch_paged.RequestOutput] = []

        def on_output(out: torch_paged.RequestOutput) -> None:
            outputs.append(out)
            if out.finished:
                ended.set()

        engine.start()
        for _ in range(3):
            ended.clear()
            outputs.clear()
            engine.add_request(ids_of(9, 9), max_new_tokens=20, on_output=on_output)
            if stream_too:
                list(engine.stream())
            assert ended.wait(60)
            tokens = [t for out in outputs for t in out.new_token_ids]
            assert tokens == answers(ids_of(9, 9), 20)
    assert not any(t.name == "torch_paged engine" and t.is_alive() for t in threading.enumerate())


def test_generate_beside_an_engine_that_steps(answers: Answers) -> None:
    with make_engine(small_model(), lag=1) as engine:
        model = engine._target
        engine.start()
        done: dict[Any, torch_paged.RequestOutput] = {}
        for n in (9, 16, 17):
            engine.add_request(
                ids_of(n, n),
                max_new_tokens=40,
                request_id=n,
                on_output=lambda out: done.update({out.request_id: out} if out.finished else {}),
            )

        def generate(i: int) -> None:
            ids = torch.tensor([ids_of(11, i)])
            with torch.inference_mode(i % 2 == 0):
                for _ in range(4):
                    out = model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=12,
                        do_sample=False,
                    )
                    assert out[0, 11:].tolist() == answers(ids_of(11, i), 12)

        in_threads([lambda i=i: generate(i) for i in range(4)])
        engine.run()
        assert {n: list(out.token_ids) for n, out in done.items()} == {
            n: answers(ids_of(n, n), 40) for n in (9, 16, 17)
        }
        engine.check_integrity()
        assert_all_free(engine)


def test_contexts_of_the_caller_do_not_matter(answers: Answers) -> None:
    with torch.inference_mode():
        engine = make_engine(small_model())
        engine.add_request(ids_of(9, 9), max_new_tokens=8, request_id=0)
        engine.step()
    with torch.no_grad():
        engine.step()
    engine.step()
    with torch.inference_mode():
        engine.step()
    assert engine.run()[0].token_ids == answers(ids_of(9, 9), 8)
    engine.close()


def test_a_thread_that_waits_while_the_model_is_configured_anew_steps_in_its_turn(
    answers: Answers,
) -> None:
    engine = make_engine(small_model(), lag=0)
    inside, may_leave = threading.Event(), threading.Event()
    outputs: dict[Any, Any] = {}

    def hold_up(output: torch_paged.RequestOutput) -> None:
        inside.set()
        assert may_leave.wait(60)

    def run() -> None:
        outputs.update(engine.run())

    def configure() -> None:
        assert inside.wait(60)
        threading.Timer(0.3, may_leave.set).start()
        engine.run()  # while the other is in a step

    with engine:
        engine.add_request(ids_of(9, 3), max_new_tokens=8, request_id=0, on_output=hold_up)
        first = threading.Thread(target=run, daemon=True)
        with engine.paused():
            first.start()
            # It has looked up the model's session, and waits for its turn.
            first.join(0.3)
            torch_paged.accelerate(engine._target, block_size=8)
        in_threads([configure])
        first.join(60)
        assert not first.is_alive()
        engine.check_integrity()
        assert_all_free(engine)
    assert outputs[0].token_ids == answers(ids_of(9, 3), 8)


def test_two_engines_on_one_model_share_its_memory(answers: Answers) -> None:
    with make_engine(small_model(), max_num_seqs=4) as one:
        with torch_paged.Engine(one._target) as two:
            for i in range(6):
                one.add_request(ids_of(9, i), max_new_tokens=12, request_id=i)
                two.add_request(ids_of(9, i), max_new_tokens=12, request_id=i)
            first: dict[Any, Any] = {}
            second: dict[Any, Any] = {}
            while not (one.is_idle and two.is_idle):
                first.update({out.request_id: out for out in one.step()})
                second.update({out.request_id: out for out in two.step()})
                one.check_integrity()
                two.check_integrity()
        assert torch_paged.is_accelerated(one._target)
        assert_all_free(one)
    for i in range(6):
        assert first[i].token_ids == second[i].token_ids == answers(ids_of(9, i), 12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_process_is_told_to_make_its_own(answers: Answers) -> None:
    with make_engine(small_model()) as engine:
        engine.start()
        engine.add_request(ids_of(9, 9), max_new_tokens=60, request_id=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
            child = os.fork()
        if child == 0:
            code = 1
            try:
                for use in (engine.step, engine.run, lambda: engine.cancel(0)):
                    with pytest.raises(torch_paged.errors.TorchPagedError, match="after the fork"):
                        use()
                engine.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        tokens = answers(ids_of(9, 9), 60)
        outputs = engine.run()
        assert 0 not in outputs or outputs[0].token_ids == tokens


def test_an_engine_dropped_in_mid_work_gives_back_what_it_held(answers: Answers) -> None:
    with make_engine(small_model()) as kept:
        dropped = torch_paged.Engine(kept._target)
        dropped.add_request(ids_of(40, 1), max_new_tokens=60)
        dropped.step()
        core = core_of(kept)
        assert core.allocator.num_live > 0
        del dropped
        gc.collect()
        kept.add_request(ids_of(9, 9), max_new_tokens=8, request_id=0)
        assert kept.run()[0].token_ids == answers(ids_of(9, 9), 8)
        assert_all_free(kept)


def test_async_tasks_each_get_their_own(answers: Answers) -> None:
    async def client(engine: torch_paged.Engine, i: int) -> list[int]:
        tokens: list[int] = []
        async for out in engine.generate_async(ids_of(9, i), max_new_tokens=10, request_id=i):
            assert out.request_id == i
            tokens += out.new_token_ids
        assert out.finished and out.finish_reason == "length"
        return tokens

    async def leaver(engine: torch_paged.Engine) -> int:
        count = 0
        async for _ in engine.generate_async(ids_of(9, 9), max_new_tokens=100, request_id="left"):
            count += 1
            if count == 3:
                break
        return count

    async def main() -> list[Any]:
        with make_engine(small_model(), lag=1) as engine:
            tasks = [client(engine, i) for i in range(6)]
            results = await asyncio.gather(*tasks, leaver(engine))
            # Breaking out of the loop cancels the request once the generator is closed.
            for _ in range(500):
                if engine.is_idle:
                    break
                await asyncio.sleep(0.01)
            assert engine.is_idle
            assert_all_free(engine)
            return results

    results = asyncio.run(main())
    assert results[:-1] == [answers(ids_of(9, i), 10) for i in range(6)]


def test_async_errors_reach_their_consumer() -> None:
    async def main() -> None:
        with make_engine(small_model()) as engine:
            with pytest.raises(TypeError, match="did you mean"):
                async for _ in engine.generate_async(ids_of(9, 9), max_new_token=3):
                    pass
            core = core_of(engine)

            def broken(*args: Any) -> None:
                raise RuntimeError("broken")

            core.prepare = broken
            outs = [out async for out in engine.generate_async(ids_of(9, 9), max_new_tokens=3)]
            assert [out.finish_reason for out in outs] == ["error"]
            assert "broken" in (outs[0].error or "")
            del core.prepare
            outs = [out async for out in engine.generate_async(ids_of(9, 9), max_new_tokens=3)]
            assert outs[-1].finish_reason == "length"

    asyncio.run(main())
