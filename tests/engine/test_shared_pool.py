"""Two engines over one model, whose blocks are too few for both at the same time."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import torch_paged

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    core_of,
    ids_of,
    make_engine,
    reference_model,
)

NUM_TOKENS = 60
POOL = 6  # blocks; a request of 9 + 60 tokens holds 5 at its end


def model() -> Any:
    return reference_model(1, vocab_size=64, initializer_range=0.2)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(model())


def step_in_turns(*engines: torch_paged.Engine) -> list[dict[Any, Any]]:
    """Step engines one after another until all are idle; return their last outputs."""
    ends: list[dict[Any, Any]] = [{} for _ in engines]
    while not all(engine.is_idle for engine in engines):
        for engine, end in zip(engines, ends, strict=True):
            end.update({out.request_id: out for out in engine.step() if out.finished})
            engine.check_integrity()
    return ends


@pytest.mark.parametrize("lag", [0, 2])
def test_who_lacks_blocks_that_another_engine_holds_runs_later(answers: Answers, lag: int) -> None:
    with make_engine(model(), num_blocks=POOL, lag=lag) as first:
        second = torch_paged.Engine(first._target)
        for engine, seed in ((first, 1), (second, 2)):
            engine.add_request(ids_of(9, seed), max_new_tokens=NUM_TOKENS, request_id=seed)
        ends = step_in_turns(first, second)
        for end, seed in zip(ends, (1, 2), strict=True):
            assert end[seed].error is None
            assert end[seed].token_ids == answers(ids_of(9, seed), NUM_TOKENS)
        assert first.num_preemptions + second.num_preemptions > 0
        second.close()
        assert_all_free(first)


def test_engines_in_threads_of_their_own_share_a_tight_pool(answers: Answers) -> None:
    with make_engine(model(), num_blocks=POOL) as first:
        engines = [first, *(torch_paged.Engine(first._target) for _ in range(2))]
        ends: dict[Any, Any] = {}

        def serve(engine: torch_paged.Engine) -> None:
            ends.update(engine.run())

        for seed in range(6):
            engines[seed % 3].add_request(
                ids_of(9, seed), max_new_tokens=NUM_TOKENS, request_id=seed
            )
        threads = [threading.Thread(target=serve, args=(engine,)) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {seed: ends[seed].error for seed in range(6)} == dict.fromkeys(range(6))
        for seed in range(6):
            assert ends[seed].token_ids == answers(ids_of(9, seed), NUM_TOKENS)
        for engine in engines[1:]:
            engine.close()
        assert_all_free(first)


def test_generate_batch_waits_for_what_an_engine_with_a_thread_holds(answers: Answers) -> None:
    with make_engine(model(), num_blocks=POOL) as engine:
        engine.add_request(ids_of(9, 1), max_new_tokens=NUM_TOKENS)
        while core_of(engine).allocator.num_live < 3:
            engine.step()
        prompts = [ids_of(60, seed) for seed in (2, 3)]
        engine.start()
        results = engine._target.generate_batch(prompts, max_new_tokens=20)
        while not engine.is_idle:
            time.sleep(0.01)
        for result, ids in zip(results.values(), prompts, strict=True):
            assert result.error is None and result.generated_tokens == answers(ids, 20)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_paged.engine.patience.PATIENCE", 0.2)
    monkeypatch.setattr("torch_paged.engine.patience._WARN_AFTER", 0.05)


@pytest.mark.usefixtures("impatient")
def test_requests_end_as_errors_when_the_holder_of_the_rest_stands_still(
    answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(model(), num_blocks=POOL) as first:
        first.add_request(ids_of(60, 1), max_new_tokens=20, request_id="holder")
        first.step()
        with torch_paged.Engine(first._target) as second:
            for seed in range(3):
                second.add_request(ids_of(60, seed), max_new_tokens=20, request_id=seed)
            second.add_request(ids_of(9, 9), max_new_tokens=5, request_id="small")
            ends = second.run()
            for seed in range(3):
                assert "other users of the model hold 4 of the pool's" in ends[seed].error
                assert "have not moved for 0.2 s; step or close" in ends[seed].error
            # Behind them, what fits runs.
            assert ends["small"].token_ids == answers(ids_of(9, 9), 5)
            assert caplog.text.count("these do not move; step or close them") == 1
            # The holder was not disturbed, and the other is served once it has ended.
            assert first.run()["holder"].token_ids == answers(ids_of(60, 1), 20)
            second.add_request(ids_of(60, 2), max_new_tokens=20, request_id=0)
            assert second.run()[0].token_ids == answers(ids_of(60, 2), 20)


def test_what_could_never_fit_ends_at_once_although_others_hold_blocks() -> None:
    with make_engine(model(), num_blocks=POOL) as first:
        first.add_request(ids_of(9, 1), max_new_tokens=20)
        first.step()
        with torch_paged.Engine(first._target) as second:
            second.add_request(ids_of(100, 1), max_new_tokens=5, request_id=0)
            outputs = [out for _ in range(3) for out in second.step()]
        (error,) = [out.error for out in outputs]
        assert error.startswith("the request needs 7 KV blocks and the pool has ")
