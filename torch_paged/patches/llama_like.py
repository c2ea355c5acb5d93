"""Reading of families that share Llama's module tree, told apart by traits."""

from __future__ import annotations

from typing import Any

from torch_paged.decoder.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    NormSpec,
    OpaqueMlpSpec,
    RotarySpec,
)
from torch_paged.patches.experts import has_experts, read_experts
from torch_paged.patches.latent import read_latent_attention
from torch_paged.patches.parts import activation_of, linear, norm, plain_ref, ref, refuse_set
from torch_paged.patches.rotary import rotaries
from torch_paged.patches.traits import Traits


def read_llama_like(
    model: Any, family: str, traits: Traits, root: str = "model", config: Any = None
) -> DecoderSpec:
    """Read the layers of `model` below `root` and their neighbours.

    Args:
        config: of the text; None takes the model's.
    """
    config = model.config if config is None else config
    refuse_set(config, *traits.absent)
    tables = rotaries(model, f"{root}.rotary_emb", config)
    kinds = list(tables)
    layers = []
    for index in range(config.num_hidden_layers):
        table = 0 if "" in tables else kinds.index(config.layer_types[index])
        layers.append(_read_layer(model, f"{root}.layers.{index}", config, table, traits))
    embedding = ref(model, f"{root}.embed_tokens")
    return DecoderSpec(
        family=family,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=norm(model, f"{root}.{traits.final_norm}", traits),
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


def _read_layer(model: Any, prefix: str, config: Any, table: int, traits: Traits) -> LayerSpec:
    names, parallel = traits.norms, traits.parallel
    if parallel is None:
        parallel = bool(config.use_parallel_residual)

    def named(name: str | None) -> NormSpec | None:
        return None if name is None else norm(model, f"{prefix}.{name}", traits)

    read = _read_attention if traits.latent is None else read_latent_attention
    mlp = _read_feed_forward(model, prefix, config, traits)
    within = names.post_mlp is not None and "." in names.post_mlp
    if within and not isinstance(mlp, ExpertsSpec):
        # A plain MLP has none, and a block that is called has it within.
        names = names._replace(post_mlp=None)
    return LayerSpec(
        read(model, f"{prefix}.self_attn", config, table, traits),
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


def _read_attention(
    model: Any, name: str, config: Any, table: int, traits: Traits
) -> AttentionSpec:
    module: Any = model.get_submodule(name)
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
    softcap = getattr(module, "attn_logit_softcapping", None) if traits.caps_scores else None
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
        softcap=float(softcap or 0.0),
        q_norm=norm(model, f"{name}.{norms[0]}", traits) if norms else None,
        k_norm=norm(model, f"{name}.{norms[1]}", traits) if norms else None,
        qk_norm_full=traits.head_norms_full,
        sinks=None if traits.sinks is None else (plain_ref(model, name), traits.sinks),
    )


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
    model: Any, layer: str, config: Any, traits: Traits
) -> MlpSpec | ExpertsSpec | OpaqueMlpSpec:
    names = traits.experts
    activation = activation_of(
        getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    )
    if names is not None and has_experts(model, layer, names):
        return read_experts(model, layer, names, activation)
    return _read_mlp(model, f"{layer}.mlp", config, traits, activation)


def _read_mlp(
    model: Any, name: str, config: Any, traits: Traits, activation: Activation
) -> MlpSpec:
    names, hidden, inner = traits.mlp, config.hidden_size, config.intermediate_size
    width = inner if len(names.inputs) == 2 or not names.gated else 2 * inner
    inputs = tuple(linear(model, f"{name}.{part}", hidden, width) for part in names.inputs)
    output = linear(model, f"{name}.{names.output}", inner, hidden)
    return MlpSpec(inputs, output, activation, names.gated)
