"""How much of a span of time the GPU is at work, and in which kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Timeline(NamedTuple):
    """What a GPU did in a span of time.

    Attributes:
        busy: share of the time from the first kernel's start to the last one's end in which some
            kernel, copy or fill ran.
        milliseconds: that time.
        kernels: milliseconds by kernel, each kernel's own; those that overlap count twice.
    """

    busy: float
    milliseconds: float
    kernels: dict[str, float]


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the length of the union of intervals (start, end), and of what they span."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0, 0.0
    total, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total, reached - ordered[0][0]


def timeline(run: Callable[[], Any]) -> Timeline:
    """Return what the GPU does while `run` is called.

    Raises:
        RuntimeError: no kernel ran.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    on_device = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy, whole = covered((e.time_range.start, e.time_range.end) for e in on_device)
    if not whole:
        raise RuntimeError("no kernel ran while the GPU was watched")
    kernels: Counter[str] = Counter()
    for event in on_device:
        kernels[event.name] += event.device_time_total / 1e3
    return Timeline(busy / whole, whole / 1e3, dict(kernels.most_common()))


__all__ = ["Timeline", "covered", "timeline"]
