"""GPT-NeoX: LayerNorm, one per-head qkv module, optional parallel residual, plain MLP."""

from __future__ import annotations

from typing import Any

from torch_paged.decoder.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
)
from torch_paged.patches.parts import activation_of, layer_norm, linear, ref
from torch_paged.patches.rotary import rotary


def read_gpt_neox(model: Any) -> DecoderSpec:
    """Read a GPTNeoXForCausalLM."""
    config = model.config
    return DecoderSpec(
        family="gpt_neox",
        embedding=ref(model, "gpt_neox.embed_in"),
        layers=tuple(_read_layer(model, i) for i in range(config.num_hidden_layers)),
        final_norm=layer_norm(model, "gpt_neox.final_layer_norm"),
        head=linear(model, "lm_head", config.hidden_size, config.vocab_size),
        rotaries=(rotary(model, "gpt_neox.rotary_emb", config),),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def _read_layer(model: Any, index: int) -> LayerSpec:
    config = model.config
    prefix = f"gpt_neox.layers.{index}"
    hidden, inner, heads = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
    )
    attention = AttentionSpec(
        projections=(linear(model, f"{prefix}.attention.query_key_value", hidden, 3 * hidden),),
        layout="per_head",
        output=linear(model, f"{prefix}.attention.dense", hidden, hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        v_head_dim=hidden // heads,
        scale=float(model.get_submodule(f"{prefix}.attention").scaling),
        rotary=0,
    )
    mlp = MlpSpec(
        inputs=(linear(model, f"{prefix}.mlp.dense_h_to_4h", hidden, inner),),
        output=linear(model, f"{prefix}.mlp.dense_4h_to_h", inner, hidden),
        activation=activation_of(config.hidden_act),
        gated=False,
    )
    return LayerSpec(
        attention,
        mlp,
        input_norm=layer_norm(model, f"{prefix}.input_layernorm"),
        mlp_norm=layer_norm(model, f"{prefix}.post_attention_layernorm"),
        parallel=bool(config.use_parallel_residual),
    )
