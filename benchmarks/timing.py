"""Clocks that every benchmark shares: device time on a GPU, wall time where there is none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# 30 ms of an H200.
_SPIN_CYCLES = 60_000_000


class Timing(NamedTuple):
    """A measured value with its spread over the repetitions."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        return self.high - self.low

    def scaled(self, factor: float) -> Timing:
        """Return the same timing in another unit."""
        return Timing(self.median * factor, self.low * factor, self.high * factor, self.repeats)


def summarize(values: Sequence[float]) -> Timing:
    """Return median, least and greatest of some repetitions."""
    return Timing(statistics.median(values), min(values), max(values), len(values))


def default_device() -> torch.device:
    """Return the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(device: torch.device | None = None) -> None:
    """Wait for the device, where there is one to wait for."""
    kind = torch.device(device) if device is not None else default_device()
    if kind.type == "cuda":
        torch.cuda.synchronize(kind)


def span_ms(run: Callable[[], Any], device: torch.device, *, queued: bool = False) -> float:
    """Return milliseconds of what `run` does on the device: CUDA events, else wall time.

    Args:
        queued: the device is kept busy until `run` has launched everything, so that none of it
            waits for the host: device time alone.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if queued:
        torch.cuda._sleep(_SPIN_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def replayable(run: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Return `run` as the replay of a CUDA graph, where there is a GPU; warmed up."""
    run()
    if device.type != "cuda":
        return run
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def graph_ms(run: Callable[[], Any], repeats: int, device: torch.device) -> Timing:
    """Return milliseconds of replaying `run`, after two or three replays that do not count."""
    replay = replayable(run, device)
    for _ in range(3 if device.type == "cuda" else 1):
        span_ms(replay, device)
    return summarize([span_ms(replay, device) for _ in range(repeats)])


def differenced(
    call: Callable[[int], float], new: int, repeats: int, *, warm_ups: int = 1
) -> dict[str, float]:
    """Return ms per token of a decode step, prefill and set-up differenced out, and end to end.

    Args:
        call: takes a number of new tokens, at least 1; returns the seconds of one whole call.
        new: decode steps behind the first token.
        warm_ups: long calls before the first that counts.
    """
    for _ in range(warm_ups):
        call(new + 1)
    for _ in range(4):  # what is met the fourth time is captured
        call(1)
    # By turns, so that clocks that drift change both ends of a difference.
    pairs = [(call(1), call(new + 1)) for _ in range(repeats)]
    shorts, longs = (summarize(ends) for ends in zip(*pairs, strict=True))
    steps = summarize([1e3 * (long - short) / new for short, long in pairs])
    return {
        "ms": steps.median,
        "low_ms": steps.low,
        "high_ms": steps.high,
        "spread_ms": steps.spread,
        "end_to_end_ms": 1e3 * longs.median / (new + 1),
        "first_token_ms": 1e3 * shorts.median,
        "first_token_spread_ms": 1e3 * shorts.spread,
        "repeats": repeats,
        "steps": new,
    }


__all__ = [
    "Timing",
    "default_device",
    "differenced",
    "graph_ms",
    "replayable",
    "span_ms",
    "summarize",
    "synchronize",
]
