"""Whole prompts may be attended to without the cache: when that is, and that nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from models import greedy, padded_prompts, prompt, tiny
from torch import Tensor, nn
from transformers import LlamaConfig

from torch_paged.decoder import bind_attention
from torch_paged.engine import large_prompts, prefill
from torch_paged.engine.prefill import CapturedPrefill
from torch_paged.generate.registry import find_session

LEAST = 32


class Replays:
    """Stands in for `GraphCache`: a replay runs the captured code."""

    def __init__(self) -> None:
        self.code: dict[Hashable, Callable[[], Any]] = {}

    def prepare(self, kind: str, key: Hashable, fn: Callable[[], Any], *, warmup: Any) -> bool:
        self.code.setdefault(key, fn)
        return True

    def replay(self, key: Hashable) -> Any:
        return self.code[key]()


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


@pytest.fixture
def models(accelerate: Callable[..., nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model plain and accelerated."""
    plain = tiny(LlamaConfig, 6, num_hidden_layers=2)
    return plain, accelerate(copy.deepcopy(plain), cuda_graphs=False)


def capture(model: nn.Module) -> Replays:
    """Let prefills be captured, as far as that is decided on the host."""
    # The pool does not move any more then.
    greedy(model, prompt(120, 1), num_tokens=1)
    core, graphs = find_session(model).core, Replays()
    runner = core.runner()
    captured = CapturedPrefill(core.step, core.device, graphs)
    runner.prefill = captured
    return graphs


def test_a_whole_prompt_is_served_and_nothing_changes(models: Any, lengths: list[int]) -> None:
    plain, fast = models
    for seed in range(2):
        ids = prompt(40, seed)
        assert torch.equal(greedy(fast, ids), greedy(plain, ids))
    assert lengths[-4:] == [40] * 4


def test_parts_of_prompts_and_several_prompts_are_not_whole(
    models: Any, lengths: list[int], accelerate: Callable[..., nn.Module]
) -> None:
    plain, fast = models
    ids, mask = padded_prompts((40, 50), "cpu")
    greedy(fast, ids[:, :4])
    lengths.clear()
    arguments = {"attention_mask": mask}
    assert torch.equal(greedy(fast, ids, **arguments), greedy(plain, ids, **arguments))
    accelerate(fast, max_num_batched_tokens=35, cuda_graphs=False)
    ids = prompt(50, 3)
    expected = greedy(plain, ids)
    assert torch.equal(greedy(fast, ids), expected)
    # The first chunk has nothing in front of it, the second has.
    assert lengths == [35] * 2


def test_graphs_of_whole_prompts_are_their_own(models: Any, lengths: list[int]) -> None:
    plain, fast = models
    graphs = capture(fast)
    lengths.clear()
    for seed in range(4):
        ids = prompt(40 + seed, seed)
        assert torch.equal(greedy(fast, ids), greedy(plain, ids))
    # The first time is uncaptured, but as padded as the others: the same bits every time.
    assert lengths == [64] * 2 * 4
    for seed in range(3):
        ids = prompt(7, seed)
        assert torch.equal(greedy(fast, ids), greedy(plain, ids))
    assert {key[2:] for key in graphs.code} == {(64, 1, True), (16, 1, False)}


def test_past_the_buckets_a_prompt_is_as_long_as_it_is(
    models: Any, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "TOKEN_BUCKETS", (16,))
    monkeypatch.setattr(large_prompts, "LARGE_TOKEN_BUCKETS", ())
    _, fast = models
    graphs = capture(fast)
    lengths.clear()
    for length in (40, 41, 40):
        greedy(fast, prompt(length, length), num_tokens=1)
    assert lengths == [40] * 2 + [41] * 2 + [40] * 2
    assert not graphs.code


def test_large_prompts_of_small_models_are_captured_when_met_often(
    models: Any, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for which the device would wait for the host, where the padding costs little."""
    plain, fast = models
    step = find_session(fast).core.step
    monkeypatch.setattr(prefill, "TOKEN_BUCKETS", (16,))
    monkeypatch.setattr(large_prompts, "LARGE_TOKEN_BUCKETS", (48, 80, 112))
    monkeypatch.setattr(large_prompts, "LARGE_FLOPS", 80.0 * step.layer_flops)
    monkeypatch.setattr(large_prompts, "_LARGE_PADDING_FLOPS", 12.0 * step.layer_flops)
    graphs = capture(fast)
    lengths.clear()
    for seed in range(4):
        assert not graphs.code
        ids = prompt(40 + seed, seed)
        assert torch.equal(greedy(fast, ids), greedy(plain, ids))
    assert lengths == [48] * 2 * 4
    assert {key[2:] for key in graphs.code} == {(48, 1, True)}
    lengths.clear()
    for seed in range(4):
        # Too much padding; a larger model, for which launches take less than its work.
        for length in (67, 81):
            ids = prompt(length, seed)
            assert torch.equal(greedy(fast, ids), greedy(plain, ids))
    assert lengths == ([67] * 2 + [81] * 2) * 4
    assert {key[2:] for key in graphs.code} == {(48, 1, True)}
