"""The table of families: the exact class a row was written for, and how to read it.

Types that share a module tree do not share its arithmetic, so rows match the class itself; a
subclass, or a class of the same name from elsewhere, has no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from torch_paged.decoder.slots import (
    hook_dicts,
    is_gradient_hook,
    is_replaced_on_class,
    override_reason,
)
from torch_paged.decoder.spec import DecoderSpec
from torch_paged.decoder.watch import spec_modules
from torch_paged.patches.alibi import read_bloom, read_mpt
from torch_paged.patches.falcon import read_falcon
from torch_paged.patches.gpt_neox import read_gpt_neox
from torch_paged.patches.gptj import read_codegen, read_gptj
from torch_paged.patches.learned_positions import read_gpt2, read_gpt_bigcode, read_opt
from torch_paged.patches.llama_like import read_llama_like
from torch_paged.patches.multimodal import WRAPPERS, is_around, read_multimodal, text_models
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import global_forward_hooks, is_output_capturing_hook
from torch_paged.patches.traits import (
    GEMMA_NORMS,
    GLM4_NORMS,
    PACKED_MLP,
    PLAIN_MLP,
    POST_NORMS,
    PRE_NORMS,
    SHARED_NORM,
    ExpertsNames,
    MlpNames,
    NormNames,
    Traits,
)

Reader = Callable[[Any], DecoderSpec]

# How the reason begins for a class without a row.
NO_ROW = "no fused decoder for"

_GEMMA = Traits(
    norm_offset=1.0,
    cast_before_gain=False,
    scaled_embedding=True,
    absent=("use_bidirectional_attention",),
)
_GEMMA2 = replace(_GEMMA, norms=GEMMA_NORMS, window="module")
_OLMO2 = Traits(
    cast_before_gain=False,
    norms=POST_NORMS,
    head_norms=("q_norm", "k_norm"),
    head_norms_full=True,
)
_COHERE = Traits(
    norm_kind="layer",
    norms=SHARED_NORM,
    parallel=True,
    interleaved=True,
    absent=("use_qk_norm",),
)
_GLM = Traits(mlp=PACKED_MLP, interleaved=True)
_SQUARED_RELU = Traits(norm_kind="layer", mlp=PLAIN_MLP)

_GRANITE_EXPERTS = ExpertsNames(
    "block_sparse_moe", "router", scoring="topk_softmax", normalise=False
)
_SHARED_GRANITE_EXPERTS = _GRANITE_EXPERTS._replace(
    shared="shared_mlp", shared_mlp=MlpNames(("input_linear",), "output_linear")
)
_SOFTMAX_EXPERTS = ExpertsNames()
_SIGMOID_EXPERTS = ExpertsNames(
    scoring="sigmoid",
    correction="e_score_correction_bias",
    float_logits=True,
    float_weights=True,
    group_best=2,
    shared="mlp.shared_experts",
)

_LATENT = Traits(latent="config", experts=_SIGMOID_EXPERTS)

# (module under transformers.models, class) -> how it departs from Llama
LLAMA_LIKE: dict[tuple[str, str], Traits] = {
    ("llama.modeling_llama", "LlamaForCausalLM"): Traits(),
    ("mistral.modeling_mistral", "MistralForCausalLM"): Traits(window="config"),
    ("ministral.modeling_ministral", "MinistralForCausalLM"): Traits(window="module"),
    ("qwen2.modeling_qwen2", "Qwen2ForCausalLM"): Traits(window="module"),
    ("qwen3.modeling_qwen3", "Qwen3ForCausalLM"): Traits(
        head_norms=("q_norm", "k_norm"), window="module"
    ),
    ("gemma.modeling_gemma", "GemmaForCausalLM"): _GEMMA,
    ("gemma2.modeling_gemma2", "Gemma2ForCausalLM"): _GEMMA2,
    ("gemma3.modeling_gemma3", "Gemma3ForCausalLM"): replace(
        _GEMMA2, head_norms=("q_norm", "k_norm"), caps_scores=False
    ),
    ("vaultgemma.modeling_vaultgemma", "VaultGemmaForCausalLM"): replace(
        _GEMMA2, norms=NormNames("input_layernorm", "pre_feedforward_layernorm")
    ),
    ("phi.modeling_phi", "PhiForCausalLM"): Traits(
        norm_kind="layer",
        norms=SHARED_NORM,
        final_norm="final_layernorm",
        parallel=True,
        output="dense",
        mlp=MlpNames(("fc1",), "fc2", gated=False),
        absent=("qk_layernorm",),
    ),
    ("phi3.modeling_phi3", "Phi3ForCausalLM"): Traits(
        fused_qkv=True, mlp=PACKED_MLP, window="config", recomputes=True
    ),
    ("starcoder2.modeling_starcoder2", "Starcoder2ForCausalLM"): Traits(
        norm_kind="layer", mlp=MlpNames(("c_fc",), "c_proj", gated=False), window="config"
    ),
    ("stablelm.modeling_stablelm", "StableLmForCausalLM"): Traits(
        norm_kind="layer", parallel=None, absent=("qk_layernorm",)
    ),
    ("granite.modeling_granite", "GraniteForCausalLM"): Traits(multipliers=True),
    ("olmo.modeling_olmo", "OlmoForCausalLM"): Traits(
        norm_kind="layer", norm_eps=1e-5, absent=("clip_qkv",)
    ),
    ("olmo2.modeling_olmo2", "Olmo2ForCausalLM"): _OLMO2,
    ("olmo3.modeling_olmo3", "Olmo3ForCausalLM"): replace(_OLMO2, window="module"),
    ("smollm3.modeling_smollm3", "SmolLM3ForCausalLM"): Traits(
        rotary_layers="use_rope", window="module"
    ),
    ("seed_oss.modeling_seed_oss", "SeedOssForCausalLM"): Traits(),
    ("cwm.modeling_cwm", "CwmForCausalLM"): Traits(window="module"),
    ("ernie4_5.modeling_ernie4_5", "Ernie4_5ForCausalLM"): Traits(interleaved=True),
    ("helium.modeling_helium", "HeliumForCausalLM"): Traits(
        cast_before_gain=False, interleaved=True
    ),
    ("glm.modeling_glm", "GlmForCausalLM"): _GLM,
    ("glm4.modeling_glm4", "Glm4ForCausalLM"): replace(_GLM, norms=GLM4_NORMS),
    ("cohere.modeling_cohere", "CohereForCausalLM"): _COHERE,
    ("cohere2.modeling_cohere2", "Cohere2ForCausalLM"): replace(
        _COHERE, rotary_layers="windowed", window="module"
    ),
    ("arcee.modeling_arcee", "ArceeForCausalLM"): Traits(mlp=PLAIN_MLP),
    ("jais2.modeling_jais2", "Jais2ForCausalLM"): _SQUARED_RELU,
    ("nemotron.modeling_nemotron", "NemotronForCausalLM"): replace(_SQUARED_RELU, norm_offset=1.0),
    ("mixtral.modeling_mixtral", "MixtralForCausalLM"): Traits(
        window="config", experts=ExpertsNames(normalise=True, float_weights=True)
    ),
    ("qwen2_moe.modeling_qwen2_moe", "Qwen2MoeForCausalLM"): Traits(
        window="module",
        experts=ExpertsNames(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
    ),
    ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeForCausalLM"): Traits(
        head_norms=("q_norm", "k_norm"), window="module", experts=_SOFTMAX_EXPERTS
    ),
    ("olmoe.modeling_olmoe", "OlmoeForCausalLM"): Traits(
        head_norms=("q_norm", "k_norm"),
        head_norms_full=True,
        experts=_SOFTMAX_EXPERTS,
        absent=("clip_qkv",),
    ),
    ("flex_olmo.modeling_flex_olmo", "FlexOlmoForCausalLM"): replace(
        _OLMO2, experts=_SOFTMAX_EXPERTS
    ),
    ("mellum.modeling_mellum", "MellumForCausalLM"): Traits(
        head_norms=("q_norm", "k_norm"), window="module", experts=_SOFTMAX_EXPERTS
    ),
    ("gpt_oss.modeling_gpt_oss", "GptOssForCausalLM"): Traits(
        cast_before_gain=False,
        window="module",
        sinks="sinks",
        experts=ExpertsNames(
            router="router", scoring="topk_softmax", normalise=False, clamped=True
        ),
    ),
    ("granitemoe.modeling_granitemoe", "GraniteMoeForCausalLM"): Traits(
        multipliers=True, experts=_GRANITE_EXPERTS
    ),
    ("granitemoeshared.modeling_granitemoeshared", "GraniteMoeSharedForCausalLM"): Traits(
        multipliers=True, experts=_SHARED_GRANITE_EXPERTS
    ),
    ("dots1.modeling_dots1", "Dots1ForCausalLM"): Traits(
        head_norms=("q_norm", "k_norm"), window="module", experts=_SIGMOID_EXPERTS
    ),
    ("glm4_moe.modeling_glm4_moe", "Glm4MoeForCausalLM"): Traits(
        experts=_SIGMOID_EXPERTS, absent=("use_qk_norm",)
    ),
    ("ernie4_5_moe.modeling_ernie4_5_moe", "Ernie4_5_MoeForCausalLM"): Traits(
        interleaved=True,
        experts=ExpertsNames(
            normalise=True,
            correction="moe_statics.e_score_correction_bias",
            float_logits=True,
            shared="mlp.shared_experts",
        ),
    ),
    ("deepseek_v2.modeling_deepseek_v2", "DeepseekV2ForCausalLM"): Traits(
        latent="pairs",
        experts=ExpertsNames(
            normalise=False,
            float_logits=True,
            float_weights=True,
            group_best=1,
            shared="mlp.shared_experts",
        ),
    ),
    ("deepseek_v3.modeling_deepseek_v3", "DeepseekV3ForCausalLM"): _LATENT,
    ("glm4_moe_lite.modeling_glm4_moe_lite", "Glm4MoeLiteForCausalLM"): _LATENT,
    ("axk1.modeling_axk1", "AXK1ForCausalLM"): replace(
        _LATENT, norms=PRE_NORMS._replace(post_mlp="mlp.post_mlp_layernorm")
    ),
    ("youtu.modeling_youtu", "YoutuForCausalLM"): Traits(latent="config"),
    ("minicpm3.modeling_minicpm3", "MiniCPM3ForCausalLM"): Traits(
        latent="halves",
        scaled_embedding=True,
        residual_scale="residual_scale",
        hidden_divisor="logits_scaling",
    ),
}


def _llama_like(module: str, traits: Traits) -> Reader:
    return lambda model: read_llama_like(model, module.partition(".")[0], traits)


# (module under transformers.models, class) -> reader
FAMILIES: dict[tuple[str, str], Reader] = {
    **{key: _llama_like(key[0], traits) for key, traits in LLAMA_LIKE.items()},
    ("gpt_neox.modeling_gpt_neox", "GPTNeoXForCausalLM"): read_gpt_neox,
    ("gpt2.modeling_gpt2", "GPT2LMHeadModel"): read_gpt2,
    ("gpt_bigcode.modeling_gpt_bigcode", "GPTBigCodeForCausalLM"): read_gpt_bigcode,
    ("opt.modeling_opt", "OPTForCausalLM"): read_opt,
    ("bloom.modeling_bloom", "BloomForCausalLM"): read_bloom,
    ("mpt.modeling_mpt", "MptForCausalLM"): read_mpt,
    ("falcon.modeling_falcon", "FalconForCausalLM"): read_falcon,
    ("gptj.modeling_gptj", "GPTJForCausalLM"): read_gptj,
    ("codegen.modeling_codegen", "CodeGenForCausalLM"): read_codegen,
}
# Of models with images, the text models that can be read.
TEXT_MODELS = text_models(LLAMA_LIKE)


def is_multimodal(model: nn.Module) -> bool:
    """Say whether the table has the class of `model` as one that reads images."""
    return _key(type(model)) in WRAPPERS


def modules_beside(model: nn.Module) -> list[nn.Module]:
    """Return the modules that encode images, which the model itself calls."""
    text = WRAPPERS.get(_key(type(model)))
    return [m for name, m in model.named_modules() if text and not is_around(name, text)]


def _key(cls: type) -> tuple[str, str]:
    return cls.__module__.removeprefix("transformers.models."), cls.__name__


def read_spec(model: nn.Module) -> DecoderSpec:
    """Read `model` into a spec.

    Raises:
        SpecRefusal: no row for the class, or this instance departs from what its row says.
    """
    cls = type(model)
    key = _key(cls)
    reader, text = FAMILIES.get(key), WRAPPERS.get(key, "")
    if not (reader or text) or not cls.__module__.startswith("transformers.models."):
        raise SpecRefusal(f"{NO_ROW} {cls.__module__}.{cls.__qualname__}")
    try:
        spec = reader(model) if reader else read_multimodal(model, text, TEXT_MODELS)
    except AttributeError as error:
        raise SpecRefusal(f"its modules are not those of {cls.__qualname__}: {error}") from error
    _refuse_overridden_containers(model, spec)
    return spec


def _refuse_overridden_containers(model: nn.Module, spec: DecoderSpec) -> None:
    """Modules above the spec's own are not called, so nothing may hang there."""
    rotaries = {id(rotary.ref.module) for rotary in spec.rotaries}
    owned = [ref.module for ref in spec_modules(spec)]
    called = {id(module) for owner in owned for module in owner.modules()} - rotaries
    beside = {id(module) for module in modules_beside(model)}
    for name, module in model.named_modules():
        if id(module) in beside:
            continue
        reason = "" if id(module) in called else override_reason(module, is_output_capturing_hook)
        if is_replaced_on_class(type(module)):
            reason = "its forward is replaced on the class"
        if reason:
            raise SpecRefusal(f"{name or 'the model'} cannot be bypassed: {reason}")
    _refuse_foreign_attention(model, spec, rotaries)


