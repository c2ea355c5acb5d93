"""Whole prompts may be attended to without the cache: when that is, and that nothing changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_paged.decoder import bind_attention
from torch_paged.engine import prefill

sys.path.append(str(Path(__file__).parent))

from serving_case import Answers, core_of, ids_of, make_engine, run_checked, small_model  # noqa: E402
from test_captured_serving import ReplayingGraphs, capture  # noqa: E402

LEAST = 32
LAYERS = 2


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Serve whole prompts by torch, and note the tokens of each of these calls."""
    noted: list[int] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        if query.shape[0] < LEAST:
            return None
        noted.append(query.shape[0])
        heads = [part.transpose(0, 1).unsqueeze(0) for part in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)

    monkeypatch.setattr(bind_attention, "whole_prompt_attention", attend)
    monkeypatch.setattr(prefill, "WHOLE_PROMPT_TOKENS", LEAST)
    return noted


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_whole_prompt_is_served_and_nothing_changes(lengths: list[int], captured: bool) -> None:
    answers = Answers(small_model())
    with make_engine(small_model(), max_num_batched_tokens=64) as engine:
        if captured:
            capture(core_of(engine), ReplayingGraphs(), (1, 2))
        for seed in range(4):
            name = engine.add_request(ids_of(40, seed), max_new_tokens=6)
            assert run_checked(engine)[name].token_ids == answers(ids_of(40, seed), 6)
    # A graph is for a bucket of 64 and the length is met first; warm-up and replay both run it.
    expected = [64] * LAYERS * 4 if captured else [40] * LAYERS * 4
    assert lengths == expected


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_parts_of_prompts_and_several_prompts_are_not_whole(
    lengths: list[int], captured: bool
) -> None:
    answers = Answers(small_model())
    with make_engine(small_model(), max_num_batched_tokens=34, max_num_seqs=2) as engine:
        if captured:
            capture(core_of(engine), ReplayingGraphs(), (1, 2))
        for wave in range(3):
            prompts = [ids_of(20, wave), ids_of(50, 7 + wave)]
            names = [engine.add_request(ids, max_new_tokens=4) for ids in prompts]
            outputs = run_checked(engine)
            for name, ids in zip(names, prompts, strict=True):
                assert outputs[name].token_ids == answers(ids, 4)
    assert lengths == []


def test_short_prompts_share_the_graphs_of_all_others(lengths: list[int]) -> None:
    graphs = ReplayingGraphs()
    with make_engine(small_model()) as engine:
        capture(core_of(engine), graphs, (1, 2))
        for wave in range(2):
            for count in (1, 2):
                for i in range(count):
                    engine.add_request(ids_of(14 // count, 5 * wave + i), max_new_tokens=2)
                run_checked(engine)
    sizes = {key[1:4] for key in graphs.code if key[0] == "serve prefill" and key[1] != "tail"}
    assert sizes == {(16, 8, False)} and lengths == []


def test_a_length_is_met_once_before_it_is_planned_for(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "TOKEN_BUCKETS", (16,))
    with make_engine(small_model(), enable_prefix_caching=False) as engine:
        capture(core_of(engine), ReplayingGraphs(), (1,))
        for length in (40, 41, 40, 40, 41):
            engine.add_request(ids_of(length, length), max_new_tokens=1)
            run_checked(engine)
    assert lengths == [40] * LAYERS + [40] * LAYERS + [41] * LAYERS
