"""Lowering and fusion: what the printed plan says, and that every form computes the same."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    MptConfig,
    NemotronConfig,
    Olmo3Config,
    OlmoConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from torch_paged.config import Config
from torch_paged.decoder import step
from torch_paged.decoder.fusion import FusionProfile, always, fuse
from torch_paged.decoder.linears import held_linear
from torch_paged.decoder.lowering import lower
from torch_paged.decoder.plan import Add, Glu, Linear, Norm
from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.batch import BatchLimits, BatchRun, PackedPrompts
from torch_paged.engine.core import EngineCore
from torch_paged.patches.families import read_spec

_DIMS = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_BOTH = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_CONFIGS = {
    "llama": LlamaConfig(**_DIMS, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**_DIMS, head_dim=16),
    "gemma2": Gemma2Config(**_DIMS, head_dim=16, sliding_window=8, query_pre_attn_scalar=9),
    "phi3": Phi3Config(**_DIMS, partial_rotary_factor=0.5),
    "gpt_neox": GPTNeoXConfig(**{**_DIMS, "num_key_value_heads": None}),
    "gemma3": Gemma3TextConfig(**_DIMS, **_BOTH, head_dim=16),
    "granite": GraniteConfig(
        **_DIMS,
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "olmo": OlmoConfig(**_DIMS),
    "olmo3": Olmo3Config(**_DIMS, **_BOTH),
    "smollm3": SmolLM3Config(**_DIMS, no_rope_layers=[1, 0]),
    "glm4": Glm4Config(**_DIMS, head_dim=16, rope_parameters=_PARTIAL),
    "cohere2": Cohere2Config(**_DIMS, **_BOTH, logit_scale=0.5),
    "phi": PhiConfig(**_DIMS, rope_parameters=_PARTIAL),
    "stablelm": StableLmConfig(**_DIMS, rope_parameters=_PARTIAL, use_parallel_residual=True),
    "starcoder2": Starcoder2Config(**_DIMS, sliding_window=8),
    "nemotron": NemotronConfig(**_DIMS, head_dim=16),
    "gpt2": GPT2Config(**_DIMS, scale_attn_by_inverse_layer_idx=True),
    "gpt_bigcode": GPTBigCodeConfig(**_DIMS),
    "opt": OPTConfig(**_DIMS, ffn_dim=80, word_embed_proj_dim=48),
    "opt-350m": OPTConfig(**_DIMS, ffn_dim=80, word_embed_proj_dim=32, do_layer_norm_before=False),
    "bloom": BloomConfig(**_DIMS),
    "mpt": MptConfig(**_DIMS, max_seq_len=128, attn_config={"clip_qkv": 1.0}),
    "falcon": FalconConfig(**_DIMS, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-rw": FalconConfig(**_DIMS, parallel_attn=False, multi_query=False, bias=True),
    "gptj": GPTJConfig(**_DIMS, rotary_dim=4),
    "codegen": CodeGenConfig(**{**_DIMS, "num_attention_heads": 4}, rotary_dim=8),
    "mixtral": MixtralConfig(**_DIMS, num_local_experts=5, sliding_window=8),
    "gpt_oss": GptOssConfig(
        **_DIMS, **_BOTH, head_dim=16, num_local_experts=6, num_experts_per_tok=3
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **_DIMS,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
}


def make_model(name):
    torch.manual_seed(0)
    config = _CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def run_steps(model, spec, ids, prompt_len, *, fuse_linears):
    """Teacher-forced logits [rows, steps, vocab] through one form of the plan."""
    core = EngineCore(DecoderStep(model, spec, fuse_linears=fuse_linears), Config(), 128)
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


@pytest.mark.parametrize("name", _CONFIGS)
@pytest.mark.parametrize("fuse_linears", [False, True], ids=["generic", "fused"])
def test_every_form_of_the_plan_gives_the_models_own_logits(name, fuse_linears):
    model = make_model(name)
    ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[:, 14:-1]
    got = run_steps(model, read_spec(model), ids, 15, fuse_linears=fuse_linears)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_small_batch_plan_of_llama_has_five_kernels_a_layer():
    spec = read_spec(make_model("llama"))
    plan = fuse(lower(spec, "decode"), FusionProfile(always))
    # embed, one rotary table, five a layer, head
    assert len(plan.instructions) == 2 + 5 * 2 + 1
    assert not any(isinstance(i, Norm | Add | Glu) for i in plan.instructions)


def test_norms_behind_a_block_add_the_residual():
    for name in ("gemma3", "olmo3"):
        plan = fuse(lower(read_spec(make_model(name)), "decode"), FusionProfile(always))
        layer = [str(i) for i in plan.instructions if "layers.1." in str(i)]
        assert not any(isinstance(i, Add) for i in plan.instructions)
        assert sum("rms_norm+add" in line for line in layer) == 2


@pytest.mark.parametrize(
    ("name", "op", "act"),
    [
        ("gemma2", "rms_norm+add+rms_norm+linear", "gelu_tanh"),
        ("gemma3", "rms_norm+add+rms_norm+linear", "gelu_tanh"),
        ("glm4", "rms_norm+add+rms_norm+linear", "silu"),
        # The only norms are behind the blocks.
        ("olmo3", "rms_norm+add+linear", "silu"),
    ],
)
def test_linears_behind_the_norm_of_a_block_make_the_sum(name, op, act):
    plan = fuse(lower(read_spec(make_model(name)), "decode"), FusionProfile(always))
    assert not any(isinstance(i, Norm) and i.added is not None for i in plan.instructions)
    qkv = next(i for i in plan.instructions if "layers.1.self_attn.q_proj" in str(i))
    mlp = next(i for i in plan.instructions if i.targets[0] == "m1")
    names = [" | ".join(part.ref.name for part in i.parts) for i in (qkv, mlp)]
    assert str(qkv) == f"q1, k1, v1, h0 = {op}[{names[0]}](d0, r0)"
    assert str(mlp) == f"m1, r1 = {op}+{act}_glu[{names[1]}](o1, h0)"
    assert qkv.outputs == ("q1", "k1", "v1") and mlp.outputs == ("m1",)
    head = next(i for i in plan.instructions if i.targets[0] == "logits")
    assert head.targets == ("logits", "h1") and head.joined.summed == "h1"
    assert plan.result == ("logits_out" if name == "gemma2" else "logits")


def test_a_sum_that_something_else_reads_first_is_made_by_its_norm():
    model = make_model("gemma3")
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *args: None)
    plan = fuse(lower(read_spec(model), "decode"), FusionProfile(always))
    assert "h0 = rms_norm+add[model.layers.0.post_feedforward_layernorm](d0, r0)" in str(plan)
    model = make_model("gemma3")
    model.model.layers[0].post_feedforward_layernorm.register_forward_hook(lambda *args: None)
    plan = fuse(lower(read_spec(model), "decode"), FusionProfile(always))
    (first,) = (i for i in plan.instructions if "layers.1.self_attn.q_proj" in str(i))
    assert first.joined is None and first.norm is not None


def test_where_norms_stay_outside_no_linear_makes_the_sum():
    plan = lower(read_spec(make_model("gemma3")), "decode")
    for profile in (FusionProfile(epilogue), FusionProfile(None)):
        linears = [i for i in fuse(plan, profile).instructions if isinstance(i, Linear)]
        assert all(i.joined is None and i.outputs == i.targets for i in linears)


def test_halves_of_one_weight_are_a_gate_and_its_up_projection():
    model = make_model("phi3")
    plan = fuse(lower(read_spec(model), "decode"), FusionProfile(always))
    assert not any(isinstance(i, Glu) for i in plan.instructions)
    name = "model.layers.1.mlp.gate_up_proj"
    assert f"m1 = rms_norm+linear+silu_glu[{name}](r1)" in str(plan)
    model.model.layers[1].mlp.gate_up_proj.register_forward_hook(lambda *args: None)
    plan = fuse(lower(read_spec(model), "decode"), FusionProfile(always))
    assert f"gu1 = linear[{name}](y1)" in str(plan) and "m1 = silu_glu(gu1)" in str(plan)


def test_plan_of_gpt2_adds_positions_and_leaves_weights_where_they_are():
    model = make_model("gpt2")
    spec = read_spec(model)
    plan = fuse(lower(spec, "decode"), FusionProfile(always))
    assert [str(i) for i in plan.instructions[:3]] == [
        "h = embed[transformer.wte](ids)",
        "placed = h + embed[transformer.wpe](positions)",
        "x0 = layer_norm[transformer.h.0.ln_1](placed)",
    ]
    # Their weights lie along the output features, which no kernel of ours reads.
    linears = [i for i in plan.instructions if isinstance(i, Linear)]
    assert not any(i.activation or i.residual for i in linears)
    module = model.transformer.h[1].attn.c_attn
    held = held_linear(module)
    assert held.weight.shape == (3 * 48, 48)
    assert held.weight.data_ptr() == module.weight.data_ptr()


def test_plan_of_opt_350m_norms_the_sums():
    plan = lower(read_spec(make_model("opt-350m")), "decode")
    prefix = "model.decoder.layers.1"
    assert [str(i) for i in plan.instructions if i.targets[0] in ("wide", "placed", "narrow")] == [
        "wide = linear[model.decoder.project_in](h)",
        "placed = wide + embed[model.decoder.embed_positions](positions + 2)",
        "narrow = linear[model.decoder.project_out](hn1)",
    ]
    assert [str(i) for i in plan.instructions if i.targets[0] in ("r1", "rn1", "h1", "hn1")] == [
        "r1 = hn0 + o1",
        f"rn1 = layer_norm[{prefix}.self_attn_layer_norm](r1)",
        "h1 = rn1 + d1",
        f"hn1 = layer_norm[{prefix}.final_layer_norm](h1)",
    ]


def test_linears_of_falcon_are_kernels_unless_they_round_before_a_bias():
    for name, folds in (("falcon", True), ("falcon-rw", False)):
        plan = fuse(lower(read_spec(make_model(name)), "decode"), FusionProfile(always))
        down = next(i for i in plan.instructions if "0.mlp.dense_4h_to_h" in str(i))
        assert isinstance(down, Linear) and (down.residual is not None) == folds


def test_large_batch_plan_adds_within_the_norm():
    spec = read_spec(make_model("llama"))
    plan = fuse(lower(spec, "decode"), FusionProfile(None))
    norms = [i for i in plan.instructions if isinstance(i, Norm)]
    assert sum(norm.residual is not None for norm in norms) == len(norms) - 1
    assert not any(isinstance(i, Add) for i in plan.instructions)


def test_between_few_and_many_rows_each_layer_is_fused_where_that_pays():
    spec = read_spec(make_model("llama"))
    inner = spec.layers[0].mlp.inputs[0].ref.module.weight.shape[0]
    asked = set()

    def pays(shape, gated):
        asked.add((shape, gated))
        return "all" if gated else "none"

    plan = fuse(lower(spec, "decode"), FusionProfile(pays))
    linears = [i for i in plan.instructions if isinstance(i, Linear)]
    glus = [i for i in linears if i.gated]
    assert len(glus) == 2 and all(i.norm is not None for i in glus)
    assert not any(i.norm or i.residual for i in linears if not i.gated)
    hidden = spec.embedding.module.weight.shape[1]
    assert ((2 * inner, hidden), True) in asked and ((hidden, inner), False) in asked


def epilogue(shape, gated):
    """Take in what follows each layer and leave the norm before it, as at many rows."""
    return "epilogue"


def test_many_rows_plan_of_llama_has_a_kernel_for_each_group_of_linears_and_for_each_norm():
    plan = fuse(lower(read_spec(make_model("llama")), "decode"), FusionProfile(epilogue))
    # embed, one rotary table, seven a layer, last norm, head
    assert len(plan.instructions) == 2 + 7 * 2 + 2
    layer = [i for i in plan.instructions if "model.layers.1." in str(i)]
    assert [type(i) for i in layer if isinstance(i, Linear | Norm)] == [
        *(Norm, Linear, Linear),
        *(Norm, Linear, Linear),
    ]
    linears = [i for i in plan.instructions if isinstance(i, Linear)]
    assert all(i.one_kernel and i.norm is None for i in linears)
    qkv, o, gate_up, down = [i for i in layer if isinstance(i, Linear)]
    assert len(qkv.targets) == 3 and gate_up.gated and o.residual and down.residual


def test_weights_that_tile_copies_cannot_read_are_left_to_torch():
    model = make_model("llama")
    linear = model.model.layers[0].self_attn.v_proj
    moved = torch.empty(linear.weight.numel() + 1)[1:].view_as(linear.weight)
    linear.weight.data = moved.copy_(linear.weight.data)
    plan = fuse(lower(read_spec(model), "decode"), FusionProfile(epilogue))
    first = next(i for i in plan.instructions if isinstance(i, Linear))
    assert len(first.parts) == 3 and not first.one_kernel


@pytest.mark.parametrize("name", _CONFIGS)
def test_the_plan_for_many_rows_gives_the_models_own_logits(name, monkeypatch):
    monkeypatch.setattr(step, "fuse", lambda plan, profile: fuse(plan, FusionProfile(epilogue)))
    model = make_model(name)
    ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[:, 14:-1]
    got = run_steps(model, read_spec(model), ids, 15, fuse_linears=None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "want"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)]
)
def test_rows_that_round_up_alike_share_a_plan(num_rows, want, monkeypatch):
    model = make_model("llama")
    decoder = DecoderStep(model, read_spec(model))
    monkeypatch.setattr(DecoderStep, "device", torch.device("cuda"))
    assert decoder._fused_rows("decode", num_rows) == want
    assert decoder._fused_rows("decode", 257) == 0
    assert decoder._fused_rows("prefill", num_rows) == 0


@pytest.mark.parametrize("fuse_linears", [False, True], ids=["generic", "fused"])
def test_norms_that_are_kept_in_float32_stay_in_the_plan(fuse_linears):
    torch.manual_seed(0)
    everyone = {"num_local_experts": 4, "num_experts_per_tok": 4}
    config = GptOssConfig(**_DIMS, **_BOTH, **everyone, head_dim=16)
    exact = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    low = copy.deepcopy(exact).to(torch.bfloat16)
    for name, module in low.named_modules():
        if "norm" in name:
            module.float()
    ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = exact(ids).logits[:, 14:-1]
        theirs = low(ids).logits[:, 14:-1].float() - expected
    spec = read_spec(low)
    plan = fuse(lower(spec, "decode"), FusionProfile(always if fuse_linears else None))
    assert ("rms_norm+linear[model.layers.1.self_attn.q_proj" in str(plan)) == fuse_linears
    ours = run_steps(low, spec, ids, 15, fuse_linears=fuse_linears).float() - expected
    assert ours.pow(2).mean().sqrt() <= 1.25 * theirs.pow(2).mean().sqrt()


def test_experts_add_the_residual_and_the_shared_expert():
    plan = fuse(lower(read_spec(make_model("mixtral")), "decode"), FusionProfile(always))
    layer = [str(i) for i in plan.instructions if i.targets[0] in ("r1", "y1", "w1", "h1")]
    names = "model.layers.1"
    assert layer == [
        f"r1 = linear+add[{names}.self_attn.o_proj](a1, h0)",
        f"y1 = rms_norm[{names}.post_attention_layernorm](r1)",
        f"w1, e1 = route[{names}.mlp.gate: 2 of 5, softmax, normalised](y1)",
        f"h1 = experts+add[{names}.mlp.experts: 5x80, silu](y1, w1, e1, r1)",
    ]
    plan = fuse(lower(read_spec(make_model("qwen2_moe")), "decode"), FusionProfile(always))
    assert "f0 = experts+add[model.layers.0.mlp.experts: 5x24, silu](y0, w0, e0, s0)" in str(plan)
    assert "s0 = sigmoid(sg0) * ds0" in str(plan)


def test_a_hooked_linear_stays_out_of_the_fusions_and_is_called():
    model = make_model("llama")
    calls = []
    hooked = model.model.layers[1].mlp.down_proj
    hooked.register_forward_hook(lambda m, args, out: calls.append(out.shape) or out * 2)
    spec = read_spec(model)
    plan = fuse(lower(spec, "decode"), FusionProfile(always))
    touching = [
        i
        for i in plan.instructions
        if isinstance(i, Linear) and any(part.ref.module is hooked for part in i.parts)
    ]
    assert len(touching) == 1 and touching[0].residual is None
    ids = torch.randint(97, (1, 20))
    with torch.no_grad():
        expected = model(ids).logits[:, 9:-1]
        calls.clear()
        got = run_steps(model, spec, ids, 10, fuse_linears=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == got.shape[1]


def test_a_plan_prints_one_line_an_instruction():
    spec = read_spec(make_model("gemma2"))
    plan = lower(spec, "prefill")
    lines = str(plan).splitlines()
    assert len(lines) == len(plan.instructions)
    assert lines[0].startswith("h = embed[model.embed_tokens](ids) * 6.9")
    assert "window=8, softcap=50" in str(plan)
    assert lines[-1].startswith("logits_out = transform(logits")


def test_a_multiplier_on_embeddings_counts_for_given_ones_too():
    model = make_model("granite")
    plan = lower(read_spec(model), "prefill")
    assert str(plan).startswith("h = embed[model.embed_tokens](ids) * 3\n")
    ids = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits[:, 9:10]
    core = EngineCore(DecoderStep(model, read_spec(model)), Config(), 128)
    positions = torch.arange(10, dtype=torch.int32)
    given = model.model.embed_tokens(ids[0, :10]).detach()
    prompts = PackedPrompts((10,), None, given, positions, positions[-1:])
    with torch.no_grad(), BatchRun(core, prompts, BatchLimits(2), lag=0) as run:
        got = run.prefill().clone()
    torch.testing.assert_close(got[:, None], expected, rtol=1e-4, atol=1e-4)
