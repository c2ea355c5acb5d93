"""Lowering: the spec of a decoder becomes the unfused plan of one step."""

from __future__ import annotations

from collections.abc import Iterator

from torch_paged.decoder.plan import (
    Activate,
    Add,
    Attention,
    Embed,
    Glu,
    Instruction,
    Linear,
    LogitTransform,
    Mode,
    Norm,
    Plan,
    RotaryTable,
    SelectLast,
)
from torch_paged.decoder.plan_experts import CallBlock, Experts, Route, SigmoidGate
from torch_paged.decoder.plan_latent import LatentAttention
from torch_paged.decoder.plan_rare import AddPositions, Clip, LookUpRotary
from torch_paged.decoder.spec import (
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    OpaqueMlpSpec,
    RotaryLookup,
)


def lower(spec: DecoderSpec, mode: Mode) -> Plan:
    """Return the unfused plan of one step of `spec`.

    Args:
        mode: "decode" is one token a row, read from the slot state; "prefill" packed prompts.
    """
    instructions: list[Instruction] = [
        Embed(spec.embedding, "h", spec.embedding_scale, spec.embedding_multiplier)
    ]
    hidden = _extend(instructions, _lower_embedding(spec))
    for index, rotary in enumerate(spec.rotaries):
        tables = (f"cos{index}", f"sin{index}")
        if isinstance(rotary, RotaryLookup):
            instructions.append(LookUpRotary(rotary, tables))
        else:
            instructions.append(RotaryTable(rotary, tables))
    for index, layer in enumerate(spec.layers):
        body = _lower_layer(layer, index, hidden)
        instructions.extend(body)
        hidden = body[-1].targets[0]
    instructions.extend(_lower_head(spec, mode, hidden))
    return Plan(mode, tuple(instructions))


def _lower_embedding(spec: DecoderSpec) -> Iterator[Instruction]:
    """Lower what is between the embeddings and the first layer."""
    hidden = "h"
    if spec.project_in is not None:
        yield Linear((spec.project_in,), hidden, ("wide",))
        hidden = "wide"
    if spec.positions is not None:
        yield AddPositions(spec.positions, hidden, "placed")
        hidden = "placed"
    if spec.embedding_norm is not None:
        yield Norm(spec.embedding_norm, hidden, "entry")


def _lower_layer(layer: LayerSpec, index: int, hidden: str) -> list[Instruction]:
    def name(value: str) -> str:
        return f"{value}{index}"

    out: list[Instruction] = []
    normed = hidden
    if layer.input_norm is not None:
        normed = name("x")
        out.append(Norm(layer.input_norm, hidden, normed))
    mixed = _extend(out, _lower_attention(layer, index, normed))
    if layer.post_attention_norm is not None:
        out.append(Norm(layer.post_attention_norm, mixed, name("on")))
        mixed = name("on")
    multiplier, norms = layer.residual_multiplier, layer.sum_norms
    stream = normed if layer.adds_to_normed else hidden
    stream = _add(out, stream, mixed, name("r"), multiplier, norms and norms[0])
    entry = hidden if layer.parallel else stream
    if layer.mlp_norm is not None:
        out.append(Norm(layer.mlp_norm, entry, name("y")))
        entry = name("y")
    elif layer.parallel:
        entry = normed
    fed = _extend(out, _lower_feed_forward(layer, index, entry))
    if layer.post_mlp_norm is not None:
        out.append(Norm(layer.post_mlp_norm, fed, name("dn")))
        fed = name("dn")
    stream = entry if layer.adds_to_normed else stream
    _add(out, stream, fed, name("h"), multiplier, norms and norms[1])
    return out


def _add(
    out: list[Instruction],
    stream: str,
    branch: str,
    target: str,
    multiplier: float,
    norm: NormSpec | None,
) -> str:
    """Append the sum of the residual stream and a branch, and its norm; return the stream."""
    out.append(Add(stream, branch, target, multiplier))
    if norm is None:
        return target
    # The layer's number stays behind the name.
    letter = target[0]
    out.append(Norm(norm, target, f"{letter}n{target[1:]}"))
    return out[-1].targets[0]


def _extend(out: list[Instruction], body: Iterator[Instruction]) -> str:
    """Append `body` to `out` and return the first target of the last instruction of all."""
    out.extend(body)
    return out[-1].targets[0]


