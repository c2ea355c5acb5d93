"""Rows go to the device longest first, and their outputs to the caller as if they did not."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_paged

sys.path.append(str(Path(__file__).parent))

from replaying_graphs import ReplayingGraphs, capture  # noqa: E402
from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    core_of,
    ids_of,
    make_engine,
    run_checked,
    small_model,
    tape_model,
)


class Watching:
    """Notes the rows of each decode step, alone or beside prompts, as the device sees them.

    Attributes:
        slots: of the rows of each step.
        num_mixed: steps with prompts beside the rows.
    """

    def __init__(self, core: Any) -> None:
        self.slots: list[list[int]] = []
        self.num_mixed = 0
        self._core = core
        self._decode, self._prefill = core.step.decode, core.step.prefill
        core.step.decode, core.step.prefill = self.decode, self.prefill

    def decode(self, slots: torch.Tensor) -> torch.Tensor:
        self._note(slots)
        return self._decode(slots)

    def prefill(self, inputs: Any) -> torch.Tensor:
        if inputs.decoding is not None and (inputs.decoding >= 0).any():
            self.num_mixed += 1
            self._note(inputs.decoding)
        return self._prefill(inputs)

    def _note(self, slots: torch.Tensor) -> None:
        live = slots[slots >= 0].tolist()
        assert slots[: len(live)].tolist() == live, "padding comes behind the rows"
        if live:
            lengths = self._core.state.context_lens[live].tolist()
            assert lengths == sorted(lengths, reverse=True)
            self.slots.append(live)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


def run_trace(engine: torch_paged.Engine, seed: int) -> dict[int, tuple[Any, list[int], int]]:
    """Let requests come and go; return each one's arguments, prompt and last output."""
    draw, asked, ended = random.Random(seed), {}, {}
    for i in range(14):
        ids, count = ids_of(draw.choice([2, 5, 9, 16, 23]), i), draw.randint(4, 40)
        asked[i] = (ids, count)
        engine.add_request(ids, max_new_tokens=count, request_id=i)
        for _ in range(draw.choice([0, 0, 1, 4])):
            ended |= {out.request_id: out for out in engine.step() if out.finished}
        if i in (6, 10):
            engine.cancel(i - 2)
    ended |= run_checked(engine)
    return {i: (*asked[i], ended[i]) for i in asked}


@pytest.mark.parametrize("captured", [False, True], ids=["op by op", "captured"])
@pytest.mark.parametrize("mixes", [False, True], ids=["apart", "mixed"])
def test_the_rows_of_a_step_are_in_descending_length(
    answers: Answers, mixes: bool, captured: bool
) -> None:
    """Rows start, end, are cancelled and preempted: the pool has too few blocks for all."""
    config = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 8, "lag": 2}
    with make_engine(small_model(), num_blocks=16, **config) as engine:
        engine._service.engine.mixes = mixes
        core = core_of(engine)
        if captured:
            # Smaller than the batch, the largest bucket takes it in two parts.
            capture(core, ReplayingGraphs(), (1, 2, 4))
        watching = Watching(core)
        outputs = run_trace(engine, seed=0)
        assert engine.num_preemptions > 0
        assert_all_free(engine)
    steps = watching.slots
    assert (watching.num_mixed > 5) == mixes
    assert sum(slots != sorted(slots) for slots in steps) > 10
    for ids, count, out in outputs.values():
        expected = answers(ids, count)
        assert out.token_ids == expected[: len(out.token_ids)]
        assert len(out.token_ids) == count or out.finish_reason == "cancelled"


def test_the_order_is_made_when_rows_come_or_go() -> None:
    """While none does, all steps are given one tensor."""
    with make_engine(small_model(), max_num_batched_tokens=64) as engine:
        core = core_of(engine)
        for n in (9, 5, 31):
            engine.add_request(ids_of(n, n), max_new_tokens=12, request_id=n)
        engine.step()
        given: list[torch.Tensor] = []
        decode = core.step.decode

        def noted(slots: torch.Tensor) -> torch.Tensor:
            given.append(slots)
            return decode(slots)

        core.step.decode = noted
        for _ in range(4):
            engine.step()
        engine.cancel(9)
        engine.step()
        lists = [slots.tolist() for slots in given]
        assert lists == [[2, 0, 1]] * 4 + [[2, 1]]
        assert len({id(slots) for slots in given}) == 2


def test_a_row_counts_with_the_tokens_that_it_has_generated() -> None:
    """The first has outgrown the prompt of the second by then, not that of the third."""
    with make_engine(small_model(), lag=2) as engine:
        watching = Watching(core_of(engine))
        for n in (5, 9, 31):
            engine.add_request(ids_of(n, n), max_new_tokens=40, request_id=n)
            for _ in range(10):
                engine.step()
    seen = [slots for i, slots in enumerate(watching.slots) if slots not in watching.slots[:i]]
    assert seen == [[0], [0, 1], [2, 0, 1]]


def test_a_preempted_row_comes_back_at_its_new_length(answers: Answers) -> None:
    """Its own tokens are part of its length when it starts again."""
    with make_engine(small_model(), num_blocks=12, block_size=8) as engine:
        watching = Watching(core_of(engine))
        for n in (20, 17, 23):
            engine.add_request(ids_of(n, n), max_new_tokens=30, request_id=n)
        outputs = run_checked(engine)
        assert engine.num_preemptions > 0
    assert any(len(slots) > 1 for slots in watching.slots)
    for n in (20, 17, 23):
        assert outputs[n].token_ids == answers(ids_of(n, n), 30)


@pytest.mark.parametrize("lag", [0, 3])
def test_requests_that_end_together_are_reported_in_the_order_of_their_start(lag: int) -> None:
    """The rows are in another order on the device: the shortest started first."""
    model = tape_model([10, 11, 12, 13], "cpu")
    called: list[Any] = []
    with make_engine(model, lag=lag) as engine:
        watching = Watching(core_of(engine))
        for n in (3, 1, 4, 2):
            engine.add_request([1] * n + [10], max_new_tokens=30, request_id=n)
        ended = []
        while not engine.is_idle:
            outputs = engine.step()
            called.append([out.request_id for out in outputs])
            ended += [out.request_id for out in outputs if out.finished]
    assert [2, 0, 3, 1] in watching.slots
    assert ended == [3, 1, 4, 2]
    assert all(names == [3, 1, 4, 2] for names in called if names)


def test_draws_and_likelihoods_do_not_depend_on_the_other_rows() -> None:
    """A row is drawn from the same numbers wherever the others put it."""

    def run(lengths: tuple[int, ...]) -> tuple[list[int], list[float]]:
        with make_engine(copy.deepcopy(small_model()), lag=1) as engine:
            for n in lengths:
                engine.add_request(
                    ids_of(n, n),
                    max_new_tokens=20,
                    request_id=n,
                    do_sample=True,
                    temperature=2.0,
                    seed=n,
                    logprobs=True,
                )
            out = run_checked(engine)[17]
        assert out.logprobs is not None
        return list(out.token_ids), list(out.logprobs)

    tokens, logprobs = run((17,))
    for lengths in ((17, 5, 9), (5, 17, 40), (31, 40, 17)):
        others, likelihoods = run(lengths)
        assert others == tokens
        assert likelihoods == pytest.approx(logprobs, abs=1e-4)
