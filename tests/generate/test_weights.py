"""The next token always comes from the weights as they are now."""

from __future__ import annotations

import copy

import pytest
import torch
from models import greedy, prompt, reference, tiny, tiny_family
from torch import nn
from transformers import LlamaConfig

import torch_paged

NUM_TOKENS = 12


@pytest.fixture
def ids(device):
    return prompt(20, 3, device=device)


@pytest.fixture
def model(ids, device, accelerate):
    """An accelerated model that has generated."""
    model = accelerate(tiny(LlamaConfig, 0, device))
    greedy(model, ids, NUM_TOKENS)
    return model


@pytest.fixture
def donor(device):
    return tiny(LlamaConfig, 5, device)


def assert_follows(model: nn.Module, ids: torch.Tensor, path: str = "fused") -> None:
    """Its tokens are those of its present weights, and not those it gave before."""
    expected = greedy(copy.deepcopy(model), ids, NUM_TOKENS)
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)
    assert torch_paged.explain(model).last_call.path == path


def test_load_state_dict_by_assignment(model, donor, ids) -> None:
    expected = reference(donor, ids, NUM_TOKENS).sequences
    model.load_state_dict(donor.state_dict(), assign=True)
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)
    assert model.lm_head.weight.data_ptr() == donor.lm_head.weight.data_ptr()


def test_load_state_dict_in_place(model, donor, ids) -> None:
    expected = reference(donor, ids, NUM_TOKENS).sequences
    model.load_state_dict(donor.state_dict())
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)


def test_data_replaced(model, donor, ids) -> None:
    expected = reference(donor, ids, NUM_TOKENS).sequences
    for ours, theirs in zip(model.parameters(), donor.parameters(), strict=True):
        ours.data = theirs.data.clone()
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)


def test_data_copied_into(model, donor, ids) -> None:
    expected = reference(donor, ids, NUM_TOKENS).sequences
    for ours, theirs in zip(model.parameters(), donor.parameters(), strict=True):
        ours.data.copy_(theirs.data)
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)


def parameters_of_one_layer_and_outside() -> list[str]:
    names = (name for name, _ in tiny(LlamaConfig, 0).named_parameters())
    return [name for name in names if "layers" not in name or "layers.2." in name]


@pytest.mark.parametrize("name", parameters_of_one_layer_and_outside())
def test_every_parameter_is_read_anew(name, model, donor, ids) -> None:
    parameter = model.get_parameter(name)
    with torch.no_grad():
        parameter.copy_(donor.get_parameter(name))
    assert_follows(model, ids)
    parameter.data = donor.get_parameter(name).data * 0.5
    assert_follows(model, ids)


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen2", "phi3", "gemma2", "gpt_neox", "gpt2", "opt", "bloom", "falcon", "gptj"],
)
def test_every_parameter_of_other_families(family, device, accelerate) -> None:
    model, other = tiny_family(family, device), tiny_family(family, device, seed=77)
    ids = prompt(9, 9, device=device)
    accelerate(model)
    greedy(model, ids, 2)
    last = model.config.num_hidden_layers - 1
    names = [n for n, _ in model.named_parameters() if f".{last}." in n or "layers" not in n]
    for name in names:
        with torch.no_grad():
            model.get_parameter(name).mul_(-0.5).add_(other.get_parameter(name))
        expected = greedy(copy.deepcopy(model), ids, 6)
        assert torch.equal(greedy(model, ids, 6), expected), name


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_steps_between_generations(optimizer, model, ids) -> None:
    optimizer = optimizer(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_follows(model, ids)


def test_device_round_trip(model, ids, device) -> None:
    expected = reference(model, ids, NUM_TOKENS).sequences
    model.to("cpu")
    on_cpu = greedy(model, ids.cpu(), NUM_TOKENS)
    assert torch.equal(on_cpu, expected.cpu())
    model.to(device)
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)


def test_dtype_changes(model, ids) -> None:
    expected = reference(model, ids, NUM_TOKENS).sequences
    torch_paged.accelerate(model, on_unsupported="fallback")
    model.to(torch.float64)
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)
    model.to(torch.bfloat16)
    greedy(model, ids, NUM_TOKENS)
    model.to(torch.float32)
    assert_follows(model, ids)


def test_tied_head_is_untied(ids, device, accelerate) -> None:
    model = tiny(LlamaConfig, 0, device, tie_word_embeddings=True)
    accelerate(model)
    before = greedy(model, ids, NUM_TOKENS)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(5, 0).clone())
    expected = greedy(copy.deepcopy(model), ids, NUM_TOKENS)
    assert not torch.equal(before, expected)
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)


def test_update_of_a_tied_weight_shows_at_both_ends(ids, device, accelerate) -> None:
    model = tiny(LlamaConfig, 0, device, tie_word_embeddings=True)
    accelerate(model)
    greedy(model, ids, NUM_TOKENS)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.roll(3, 0))
    assert_follows(model, ids)


def test_vocabulary_is_resized(model, ids) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(300, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[257:].normal_(std=1.5)
    expected = greedy(copy.deepcopy(model), ids, 30)
    assert int(expected.max()) >= 257
    assert torch.equal(greedy(model, ids, 30), expected)


def test_frozen_and_unfrozen_parameters(model, ids) -> None:
    expected = reference(model, ids, NUM_TOKENS).sequences
    model.requires_grad_(False)
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)
    model.requires_grad_(True)
    assert torch.equal(greedy(model, ids, NUM_TOKENS), expected)


def test_weights_are_not_copied(device, accelerate) -> None:
    model = tiny(LlamaConfig, 0, device)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    accelerate(model)
    greedy(model, prompt(20, 3, device=device), NUM_TOKENS)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
