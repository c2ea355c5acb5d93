"""Reading of families that share Llama's module tree, told apart by traits."""

from __future__ import annotations

from typing import Any

from torch_paged.decoder.slots import override_reason
from torch_paged.decoder.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModuleRef,
    NormSpec,
    OpaqueMlpSpec,
    RotarySpec,
)
from torch_paged.patches.experts import has_experts, read_experts
from torch_paged.patches.latent import read_latent_attention
from torch_paged.patches.parts import activation_of, linear, norm, ref
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.rotary import rotaries
from torch_paged.patches.seams import is_output_capturing_hook
from torch_paged.patches.traits import Traits


def read_llama_like(model: Any, family: str, traits: Traits) -> DecoderSpec:
    """Read `model.model.layers` and its neighbours."""
    config = model.config
    for name in traits.absent:
        if getattr(config, name, None):
            raise SpecRefusal(f"{name}={getattr(config, name)!r} has no fused form")
    tables = rotaries(model, "model.rotary_emb", config)
    kinds = list(tables)
    layers = []
    for index in range(config.num_hidden_layers):
        table = 0 if "" in tables else kinds.index(config.layer_types[index])
        layers.append(_read_layer(model, index, table, traits))
    embedding = ref(model, "model.embed_tokens")
    return DecoderSpec(
        family=family,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=norm(model, traits.final_norm, traits),
        head=linear(model, "lm_head", config.hidden_size, config.vocab_size),
        rotaries=tuple(tables.values()),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        embedding_scale=_embedding_scale(embedding.module) if traits.scaled_embedding else 1.0,
        embedding_multiplier=float(config.embedding_multiplier) if traits.multipliers else 1.0,
        logit_scale=_logit_scale(config, traits),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        recompute_length=_recompute_length(config, traits, tables),
    )


def _embedding_scale(module: Any) -> float:
    """Return the factor in the dtype of the table, as the module itself rounds it."""
    return float(module.embed_scale.to(module.weight.dtype))


def _recompute_length(config: Any, traits: Traits, tables: dict[str, RotarySpec]) -> int:
    # With frequencies that stay, it would compute the same once more.
    if not traits.recomputes or all(table.change is None for table in tables.values()):
        return 0
    return int(getattr(config, "original_max_position_embeddings", None) or 0)


def _logit_scale(config: Any, traits: Traits) -> float:
    divisor = "logits_scaling" if traits.multipliers else traits.hidden_divisor
    if divisor is not None:
        return 1.0 / float(getattr(config, divisor))
    return float(getattr(config, "logit_scale", None) or 1.0)


def _read_layer(model: Any, index: int, table: int, traits: Traits) -> LayerSpec:
    prefix = f"model.layers.{index}"
    config, names = model.config, traits.norms
    parallel = traits.parallel
    if parallel is None:
        parallel = bool(config.use_parallel_residual)

    def named(name: str | None) -> NormSpec | None:
        return None if name is None else norm(model, f"{prefix}.{name}", traits)

    read = _read_attention if traits.latent is None else read_latent_attention
    mlp = _read_feed_forward(model, prefix, traits)
    within = names.post_mlp is not None and "." in names.post_mlp
    if within and not isinstance(mlp, ExpertsSpec):
        # A plain MLP has none, and a block that is called has it within.
        names = names._replace(post_mlp=None)
    return LayerSpec(
        read(model, f"{prefix}.self_attn", table, traits),
        mlp,
        input_norm=named(names.input),
        mlp_norm=None if parallel else named(names.mlp),
        post_attention_norm=named(names.post_attention),
        post_mlp_norm=named(names.post_mlp),
        parallel=parallel,
        residual_multiplier=_residual_multiplier(model.get_submodule(prefix), config, traits),
    )


def _residual_multiplier(layer: Any, config: Any, traits: Traits) -> float:
    if traits.residual_scale is not None:
        return float(getattr(layer, traits.residual_scale))
    return float(config.residual_multiplier) if traits.multipliers else 1.0


def _read_attention(model: Any, name: str, table: int, traits: Traits) -> AttentionSpec:
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
    window = _window(module, config, traits)
    return AttentionSpec(
        projections=projections,
        layout="concat" if traits.fused_qkv else "separate",
        output=linear(model, f"{name}.{traits.output}", heads * dim, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        scale=float(module.scaling),
        rotary=table if _has_rotary(module, window, traits) else None,
        interleaved=traits.interleaved,
        window=window,
        softcap=float(getattr(module, "attn_logit_softcapping", None) or 0.0),
        q_norm=norm(model, f"{name}.{norms[0]}", traits) if norms else None,
        k_norm=norm(model, f"{name}.{norms[1]}", traits) if norms else None,
        qk_norm_full=traits.head_norms_full,
        sinks=None if traits.sinks is None else (_plain_ref(model, name), traits.sinks),
    )


def _plain_ref(model: Any, name: str) -> ModuleRef:
    """Return a module that only its parameters are taken of; its own forward must not matter."""
    found = ref(model, name)
    reason = override_reason(found.module, ignore_hook=is_output_capturing_hook)
    if reason:
        raise SpecRefusal(f"{name} cannot be bypassed: {reason}")
    return found


def _window(module: Any, config: Any, traits: Traits) -> int:
    if traits.window == "none":
        return 0
    owner = module if traits.window == "module" else config
    return int(getattr(owner, "sliding_window", None) or 0)


def _has_rotary(module: Any, window: int, traits: Traits) -> bool:
    if traits.rotary_layers == "use_rope":
        return bool(module.use_rope)
    return traits.rotary_layers == "all" or window > 0


def _read_feed_forward(
    model: Any, layer: str, traits: Traits
) -> MlpSpec | ExpertsSpec | OpaqueMlpSpec:
    config, names = model.config, traits.experts
    activation = activation_of(
        getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    )
    if names is not None and has_experts(model, layer, names):
        return read_experts(model, layer, names, activation)
    return _read_mlp(model, f"{layer}.mlp", traits, activation)


def _read_mlp(model: Any, name: str, traits: Traits, activation: Activation) -> MlpSpec:
    config, names = model.config, traits.mlp
    hidden = config.hidden_size
    inner = config.intermediate_size
    width = inner if len(names.inputs) == 2 or not names.gated else 2 * inner
    inputs = tuple(linear(model, f"{name}.{part}", hidden, width) for part in names.inputs)
    output = linear(model, f"{name}.{names.output}", inner, hidden)
    return MlpSpec(inputs, output, activation, names.gated)
