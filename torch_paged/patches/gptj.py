"""GPT-J and CodeGen: attention and MLP behind one norm, rotary tables of all positions."""

from __future__ import annotations

from typing import Any, Literal

from torch_paged.decoder.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    RotaryLookup,
)
from torch_paged.patches.parts import activation_of, layer_norm, linear, plain_ref, ref
from torch_paged.patches.refusal import SpecRefusal

_TABLE = "embed_positions"


def read_gptj(model: Any) -> DecoderSpec:
    """Read a GPTJForCausalLM."""
    return _read(model, "gptj", "separate", ("q_proj", "k_proj", "v_proj"))


def read_codegen(model: Any) -> DecoderSpec:
    """Read a CodeGenForCausalLM."""
    if model.config.n_head % 4:
        raise SpecRefusal(f"n_head={model.config.n_head} is not a multiple of 4")
    return _read(model, "codegen", "quarters", ("qkv_proj",))


def _read(
    model: Any, family: str, layout: Literal["separate", "quarters"], names: tuple[str, ...]
) -> DecoderSpec:
    config = model.config
    if config.rotary_dim is None:
        raise SpecRefusal("rotary_dim=None has no fused form")
    tables = _rotary_tables(model)
    shared = len(tables) == 1
    layers = (
        _read_layer(model, index, 0 if shared else index, layout, names)
        for index in range(config.n_layer)
    )
    positions = {getattr(table.ref.module, _TABLE).shape[0] for table in tables}
    return DecoderSpec(
        family=family,
        embedding=ref(model, "transformer.wte"),
        layers=tuple(layers),
        final_norm=layer_norm(model, "transformer.ln_f"),
        head=linear(model, "lm_head", config.n_embd, config.vocab_size),
        rotaries=tables,
        hidden_size=config.n_embd,
        vocab_size=config.vocab_size,
        max_positions=min(positions),
    )


def _rotary_tables(model: Any) -> tuple[RotaryLookup, ...]:
    """Read the one table of the model, or that which each layer has in older releases."""
    owners = ["transformer.rotary_emb"]
    if not hasattr(model.transformer, "rotary_emb"):
        owners = [f"transformer.h.{index}.attn" for index in range(model.config.n_layer)]
    return tuple(RotaryLookup(plain_ref(model, owner), _TABLE) for owner in owners)


def _read_layer(
    model: Any,
    index: int,
    table: int,
    layout: Literal["separate", "quarters"],
    names: tuple[str, ...],
) -> LayerSpec:
    config, prefix = model.config, f"transformer.h.{index}"
    hidden, heads = config.n_embd, config.n_head
    inner, dim = config.n_inner or 4 * hidden, hidden // heads
    width = hidden if layout == "separate" else 3 * hidden
    projections: tuple[LinearSpec, ...] = tuple(
        linear(model, f"{prefix}.attn.{name}", hidden, width) for name in names
    )
    attention = AttentionSpec(
        projections=projections,
        layout=layout,
        output=linear(model, f"{prefix}.attn.out_proj", hidden, hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=dim,
        scale=dim**-0.5,
        rotary=table,
        interleaved=True,
    )
    mlp = MlpSpec(
        inputs=(linear(model, f"{prefix}.mlp.fc_in", hidden, inner),),
        output=linear(model, f"{prefix}.mlp.fc_out", inner, hidden),
        activation=activation_of(config.activation_function),
        gated=False,
    )
    input_norm = layer_norm(model, f"{prefix}.ln_1")
    return LayerSpec(attention, mlp, input_norm=input_norm, mlp_norm=None, parallel=True)
