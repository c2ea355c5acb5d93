"""What instructions of a plan have in common: the values that they read and write."""

from __future__ import annotations


class OneTarget:
    """An instruction that writes `target` alone."""

    __slots__ = ()
    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)


class OneSource:
    """An instruction that reads `source` alone."""

    __slots__ = ()
    source: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)
