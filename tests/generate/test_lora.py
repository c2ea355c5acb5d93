"""PEFT adapters: unmerged, merged, disabled, switched and removed."""

from __future__ import annotations

import copy

import pytest
import torch
from models import greedy, padded_prompts, prompt, tiny
from transformers import LlamaConfig

import torch_paged

peft = pytest.importorskip("peft")

NUM_TOKENS = 16


def adapter_config(rank: int = 4, task_type: str | None = "CAUSAL_LM", **fields):
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return peft.LoraConfig(
        r=rank,
        lora_alpha=16,
        target_modules=targets,
        init_lora_weights=False,
        task_type=task_type,
        **fields,
    )


def with_adapter(model, seed: int = 1, **fields):
    torch.manual_seed(seed)
    return peft.get_peft_model(model, adapter_config(**fields)).eval()


@pytest.fixture
def base(device):
    return tiny(LlamaConfig, 0, device)


@pytest.fixture
def batch(device):
    ids, mask = padded_prompts((5, 20), device)
    return ids, {"attention_mask": mask, "num_tokens": NUM_TOKENS}


def assert_same_as_a_copy(model, batch) -> torch.Tensor:
    ids, options = batch
    expected = greedy(copy.deepcopy(model), ids, **options)
    assert torch.equal(greedy(model, ids, **options), expected)
    return expected


@pytest.mark.parametrize("task_type", ["CAUSAL_LM", None])
@pytest.mark.parametrize("accelerated", ["wrapper", "base_first", "base_after"])
def test_unmerged_adapter(accelerated, task_type, base, batch, accelerate) -> None:
    ids, options = batch
    plain = greedy(copy.deepcopy(base), ids, **options)
    if accelerated == "base_first":
        accelerate(base)
        greedy(base, ids, **options)
    model = with_adapter(base, task_type=task_type)
    if accelerated == "wrapper":
        assert accelerate(model) is model
        assert torch_paged.is_accelerated(model)
    elif accelerated == "base_after":
        accelerate(base)
    expected = assert_same_as_a_copy(model, batch)
    assert not torch.equal(expected, plain)
    owner = model if accelerated == "wrapper" else base
    assert torch_paged.explain(owner).last_call.path == "fused"


def test_disabled_adapter(base, batch, accelerate) -> None:
    ids, options = batch
    plain = greedy(copy.deepcopy(base), ids, **options)
    model = accelerate(with_adapter(base))
    adapted = assert_same_as_a_copy(model, batch)
    with model.disable_adapter():
        assert torch.equal(greedy(model, ids, **options), plain)
    assert torch.equal(greedy(model, ids, **options), adapted)


def test_merged_in_place_and_back(base, batch, accelerate) -> None:
    model = accelerate(with_adapter(base))
    adapted = assert_same_as_a_copy(model, batch)
    model.merge_adapter()
    assert torch.equal(assert_same_as_a_copy(model, batch), adapted)
    model.unmerge_adapter()
    assert torch.equal(assert_same_as_a_copy(model, batch), adapted)


@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_adapter_removed(end, base, batch, accelerate) -> None:
    ids, options = batch
    accelerate(base)
    plain = greedy(base, ids, **options)
    model = with_adapter(base)
    adapted = assert_same_as_a_copy(model, batch)
    unwrapped = getattr(model, end)()
    assert unwrapped is base
    got = assert_same_as_a_copy(base, batch)
    assert torch.equal(got, adapted if end == "merge_and_unload" else plain)
    assert torch_paged.explain(base).last_call.path == "fused"


def test_switching_between_two_adapters(base, batch, accelerate) -> None:
    model = with_adapter(base, seed=1)
    torch.manual_seed(2)
    model.add_adapter("second", adapter_config(rank=2))
    accelerate(model)
    first = assert_same_as_a_copy(model, batch)
    model.set_adapter("second")
    second = assert_same_as_a_copy(model, batch)
    assert not torch.equal(first, second)
    model.set_adapter("default")
    assert torch.equal(assert_same_as_a_copy(model, batch), first)


def test_adapter_is_trained_between_generations(base, batch, device, accelerate) -> None:
    model = accelerate(with_adapter(base))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    labels = prompt(20, 3, device=device)
    before = assert_same_as_a_copy(model, batch)
    model.train()
    for _ in range(2):
        model(input_ids=labels, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert not torch.equal(assert_same_as_a_copy(model, batch), before)


def test_saved_head_and_embedding(base, batch, accelerate) -> None:
    model = with_adapter(base, modules_to_save=["lm_head", "embed_tokens"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1)
    accelerate(model, on_unsupported="fallback")
    assert_same_as_a_copy(model, batch)


def test_dora(base, batch, accelerate) -> None:
    model = with_adapter(base, use_dora=True)
    accelerate(model, on_unsupported="fallback")
    assert_same_as_a_copy(model, batch)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_prompt_learning(kind, base, batch, accelerate) -> None:
    config_class = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}[kind]
    torch.manual_seed(4)
    model = peft.get_peft_model(
        base, config_class(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ).eval()
    accelerate(model, on_unsupported="fallback")
    ids, options = batch
    copied = copy.deepcopy(model)
    arguments = {"attention_mask": options["attention_mask"], "max_new_tokens": NUM_TOKENS}
    expected = copied.generate(input_ids=ids, do_sample=False, **arguments)
    assert torch.equal(model.generate(input_ids=ids, do_sample=False, **arguments), expected)
