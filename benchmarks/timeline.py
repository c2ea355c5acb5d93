"""How much of a span of time the GPU is at work, and in which kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

# Start, end and name of a kernel, copy or fill, in microseconds.
Event = tuple[float, float, str]

# A decode step begins with it.
FIRST_KERNEL = "_embed_kernel"


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
    events = _traced(run)
    busy, whole = covered((start, end) for start, end, _ in events)
    kernels: Counter[str] = Counter()
    for start, end, name in events:
        kernels[name] += (end - start) / 1e3
    return Timeline(busy / whole, whole / 1e3, dict(kernels.most_common()))


def idle_between_steps(run: Callable[[], Any]) -> float:
    """Return for which share of the time the GPU stands still between decode steps.

    Raises:
        RuntimeError: no kernel ran, or fewer than three steps.
    """
    return idle_before(_traced(run), FIRST_KERNEL)


def idle_before(events: Iterable[Event], first: str) -> float:
    """Return the share of the gaps before kernels whose names begin with `first`.

    The first step is left out: it comes behind the prompt.
    """
    gaps, starts, reached = 0.0, [], 0.0
    for start, end, name in sorted(events):
        if name.startswith(first):
            if len(starts) > 1:
                gaps += max(0.0, start - reached)
            starts.append(start)
        reached = max(reached, end)
    if len(starts) < 3:
        raise RuntimeError(f"{len(starts)} steps ran while the GPU was watched, 3 are needed")
    return gaps / (starts[-1] - starts[1])


def _traced(run: Callable[[], Any]) -> list[Event]:
    """Return what runs on the GPU while `run` is called."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
        torch.cuda.synchronize()
    events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in prof.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not events:
        raise RuntimeError("no kernel ran while the GPU was watched")
    return events


__all__ = ["FIRST_KERNEL", "Timeline", "covered", "idle_before", "idle_between_steps", "timeline"]
