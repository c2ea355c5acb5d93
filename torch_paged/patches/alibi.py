"""Families that take a share of the distance off the scores: BLOOM and MPT."""

from __future__ import annotations

from typing import Any

import torch

from torch_paged.decoder.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
)
from torch_paged.patches.parts import layer_norm, linear, ref
from torch_paged.patches.refusal import SpecRefusal


def _mlp(model: Any, names: tuple[str, str], hidden: int, activation: Activation) -> MlpSpec:
    """Read an MLP four times as wide as the stream."""
    up, down = names
    return MlpSpec(
        inputs=(linear(model, up, hidden, 4 * hidden),),
        output=linear(model, down, 4 * hidden, hidden),
        activation=activation,
        gated=False,
    )


def read_bloom(model: Any) -> DecoderSpec:
    """Read a BloomForCausalLM.

    Its biases count tokens from the first one that the mask shows, so they differ from those of
    the distance by a number for each row, and softmax does not see that.
    """
    config = model.config
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise SpecRefusal("slow_but_exact=True with pretraining_tp > 1 leaves biases out")
    mask = torch.ones((1, 2), dtype=torch.long, device="cpu")
    biases = model.transformer.build_alibi_tensor(mask, config.n_head, torch.float32)
    slopes = tuple(biases[:, 0, 1].tolist())
    layers = (_read_bloom_layer(model, i, slopes) for i in range(config.num_hidden_layers))
    return DecoderSpec(
        family="bloom",
        embedding=ref(model, "transformer.word_embeddings"),
        layers=tuple(layers),
        final_norm=layer_norm(model, "transformer.ln_f"),
        head=linear(model, "lm_head", config.hidden_size, config.vocab_size),
        rotaries=(),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        embedding_norm=layer_norm(model, "transformer.word_embeddings_layernorm"),
    )


def _read_bloom_layer(model: Any, index: int, slopes: tuple[float, ...]) -> LayerSpec:
    config, prefix = model.config, f"transformer.h.{index}"
    hidden, heads = config.hidden_size, config.n_head
    attention = AttentionSpec(
        projections=(
            linear(model, f"{prefix}.self_attention.query_key_value", hidden, 3 * hidden),
        ),
        layout="per_head",
        output=linear(model, f"{prefix}.self_attention.dense", hidden, hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        v_head_dim=hidden // heads,
        scale=float(model.get_submodule(f"{prefix}.self_attention").inv_norm_factor),
        alibi=slopes,
        rotary=None,
    )
    names = (f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h")
    return LayerSpec(
        attention,
        _mlp(model, names, hidden, "gelu_tanh"),
        input_norm=layer_norm(model, f"{prefix}.input_layernorm"),
        mlp_norm=layer_norm(model, f"{prefix}.post_attention_layernorm"),
        adds_to_normed=bool(config.apply_residual_connection_post_layernorm),
    )


def read_mpt(model: Any) -> DecoderSpec:
    """Read an MptForCausalLM, as transformers computes it.

    That is ALiBi whatever its `attn_config` says, with slopes up to 8. Its biases end at
    `max_seq_len`, and count columns: those that a mask hides between two tokens, too.
    """
    config = model.config
    biases = model.transformer.build_mpt_alibi_tensor(config.n_heads, 2)
    slopes = tuple((-biases[:, 0, 0]).tolist())
    layers = (_read_mpt_layer(model, i, slopes) for i in range(config.n_layers))
    return DecoderSpec(
        family="mpt",
        embedding=ref(model, "transformer.wte"),
        layers=tuple(layers),
        final_norm=layer_norm(model, "transformer.norm_f"),
        head=linear(model, "lm_head", config.hidden_size, config.vocab_size),
        rotaries=(),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_seq_len,
        counts_columns=True,
    )


def _read_mpt_layer(model: Any, index: int, slopes: tuple[float, ...]) -> LayerSpec:
    config, prefix = model.config, f"transformer.blocks.{index}"
    hidden, heads = config.hidden_size, config.n_heads
    module = model.get_submodule(f"{prefix}.attn")
    attention = AttentionSpec(
        projections=(linear(model, f"{prefix}.attn.Wqkv", hidden, 3 * hidden),),
        layout="concat",
        output=linear(model, f"{prefix}.attn.out_proj", hidden, hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        v_head_dim=hidden // heads,
        scale=float(module.softmax_scale),
        alibi=slopes,
        clip=float(module.clip_qkv or 0.0),
        rotary=None,
    )
    names = (f"{prefix}.ffn.up_proj", f"{prefix}.ffn.down_proj")
    return LayerSpec(
        attention,
        _mlp(model, names, hidden, "gelu"),
        input_norm=layer_norm(model, f"{prefix}.norm_1"),
        mlp_norm=layer_norm(model, f"{prefix}.norm_2"),
    )
