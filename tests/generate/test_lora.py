"""PEFT adapters: unmerged, merged, disabled, switched and removed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import greedy, padded_prompts, prompt, tiny, tiny_family
from transformers import LlamaConfig

import torch_paged
from torch_paged.errors import UnsupportedModelError

peft = pytest.importorskip("peft")

NUM_TOKENS = 16


def adapter_config(rank: int = 4, task_type: str | None = "CAUSAL_LM", **fields):
    settings = {
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        "init_lora_weights": False,
    }
    return peft.LoraConfig(r=rank, task_type=task_type, **{**settings, **fields})


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


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["gate_proj", "k_proj"], "rank": 1},
        {"target_modules": ["lm_head", "q_proj"]},
        {"use_rslora": True, "lora_alpha": 3},
        {"lora_dropout": 0.5},
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 40}},
        {"layers_to_transform": [1]},
        {"init_lora_weights": "pissa"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_plain_form_is_fused(fields, base, batch, accelerate) -> None:
    model = accelerate(with_adapter(base, **fields))
    assert_same_as_a_copy(model, batch)
    report = torch_paged.explain(model)
    assert report.last_call.path == "fused"
    assert {slot.kind for slot in report.slots} == {"fused"}
    assert any("LoRA default" in slot.why for slot in report.slots)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", ["c_attn", "c_proj", "c_fc"]),
        ("falcon", ["query_key_value", "dense_h_to_4h"]),
        ("gptj", ["q_proj", "v_proj", "fc_in", "fc_out"]),
    ],
)
def test_other_linears_with_an_adapter(family, targets, batch, device, accelerate) -> None:
    base = tiny_family(family, device)
    ids, options = batch
    plain = greedy(copy.deepcopy(base), ids, **options)
    model = accelerate(with_adapter(base, target_modules=targets))
    assert not torch.equal(assert_same_as_a_copy(model, batch), plain)
    assert torch_paged.explain(model).last_call.path == "fused"
    if family == "gpt2":
        rows = torch_paged.explain(model).slots
        assert {row.kind for row in rows if "c_attn" in row.module} == {"generic"}
    model.merge_adapter()
    assert_same_as_a_copy(model, batch)
    with model.disable_adapter():
        assert torch.equal(greedy(model, ids, **options), plain)


def test_two_adapters_at_once(base, batch, accelerate) -> None:
    model = with_adapter(base, seed=1)
    torch.manual_seed(2)
    model.add_adapter("second", adapter_config(rank=2, target_modules=["q_proj", "gate_proj"]))
    accelerate(model)
    alone = assert_same_as_a_copy(model, batch)
    model.base_model.set_adapter(["default", "second"])
    both = assert_same_as_a_copy(model, batch)
    assert not torch.equal(alone, both)
    names = [slot.why for slot in torch_paged.explain(model).slots]
    assert "with LoRA default (rank 4), second (rank 2)" in names


def test_scale_of_an_adapter_is_changed(base, batch, accelerate) -> None:
    model = accelerate(with_adapter(base))
    before = assert_same_as_a_copy(model, batch)
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
    for layer in layers:
        layer.scale_layer(0.25)
    assert not torch.equal(assert_same_as_a_copy(model, batch), before)
    for layer in layers:
        layer.unscale_layer()
    assert torch.equal(assert_same_as_a_copy(model, batch), before)


def test_adapters_come_and_go_after_acceleration(base, batch, accelerate) -> None:
    model = accelerate(with_adapter(base, seed=1))
    first = assert_same_as_a_copy(model, batch)
    torch.manual_seed(2)
    model.add_adapter("second", adapter_config(rank=2))
    assert torch.equal(assert_same_as_a_copy(model, batch), first)
    model.set_adapter("second")
    second = assert_same_as_a_copy(model, batch)
    assert not torch.equal(second, first)
    model.delete_adapter("second")
    model.set_adapter("default")
    assert torch.equal(assert_same_as_a_copy(model, batch), first)
    torch.manual_seed(3)
    model.add_adapter("second", adapter_config(rank=3))
    model.set_adapter("second")
    assert not torch.equal(assert_same_as_a_copy(model, batch), second)
    assert torch_paged.explain(model).last_call.path == "fused"


def test_disabling_takes_a_merged_adapter_out_of_the_weights(base, batch, accelerate) -> None:
    ids, options = batch
    plain = greedy(copy.deepcopy(base), ids, **options)
    model = accelerate(with_adapter(base))
    adapted = assert_same_as_a_copy(model, batch)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(greedy(model, ids, **options), plain)
        layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.Linear)]
        assert not any(layer.merged for layer in layers)
    assert torch.equal(greedy(model, ids, **options), adapted)


def test_an_adapter_in_another_dtype(base, batch, accelerate) -> None:
    model = with_adapter(base)
    for name, module in model.named_modules():
        if "lora_A." in name or "lora_B." in name:
            module.bfloat16()
    accelerate(model)
    assert_same_as_a_copy(model, batch)
    assert torch_paged.explain(model).last_call.path == "fused"


def test_a_float32_adapter_beside_half_weights(batch, device, accelerate) -> None:
    ids, options = batch
    base = tiny(LlamaConfig, 0, device).bfloat16()
    model = accelerate(with_adapter(base, target_modules="all-linear"), verify=False)
    layer = base.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.dtype == torch.float32
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        expected = wide(ids, attention_mask=options["attention_mask"]).logits[:, -1]
        own = copy.deepcopy(model)(ids, attention_mask=options["attention_mask"]).logits[:, -1]
    out = model.generate(
        input_ids=ids,
        attention_mask=options["attention_mask"],
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert torch_paged.explain(model).last_call.path == "fused"
    error = (out.logits[0].float() - expected).pow(2).mean().sqrt()
    limit = (own.float() - expected).pow(2).mean().sqrt()
    assert error <= 1.25 * limit


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"use_dora": True}, "its adapter default is of a variant, DoraLinearVariant"),
        ({"lora_bias": True}, "its adapter default has a bias"),
    ],
    ids=["dora", "bias"],
)
def test_other_forms_are_called_as_they_are(fields, why, base, batch, accelerate) -> None:
    model = accelerate(with_adapter(base, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and name.endswith("bias"):
                parameter.normal_()
    assert_same_as_a_copy(model, batch)
    report = torch_paged.explain(model)
    assert report.last_call.path == "fused"
    assert {slot.why for slot in report.slots if slot.kind == "opaque"} == {why}


def test_embeddings_with_an_adapter_are_called_as_they_are(base, batch, accelerate) -> None:
    model = with_adapter(base, target_modules=["embed_tokens", "q_proj"])
    accelerate(model)
    assert_same_as_a_copy(model, batch)
    report = torch_paged.explain(model)
    assert report.last_call.path == "fused"
    assert [s.module for s in report.slots if s.kind == "opaque"] == ["model.embed_tokens"]
    with model.disable_adapter():
        assert_same_as_a_copy(model, batch)


def test_a_saved_copy_of_a_module_follows_the_adapter(base, batch, accelerate) -> None:
    ids, options = batch
    plain = greedy(copy.deepcopy(base), ids, **options)
    model = with_adapter(base, modules_to_save=["lm_head", "embed_tokens"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1)
        model.base_model.model.model.embed_tokens.modules_to_save["default"].weight.mul_(2)
    accelerate(model, on_unsupported="fallback")
    adapted = assert_same_as_a_copy(model, batch)
    with model.disable_adapter():
        assert torch.equal(greedy(model, ids, **options), plain)
    assert torch.equal(greedy(model, ids, **options), adapted)


def test_rows_with_adapters_of_their_own_are_peft_s(base, batch, accelerate) -> None:
    ids, options = batch
    model = with_adapter(base, seed=1)
    torch.manual_seed(2)
    model.add_adapter("second", adapter_config(rank=2))
    accelerate(model, on_unsupported="fallback")
    arguments = {
        "input_ids": ids,
        "attention_mask": options["attention_mask"],
        "max_new_tokens": NUM_TOKENS,
        "do_sample": False,
        "adapter_names": ["second", "__base__"],
    }
    expected = copy.deepcopy(model).generate(**arguments)
    assert torch.equal(model.generate(**arguments), expected)
    assert_same_as_a_copy(model, batch)


def test_adapters_injected_into_the_model(base, batch, accelerate) -> None:
    """Without a PeftModel around it, as transformers' own `add_adapter` does it."""
    ids, options = batch
    accelerate(base)
    plain = greedy(base, ids, **options)
    for seed, (name, rank) in enumerate((("first", 4), ("second", 2))):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(adapter_config(rank=rank, task_type=None), base, name)
    base.eval()
    layers = [m for m in base.modules() if isinstance(m, peft.tuners.lora.Linear)]
    found = [plain]
    for names in ("first", "second", ["first", "second"]):
        for layer in layers:
            layer.set_adapter(names)
        found.append(assert_same_as_a_copy(base, batch))
        assert torch_paged.explain(base).last_call.path == "fused"
    assert len({tuple(tokens.flatten().tolist()) for tokens in found}) == 4
    for layer in layers:
        layer.enable_adapters(False)
    assert torch.equal(greedy(base, ids, **options), plain)
    for layer in layers:
        layer.enable_adapters(True)
        layer.set_adapter("first")
    assert torch.equal(greedy(base, ids, **options), found[1])


