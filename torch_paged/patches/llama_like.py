"""Families that share Llama's module tree, told apart by traits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from torch_paged.decoder.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModuleRef,
    NormSpec,
    RotarySpec,
)
from torch_paged.patches.refusal import SpecRefusal

# Rotary kinds whose frequencies do not depend on the length of the sequence.
STATIC_ROTARY = ("default", "linear", "llama3", "yarn")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Traits:
    """How a family departs from Llama.

    Attributes:
        norm_offset, cast_before_gain: see `NormSpec`.
        head_norms: names of the per-head q and k norms, or None.
        fused_qkv, fused_gate_up: one module holds these projections.
        sandwich: norms before and after both blocks, under Gemma's names.
        scaled_embedding: the embedding module multiplies by its `embed_scale`.
        window: where a layer's window is found: on the attention module, or in the config for
            every layer, or nowhere.
    """

    norm_offset: float = 0.0
    cast_before_gain: bool = True
    head_norms: tuple[str, str] | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    sandwich: bool = False
    scaled_embedding: bool = False
    window: Literal["module", "config", "none"] = "none"


def ref(model: nn.Module, name: str) -> ModuleRef:
    """Return the module of `model` at a dotted name."""
    return ModuleRef(name, model.get_submodule(name))


def linear(model: nn.Module, name: str, in_features: int, out_features: int) -> LinearSpec:
    return LinearSpec(ref(model, name), in_features, out_features)


def activation_of(name: object) -> Activation:
    """Translate a config's activation name; refuses the ones without a kernel."""
    if name not in _ACTIVATIONS:
        raise SpecRefusal(f"activation {name!r} has no kernel")
    return _ACTIVATIONS[str(name)]


def rms_norm(model: nn.Module, name: str, traits: Traits) -> NormSpec:
    module_ref = ref(model, name)
    module: Any = module_ref.module
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    if eps is None:
        raise SpecRefusal(f"{name} has no epsilon that is known here")
    return NormSpec(module_ref, "rms", float(eps), traits.norm_offset, traits.cast_before_gain)


def rotary(model: nn.Module, name: str, config: Any) -> RotarySpec:
    """Read a rotary module whose frequencies are static."""
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind not in STATIC_ROTARY:
        raise SpecRefusal(f"rotary type {kind!r} changes with the length of the sequence")
    module: Any = model.get_submodule(name)
    return RotarySpec(ModuleRef(name, module), "inv_freq", float(module.attention_scaling))


def read_llama_like(model: Any, family: str, traits: Traits) -> DecoderSpec:
    """Read `model.model.layers` and its neighbours."""
    config = model.config
    layers = tuple(_read_layer(model, index, traits) for index in range(config.num_hidden_layers))
    embedding = ref(model, "model.embed_tokens")
    scale = float(embedding.module.embed_scale) if traits.scaled_embedding else 1.0
    return DecoderSpec(
        family=family,
        embedding=embedding,
        layers=layers,
        final_norm=rms_norm(model, "model.norm", traits),
        head=linear(model, "lm_head", config.hidden_size, config.vocab_size),
        rotaries=(rotary(model, "model.rotary_emb", config),),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        embedding_scale=scale,
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def _read_layer(model: Any, index: int, traits: Traits) -> LayerSpec:
    prefix = f"model.layers.{index}"

    def norm(name: str) -> NormSpec:
        return rms_norm(model, f"{prefix}.{name}", traits)

    attention = _read_attention(model, f"{prefix}.self_attn", traits)
    mlp = _read_mlp(model, f"{prefix}.mlp", traits)
    if traits.sandwich:
        return LayerSpec(
            attention,
            mlp,
            input_norm=norm("input_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            post_attention_norm=norm("post_attention_layernorm"),
            post_mlp_norm=norm("post_feedforward_layernorm"),
        )
    return LayerSpec(
        attention,
        mlp,
        input_norm=norm("input_layernorm"),
        mlp_norm=norm("post_attention_layernorm"),
    )


def _read_attention(model: Any, name: str, traits: Traits) -> AttentionSpec:
    config, module = model.config, model.get_submodule(name)
    hidden, heads, kv_heads = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    dim = module.head_dim
    if traits.fused_qkv:
        width = (heads + 2 * kv_heads) * dim
        projections: tuple[LinearSpec, ...] = (linear(model, f"{name}.qkv_proj", hidden, width),)
    else:
        projections = (
            linear(model, f"{name}.q_proj", hidden, heads * dim),
            linear(model, f"{name}.k_proj", hidden, kv_heads * dim),
            linear(model, f"{name}.v_proj", hidden, kv_heads * dim),
        )
    norms = traits.head_norms
    return AttentionSpec(
        projections=projections,
        layout="concat" if traits.fused_qkv else "separate",
        output=linear(model, f"{name}.o_proj", heads * dim, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        scale=float(module.scaling),
        rotary=0,
        window=_window(module, config, traits),
        softcap=float(getattr(module, "attn_logit_softcapping", None) or 0.0),
        q_norm=rms_norm(model, f"{name}.{norms[0]}", traits) if norms else None,
        k_norm=rms_norm(model, f"{name}.{norms[1]}", traits) if norms else None,
    )


def _window(module: Any, config: Any, traits: Traits) -> int:
    if traits.window == "none":
        return 0
    owner = module if traits.window == "module" else config
    return int(getattr(owner, "sliding_window", None) or 0)


def _read_mlp(model: Any, name: str, traits: Traits) -> MlpSpec:
    config = model.config
    hidden = config.hidden_size
    inner = config.intermediate_size
    activation = activation_of(
        getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    )
    if traits.fused_gate_up:
        inputs: tuple[LinearSpec, ...] = (
            linear(model, f"{name}.gate_up_proj", hidden, 2 * inner),
        )
    else:
        inputs = (
            linear(model, f"{name}.gate_proj", hidden, inner),
            linear(model, f"{name}.up_proj", hidden, inner),
        )
    return MlpSpec(inputs, linear(model, f"{name}.down_proj", inner, hidden), activation)
