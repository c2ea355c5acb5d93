"""Hooks, replaced forwards and subclasses act as they do under Hugging Face's loop."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from models import greedy, prompt, reference, tiny
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

import torch_paged

PLACES = [
    "",
    "model",
    "model.embed_tokens",
    "model.rotary_emb",
    "model.layers.1",
    "model.layers.1.input_layernorm",
    "model.layers.1.self_attn",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.mlp",
    "model.layers.1.mlp.act_fn",
    "model.layers.1.mlp.down_proj",
    "model.norm",
    "lm_head",
]


def changed(output):
    """Change the values of any module's output so that other tokens come out."""
    if isinstance(output, tuple):
        return (changed(output[0]), *output[1:])
    if isinstance(output, torch.Tensor):
        return output + 0.7 * output.roll(1, -1)
    key = "logits" if "logits" in output else "last_hidden_state"
    output[key] = changed(output[key])
    return output


def add_hook(model: nn.Module, place: str, calls: list[str]):
    def hook(module, args, output):
        calls.append(place)
        return changed(output)

    return model.get_submodule(place).register_forward_hook(hook)


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_forward_hook(place, when, model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    plain = reference(model, ids, 10).sequences
    copied, theirs, ours = copy.deepcopy(model), [], []
    add_hook(copied, place, theirs)
    expected = greedy(copied, ids, 10)
    assert not torch.equal(expected, plain)
    if when == "before":
        handle = add_hook(model, place, ours)
        accelerate(model, on_unsupported="fallback")
    else:
        accelerate(model, on_unsupported="fallback")
        assert torch.equal(greedy(model, ids, 10), plain)
        handle = add_hook(model, place, ours)
    ours.clear()
    assert torch.equal(greedy(model, ids, 10), expected)
    ours.clear()
    assert torch.equal(greedy(model, ids, 10), expected)
    assert ours == theirs, "not called once a step"
    handle.remove()
    assert torch.equal(greedy(model, ids, 10), plain)


@pytest.mark.parametrize("place", ["model.layers.1", "model.layers.1.self_attn.q_proj", "lm_head"])
def test_forward_pre_hook(place, model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)

    def hook(module, args):
        return (args[0] * 0.5 + 0.1, *args[1:])

    copied = copy.deepcopy(model)
    copied.get_submodule(place).register_forward_pre_hook(hook)
    expected = greedy(copied, ids, 10)
    accelerate(model, on_unsupported="fallback")
    greedy(model, ids, 10)
    model.get_submodule(place).register_forward_pre_hook(hook)
    assert torch.equal(greedy(model, ids, 10), expected)


def test_global_forward_hook(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    plain = reference(model, ids, 10).sequences
    copied = copy.deepcopy(model)

    def hook(module, args, output):
        return output * 1.5 if type(module).__name__ == "LlamaMLP" else None

    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 10), plain)
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        expected = greedy(copied, ids, 10)
        got = greedy(model, ids, 10)
    finally:
        handle.remove()
    assert not torch.equal(expected, plain)
    assert torch.equal(got, expected)
    assert torch.equal(greedy(model, ids, 10), plain)


@pytest.mark.parametrize(
    "place",
    [
        "",
        "model",
        "model.layers.1",
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
        "model.norm",
        "lm_head",
    ],
)
def test_forward_replaced_on_the_instance(place, model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    plain = reference(model, ids, 10).sequences

    def replace(root: nn.Module) -> None:
        module = root.get_submodule(place)
        original = type(module).forward

        def forward(self, *args, **kwargs):
            return changed(original(self, *args, **kwargs))

        module.forward = types.MethodType(forward, module)

    copied = copy.deepcopy(model)
    replace(copied)
    expected = greedy(copied, ids, 10)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 10), plain)
    replace(model)
    assert torch.equal(greedy(model, ids, 10), expected)
    del model.get_submodule(place).forward
    assert torch.equal(greedy(model, ids, 10), plain)


@pytest.mark.parametrize(
    "place",
    [
        "",
        "model",
        "model.layers.1",
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ],
)
def test_forward_replaced_on_the_class(place, model, device, accelerate, monkeypatch) -> None:
    """Before the model is read; afterwards what calls the class alone takes note."""
    ids = prompt(17, 17, device=device)
    plain, cls = reference(model, ids, 10).sequences, type(model.get_submodule(place))
    original = cls.forward

    def forward(self, *args, **kwargs):
        return changed(original(self, *args, **kwargs))

    with monkeypatch.context() as patched:
        patched.setattr(cls, "forward", forward)
        accelerate(model, on_unsupported="fallback")
        expected = greedy(copy.deepcopy(model), ids, 10)
        assert not torch.equal(expected, plain)
        assert torch.equal(greedy(model, ids, 10), expected)
    torch_paged.restore(model)
    accelerate(model, on_unsupported="raise")
    assert torch.equal(greedy(model, ids, 10), plain)
    monkeypatch.setattr(cls, "forward", forward)
    assert torch.equal(greedy(model, ids, 10), plain)


