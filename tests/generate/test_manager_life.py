"""Starting, pausing and stopping a manager; ids of requests whose sequences end one by one."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_paged
from torch_paged.generate.registry import find_session

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))

from serving_case import Answers, ids_of, small_model  # noqa: E402

pytestmark = pytest.mark.timeout(60)  # what is tested here is that nothing waits for ever
PROMPT = ids_of(5, 5)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


@pytest.fixture
def model(accelerate: Any) -> Any:
    return accelerate(copy.deepcopy(small_model()))


@pytest.fixture
def manager(model: Any) -> Iterator[Any]:
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=40, do_sample=False)
    manager = model.init_continuous_batching(generation_config=config)
    yield manager
    manager.destroy()
    core = find_session(model).core
    assert core is not None and (not core.is_prepared or core.allocator.num_live == 0)


@pytest.mark.parametrize("hard_stop", [False, True])
def test_a_manager_that_never_ran_stops_at_once(manager: Any, hard_stop: bool) -> None:
    manager.add_request(PROMPT, "a")
    manager.stop(hard_stop=hard_stop)
    manager.start()
    assert manager.get_result(timeout=30).request_id == "a"
    manager.stop()
    manager.stop()


def test_a_manager_whose_thread_has_ended_stops(manager: Any) -> None:
    manager.start()
    with manager.pause():
        manager.add_request(PROMPT, "a")
        stopping = threading.Thread(target=manager.stop)
        stopping.start()
        # As if it had died: it waits for the end of the pause, which no step is part of.
        manager.service.stop()
        stopping.join(20)
        assert not stopping.is_alive()


@pytest.mark.parametrize("hard_stop", [False, True])
def test_stopping_within_a_pause_is_refused(
    manager: Any, answers: Answers, hard_stop: bool
) -> None:
    with pytest.raises(RuntimeError, match="does not run"), manager.pause():
        pass
    manager.start()
    with manager.pause():
        manager.add_request(PROMPT, "a")
        with pytest.raises(RuntimeError, match="within pause"):
            manager.stop(hard_stop=hard_stop)
    assert manager.get_result(timeout=30).generated_tokens == answers(PROMPT, 40)


def test_threads_pause_together_and_no_step_runs_meanwhile(
    model: Any, manager: Any, answers: Answers
) -> None:
    manager.start()
    together, seen = threading.Barrier(2, timeout=20), []

    def pause() -> None:
        with manager.pause():
            together.wait()
            before = torch_paged.stats(model).steps
            manager.add_request(PROMPT, f"of {threading.get_ident()}")
            together.wait()
            seen.append(torch_paged.stats(model).steps - before)
            together.wait()

    threads = [threading.Thread(target=pause) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [0, 0]
    for _ in threads:
        assert manager.get_result(timeout=30).generated_tokens == answers(PROMPT, 40)


def test_another_thread_may_leave_a_pause(manager: Any, answers: Answers) -> None:
    manager.start()
    block = manager.pause()
    block.__enter__()
    leaving = threading.Thread(target=block.__exit__, args=(None, None, None))
    leaving.start()
    leaving.join()
    manager.add_request(PROMPT, "a")
    assert manager.get_result(timeout=30).generated_tokens == answers(PROMPT, 40)


def test_generate_batch_waits_for_the_end_of_another_threads_pause(
    model: Any, manager: Any, answers: Answers
) -> None:
    model._cached_continuous_batching_manager = manager
    manager.start()
    results: dict[str, Any] = {}

    def run() -> None:
        results.update(model.generate_batch([PROMPT], persistent_manager=True))

    thread = threading.Thread(target=run)
    with manager.pause():
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not results
        # Whoever pauses may go on with the model alone.
        ids = torch.tensor([PROMPT])
        out = model.generate(ids, max_new_tokens=3, do_sample=False)
        assert out[0, len(PROMPT) :].tolist() == answers(PROMPT, 3)
    thread.join()
    assert [r.generated_tokens for r in results.values()] == [answers(PROMPT, 40)]


def test_a_stop_that_does_not_wait_leaves_the_next_session_alone(
    manager: Any, answers: Answers
) -> None:
    for round_ in range(5):
        manager.start()
        manager.add_request(PROMPT, f"first {round_}")
        manager.stop(block=False)
        manager.start()
        manager.add_request(PROMPT, f"second {round_}")
        found = {manager.get_result(timeout=30).request_id for _ in range(2)}
        assert found == {f"first {round_}", f"second {round_}"}
        assert manager.is_running()


def first_ended(model: Any) -> torch_paged.Engine:
    """Run a request of three sequences until the one of its own name has ended."""
    engine = torch_paged.Engine(model)
    for seed in range(40):
        fields = {"do_sample": True, "temperature": 3.0, "num_return_sequences": 3, "seed": seed}
        fields |= {"max_new_tokens": 60, "eos_token_id": list(range(8))}
        engine.add_request(PROMPT, request_id="a", **fields)
        ended: set[Any] = set()
        while len(ended) < 3:
            ended |= {out.request_id for out in engine.step() if out.finished}
            if "a" in ended and len(ended) < 3:
                return engine
    raise AssertionError("no seed lets the first sequence end first")


def test_a_request_is_cancelled_whose_first_sequence_has_ended(model: Any) -> None:
    with first_ended(model) as engine:
        engine.cancel("a")
        assert {out.finish_reason for out in engine.run().values()} == {"cancelled"}
        assert engine.is_idle
        with pytest.raises(KeyError, match="not running"):
            engine.cancel("a")
        engine.check_integrity()


def test_an_id_is_in_use_until_the_last_sequence_has_ended(model: Any, answers: Answers) -> None:
    with first_ended(model) as engine:
        with pytest.raises(ValueError, match="in use"):
            engine.add_request(PROMPT, request_id="a", max_new_tokens=2)
        assert set(engine.run()) <= {"a__child#0", "a__child#1"}
        engine.add_request(PROMPT, request_id="a", max_new_tokens=2, do_sample=False)
        assert engine.run()["a"].token_ids == answers(PROMPT, 2)


def test_automatic_ids_are_none_that_somebody_has_chosen(model: Any, manager: Any) -> None:
    with torch_paged.Engine(model) as engine:
        engine.add_request(PROMPT, request_id="req_1", max_new_tokens=2)
        engine.add_request(PROMPT, request_id="req_3", max_new_tokens=2)
        names = [engine.add_request(PROMPT, max_new_tokens=2) for _ in range(4)]
        assert len(engine.run()) == 6
        assert not {"req_1", "req_3"} & {name for name in names if isinstance(name, str)}
    manager.start()
    manager.add_request(PROMPT, "req_1")
    assert "req_1" not in manager.add_requests([PROMPT, PROMPT, PROMPT])
    assert len({manager.get_result(timeout=30).request_id for _ in range(4)}) == 4


@pytest.mark.parametrize("tokens", [True, False])
def test_a_stream_that_is_left_early_keeps_what_it_has_not_told(
    model: Any, answers: Answers, tokens: bool
) -> None:
    prompts = {"a": ids_of(5, 5), "b": ids_of(6, 6), "c": ids_of(7, 7)}
    with torch_paged.Engine(model) as engine:
        for name, ids in prompts.items():
            engine.add_request(ids, request_id=name, max_new_tokens=8, do_sample=False)
        told: dict[str, list[int]] = {name: [] for name in prompts}
        ends = []
        for _ in range(100):
            # Whoever reads takes one output at a time, and leaves.
            for output in engine.stream(tokens=tokens):
                told[output.request_id] += output.new_token_ids
                ends += [output.request_id] if output.finished else []
                break
        assert sorted(ends) == ["a", "b", "c"] and engine.is_idle
        for name, ids in prompts.items():
            assert told[name] == answers(ids, 8)
        assert engine.run() == {}
