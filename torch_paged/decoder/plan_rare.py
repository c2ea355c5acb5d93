"""Instructions that few families need: tables read by position, and bounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch_paged.decoder.plan_values import OneSource, OneTarget
from torch_paged.decoder.spec import PositionsSpec, RotaryLookup


@dataclass(frozen=True, slots=True)
class AddPositions(OneSource, OneTarget):
    """target = source + the learned rows of the positions of this step."""

    spec: PositionsSpec
    source: str
    target: str

    def __str__(self) -> str:
        offset = f" + {self.spec.offset}" if self.spec.offset else ""
        return f"{self.target} = {self.source} + embed[{self.spec.ref.name}](positions{offset})"


@dataclass(frozen=True, slots=True)
class LookUpRotary:
    """targets = cos and sin of the positions of this step, from a table of all positions."""

    spec: RotaryLookup
    targets: tuple[str, str]

    @property
    def sources(self) -> tuple[str, ...]:
        return ()

    def __str__(self) -> str:
        return f"{', '.join(self.targets)} = rows[{self.spec.ref.name}](positions)"


@dataclass(frozen=True, slots=True)
class Clip(OneSource, OneTarget):
    """target = source within [-bound, bound]."""

    source: str
    target: str
    bound: float

    def __str__(self) -> str:
        return f"{self.target} = clip({self.source}, {self.bound:g})"
