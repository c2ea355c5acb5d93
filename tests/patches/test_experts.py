"""Mixtures of experts: what is read into a spec, what is refused, what stays the model's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import torch_paged
from torch_paged.decoder.spec import DecoderSpec, ExpertsSpec, OpaqueMlpSpec
from torch_paged.generate.support import zoo
from torch_paged.generate.support.parity import NEW_TOKENS, prompts
from torch_paged.patches.families import LLAMA_LIKE, read_spec
from torch_paged.patches.refusal import SpecRefusal

# For the module beside this one.
sys.path.insert(0, str(Path(__file__).parent))
import tiers  # noqa: E402

TYPES = sorted(
    module.partition(".")[0]
    for (module, _), traits in LLAMA_LIKE.items()
    if traits.experts is not None and module.partition(".")[0] in zoo.causal_lm_types()
)


def generate(model: PreTrainedModel) -> torch.Tensor:
    ids, mask = prompts()
    kwargs = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(ids, **kwargs)


def experts_of(model: PreTrainedModel) -> nn.Module:
    return last_experts(read_spec(model)).ref.module


def last_experts(spec: DecoderSpec) -> ExpertsSpec:
    mlp = spec.layers[-1].mlp
    assert isinstance(mlp, ExpertsSpec)
    return mlp


def test_types_are_found() -> None:
    assert {"mixtral", "qwen3_moe", "olmoe", "gpt_oss"} <= set(TYPES)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("model_type", TYPES)
def test_tokens_equal_every_implementation_of_hugging_face(
    model_type: str, implementation: str
) -> None:
    model = zoo.tiny_model(model_type)
    model.set_experts_implementation(implementation)
    expected = generate(model)
    with torch_paged.accelerated(model, on_unsupported="raise"):
        assert torch.equal(generate(model), expected)
        assert torch_paged.explain(model).tier == "fused" == tiers.tier(model_type)


@pytest.mark.parametrize("model_type", TYPES)
def test_no_expert_or_router_of_hugging_face_runs(model_type: str) -> None:
    model = zoo.tiny_model(model_type)
    expected = generate(model)
    mlp = last_experts(read_spec(model))
    torch_paged.accelerate(model, on_unsupported="raise", verify=False)
    broken = mock.Mock(side_effect=AssertionError("Hugging Face's forward ran"))
    with (
        mock.patch.object(type(mlp.ref.module), "forward", broken),
        mock.patch.object(type(mlp.router.ref.module), "forward", broken),
    ):
        assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("change", ["in place", "moved"])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_changed_experts_show_in_the_next_tokens(model_type: str, name: str, change: str) -> None:
    model = zoo.tiny_model(model_type)
    torch_paged.accelerate(model, on_unsupported="raise")
    before = generate(model)
    parameter = getattr(experts_of(model), name)
    if change == "in place":
        with torch.no_grad():
            parameter.mul_(-2.0)
    else:
        parameter.data = -2.0 * parameter.data
    after = generate(model)
    assert not torch.equal(after, before)
    torch_paged.restore(model)
    assert torch.equal(after, generate(model))


def own_forward(experts: nn.Module) -> None:
    forward = experts.forward
    experts.forward = lambda *args, **kwargs: 0.5 * forward(*args, **kwargs)


def half_precision(experts: nn.Module) -> None:
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.data.half())


def integers(experts: nn.Module) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj.data.to(torch.int8), requires_grad=False)


def parallel(experts: nn.Module) -> None:
    experts._is_expert_parallel = True


def only_block(model: PreTrainedModel, index: int = -1) -> OpaqueMlpSpec:
    """Return a layer's block, which must have been read as one that is called."""
    mlp = read_spec(model).layers[index].mlp
    assert isinstance(mlp, OpaqueMlpSpec)
    return mlp


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_forward, "mlp.experts cannot be fused: its forward is replaced on the instance"),
        (half_precision, "gate_up_proj of model.layers.1.mlp.experts is torch.float16"),
        (integers, "cannot be fused: its down_proj holds torch.int8"),
        (parallel, "has a form that is not known here"),
    ],
)
def test_a_block_whose_experts_have_another_form_is_called(
    change: Callable[[nn.Module], None], reason: str
) -> None:
    model = zoo.tiny_model("mixtral")
    change(experts_of(model))
    block = only_block(model)
    assert block.ref.module is model.model.layers[1].mlp and reason in block.why
    assert isinstance(read_spec(model).layers[0].mlp, ExpertsSpec)


