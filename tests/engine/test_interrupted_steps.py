"""Ctrl-C at any statement of the engine loses no request, no token, no block and no slot."""

from __future__ import annotations

import signal
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

_PACKAGE = Path(torch_paged.__file__).parent
_BOOKS = {
    str(_PACKAGE / name)
    for name in (
        "cache/blocks.py",
        "cache/prefix.py",
        "engine/decode_clock.py",
        "engine/engine.py",
        "engine/held_blocks.py",
        "engine/host_blocks.py",
        "engine/job_launch.py",
        "engine/launch.py",
        "engine/ledger.py",
        "engine/prefix_reuse.py",
        "engine/request_blocks.py",
        "engine/scheduler.py",
        "engine/slot_pool.py",
        "engine/step.py",
        "engine/swap.py",
        "engine/waiting_line.py",
    )
}
_CHANGING = {"_end", "_plan_prefills", "_vacate", "complete", "forget_rows", "put_back", "start"}
_NUM_BLOCKS = 5
_NUM_TOKENS = 40
# Lengths around the edges of blocks; the last two share a prefix.
_PROMPTS = {"a": ids_of(5, 5), "b": ids_of(16, 16), "c": ids_of(31, 31), "d": ids_of(33, 31)}
_Place = tuple[str, int]


class Visits:
    """Counts how often each line of the books runs, and interrupts a visit of one of them."""

    def __init__(self, place: _Place | None = None, visit: int = 0) -> None:
        self.counts: Counter[_Place] = Counter()
        self.names: dict[_Place, str] = {}  # of the functions
        self.stack: list[str] = []  # names of the interrupted functions, outermost last
        self._place, self._visit = place, visit

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in _BOOKS:
            return None
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.counts[place] += 1
            self.names[place] = frame.f_code.co_name
            if place == self._place and self.counts[place] == self._visit:
                sys.settrace(None)
                self.stack = _names(frame)
                signal.raise_signal(signal.SIGINT)
        return self

    def trace(self, call: Callable[[], object]) -> None:
        """Run `call`, up to the interrupt if there is one."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            assert self.stack
        finally:
            sys.settrace(before)


def _names(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


class Case:
    """Requests of all sorts that compete for a few blocks, and what must come of them."""

    def __init__(self, engine: torch_paged.Engine, answers: Answers) -> None:
        self.engine = engine
        self.ends: dict[Any, torch_paged.RequestOutput] = {}
        self.expected = {name: answers(ids, _NUM_TOKENS) for name, ids in _PROMPTS.items()}
        # It ends early, and on the host.
        stopped = self.expected["b"]
        self.expected["b"] = stopped[: stopped.index(stopped[7]) + 1]
        self._stop_token = stopped[7]
        self._heard: list[torch_paged.RequestOutput] = []

    def add(self) -> None:
        """Add all requests, as if the engine were new."""
        if core_of(self.engine).is_prepared:
            core_of(self.engine).prefixes.reset()
        self.ends.clear()
        self._heard.clear()
        extras: dict[str, dict[str, Any]] = {
            "a": {"on_output": self._heard.append},
            "b": {"stop_token_ids": [self._stop_token]},
            "c": {"logprobs": 2},
            "d": {"deadline": 1e6},
        }
        for name, ids in _PROMPTS.items():
            self.engine.add_request(
                ids, request_id=name, max_new_tokens=_NUM_TOKENS, **extras[name]
            )
        self.engine.add_request([3], request_id="e", max_new_tokens=50)

    def run(self) -> None:
        """Step until idle; fail where that never comes."""
        for number in range(400):
            if self.engine.is_idle:
                return
            if number == 3 and "e" in self.engine._service._live:
                self.engine.cancel("e")
            for out in self.engine.step():
                if out.finished:
                    assert out.request_id not in self.ends
                    self.ends[out.request_id] = out
        raise AssertionError("the engine does not come to an end")

    def check(self, visits: Visits) -> None:
        """Check all ends, and that nothing is held."""
        self.engine.check_integrity()
        # A step that is broken off behind the ends that it tells of is lost with these.
        if "take_outputs" not in visits.stack:
            assert self.ends.keys() == {*_PROMPTS, "e"}
        for name, out in self.ends.items():
            if name == "e":
                assert out.finish_reason == "cancelled"
                continue
            assert out.error is None and list(out.token_ids) == self.expected[name], name
        if "c" in self.ends:
            logprobs = self.ends["c"].logprobs
            assert logprobs is not None and len(logprobs) == _NUM_TOKENS
        last = [out for out in self._heard if out.finished]
        assert len(last) <= 1 and all(list(o.token_ids) == self.expected["a"] for o in last)
        assert_all_free(self.engine)
        assert core_of(self.engine).host_blocks.num_used == 0


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


def make_case(answers: Answers, space: int) -> Case:
    engine = make_engine(
        small_model(), num_blocks=_NUM_BLOCKS, max_num_seqs=4, cpu_offload_space=space, lag=1
    )
    return Case(engine, answers)


@pytest.mark.parametrize("space", [0, 1], ids=["recompute", "swap"])
def test_an_interrupt_at_any_statement_loses_nothing(answers: Answers, space: int) -> None:
    case = make_case(answers, space)
    with case.engine as engine:
        counting = Visits()
        for _ in range(2):  # the second time nothing is made anew
            counting = Visits()
            case.add()
            counting.trace(case.run)
            case.check(counting)
        assert engine._service.engine.num_preemptions > 0
        for number, (place, count) in enumerate(sorted(counting.counts.items())):
            # All lines take a minute: those where more than one book changes, and some others.
            if counting.names[place] not in _CHANGING and number % 32:
                continue
            # Each line once: its first, its last or a middle visit by turns.
            visit = (1, count, (count + 1) // 2)[number % 3]
            visits = Visits(place, visit)
            case.add()
            visits.trace(case.run)
            assert visits.stack, (place, visit)
            try:
                case.run()
                case.check(visits)
            except BaseException as error:
                raise AssertionError(f"after {place}, visit {visit}") from error
