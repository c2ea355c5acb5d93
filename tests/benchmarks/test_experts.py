"""The benchmark of experts: what it counts as touched, checks, and compares with."""

from __future__ import annotations

import pytest
import torch

from benchmarks import ops_experts, shapes
from benchmarks.ops_experts import Case, HuggingFaceExperts
from benchmarks.ops_experts_cases import MIXTURES, Mixture, candidates, chosen
from benchmarks.parity import WrongResult
from torch_paged.ops.experts import experts_reference
from torch_paged.ops.experts.configs import ExpertsConfig, GemvConfig, TileConfig, table_shape

TINY = MIXTURES["tiny"]
FORMS = [TINY, TINY._replace(gpt_oss=True)]


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("mixture", FORMS, ids=["mixtral", "gpt-oss"])
def test_case_checks_and_counts_the_experts_that_were_drawn(
    mixture: Mixture, num_tokens: int
) -> None:
    case = Case(mixture, num_tokens, [mixture.layer() for _ in range(2)])
    case.check()
    drawn = sum(len(set(ids.flatten().tolist())) for ids, _ in case.routing)
    assert case.nbytes == drawn * 2 * 3 * 64 * 48
    assert case.run().shape == (num_tokens, 64)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(TINY, 2, [TINY.layer()])
    reference = experts_reference
    monkeypatch.setattr(ops_experts, "experts_reference", lambda *a, **k: 1.1 * reference(*a, **k))
    with pytest.raises(WrongResult, match="experts: error"):
        case.check()


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("mixture", FORMS, ids=["mixtral", "gpt-oss"])
def test_the_baseline_computes_the_same(mixture: Mixture, num_tokens: int) -> None:
    case = Case(mixture, num_tokens, [mixture.layer()])
    (ids, weights), layer = case.routing[0], case.layers[0]
    module = HuggingFaceExperts(mixture, layer)
    forward = (
        ops_experts.batched_mm_experts_forward
        if num_tokens == 1
        else ops_experts.grouped_mm_experts_forward
    )
    got = forward(module, case.x, ids.long(), weights)
    want = experts_reference(case.x, ids, weights, *layer, **mixture.options())
    assert (got - want).abs().max() <= 0.03 * want.abs().max()


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 64])
@pytest.mark.parametrize("name", MIXTURES)
def test_candidates_hold_the_chosen_one_and_fit_the_table(name: str, num_tokens: int) -> None:
    mixture = MIXTURES[name]
    assert table_shape(mixture.problem(num_tokens)) is not None
    for part in ("gate_up", "down"):
        found = candidates(mixture, num_tokens, part)
        assert found[0] == chosen(mixture, num_tokens) and len(found) > 1
        for config in found:
            assert isinstance(config, ExpertsConfig)
            kind = GemvConfig if config.tokens == 0 else TileConfig
            assert type(config.gate_up) is type(config.down) is kind
            assert config.gate_up.splits == 1


def test_bytes_of_a_step_count_the_experts_of_the_batch() -> None:
    with torch.device("meta"):
        model = shapes.AutoModelForCausalLM.from_config(shapes.config("8x1b"))
    model.to(torch.bfloat16)
    layer = 2 * 3 * 2048 * 8192
    rest = shapes.weight_bytes(model, 1) - 16 * 2 * layer
    assert shapes.weight_bytes(model, 1000) == rest + 16 * 8 * layer
    assert shapes.weight_bytes(model, 2) == rest + 16 * 8 * layer * (1 - 0.75**2)
