"""An interrupt at any statement of adding a request leaves nothing behind."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
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
    small_model,
)

_PACKAGE = str(Path(torch_paged.__file__).parent)
NUM_TOKENS = 3


class Interrupt:
    """Raises KeyboardInterrupt before the `at`-th statement that runs in the package.

    Not before the exit of a with block: Python handles no signal between the end of the block and
    the release of a lock.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self._visits: Counter[tuple[int, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            self._visits[id(frame), frame.f_lineno] += 1
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            leaves = line.startswith("with ") and self._visits[id(frame), frame.f_lineno] > 1
            if not leaves:
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
        return self


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Say whether `call` was interrupted, not over before its statement number `at`."""
    before = sys.gettrace()
    sys.settrace(Interrupt(at))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def run_briefly(engine: torch_paged.Engine) -> dict[Any, torch_paged.RequestOutput]:
    """Return the ends of short requests; fail where one is never scheduled."""
    outputs = [out for _ in range(40) if not engine.is_idle for out in engine.step()]
    assert engine.is_idle
    return {out.request_id: out for out in outputs if out.finished}


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_an_interrupt_anywhere_in_add_request_leaves_no_request(
    answers: Answers, num_sequences: int
) -> None:
    with make_engine(small_model()) as engine:
        service, ids, at = engine._service, ids_of(9, 1), 0

        def add() -> None:
            engine.add_request(
                ids,
                max_new_tokens=NUM_TOKENS,
                request_id="a",
                num_return_sequences=num_sequences,
                do_sample=True,
                top_k=1,
            )

        while interrupted(add, at):
            at += 1
            assert engine.is_idle and service.wait_until_idle(0) and not service._sequences
            assert not service._inbox
        assert at > 50
        outputs = engine.run()
        assert len(outputs) == num_sequences
        for out in outputs.values():
            assert list(out.token_ids) == answers(ids, NUM_TOKENS)
        assert_all_free(engine)


@pytest.mark.parametrize("released", [False, True], ids=["prepared", "bare"])
def test_an_interrupt_anywhere_in_adding_a_job_lets_the_next_step_add_it(
    answers: Answers, released: bool
) -> None:
    """The inbox is emptied by a step; the engine's parts before its first step are made there."""
    others = {name: ids_of(5, 7) for name in ("b", "c")}
    with make_engine(small_model(), max_num_seqs=3) as engine:
        service, ids, at, was_interrupted = engine._service, ids_of(9, 1), 0, True
        while was_interrupted:
            if released:
                torch_paged.release(engine._target)
            else:  # beside one that runs
                engine.add_request(others["b"], max_new_tokens=NUM_TOKENS, request_id="b")
                engine.step()
            engine.add_request(ids, max_new_tokens=NUM_TOKENS, request_id="a")
            engine.add_request(others["c"], max_new_tokens=NUM_TOKENS, request_id="c")
            was_interrupted = interrupted(
                lambda: service._empty_inbox(service._serving(service.session())), at
            )
            at += 1
            outputs = run_briefly(engine)
            engine.check_integrity()
            assert sorted(outputs) == (["a", "c"] if released else ["a", "b", "c"])
            for name, out in outputs.items():
                expected = answers(others.get(name, ids), NUM_TOKENS)
                assert out.error is None and list(out.token_ids) == expected, (at, name)
            core = core_of(engine)
            assert core.slots.num_slots == core.state.max_num_seqs
            assert_all_free(engine)
        assert at > 50


def test_a_callback_that_interrupts_adding_a_job_is_heard_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that cannot run tells its callback so while it is added."""
    heard = []

    def on_output(output: torch_paged.RequestOutput) -> None:
        heard.append(output)
        raise KeyboardInterrupt

    with make_engine(small_model()) as engine:
        loop = engine._service.engine

        def enter(job: Any) -> None:
            raise RuntimeError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(loop, "_enter", enter)
            engine.add_request(ids_of(9, 1), max_new_tokens=2, request_id="a", on_output=on_output)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        outputs = engine.run()
        assert [out.error for out in heard] == ["RuntimeError: no room"]
        assert outputs["a"].error == "RuntimeError: no room" and engine.is_idle
