"""LoRA as a kind of linear: what is fused, what the watch notices, and that numbers agree."""

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from torch_paged.config import Config
from torch_paged.decoder.fusion import FusionProfile, always, fuse
from torch_paged.decoder.linears import held_linear, linear_slot
from torch_paged.decoder.lowering import lower
from torch_paged.decoder.plan import Attention, Linear
from torch_paged.decoder.step import DecoderStep
from torch_paged.decoder.watch import ModuleWatch
from torch_paged.engine.batch import BatchLimits, BatchRun, PackedPrompts
from torch_paged.engine.core import EngineCore
from torch_paged.patches.families import read_spec

peft = pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["v_proj", "up_proj", "down_proj"]


def make(targets, rank=4, **fields):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.2,
        attention_bias=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    settings = {"lora_alpha": 8, "init_lora_weights": False, **fields}
    lora = peft.LoraConfig(r=rank, target_modules=targets, **settings)
    return model, peft.get_peft_model(model, lora).eval()


def logits_of(model, ids, prompt_len):
    """Teacher-forced logits [rows, steps, vocab] of a step whose linears are fused."""
    core = EngineCore(DecoderStep(model, read_spec(model), fuse_linears=True), Config(), 128)
    rows = ids.shape[0]
    positions = torch.arange(prompt_len, dtype=torch.int32)
    prompts = PackedPrompts(
        (prompt_len,) * rows,
        ids[:, :prompt_len].reshape(-1),
        None,
        positions.repeat(rows),
        positions[-1:].expand(rows),
    )
    out = []
    with torch.no_grad(), BatchRun(core, prompts, BatchLimits(ids.shape[1]), lag=0) as run:
        out.append(run.prefill().clone())
        for at in range(prompt_len, ids.shape[1] - 1):
            run.commit(ids[:, at].contiguous())
            out.append(run.next_logits().clone())
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("targets", [ALL, SOME, ["q_proj", "v_proj"], ["lm_head"]], ids=str)
def test_fused_linears_with_adapters_give_the_models_own_logits(targets):
    model, _ = make(targets)
    ids = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[:, 9:-1]
    torch.testing.assert_close(logits_of(model, ids, 10), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_weights_take_adapters_of_their_own_dtype_or_float32(dtype):
    model, wrapper = make(ALL, lora_alpha=1)
    exact, _ = make(ALL, lora_alpha=1)
    model.bfloat16()
    for name, module in wrapper.named_modules():
        if "lora_A." in name or "lora_B." in name:
            module.to(dtype)
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    ids = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = exact(ids).logits[:, 9:-1]
        own = model(ids).logits[:, 9:-1].float()
    got = logits_of(model, ids, 10).float()
    error, limit = (got - want).pow(2).mean().sqrt(), (own - want).pow(2).mean().sqrt()
    assert error <= 1.25 * limit


def test_adapters_do_not_take_a_linear_out_of_its_kernel():
    model, _ = make(ALL)
    plan = fuse(lower(read_spec(model), "decode"), FusionProfile(always))
    # embed, one rotary table, five a layer, head
    assert len(plan.instructions) == 2 + 5 * 2 + 1
    assert "q_proj + lora default |" in str(plan)
    assert "down_proj + lora default](" in str(plan)


def test_a_linear_with_an_adapter_leaves_the_norm_of_a_block_in_front_of_it():
    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    lora = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).eval()
    plan = fuse(lower(read_spec(model), "decode"), FusionProfile(always))
    by_target = {i.targets[0]: i for i in plan.instructions}
    assert by_target["q1"].joined is None and by_target["q1"].sources == ("h0",)
    assert by_target["m1"].joined is not None
    ids = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[:, 9:-1]
    torch.testing.assert_close(logits_of(model, ids, 10), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["dtype", "second"])
