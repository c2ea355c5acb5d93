"""What is changed on a model between two calls shows in the second, and nothing else counts."""

from __future__ import annotations

import copy

import pytest
import torch
from models import greedy, prompt, reference, seeded, tiny, tiny_family
from torch import nn
from transformers import LlamaConfig

import torch_paged
from torch_paged.generate.registry import find_session


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device)


def change_epsilon(model) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 50.0


def change_scaling(model) -> None:
    model.model.layers[1].self_attn.scaling *= 0.25


def change_frequencies(model) -> None:
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(0.5)


def change_activation(model) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


@pytest.mark.parametrize(
    "change", [change_epsilon, change_scaling, change_frequencies, change_activation]
)
def test_constant_of_a_module_changed_after_acceleration(
    change, model, device, accelerate
) -> None:
    ids = prompt(17, 17, device=device)
    accelerate(model, on_unsupported="fallback")
    plain = greedy(model, ids, 16)
    change(model)
    expected = greedy(copy.deepcopy(model), ids, 16)
    assert not torch.equal(expected, plain)
    assert torch.equal(greedy(model, ids, 16), expected)


def add_bias(model) -> None:
    bias = torch.linspace(-3, 3, 64, device=model.device)
    model.model.layers[1].self_attn.q_proj.bias = nn.Parameter(bias)


def change_field(name, value):
    return lambda model: setattr(model.config, name, value)


@pytest.mark.parametrize(
    "family, change",
    [
        ("llama", add_bias),
        ("gpt_neox", lambda model: setattr(model.gpt_neox.layers[0], "use_parallel_residual", 0)),
        ("llama", change_field("num_hidden_layers", 2)),
        ("gemma2", change_field("final_logit_softcapping", 0.5)),
        ("gemma3", change_field("layer_types", ["full_attention"] * 3)),
        ("granite", change_field("logits_scaling", 40.0)),
        ("mistral", change_field("sliding_window", 5)),
        ("olmo", change_field("clip_qkv", 0.5)),
    ],
)
@pytest.mark.parametrize("then", ["greedy", "sampled"])
def test_what_a_forward_reads_changed_after_acceleration(
    family, change, then, device, accelerate
) -> None:
    """Parameters, flags of modules, and fields of a config that no module keeps."""
    model, ids = tiny_family(family, device), prompt(40, 40, device=device)

    def run(used):
        return seeded(used, 3, ids, do_sample=then == "sampled", max_new_tokens=16).result

    accelerate(model, on_unsupported="fallback")
    plain = run(model)
    change(model)
    expected = run(copy.deepcopy(model))
    if then == "sampled":  # the best may stay the best
        assert not torch.equal(expected, plain)
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("name, value", [("use_cache", False), ("pad_token_id", 1)])
def test_fields_of_no_arithmetic_leave_the_model_as_it_is_read(
    name, value, model, accelerate, tmp_path
) -> None:
    ids = prompt(17, 17, device=model.device)
    accelerate(model)
    greedy(model, ids, 2)
    core = find_session(model).core
    setattr(model.config, name, value)
    model.save_pretrained(tmp_path)
    greedy(model, ids, 2)
    assert find_session(model).core is core


def test_gradient_checkpointing_around_training_leaves_nothing_behind(
    model, device, accelerate
) -> None:
    """It hooks the embeddings whenever it is switched on, and leaves the hooks there."""
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 8).sequences
    accelerate(model)
    greedy(model, ids, 2)
    core = find_session(model).core
    for _ in range(2):
        model.gradient_checkpointing_enable()
        model.train()
        model(ids, labels=ids).loss.backward()
        model.zero_grad()
        model.gradient_checkpointing_disable()
        assert model.get_input_embeddings()._forward_hooks
        assert torch.equal(greedy(model, ids, 8), expected)
        model.gradient_checkpointing_enable()
        model.eval()
        assert torch.equal(greedy(model, ids, 8), expected)
    report = torch_paged.explain(model)
    assert report.last_call.path == "fused"
    assert all(row.why != "it has hooks" for row in report.slots)
    assert find_session(model).core is core