def test_a_block_of_another_class_of_experts_is_called() -> None:
    class Quantised(nn.Module):
        pass

    model = zoo.tiny_model("gpt_oss")
    model.model.layers[0].mlp.experts = Quantised()
    assert "layers.0.mlp.experts is a " in only_block(model, 0).why
    assert "Quantised, which has no fused form" in only_block(model, 0).why


@pytest.mark.parametrize("part", ["experts", "router", "block"])
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_what_is_replaced_on_an_instance_takes_part(model_type: str, part: str) -> None:
    model = zoo.tiny_model(model_type)
    block = model.model.layers[1].mlp
    spec = last_experts(read_spec(model))
    module = {"experts": spec.ref.module, "router": spec.router.ref.module, "block": block}[part]
    before = generate(model)
    forward = module.forward

    def replaced(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        return forward(-x, *args, **kwargs)

    module.forward = replaced
    expected = generate(model)
    assert not torch.equal(expected, before)
    with torch_paged.accelerated(model, on_unsupported="raise"):
        assert torch.equal(generate(model), expected)
        report = torch_paged.explain(model)
    assert (report.tier, report.last_call.path) == ("fused", "fused")
    opaque = {row.module for row in report.slots if row.kind == "opaque"}
    assert opaque == {"model.layers.1.mlp"}


@pytest.mark.parametrize(
    ("model_type", "changes", "tier", "reason"),
    [
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
            "fused",
            "its choice among groups of experts",
        ),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "fused", "norm_min=0.5"),
        ("olmoe", {"clip_qkv": 0.5}, "patched", "clip_qkv=0.5 has no fused form"),
        ("glm4_moe", {"use_qk_norm": True}, "patched", "use_qk_norm=True has no fused form"),
    ],
)
def test_settings_without_a_fused_form_are_named(
    model_type: str, changes: dict[str, object], tier: str, reason: str
) -> None:
    model = zoo.tiny_model(model_type, **changes)
    expected = generate(model)
    with torch_paged.accelerated(model, on_unsupported="raise"):
        assert torch.equal(generate(model), expected)
        report = torch_paged.explain(model)
    assert report.tier == report.last_call.path == tier
    assert reason in "; ".join((*report.reasons, *(row.why for row in report.slots)))


@pytest.mark.parametrize("model_type", ["dots1", "glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_a_choice_among_groups_of_experts_is_fused(model_type: str) -> None:
    changes = {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2}
    if model_type == "deepseek_v2":
        changes |= {"topk_method": "group_limited_greedy"}
    model = zoo.tiny_model(model_type, **changes)
    expected = generate(model)
    router = last_experts(read_spec(model)).router
    assert (router.num_groups, router.top_groups) == (2, 1)
    with torch_paged.accelerated(model, on_unsupported="raise"):
        assert torch.equal(generate(model), expected)
        report = torch_paged.explain(model)
    assert report.last_call.path == "fused" and "within 1 of 2 groups" in str(report)
    assert not [row for row in report.slots if row.kind == "opaque"]


def test_a_block_that_is_not_all_of_the_mlp_is_not_called_alone() -> None:
    model = zoo.tiny_model("granitemoeshared")
    own_forward(experts_of(model))
    with pytest.raises(SpecRefusal, match="its forward is replaced"):
        read_spec(model)
    expected = generate(model)
    with torch_paged.accelerated(model):
        assert torch.equal(generate(model), expected)


def test_experts_whose_forward_is_replaced_later_are_called_from_then_on() -> None:
    model = zoo.tiny_model("mixtral")
    torch_paged.accelerate(model)
    before = generate(model)
    own_forward(experts_of(model))
    after = generate(model)
    assert not torch.equal(after, before)
    assert "call[model.layers.1.mlp](y1)" in str(torch_paged.explain(model))
    torch_paged.restore(model)
    assert torch.equal(after, generate(model))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_hooks_of_hugging_face_itself_change_nothing(model_type: str) -> None:
    model = zoo.tiny_model(model_type)
    expected = generate(model)
    torch_paged.accelerate(model, on_unsupported="raise")
    model(prompts()[0], output_router_logits=True)
    assert any(module._forward_hooks for module in model.modules())
    assert torch.equal(generate(model), expected)
    report = torch_paged.explain(model)
    assert report.last_call.path == "fused"
    assert {row.kind for row in report.slots} == {"fused"}


def test_a_replaced_forward_of_attention_with_sinks_is_not_bypassed() -> None:
    model = zoo.tiny_model("gpt_oss")
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward
    with pytest.raises(SpecRefusal, match=r"self_attn cannot be bypassed"):
        read_spec(model)
