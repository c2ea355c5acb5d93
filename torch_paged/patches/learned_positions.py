"""Families with learned positions: GPT-2, GPTBigCode and OPT."""

from __future__ import annotations

from typing import Any, Literal

from torch_paged.decoder.slots import plain_slot
from torch_paged.decoder.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    PositionsSpec,
)
from torch_paged.patches.parts import (
    activation_of,
    layer_norm,
    linear,
    plain_ref,
    ref,
    refuse_set,
)
from torch_paged.patches.refusal import SpecRefusal


def _positions(model: Any, name: str, offset: int = 0) -> PositionsSpec:
    table = plain_ref(model, name)
    slot = plain_slot(table.module)
    if slot.kind != "fused":
        raise SpecRefusal(f"{name} cannot be read: {slot.why}")
    return PositionsSpec(table, offset)


def _num_positions(positions: PositionsSpec) -> int:
    return int(positions.ref.module.weight.shape[0]) - positions.offset


def read_gpt2(model: Any) -> DecoderSpec:
    """Read a GPT2LMHeadModel, whose projections are Conv1D: weights [in, out].

    Its `reorder_and_upcast_attn` is what our attention does in any case.
    """
    heads = model.config.num_attention_heads
    return _read_gpt2_like(model, "gpt2", "concat", heads)


def read_gpt_bigcode(model: Any) -> DecoderSpec:
    """Read a GPTBigCodeForCausalLM: GPT-2 with plain linears, and one kv head or all of them."""
    if model.config.multi_query:
        return _read_gpt2_like(model, "gpt_bigcode", "concat", 1)
    return _read_gpt2_like(model, "gpt_bigcode", "per_head", model.config.num_attention_heads)


def _read_gpt2_like(
    model: Any, family: str, layout: Literal["concat", "per_head"], kv_heads: int
) -> DecoderSpec:
    config = model.config
    refuse_set(config, "add_cross_attention")
    positions = _positions(model, "transformer.wpe")
    layers = (
        _read_gpt2_layer(model, f"transformer.h.{index}", layout, kv_heads)
        for index in range(config.num_hidden_layers)
    )
    return DecoderSpec(
        family=family,
        embedding=ref(model, "transformer.wte"),
        layers=tuple(layers),
        final_norm=layer_norm(model, "transformer.ln_f"),
        head=linear(model, "lm_head", config.hidden_size, config.vocab_size),
        rotaries=(),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        positions=positions,
        max_positions=_num_positions(positions),
    )


def _read_gpt2_layer(
    model: Any, prefix: str, layout: Literal["concat", "per_head"], kv_heads: int
) -> LayerSpec:
    config = model.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    inner, dim = config.n_inner or 4 * hidden, hidden // heads
    attention = AttentionSpec(
        projections=(linear(model, f"{prefix}.attn.c_attn", hidden, hidden + 2 * kv_heads * dim),),
        layout=layout,
        output=linear(model, f"{prefix}.attn.c_proj", hidden, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        scale=float(model.get_submodule(f"{prefix}.attn").scaling),
        rotary=None,
    )
    mlp = MlpSpec(
        inputs=(linear(model, f"{prefix}.mlp.c_fc", hidden, inner),),
        output=linear(model, f"{prefix}.mlp.c_proj", inner, hidden),
        activation=activation_of(config.activation_function),
        gated=False,
    )
    return LayerSpec(
        attention,
        mlp,
        input_norm=layer_norm(model, f"{prefix}.ln_1"),
        mlp_norm=layer_norm(model, f"{prefix}.ln_2"),
    )


def read_opt(model: Any) -> DecoderSpec:
    """Read an OPTForCausalLM: norms before the blocks or on the sums behind them."""
    config, decoder = model.config, model.model.decoder
    width, hidden = config.word_embed_proj_dim, config.hidden_size
    offset = int(decoder.embed_positions.offset)
    positions = _positions(model, "model.decoder.embed_positions", offset)
    final = decoder.final_layer_norm is not None

    def optional(name: str, in_features: int, out_features: int) -> LinearSpec | None:
        if getattr(decoder, name) is None:
            return None
        return linear(model, f"model.decoder.{name}", in_features, out_features)

    return DecoderSpec(
        family="opt",
        embedding=ref(model, "model.decoder.embed_tokens"),
        layers=tuple(_read_opt_layer(model, i) for i in range(config.num_hidden_layers)),
        final_norm=layer_norm(model, "model.decoder.final_layer_norm") if final else None,
        head=linear(model, "lm_head", width, config.vocab_size),
        rotaries=(),
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        project_in=optional("project_in", width, hidden),
        project_out=optional("project_out", hidden, width),
        positions=positions,
        max_positions=_num_positions(positions),
    )


def _read_opt_layer(model: Any, index: int) -> LayerSpec:
    config, prefix = model.config, f"model.decoder.layers.{index}"
    hidden, heads, inner = config.hidden_size, config.num_attention_heads, config.ffn_dim
    attention = AttentionSpec(
        projections=(
            linear(model, f"{prefix}.self_attn.q_proj", hidden, hidden),
            linear(model, f"{prefix}.self_attn.k_proj", hidden, hidden),
            linear(model, f"{prefix}.self_attn.v_proj", hidden, hidden),
        ),
        layout="separate",
        output=linear(model, f"{prefix}.self_attn.out_proj", hidden, hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        v_head_dim=hidden // heads,
        scale=float(model.get_submodule(f"{prefix}.self_attn").scaling),
        rotary=None,
    )
    mlp = MlpSpec(
        inputs=(linear(model, f"{prefix}.fc1", hidden, inner),),
        output=linear(model, f"{prefix}.fc2", inner, hidden),
        activation=activation_of(config.activation_function),
        gated=False,
    )
    norms = (
        layer_norm(model, f"{prefix}.self_attn_layer_norm"),
        layer_norm(model, f"{prefix}.final_layer_norm"),
    )
    if config.do_layer_norm_before:
        return LayerSpec(attention, mlp, input_norm=norms[0], mlp_norm=norms[1])
    return LayerSpec(attention, mlp, input_norm=None, mlp_norm=None, sum_norms=norms)
