"""The self-test of mixtures of experts in low precision: it fails for faults, not for rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import FAMILIES, greedy, prompt, tiny_family

import torch_paged
from torch_paged.decoder.step import DecoderStep
from torch_paged.generate.forced_routing import ForcedRouting
from torch_paged.generate.support import zoo
from torch_paged.patches import families
from torch_paged.patches.families import read_spec

_MORE = ("mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3")
MIXTURES = [name for name in FAMILIES if "moe" in name or name in _MORE]


def tier_of(model: Any) -> tuple[str, str]:
    """Return the tier after a call, which runs the self-test, and its reasons."""
    torch_paged.accelerate(model)
    greedy(model, prompt(5, 1, zoo.VOCAB, model.device), 2)
    report = torch_paged.explain(model)
    return report.tier, "; ".join(report.reasons)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", MIXTURES)
def test_rounding_does_not_fail_the_self_test(family: str, seed: int, device) -> None:
    model = tiny_family(family, device, seed=seed).to(torch.bfloat16)
    assert tier_of(model) == ("fused", "")


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mixtral", {"normalise": False}, "weights of experts differ"),
        ("mixtral", {"scoring": "sigmoid"}, "weights of experts differ"),
        ("gpt_oss", {"scoring": "softmax"}, "weights of experts differ"),
        ("ernie4_5_moe", {"correction": None}, "routers share"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wrong_router_fails_it(
    model_type: str,
    changes: dict[str, Any],
    reason: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = next(k for k in families.LLAMA_LIKE if k[0].startswith(f"{model_type}."))
    traits = families.LLAMA_LIKE[key]
    assert traits.experts is not None
    wrong = replace(traits, experts=traits.experts._replace(**changes))
    monkeypatch.setitem(families.FAMILIES, key, families._llama_like(key[0], wrong))
    model = zoo.tiny_model(model_type)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "top_k") and hasattr(module, "weight"):  # scores that are far apart
                module.weight.mul_(6.0)
            if hasattr(module, "e_score_correction_bias"):  # and a correction that decides
                module.e_score_correction_bias.copy_(torch.tensor([[0.0, 5.0, 0.0, 5.0]]))
    tier, reasons = tier_of(model.to(dtype))
    assert tier != "fused" and reason in reasons


@pytest.mark.parametrize("what", ["alpha", "limit"])
def test_wrong_experts_fail_it(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.tiny_model("gpt_oss").to(torch.bfloat16)
    assert tier_of(model)[0] == "fused"
    torch_paged.restore(model)
    read = families.FAMILIES[("gpt_oss.modeling_gpt_oss", "GptOssForCausalLM")]

    def read_wrongly(model: Any) -> Any:
        spec = read(model)
        layers = (replace(layer, mlp=replace(layer.mlp, **{what: 0.1})) for layer in spec.layers)
        return replace(spec, layers=tuple(layers))

    key = ("gpt_oss.modeling_gpt_oss", "GptOssForCausalLM")
    monkeypatch.setitem(families.FAMILIES, key, read_wrongly)
    tier, reasons = tier_of(model)
    assert tier != "fused" and "logits differ" in reasons


def test_no_hook_and_no_visitor_stay_behind() -> None:
    model = zoo.tiny_model("mixtral").to(torch.bfloat16)
    step = DecoderStep(model, read_spec(model))
    routing = ForcedRouting(step)
    with pytest.raises(RuntimeError, match="stop"), routing.noting(), routing.giving():
        assert step.visitor is routing
        assert any(module._forward_hooks for module in model.modules())
        raise RuntimeError("stop")
    assert step.visitor is None
    assert not any(module._forward_hooks for module in model.modules())


def test_float32_is_tested_with_its_own_choices() -> None:
    model = zoo.tiny_model("mixtral")
    step = DecoderStep(model, read_spec(model))
    with ForcedRouting(step).giving():
        assert step.visitor is None
