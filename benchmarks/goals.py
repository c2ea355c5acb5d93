"""The goals for one H200 in bfloat16 that a report is held against."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.record import Row

GOAL_GPU = "H200"


class Goal(NamedTuple):
    """A figure to reach: at most `value`, or at least where `at_least` is set.

    Attributes:
        unit: of the row.
        figure: what of the row is meant: "" for its median, "of_ceiling", or a name in `extra`.
    """

    section: str
    model: str
    case: str
    unit: str
    value: float
    at_least: bool = False
    figure: str = ""

    def measured(self, row: Row) -> float | None:
        """Return the figure of a row that `finds` found, None if the row has none."""
        if not self.figure:
            return row.value
        value = row.of_ceiling if self.figure == "of_ceiling" else row.extra.get(self.figure)
        return None if isinstance(value, str) else value

    def is_met(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return value >= self.value if self.at_least else value <= self.value

    def finds(self, row: Row) -> bool:
        """Whether a row is what the goal is about."""
        named = (row.section, row.model, row.case, row.unit)
        return row.system == "torch_paged" and named == self[:4]


_DECODE = {
    "0.6b": {1: 0.50, 32: 0.9, 128: 1.5},
    "1b": {1: 0.67, 32: 0.9, 128: 1.25},
    "8b": {1: 3.6, 8: 4.0, 32: 4.4, 128: 5.6},
}
_SAMPLING = {"0.6b": 1.15, "8b": 1.05}
_PREFILL = {
    "0.6b": {512: 2.0, 2048: 5.0, 8192: 28.0},
    "8b": {512: 13.0, 2048: 48.0, 8192: 210.0},
}
_STARTUP = {"0.6b": (20.0, 2.0), "8b": (25.0, 4.0)}
_RAGGED = {"0.6b": 33_000, "1b": 44_000, "8b": 10_500}
_RESPONSE = {"1b": 0.28, "8b": 1.15}
_BUCKETS = "a step in 15 buckets to 256, kernels compiled before"

GOALS = [
    Goal("decode", model, f"batch {batch}", "ms/token", ms)
    for model, goals in _DECODE.items()
    for batch, ms in goals.items()
]
GOALS.append(Goal("decode", "0.6b", "batch 1", "ms/token", 0.02, False, "idle_between_steps"))
GOALS += [
    Goal(
        "sampling",
        model,
        f"batch {batch}, engine, drawn by counter",
        "ms/token",
        most,
        figure="times_greedy",
    )
    for model, most in _SAMPLING.items()
    for batch in (1, 32, 128)
]
GOALS.append(
    Goal(
        "long_context",
        "1b",
        "batch 1 at 32768 tokens",
        "ms/token",
        0.8,
        at_least=True,
        figure="of_ceiling",
    )
)
GOALS += [
    Goal("prefill", model, f"{length} tokens", "ms", ms)
    for model, goals in _PREFILL.items()
    for length, ms in goals.items()
]
for _model, (_cold, _warm) in _STARTUP.items():
    GOALS += [
        Goal("startup", _model, "to first token, kernels compiled on the way", "s", _cold),
        Goal("startup", _model, "to first token, kernels compiled before", "s", _warm),
        Goal("startup", _model, _BUCKETS, "s", 8.0),
        Goal("startup", _model, _BUCKETS, "s", 400.0, figure="megabytes"),
    ]
GOALS += [
    Goal("ragged", model, "256 requests", "tokens/s", speed, at_least=True)
    for model, speed in _RAGGED.items()
]
GOALS += [
    Goal("ragged", model, "mean response to 128 requests of 128 + 128 tokens", "s", seconds)
    for model, seconds in _RESPONSE.items()
]
GOALS.append(Goal("ragged", "8b", "256 requests", "tokens/s", 0.95, True, "gpu_busy"))

__all__ = ["GOALS", "GOAL_GPU", "Goal"]
