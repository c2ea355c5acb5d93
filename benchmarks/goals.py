"""The goals for one H200 in bfloat16 that a report is held against."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.record import Row

GOAL_GPU = "H200"


class Goal(NamedTuple):
    """A figure to reach: at most `value`, or at least where `at_least` is set."""

    section: str
    model: str
    case: str
    unit: str
    value: float
    at_least: bool = False

    def is_met(self, row: Row) -> bool:
        """Whether the median of a row reaches it."""
        return row.value >= self.value if self.at_least else row.value <= self.value

    def finds(self, row: Row) -> bool:
        """Whether a row is what the goal is about."""
        named = (row.section, row.model, row.case, row.unit)
        return row.system == "torch_paged" and named == self[:4]


_DECODE = {
    "0.6b": {1: 0.50, 32: 0.9, 128: 1.5},
    "1b": {1: 0.67, 32: 0.9, 128: 1.25},
    "8b": {1: 3.6, 8: 4.0, 32: 4.4, 128: 5.6},
}
_RAGGED = {"0.6b": 33_000, "1b": 44_000, "8b": 10_500}

GOALS = [
    Goal("decode", model, f"batch {batch}", "ms/token", ms)
    for model, goals in _DECODE.items()
    for batch, ms in goals.items()
]
GOALS += [
    Goal("ragged", model, "256 requests", "tokens/s", speed, at_least=True)
    for model, speed in _RAGGED.items()
]

__all__ = ["GOALS", "GOAL_GPU", "Goal"]
