"""The plan: a flat, printable list of op calls over named values, lowered from a spec.

Lowering is plain; `fusion.fuse` then rewrites it with peephole rules, and `bind.bind_plan` turns
it into callables over tensors. There is no model class and no flagged forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch_paged.decoder.linears import linear_updates
from torch_paged.decoder.plan_experts import CallBlock, Experts, Route, SigmoidGate
from torch_paged.decoder.plan_latent import LatentAttention
from torch_paged.decoder.plan_rare import AddPositions, Clip, LookUpRotary
from torch_paged.decoder.plan_values import OneSource, OneTarget
from torch_paged.decoder.spec import (
    Activation,
    AttentionSpec,
    LinearSpec,
    ModuleRef,
    NormSpec,
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


class Join(NamedTuple):
    """What a linear reads instead of its source: summed = added + norm(source)."""

    spec: NormSpec
    added: str
    summed: str


@dataclass(frozen=True, slots=True)
class Linear:
    """Projections of one source, with an optional norm prologue and one optional epilogue.

    Without an epilogue there is a target for each part. `joined` comes before the prologue, and
    its sum is one target more, the last. `gated` combines (gate, up) into one
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
    joined: Join | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        if self.joined is not None:
            return (self.source, self.joined.added)
        return (self.source,) if self.residual is None else (self.source, self.residual)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The targets that are projections."""
        return self.targets if self.joined is None else self.targets[:-1]

    def __str__(self) -> str:
        names = " | ".join(_named(part) for part in self.parts)
        op = "linear" if self.norm is None else f"{self.norm.kind}_norm+linear"
        if self.joined is not None:
            op = f"{self.joined.spec.kind}_norm+add+{op}"
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
