"""The plan: a flat, printable list of op calls over named values, lowered from a spec.

Lowering is plain; `fusion.fuse` then rewrites it with peephole rules, and `bind.bind_plan` turns
it into callables over tensors. There is no model class and no flagged forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch_paged.decoder.linears import linear_updates
from torch_paged.decoder.plan_experts import CallBlock, Experts, Route, SigmoidGate
from torch_paged.decoder.plan_latent import LatentAttention
from torch_paged.decoder.plan_rare import AddPositions, Clip, LookUpRotary
from torch_paged.decoder.plan_values import OneSource, OneTarget
from torch_paged.decoder.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModuleRef,
    NormSpec,
    OpaqueMlpSpec,
    RotaryLookup,
    RotarySpec,
)

Mode = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Embed(OneTarget):
    """target = embedding(token ids) * scale * multiplier; given embeddings skip the scale."""

    ref: ModuleRef
    target: str
    scale: float = 1.0
    multiplier: float = 1.0

    @property
    def sources(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        factors = (self.scale, self.multiplier)
        scale = "".join(f" * {factor:g}" for factor in factors if factor != 1.0)
        return f"{self.target} = embed[{self.ref.name}](ids){scale}"


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """targets = cos and sin of the positions of this step."""

    spec: RotarySpec
    targets: tuple[str, str]

    @property
    def sources(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        op = "rotary_table" if self.spec.change is None else "rotary_by_span"
        return f"{', '.join(self.targets)} = {op}[{self.spec.ref.name}](positions)"


@dataclass(frozen=True, slots=True)
class Norm:
    """target = norm(source), or norm(source + residual) with the sum kept in `summed`.

    With `added` instead of these: target = added + norm(source).
    """

    spec: NormSpec
    source: str
    target: str
    residual: str | None = None
    summed: str | None = None
    added: str | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        others = (self.residual, self.added)
        return (self.source, *(other for other in others if other is not None))

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,) if self.summed is None else (self.target, self.summed)

    def __str__(self) -> str:
        if self.residual is None:
            op = f"{self.spec.kind}_norm" + ("" if self.added is None else "+add")
            return f"{self.target} = {op}[{self.spec.ref.name}]({', '.join(self.sources)})"
        return (
            f"{self.target}, {self.summed} = add_{self.spec.kind}_norm[{self.spec.ref.name}]"
            f"({self.source}, {self.residual})"
        )


@dataclass(frozen=True, slots=True)
class Linear:
    """Projections of one source, with an optional norm prologue and one optional epilogue.

    Without an epilogue there is a target for each part. `gated` combines (gate, up) into one
    target, which may be the halves of one part; `activation` alone applies to a single part;
    `residual` is added to a single part. `one_kernel`: one call serves all parts even where
    neither norm nor epilogue asks for it.
    """

    parts: tuple[LinearSpec, ...]
    source: str
    targets: tuple[str, ...]
    norm: NormSpec | None = None
    activation: Activation | None = None
    gated: bool = False
    residual: str | None = None
    one_kernel: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if self.residual is None else (self.source, self.residual)

    def __str__(self) -> str:
        names = " | ".join(_named(part) for part in self.parts)
        op = "linear" if self.norm is None else f"{self.norm.kind}_norm+linear"
        if self.activation is not None:
            op += f"+{self.activation}" + ("_glu" if self.gated else "")
        if self.residual is not None:
            op += "+add"
        return f"{', '.join(self.targets)} = {op}[{names}]({', '.join(self.sources)})"


def _named(part: LinearSpec) -> str:
    updates = linear_updates(part.ref.module)
    return part.ref.name + "".join(f" + lora {update.name}" for update in updates)


@dataclass(frozen=True, slots=True)
class Attention(OneTarget):
    """target = paged attention; writes this step's keys and values into the cache of `layer`."""

    spec: AttentionSpec
    layer: int
    projections: tuple[str, ...]
    tables: tuple[str, str] | None
    target: str

    @property
    def sources(self) -> tuple[str, ...]:
        return self.projections + (self.tables or ())

    def __str__(self) -> str:
        spec = self.spec
        extras = [f"{spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim}"]
        extras += ["qk_norm"] if spec.q_norm is not None and not spec.qk_norm_full else []
        extras += ["interleaved"] if spec.interleaved else []
        extras += [f"window={spec.window}"] if spec.window else []
        extras += [f"softcap={spec.softcap:g}"] if spec.softcap else []
        extras += ["sinks"] if spec.sinks else []
        extras += ["rounded alibi" if spec.alibi_rounded else "alibi"] if spec.alibi else []
        what = f"attention[{self.layer}: {', '.join(extras)}]"
        return f"{self.target} = {what}({', '.join(self.sources)})"


@dataclass(frozen=True, slots=True)
class Add(OneTarget):
    """target = left + multiplier * right."""

    left: str
    right: str
    target: str
    multiplier: float = 1.0

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.left, self.right)

    def __str__(self) -> str:
        factor = "" if self.multiplier == 1.0 else f"{self.multiplier:g} * "
        return f"{self.target} = {self.left} + {factor}{self.right}"


@dataclass(frozen=True, slots=True)
class Glu(OneTarget):
    """target = act(gate) * up; `packed` when one source holds gate | up."""

    projections: tuple[str, ...]
    target: str
    activation: Activation

    @property
    def sources(self) -> tuple[str, ...]:
        return self.projections

    def __str__(self) -> str:
        return f"{self.target} = {self.activation}_glu({', '.join(self.projections)})"


@dataclass(frozen=True, slots=True)
class Activate(OneSource, OneTarget):
    """target = act(source)."""

    source: str
    target: str
    activation: Activation

    def __str__(self) -> str:
        return f"{self.target} = {self.activation}({self.source})"


@dataclass(frozen=True, slots=True)
class SelectLast(OneSource, OneTarget):
    """target = the last token of each row of a packed prefill."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.target} = last_token({self.source})"


@dataclass(frozen=True, slots=True)
class LogitTransform(OneSource, OneTarget):
    """target = softcap(scale * source)."""

    source: str
    target: str
    scale: float
    softcap: float

    def __str__(self) -> str:
        how = f"scale={self.scale:g}, cap={self.softcap:g}"
        return f"{self.target} = transform({self.source}, {how})"


Instruction = (
    Embed
    | AddPositions
    | RotaryTable
    | LookUpRotary
    | Norm
    | Linear
    | Attention
    | LatentAttention
    | Add
    | Glu
    | Activate
    | Clip
    | Route
    | Experts
    | SigmoidGate
    | CallBlock
    | SelectLast
    | LogitTransform
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Instructions in order; the last value written is the logits."""

    mode: Mode
    instructions: tuple[Instruction, ...]

    @property
    def result(self) -> str:
        return self.instructions[-1].targets[0]

    def __str__(self) -> str:
        return "\n".join(str(instruction) for instruction in self.instructions)


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
