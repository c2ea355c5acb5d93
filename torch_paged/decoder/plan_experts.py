"""The instructions of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch_paged.decoder.plan_values import OneSource, OneTarget
from torch_paged.decoder.spec import ExpertsSpec, ModuleRef, RouterSpec


@dataclass(frozen=True, slots=True)
class Route(OneSource):
    """targets = weights and ids of the experts that each token of source takes."""

    spec: RouterSpec
    source: str
    targets: tuple[str, str]

    def __str__(self) -> str:
        spec = self.spec
        how = f"{spec.top_k} of {spec.num_experts}, {spec.scoring}"
        how += ", normalised" if spec.normalise else ""
        if spec.top_groups < spec.num_groups:
            how += f", within {spec.top_groups} of {spec.num_groups} groups"
        return f"{', '.join(self.targets)} = route[{spec.ref.name}: {how}]({self.source})"


@dataclass(frozen=True, slots=True)
class Experts(OneTarget):
    """target = the chosen experts of each token of source, weighted, plus an optional residual."""

    spec: ExpertsSpec
    source: str
    routing: tuple[str, str]
    target: str
    residual: str | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        read = (self.source, *self.routing)
        return read if self.residual is None else (*read, self.residual)

    def __str__(self) -> str:
        spec = self.spec
        op = "experts" if self.residual is None else "experts+add"
        what = f"{spec.router.num_experts}x{spec.inner}, {spec.activation}"
        return f"{self.target} = {op}[{spec.ref.name}: {what}]({', '.join(self.sources)})"


@dataclass(frozen=True, slots=True)
class SigmoidGate(OneTarget):
    """target = sigmoid(gate) * source, with one gate logit a token."""

    gate: str
    source: str
    target: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.gate, self.source)

    def __str__(self) -> str:
        return f"{self.target} = sigmoid({self.gate}) * {self.source}"


@dataclass(frozen=True, slots=True)
class CallBlock(OneSource, OneTarget):
    """target = what the block found there makes of source."""

    ref: ModuleRef
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.target} = call[{self.ref.name}]({self.source})"
