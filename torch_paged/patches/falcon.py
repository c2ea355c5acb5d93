"""Falcon: three layouts of q, k and v, blocks in parallel or in turn."""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch

from torch_paged.decoder.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from torch_paged.patches.parts import activation_of, layer_norm, linear, ref
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.rotary import rotary


def read_falcon(model: Any) -> DecoderSpec:
    """Read a FalconForCausalLM, with rotary embeddings or with ALiBi rounded to bfloat16."""
    config = model.config
    if config.new_decoder_architecture and not config.parallel_attn:
        raise SpecRefusal("new_decoder_architecture=True with parallel_attn=False does not run")
    slopes = _slopes(model) if config.alibi else ()
    layers = tuple(_read_layer(model, i, slopes) for i in range(config.num_hidden_layers))
    rotaries = () if slopes else (rotary(model, "transformer.rotary_emb", config),)
    return DecoderSpec(
        family="falcon",
        embedding=ref(model, "transformer.word_embeddings"),
        layers=layers,
        final_norm=layer_norm(model, "transformer.ln_f"),
        head=linear(model, "lm_head", config.hidden_size, config.vocab_size),
        rotaries=rotaries,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        cache_repeats=_cache_repeats(config),
    )


def _cache_repeats(config: Any) -> int:
    """Return how often transformers' cache has each head of keys and values."""
    grouped = config.new_decoder_architecture
    return int(config.num_attention_heads // config.num_kv_heads) if grouped else 1


def _slopes(model: Any) -> tuple[float, ...]:
    """Return the slopes: transformers adds the biases twice in its eager attention, else once."""
    config = model.config
    if config._attn_implementation not in ("eager", "sdpa"):
        raise SpecRefusal(f"alibi=True under {config._attn_implementation!r} does not run")
    build = sys.modules[type(model).__module__].build_alibi_tensor
    mask = torch.ones((1, 2), dtype=torch.long, device="cpu")
    biases = build(mask, config.num_attention_heads, torch.float32)
    times = 2 if config._attn_implementation == "eager" else 1
    return tuple((times * biases[:, 0, 1]).tolist())


def _read_layer(model: Any, index: int, slopes: tuple[float, ...]) -> LayerSpec:
    config, prefix = model.config, f"transformer.h.{index}"
    hidden, inner = config.hidden_size, config.ffn_hidden_size
    mlp = MlpSpec(
        inputs=(linear(model, f"{prefix}.mlp.dense_h_to_4h", hidden, inner),),
        output=linear(model, f"{prefix}.mlp.dense_4h_to_h", inner, hidden),
        activation=activation_of(config.activation),
        gated=False,
    )
    parallel = bool(config.parallel_attn)
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn == 2:
        before, between = "ln_attn", "ln_mlp"
    else:
        before, between = "input_layernorm", "" if parallel else "post_attention_layernorm"
    return LayerSpec(
        _read_attention(model, f"{prefix}.self_attention", slopes),
        mlp,
        input_norm=layer_norm(model, f"{prefix}.{before}"),
        mlp_norm=layer_norm(model, f"{prefix}.{between}") if between else None,
        parallel=parallel,
    )


def _read_attention(model: Any, name: str, slopes: tuple[float, ...]) -> AttentionSpec:
    config = model.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    layout: Literal["concat", "per_head"] = "per_head"
    kv_heads = heads
    if config.new_decoder_architecture:
        kv_heads = config.num_kv_heads
    elif config.multi_query:
        layout, kv_heads = "concat", 1
    dim = hidden // heads
    width = (heads + 2 * kv_heads) * dim
    return AttentionSpec(
        projections=(linear(model, f"{name}.query_key_value", hidden, width),),
        layout=layout,
        output=linear(model, f"{name}.dense", hidden, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        scale=float(model.get_submodule(name).inv_norm_factor),
        alibi=slopes,
        alibi_rounded=bool(slopes),
        rotary=None if slopes else 0,
    )