def _refuse_foreign_attention(model: nn.Module, spec: DecoderSpec, rotaries: set[int]) -> None:
    """Classes of others may attend otherwise far into a text, where no self-test looks."""
    linears = {id(p.ref.module) for layer in spec.layers for p in layer.attention.linears}
    for name, module in model.named_modules():
        if id(module) in linears or (linears | rotaries).isdisjoint(map(id, module.modules())):
            continue
        cls = type(module)
        if cls.__module__.partition(".")[0] not in ("transformers", "torch"):
            raise SpecRefusal(f"{name} cannot be bypassed: it is a {cls.__qualname__}")


def hook_reason(model: nn.Module) -> str:
    """Say which module has a user's forward hook, or return "".

    A hook fires once per forward with the shapes of that forward; a replayed step would not call
    it, and packed prompts would show it other shapes.
    """
    if any(global_forward_hooks()):
        return "there are global forward hooks"
    beside = {id(module) for module in modules_beside(model)}
    for name, module in model.named_modules():
        if id(module) in beside:
            continue
        for hooks in hook_dicts(module):
            if not all(_is_harmless(hook) for hook in hooks.values()):
                return f"{name or 'the model'} has forward hooks"
    return ""


def _is_harmless(hook: object) -> bool:
    return is_output_capturing_hook(hook) or is_gradient_hook(hook)


def dropout_reason(model: nn.Module) -> str:
    """Say what would drop out, or draw random numbers, in training mode, or return ""."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0.0:
            return f"{name} applies dropout in training mode"
        # Many modules keep the rate and call the function.
        for key, rate in vars(module).items():
            random = "drop" in key or "jitter" in key
            if random and isinstance(rate, float) and rate > 0.0:
                return f"{name} applies {key} in training mode"
    return ""