def departing_late(original):
    """A forward that changes what it returns for places past 30, where no self-test looks."""

    def forward(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        late = kwargs["position_ids"][..., None] > 30
        if isinstance(output, torch.Tensor):
            return torch.where(late, changed(output), output)
        return torch.where(late, changed(output[0]), output[0]), *output[1:]

    return forward


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("another class", "before"),
        ("another class", "after"),
        ("its own forward", "before"),
        ("its own forward", "after"),
        ("its class's forward", "before"),
    ],
)
@pytest.mark.parametrize("place", ["model.layers.1.self_attn", "model.rotary_emb"])
def test_what_departs_behind_the_self_test_alone(
    place, how, when, model, device, accelerate, monkeypatch
) -> None:
    ids = prompt(17, 17, device=device)
    plain, module = reference(model, ids, 24).sequences, model.get_submodule(place)
    cls = type(module)
    forward = departing_late(cls.forward)
    if when == "after":
        accelerate(model, on_unsupported="fallback")
        assert torch.equal(greedy(model, ids, 24), plain)
    if how == "another class":
        module.__class__ = type("Other", (cls,), {"forward": forward, "__module__": __name__})
    elif how == "its class's forward":
        monkeypatch.setattr(cls, "forward", forward)
    else:
        module.forward = types.MethodType(forward, module)
    opted_out = GenerationConfig(torch_paged=False)
    expected = greedy(model, ids, 24, generation_config=opted_out)
    assert not torch.equal(expected, plain)
    if when == "before":
        accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 24), expected)


def halved_attention(*args, **kwargs):
    output, weights = eager_attention_forward(*args, **kwargs)
    return output * 0.5, weights


@pytest.mark.parametrize("when", ["before", "after"])
def test_attention_that_the_user_registered(when, model, device, accelerate) -> None:
    AttentionInterface.register("halved", halved_attention)
    AttentionMaskInterface.register("halved", eager_mask)
    ids = prompt(17, 17, device=device)
    plain, copied = reference(model, ids, 10).sequences, copy.deepcopy(model)
    copied.set_attn_implementation("halved")
    expected = greedy(copied, ids, 10)
    assert not torch.equal(expected, plain)
    if when == "before":
        model.set_attn_implementation("halved")
    accelerate(model, on_unsupported="fallback")
    if when == "after":
        assert torch.equal(greedy(model, ids, 10), plain)
        model.set_attn_implementation("halved")
    assert torch.equal(greedy(model, ids, 10), expected)
    assert "'halved'" in torch_paged.explain(model).last_call.reasons[0]
    model.set_attn_implementation("eager")
    assert torch.equal(greedy(model, ids, 10), plain)
    assert torch_paged.explain(model).last_call.path == "fused"


def test_replaced_preparation_of_inputs(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    plain = reference(model, ids, 10).sequences

    def replace(root: nn.Module) -> None:
        original = root.prepare_inputs_for_generation

        def prepare(input_ids, **kwargs):
            inputs = original(input_ids, **kwargs)
            inputs["input_ids"] = (inputs["input_ids"] + 1) % 257
            return inputs

        root.prepare_inputs_for_generation = prepare

    copied = copy.deepcopy(model)
    replace(copied)
    expected = greedy(copied, ids, 10)
    assert not torch.equal(expected, plain)
    accelerate(model, on_unsupported="fallback")
    greedy(model, ids, 10)
    replace(model)
    assert torch.equal(greedy(model, ids, 10), expected)


class OtherForward(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return changed(super().forward(*args, **kwargs))


class OtherSample(LlamaForCausalLM):
    def _sample(self, input_ids, **kwargs):
        return input_ids.flip(1)


class SameBehaviour(LlamaForCausalLM):
    pass


@pytest.mark.parametrize("subclass", [OtherForward, OtherSample, SameBehaviour])
def test_subclass(subclass, model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    other = subclass(model.config).to(device).eval()
    other.load_state_dict(model.state_dict())
    other.generation_config = copy.deepcopy(model.generation_config)
    expected = greedy(copy.deepcopy(other), ids, 10)
    accelerate(other, on_unsupported="fallback")
    assert torch.equal(greedy(other, ids, 10), expected)
    assert type(other) is subclass


@pytest.mark.parametrize("place", ["model.layers.1.mlp", "model.layers.1.self_attn", "model.norm"])
def test_module_replaced_after_acceleration(place, model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    donor = tiny(LlamaConfig, 5, device)
    accelerate(model, on_unsupported="fallback")
    plain = greedy(model, ids, 10)
    model.set_submodule(place, donor.get_submodule(place))
    expected = greedy(copy.deepcopy(model), ids, 10)
    assert not torch.equal(expected, plain)
    assert torch.equal(greedy(model, ids, 10), expected)


def test_module_of_another_kind_put_in(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)

    class Bottleneck(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return self.inner(hidden).tanh()

    model.model.layers[1].mlp.down_proj = Bottleneck(model.model.layers[1].mlp.down_proj)
    expected = reference(model, ids, 10).sequences
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 10), expected)
    model.model.layers[2].mlp = Bottleneck(model.model.layers[2].mlp)
    expected = greedy(copy.deepcopy(model), ids, 10)
    assert torch.equal(greedy(model, ids, 10), expected)


def test_layers_dropped_after_acceleration(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    accelerate(model, on_unsupported="fallback")
    greedy(model, ids, 10)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    expected = greedy(copy.deepcopy(model), ids, 10)
    assert torch.equal(greedy(model, ids, 10), expected)


def test_own_hooks_of_hugging_face_are_no_reason_to_fall_back(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    accelerate(model)
    with torch.no_grad():
        model(ids, output_hidden_states=True, output_attentions=True)
    greedy(model, ids, 10)
    assert torch_paged.explain(model).last_call.path == "fused"