def test_an_engine_follows_the_adapter(base, device, accelerate) -> None:
    model = with_adapter(base, seed=1)
    torch.manual_seed(2)
    model.add_adapter("second", adapter_config(rank=2))
    # Two full blocks in common, which a prefix cache keeps.
    ids = prompt(40, 3, device=device)
    with torch_paged.Engine(model, enable_prefix_caching=True) as engine:

        def run() -> list[int]:
            name = engine.add_request(ids[0].tolist(), max_new_tokens=NUM_TOKENS)
            return list(engine.run()[name].token_ids)

        found = {}
        for adapter in ("default", "second", "default", "second"):
            model.set_adapter(adapter)
            expected = greedy(copy.deepcopy(model), ids, num_tokens=NUM_TOKENS)
            tokens = run()
            assert tokens == expected[0, ids.shape[1] :].tolist()
            assert found.setdefault(adapter, tokens) == tokens
        assert found["default"] != found["second"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_of_an_adapter_wait_for_its_return(base, batch, accelerate) -> None:
    model = with_adapter(base, seed=1)
    torch.manual_seed(2)
    model.add_adapter("second", adapter_config(rank=2))
    accelerate(model)
    for adapter in ("default", "second"):
        model.set_adapter(adapter)
        for _ in range(3):
            assert_same_as_a_copy(model, batch)
    graphs = torch_paged.stats(model).graphs
    for adapter in ("default", "second", "default"):
        model.set_adapter(adapter)
        assert_same_as_a_copy(model, batch)
    assert torch_paged.stats(model).graphs == graphs
    assert torch_paged.stats(model).recaptures == 0


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


@pytest.mark.parametrize("kind", ["prompt", "activated"])
def test_an_engine_refuses_what_is_applied_in_generate(kind: str, device, accelerate) -> None:
    model = tiny_family("llama", device)
    if kind == "prompt":
        config: Any = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    else:
        targets = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        config = peft.LoraConfig(r=4, alora_invocation_tokens=[5, 9], **targets)
    wrapped = peft.get_peft_model(model, config).eval()
    with pytest.raises(UnsupportedModelError, match="applied by PEFT's own"):
        torch_paged.Engine(wrapped)
    assert not torch_paged.is_accelerated(wrapped)


@pytest.mark.parametrize(
    ("targets", "tier"),
    [
        (["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], "fused"),
        # Its weight is taken apart, and the update would have to be too.
        (["q_b_proj", "kv_b_proj"], "patched"),
    ],
    ids=["around", "within"],
)
def test_adapters_of_latent_attention(targets, tier, batch, device, accelerate) -> None:
    ids, options = batch
    base = tiny_family("deepseek_v3", device)
    plain = greedy(copy.deepcopy(base), ids, **options)
    model = with_adapter(base, target_modules=targets)
    expected = greedy(copy.deepcopy(model), ids, **options)
    accelerate(model)
    assert torch.equal(greedy(model, ids, **options), expected)
    assert torch_paged.explain(model).last_call.path == tier
    with model.disable_adapter():
        assert torch.equal(greedy(model, ids, **options), plain)
    assert not torch.equal(plain, expected)
