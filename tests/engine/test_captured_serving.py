"""Buckets, padding and static inputs of captured steps; the graphs only replay their code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_paged.engine import prompt_graphs, runner
from torch_paged.engine.output import RequestOutput

sys.path.append(str(Path(__file__).parent))

from replaying_graphs import ReplayingGraphs, capture  # noqa: E402
from serving_case import (  # noqa: E402
    Answers,
    core_of,
    ids_of,
    make_engine,
    run_checked,
    small_model,
)


def serve(buckets: tuple[int, ...], budget: int, graphs: ReplayingGraphs) -> None:
    """Two waves of more rows than the largest bucket, each held to its answer alone."""
    answers = Answers(small_model())
    kinds: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.6}, {"suppress_tokens": [5, 6]}]
    engine = make_engine(small_model(), max_num_seqs=7, max_num_batched_tokens=budget, lag=2)
    with engine:
        capture(core_of(engine), graphs, buckets)
        for wave in range(2):
            for i in range(9):
                engine.add_request(
                    ids_of(3 + 4 * i, i), max_new_tokens=3 + 3 * i, request_id=i, **kinds[i % 3]
                )
                if i % 2:
                    engine.step()
            outputs = run_checked(engine)
            for i in range(9):
                expected = answers(ids_of(3 + 4 * i, i), 3 + 3 * i, **kinds[i % 3])
                if i in outputs:
                    assert outputs[i].token_ids == expected, (wave, i)


@pytest.mark.parametrize("buckets", [(1, 2, 4, 8), (8,), (3,), (1, 5)], ids=str)
@pytest.mark.parametrize("budget", [5, 64])
def test_buckets_change_nothing(buckets: tuple[int, ...], budget: int) -> None:
    graphs = ReplayingGraphs()
    serve(buckets, budget, graphs)
    keys = {key[0] for key in graphs.code if isinstance(key, tuple)}
    assert keys >= {"serve", "serve prefill"} and graphs.num_replays > 40
    prompts = {key for key in graphs.code if key[0] == "serve prefill"}
    assert any(key[3] for key in prompts) and any(not key[3] for key in prompts)


def test_a_size_of_prompts_is_captured_at_its_fourth_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # the number that tests of this folder do with
    graphs, answers = ReplayingGraphs(), Answers(small_model())
    found = []
    with make_engine(small_model(), max_num_seqs=2, lag=2) as engine:
        capture(core_of(engine), graphs)
        for seed in range(5):
            engine.add_request(ids_of(20, seed), max_new_tokens=3, request_id=0)
            assert run_checked(engine)[0].token_ids == answers(ids_of(20, seed), 3)
            found.append(sum(key[0] == "serve prefill" for key in graphs.code))
    assert found == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("spread", [2, 80])
def test_rows_of_like_length_have_graphs_of_their_own(
    spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    @contextlib.contextmanager
    def noted(alike: bool) -> Iterator[None]:
        told.append(alike)
        yield

    monkeypatch.setattr(runner, "rows_alike", noted)
    monkeypatch.setattr(runner, "cares_for_lengths", lambda device, dtype, rows, *shape: rows == 2)
    answers, graphs = Answers(small_model()), ReplayingGraphs()
    prompts = [ids_of(5, 0), ids_of(5 + spread, 1)]
    with make_engine(small_model(), max_num_seqs=4) as engine:
        capture(core_of(engine), graphs, (1, 2))
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, max_new_tokens=6 + 2 * i, request_id=i)
        outputs = run_checked(engine)
    for i, prompt in enumerate(prompts):
        assert outputs[i].token_ids == answers(prompt, 6 + 2 * i)
    keys = {(key[1], key[4]) for key in graphs.code if key[0] == "serve"}
    # One row is alone at the end: its bucket has a single graph.
    assert keys == {(2, spread < 64), (1, False)}
    assert (spread < 64) in told


KINDS = ["a decode step", "a prefill"]


@pytest.mark.parametrize("refused", [*([kind] for kind in KINDS), KINDS], ids=str)
def test_what_cannot_be_captured_is_launched_op_by_op(refused: list[str]) -> None:
    graphs = ReplayingGraphs(refused)
    serve((1, 2, 4), 64, graphs)
    assert (graphs.num_replays == 0) == (refused == KINDS)


@pytest.mark.parametrize("refused", KINDS)
def test_a_step_runs_op_by_op_where_its_capture_takes_more_memory_than_is_left(
    refused: str,
) -> None:
    class FullGraphs(ReplayingGraphs):
        def __init__(self) -> None:
            super().__init__()
            self.attempts: list[Any] = []

        def prepare(self, kind: str, key: Any, fn: Any, *, warmup: Any = None) -> bool:
            if kind != refused or key in self.code:
                return super().prepare(kind, key, fn, warmup=warmup)
            if self.may_capture(kind, key):
                self.attempts.append(key)
                self.refuse(kind, key, torch.OutOfMemoryError("no memory in a capture"))
            return False

    graphs = FullGraphs()
    serve((1, 2, 4), 64, graphs)  # every answer is there
    kinds = {"a decode step": "serve", "a prefill": "serve prefill"}
    assert {key[0] for key in graphs.attempts} == {kinds.pop(refused)}
    assert len(set(graphs.attempts)) == len(graphs.attempts), "nothing is tried twice"
    assert {key[0] for key in graphs.code} == set(kinds.values())


def test_a_prompt_runs_op_by_op_where_the_inputs_of_a_graph_have_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[Any] = []

    def full(room: Any, *args: Any, **kwargs: Any) -> None:
        failures.append(room)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prompt_graphs, "StaticInputs", full)
    answers = Answers(small_model())
    with make_engine(small_model(), max_num_seqs=4) as engine:
        capture(core_of(engine), ReplayingGraphs())
        for i in range(4):
            engine.add_request(ids_of(20 + i, i), max_new_tokens=2, request_id=i)
            assert run_checked(engine)[i].token_ids == answers(ids_of(20 + i, i), 2)
    assert len(failures) == 1, "nothing is tried twice"


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("buckets", [(1, 2, 4), (8,)], ids=str)
def test_captured_steps_report_as_many_likely_tokens_as_their_rows_ask_for(
    buckets: tuple[int, ...], mode: str
) -> None:
    asked: list[bool | int] = [1, 4, 20, True, False, 2]

    def run(graphs: ReplayingGraphs | None) -> list[RequestOutput]:
        with make_engine(small_model(), max_num_seqs=6, lag=2, logprobs_mode=mode) as engine:
            if graphs is not None:
                capture(core_of(engine), graphs, buckets)
            outputs = {}
            for wave in range(2):
                for i, count in enumerate(asked):
                    engine.add_request(
                        ids_of(5 + 3 * i, i),
                        max_new_tokens=4 + 5 * i,
                        request_id=(wave, i),
                        logprobs=count,
                        seed=i,
                        do_sample=i % 2 == 0,
                        prompt_logprobs=asked[-i] if wave else False,
                    )
                outputs |= run_checked(engine)
        return [outputs[wave, i] for wave in range(2) for i in range(len(asked))]

    graphs = ReplayingGraphs()
    for out, expected in zip(run(graphs), run(None), strict=True):
        assert out.token_ids == expected.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            values, wanted = getattr(out, name), getattr(expected, name)
            assert (values is None) == (wanted is None)
            assert values is None or values[1:] == pytest.approx(wanted[1:], abs=1e-5)
        for name in ("top_logprobs", "prompt_top_logprobs"):
            tops, wanted = getattr(out, name), getattr(expected, name)
            assert (tops is None) == (wanted is None)
            for top, other in zip(tops or (), wanted or (), strict=True):
                assert (top is None) == (other is None)
                values = [value for _, value in top or ()]
                assert values == pytest.approx([value for _, value in other or ()], abs=1e-5)
    keys = {key[2] for key in graphs.code if key[0] == "serve"}
    assert {key[4] for key in keys} >= {5, 20} and graphs.num_replays > 20


@pytest.mark.parametrize("start", [1, 3])
def test_captured_prompts_are_scored_as_others(start: int) -> None:
    """One by one, so that every number of likely tokens is met in the same buckets."""

    def run(graphs: ReplayingGraphs | None) -> dict[Any, RequestOutput]:
        outputs: dict[Any, RequestOutput] = {}
        number = 0
        with make_engine(small_model(), max_num_seqs=4, lag=2) as engine:
            if graphs is not None:
                capture(core_of(engine), graphs, (1, 2, 4))
            for count in (True, 1, 3, 20):
                # The second time each bucket is captured, the third replayed with less in it.
                for length in (6, 13, 9, 40, 33, 8, 15, 11, 38, 35, 4, 13, 9, 40, 31):
                    engine.add_request(
                        ids_of(length, length),
                        max_new_tokens=2,
                        prompt_logprobs=count,
                        prompt_logprobs_start=start,
                        request_id=(count is True, number),
                    )
                    number += 1
                    if length % 2:  # two prompts in one step where the first is even
                        outputs |= run_checked(engine)
        return outputs

    graphs = ReplayingGraphs()
    captured, expected = run(graphs), run(None)
    assert len(captured) == 60 and captured.keys() == expected.keys()
    for name, out in captured.items():
        wanted = expected[name]
        assert out.prompt_logprobs is not None and wanted.prompt_logprobs is not None
        assert out.prompt_logprobs[:start] == [None] * start
        assert out.prompt_logprobs[start:] == pytest.approx(
            wanted.prompt_logprobs[start:], abs=1e-5
        )
        assert (out.prompt_top_logprobs is None) == (name[0])
        for top, other in zip(
            out.prompt_top_logprobs or (), wanted.prompt_top_logprobs or (), strict=True
        ):
            assert (top is None) == (other is None)
            values = [value for _, value in top or ()]
            assert values == pytest.approx([value for _, value in other or ()], abs=1e-5)
            assert [token for token, _ in top or ()] == [token for token, _ in other or ()]
    assert {key[4] for key in graphs.code if key[0] == "serve prefill"} == {0, 1, 5, 20}


def test_scored_logits_that_would_fill_the_pool_are_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The logits of a token take 64 words of 4 bytes.
    monkeypatch.setattr("torch_paged.engine.prompt_graphs._SCORED_BYTES", 32 * 64 * 4)
    graphs = ReplayingGraphs()
    with make_engine(small_model(), max_num_seqs=4) as engine:
        capture(core_of(engine), graphs, (1, 2, 4))
        for wave in range(3):
            for length in (20, 50):
                ids = ids_of(length, wave)
                engine.add_request(ids, max_new_tokens=1, prompt_logprobs=1)
                run_checked(engine)
    assert {key[2] for key in graphs.code if key[0] == "serve prefill"} == {32}


@pytest.mark.parametrize("most", [3, 12])
def test_steps_past_the_last_bucket_are_captured_where_launches_take_longer(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets as those of 8,192 tokens, scaled down: many chunks, rows padded to one size."""
    graphs_of = "torch_paged.engine.prompt_graphs."
    large = "torch_paged.engine.large_prompts."
    monkeypatch.setattr(graphs_of + "_TOKEN_BUCKETS", (8, 16))
    monkeypatch.setattr(large + "LARGE_TOKEN_BUCKETS", (32, 48, 64, 80))
    monkeypatch.setattr(graphs_of + "_CHUNKS", ((16, 2), (80, 9)))
    monkeypatch.setattr(graphs_of + "_LARGE_DECODING", 8)
    answers, graphs = Answers(small_model()), ReplayingGraphs()
    with make_engine(small_model(), max_num_seqs=most, max_num_batched_tokens=80) as engine:
        core = core_of(engine)
        monkeypatch.setattr(large + "LARGE_FLOPS", 64.0 * core.step.layer_flops)
        capture(core, graphs, (most,))
        for wave in range(4):
            lengths = [5 + (7 * i + wave) % 23 for i in range(12)]
            for i, length in enumerate(lengths):
                engine.add_request(ids_of(length, i), max_new_tokens=4 + i, request_id=(wave, i))
            outputs = run_checked(engine)
            for i, length in enumerate(lengths):
                assert outputs[wave, i].token_ids == answers(ids_of(length, i), 4 + i)
    sizes = {key[2:4] for key in graphs.code if key[0] == "serve prefill"}
    assert {tokens for tokens, _ in sizes} & {32, 48, 64}
    assert 80 not in {tokens for tokens, _ in sizes}
    assert {rows for tokens, rows in sizes if tokens > 16} <= {0, min(most, 8), most}


def test_a_new_shape_runs_in_a_larger_graph_that_is_there() -> None:
    answers, graphs = Answers(small_model()), ReplayingGraphs()
    with make_engine(small_model(), max_num_seqs=4) as engine:
        capture(core_of(engine), graphs, (1, 2, 4))
        for i, length in enumerate((90, 91, 92, 20, 21)):
            before = set(graphs.code), graphs.num_replays
            engine.add_request(ids_of(length, i), max_new_tokens=1, request_id=i)
            assert run_checked(engine)[i].token_ids == answers(ids_of(length, i), 1)
            new = {key[2] for key in set(graphs.code) - before[0]}
            assert new == {1: {96}, 4: {32}}.get(i, set())
            assert graphs.num_replays - before[1] == (i > 0)
