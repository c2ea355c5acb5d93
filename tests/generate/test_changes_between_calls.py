"""What is changed on a model between two calls shows in the second, and nothing else counts."""

from __future__ import annotations

import copy

import pytest
import torch
from models import greedy, prompt, reference, tiny
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
