"""Buckets, padding and static inputs of captured steps; the graphs only replay their code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_paged.engine.runner import CapturedRunner

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    core_of,
    ids_of,
    make_engine,
    run_checked,
    small_model,
)


class ReplayingGraphs:
    """Stands in for `GraphCache`: a replay runs the captured code, into a static output."""

    def __init__(self) -> None:
        self.code: dict[Hashable, Callable[[], Any]] = {}
        self.static: dict[Hashable, torch.Tensor] = {}
        self.num_replays = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self.code

    def capture(self, key: Hashable, fn: Callable[[], Any], *, warmup: Any = None) -> None:
        warmup()
        self.code[key] = fn

    def run(self, key: Hashable, fn: Callable[[], Any], *, warmup: Any = None) -> Any:
        if key not in self.code:
            self.capture(key, fn, warmup=warmup)
        return self.replay(key)

    def replay(self, key: Hashable) -> Any:
        self.num_replays += 1
        out = self.code[key]()
        if out is None:
            return None
        if key not in self.static:
            self.static[key] = torch.empty_like(out)
        # What an earlier replay returned is overwritten, as a graph would.
        return self.static[key].copy_(out)

    def clear(self) -> None:
        self.code.clear()
        self.static.clear()


@pytest.mark.parametrize("buckets", [(1, 2, 4, 8), (8,), (3,), (1, 5)], ids=str)
@pytest.mark.parametrize("budget", [5, 64])
def test_buckets_change_nothing(buckets: tuple[int, ...], budget: int) -> None:
    """More rows than the largest bucket as well."""
    answers = Answers(small_model())
    kinds: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.6}, {"suppress_tokens": [5, 6]}]
    engine = make_engine(small_model(), max_num_seqs=7, max_num_batched_tokens=budget, lag=2)
    with engine:
        core = core_of(engine)
        graphs = ReplayingGraphs()
        made: dict[int, CapturedRunner] = {}
        eager = core.runner

        def captured() -> CapturedRunner:
            eager()  # binds
            state = core.state
            if id(state) not in made:
                graphs.clear()
                made.clear()
                made[id(state)] = CapturedRunner(core.step, state, graphs, buckets)  # type: ignore[arg-type]
            return made[id(state)]

        core.runner = captured
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
        keys = {key[0] for key in graphs.code if isinstance(key, tuple)}
        assert keys >= {"serve", "serve prefill"} and graphs.num_replays > 40
        assert any(key[1] == "tail" for key in graphs.code if key[0] == "serve prefill")