def test_what_one_kernel_cannot_add_is_added_behind_it(change):
    model, wrapper = make(ALL)
    layer = model.model.layers[0].self_attn
    if change == "dtype":
        layer.q_proj.lora_A["default"].bfloat16()
        layer.q_proj.lora_B["default"].bfloat16()
    else:
        torch.manual_seed(3)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        wrapper.add_adapter("second", lora)
        wrapper.base_model.set_adapter(["default", "second"])
    plan = fuse(lower(read_spec(model), "decode"), FusionProfile(always))
    attentions = [at for at, i in enumerate(plan.instructions) if isinstance(i, Attention)]
    first = plan.instructions[attentions[0] - 1]
    assert isinstance(first, Linear) and first.norm is None
    ids = torch.randint(97, (2, 14), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[:, 9:-1]
    torch.testing.assert_close(logits_of(model, ids, 10), expected, rtol=1e-4, atol=1e-4)


def test_merged_and_disabled_layers_are_their_base():
    model, wrapper = make(ALL)
    layer = model.model.layers[0].mlp.up_proj
    assert [u.name for u in held_linear(layer).updates] == ["default"]
    wrapper.merge_adapter()
    assert held_linear(layer).updates == () and held_linear(layer).base is layer.base_layer
    wrapper.unmerge_adapter()
    wrapper.base_model.disable_adapter_layers()
    assert held_linear(layer).updates == ()


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda m: m.register_forward_hook(lambda *a: None), "it has hooks"),
        (
            lambda m: m.base_layer.register_forward_hook(lambda *a: None),
            "it is LoRA over a layer of which it has hooks",
        ),
        (
            lambda m: m.lora_A["default"].register_forward_hook(lambda *a: None),
            "its adapter default has a half of which it has hooks",
        ),
        (
            lambda m: m.lora_A.__setitem__("default", nn.Sequential(m.lora_A["default"])),
            "its adapter default has a half of which it is a Sequential",
        ),
        (
            lambda m: m.scaling.__setitem__("default", torch.tensor(2.0)),
            "its adapter default is scaled by a Tensor",
        ),
        (
            lambda m: m.lora_dropout.__setitem__("default", nn.Dropout(0.5).train()),
            "its adapter default applies dropout in training mode",
        ),
        (
            lambda m: m.lora_A["default"].bfloat16(),
            "its adapter default has halves in torch.bfloat16 and torch.float32",
        ),
    ],
)
def test_anything_else_is_called(break_it, why):
    model, _ = make(ALL)
    layer = model.model.layers[0].mlp.up_proj
    assert linear_slot(layer).kind == "fused"
    break_it(layer)
    assert linear_slot(layer) == ("opaque", why)


def test_a_subclass_of_the_wrapper_is_called():
    model, _ = make(ALL)
    layer = model.model.layers[0].mlp.up_proj

    class Own(type(layer)):
        def forward(self, x):
            return super().forward(x) * 2

    layer.__class__ = Own
    assert linear_slot(layer) == ("opaque", "it is a Own")


def test_the_watch_numbers_the_states_of_the_adapters():
    model, wrapper = make(SOME)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    wrapper.add_adapter("second", lora)
    watch = ModuleWatch(model, read_spec(model))
    key, first = watch.storage_key(), watch.variant()
    seen = {first}

    def new(*, known: bool = False) -> None:
        number = watch.variant()
        assert (number in seen) is known
        seen.add(number)
        assert watch.variant() == number
        assert watch.storage_key() == key and not watch.structure_changed()

    wrapper.set_adapter("second")
    new()
    wrapper.base_model.set_adapter(["default", "second"])
    new()
    wrapper.set_adapter("default")
    new(known=True)
    with wrapper.disable_adapter():
        new()
    wrapper.merge_adapter()
    new()
    wrapper.unmerge_adapter()
    new(known=True)
    model.model.layers[0].self_attn.v_proj.scale_layer(0.5)
    new()
    assert watch.variant() != first


def test_an_adapter_that_comes_or_goes_is_structure():
    model, wrapper = make(SOME)
    watch = ModuleWatch(model, read_spec(model))
    assert not watch.structure_changed()
    wrapper.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert watch.structure_changed()
    watch = ModuleWatch(model, read_spec(model))
    wrapper.delete_adapter("second")
    assert watch.structure_changed()


def test_states_beyond_what_is_kept_are_new_ones():
    model, _ = make(SOME)
    watch = ModuleWatch(model, read_spec(model))
    layer = model.model.layers[0].self_attn.v_proj
    numbers = []
    for scale in range(100):
        layer.scaling["default"] = float(scale)
        numbers.append(watch.variant())
    layer.scaling["default"] = 0.0
    assert len({*numbers, watch.variant()}) == 101


def test_plans_of_a_state_are_kept_for_its_return():
    """Graphs of the one read what its plans hold while the other runs."""
    model, wrapper = make(SOME)
    wrapper.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    step = DecoderStep(model, read_spec(model))
    core = EngineCore(step, Config(), 128)
    held = {}
    for adapter in ("default", "second", "default", "second"):
        wrapper.set_adapter(adapter)
        core.prepare(1, 32, 1)
        core.runner()
        assert step.variant == held.setdefault(adapter, (step.variant, None))[0]
        bound = step._bound_plan("decode", 1)
        assert held[adapter][1] in (None, bound)
        held[adapter] = (step.variant, bound)
    assert held["default"][1] is not held["second"][1]
    # Too many states: all are dropped, and graphs with them.
    layer = model.model.layers[0].self_attn.q_proj
    moves = 0
    for scale in range(120):
        layer.scaling["second"] = float(scale)
        moves += step.refresh()
        step._bound_plan("decode", 1)
    assert moves == 1
