"""Buckets, padding and static inputs of captured steps; the graphs only replay their code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

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


KINDS = ["a decode step", "a prefill"]


@pytest.mark.parametrize("refused", [*([kind] for kind in KINDS), KINDS], ids=str)
def test_what_cannot_be_captured_is_launched_op_by_op(refused: list[str]) -> None:
    graphs = ReplayingGraphs(refused)
    serve((1, 2, 4), 64, graphs)
    assert (graphs.num_replays == 0) == (refused == KINDS)


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
    keys = {key[3] for key in graphs.code if key[0] == "serve"}
    assert {key[4] for key in keys} >= {5, 20} and graphs.num_replays > 20