def _lower_attention(layer: LayerSpec, index: int, source: str) -> Iterator[Instruction]:
    spec = layer.attention
    if isinstance(spec, LatentAttentionSpec):
        yield from _lower_latent_attention(spec, index, source)
        return
    names = ("q", "k", "v") if spec.layout == "separate" else ("qkv",)
    values = tuple(f"{n}{index}" for n in names)
    yield Linear(spec.projections, source, values)
    if spec.qk_norm_full:
        if spec.layout != "separate" or spec.q_norm is None or spec.k_norm is None:
            raise NotImplementedError("full-width q/k norm needs separate q and k projections")
        yield Norm(spec.q_norm, values[0], f"qn{index}")
        yield Norm(spec.k_norm, values[1], f"kn{index}")
        values = (f"qn{index}", f"kn{index}", values[2])
    if spec.clip:
        for value, name in zip(values, names, strict=True):
            yield Clip(value, f"{name}c{index}", spec.clip)
        values = tuple(f"{name}c{index}" for name in names)
    tables = None if spec.rotary is None else (f"cos{spec.rotary}", f"sin{spec.rotary}")
    yield Attention(spec, index, values, tables, f"a{index}")
    yield Linear((spec.output,), f"a{index}", (f"o{index}",))


def _lower_latent_attention(
    spec: LatentAttentionSpec, index: int, source: str
) -> Iterator[Instruction]:
    query, latent = f"q{index}", f"kv{index}"
    if spec.query_norm is None:
        yield Linear((*spec.query, spec.compress), source, (query, latent))
    else:
        first, second = spec.query
        yield Linear((first, spec.compress), source, (f"qa{index}", latent))
        yield Norm(spec.query_norm, f"qa{index}", f"qn{index}")
        yield Linear((second,), f"qn{index}", (query,))
    tables = (f"cos{spec.rotary}", f"sin{spec.rotary}")
    yield LatentAttention(spec, index, query, latent, tables, f"a{index}")
    yield Linear((spec.output,), f"a{index}", (f"o{index}",))


def _lower_feed_forward(layer: LayerSpec, index: int, source: str) -> Iterator[Instruction]:
    spec = layer.mlp
    if isinstance(spec, MlpSpec):
        yield from _lower_mlp(spec, str(index), source)
        return
    if isinstance(spec, OpaqueMlpSpec):
        yield CallBlock(spec.ref, source, f"ex{index}")
        return
    # Before the experts, which can then add it to their sum.
    shared = None
    if spec.shared is not None:
        yield from _lower_mlp(spec.shared, f"s{index}", source)
        shared = f"ds{index}"
        if spec.shared_gate is not None:
            yield Linear((spec.shared_gate,), source, (f"sg{index}",))
            yield SigmoidGate(f"sg{index}", shared, f"s{index}")
            shared = f"s{index}"
    routing = (f"w{index}", f"e{index}")
    yield Route(spec.router, source, routing)
    yield Experts(spec, source, routing, f"ex{index}")
    if shared is not None:
        yield Add(shared, f"ex{index}", f"f{index}")


def _lower_mlp(spec: MlpSpec, suffix: str, source: str) -> Iterator[Instruction]:
    if spec.gated:
        names = ("g", "u") if len(spec.inputs) == 2 else ("gu",)
        values = tuple(f"{n}{suffix}" for n in names)
        yield Linear(spec.inputs, source, values)
        yield Glu(values, f"m{suffix}", spec.activation)
    else:
        yield Linear(spec.inputs, source, (f"u{suffix}",))
        yield Activate(f"u{suffix}", f"m{suffix}", spec.activation)
    yield Linear((spec.output,), f"m{suffix}", (f"d{suffix}",))


def _lower_head(spec: DecoderSpec, mode: Mode, hidden: str) -> Iterator[Instruction]:
    if mode == "prefill":
        yield SelectLast(hidden, "last")
        hidden = "last"
    if spec.final_norm is not None:
        yield Norm(spec.final_norm, hidden, "final")
        hidden = "final"
    if spec.project_out is not None:
        yield Linear((spec.project_out,), hidden, ("narrow",))
        hidden = "narrow"
    yield Linear((spec.head,), hidden, ("logits",))
    if spec.logit_scale != 1.0 or spec.logit_softcap:
        yield LogitTransform("logits", "logits_out", spec.logit_scale, spec.logit_softcap)
