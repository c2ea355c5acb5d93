"""A comparison as text: a table of what was compared, and where it first parts."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable

from torch_paged.generate.check.comparison import Comparison
from torch_paged.generate.check.points import Point

_WIDTH = 99
_MOST_NAMED = 8


def format_comparison(found: Comparison, *, every_point: bool = False) -> str:
    """Write the tables of both phases, then what parts; with `every_point` a row for each."""
    lines = [f"tier      {found.tier}"]
    lines += _wrapped("because   ", ["; ".join(found.reasons)] if found.reasons else [])
    if found.tier == "eager":
        return "\n".join(
            [*lines, "", "Hugging Face's own code runs: there is nothing to compare."]
        )
    lines += [f"limit     {found.limit:g} of the size of each token's values"]
    for phase in dict.fromkeys(point.phase for point in found.points):
        points = [point for point in found.points if point.phase == phase]
        lines += ["", *(_every_point(phase, points) if every_point else _worst(phase, points))]
    lines += ["", *_verdict(found)]
    if found.uncompared:
        lines += _wrapped("without a counterpart: ", [", ".join(found.uncompared)])
    lines += _wrapped("note: ", found.notes)
    return "\n".join(lines)


def _every_point(phase: str, points: list[Point]) -> list[str]:
    return _table((phase, ""), [(point.where, "", point) for point in points])


def _worst(phase: str, points: list[Point]) -> list[str]:
    """Write a row for each title: how many points it has, and the worst of them."""
    worst: dict[str, Point] = {}
    for point in points:
        known = worst.setdefault(point.title, point)
        # What is not a number counts as worst.
        if point.relative != point.relative or point.relative > known.relative:
            worst[point.title] = point
    counts = Counter(point.title for point in points)
    return _table((phase, "points"), [(t, str(counts[t]), point) for t, point in worst.items()])


def _table(header: tuple[str, str], rows: list[tuple[str, str, Point]]) -> list[str]:
    width = max(len(name) for name in (header[0], *(row[0] for row in rows)))
    lines = [f"{header[0]:<{width}}  {header[1]:>6}   max abs  relative"]
    for name, count, point in rows:
        notes = "  <- parts" if point.parts else ""
        if count and point.layer is not None and point.relative > 0:
            notes = f"  layer {point.layer}{notes}"
        lines.append(
            f"{name:<{width}}  {count:>6}  {point.max_abs:>8.2g}  {point.relative:>8.2g}{notes}"
        )
    return lines


def _verdict(found: Comparison) -> list[str]:
    parted = [point for point in found.points if point.parts]
    lines: list[str] = []
    if parted:
        first = parted[0]
        lines += [
            f"They first part in {first.phase} at {first.where}:",
            f"  ours          {first.op}",
            f"  Hugging Face  {first.place}",
            f"  difference    {first.max_abs:.2g} at most, {first.relative:.2g} of the worst "
            f"token's size (limit {first.limit:g})",
        ]
        others = list(dict.fromkeys(f"{point.phase}: {point.where}" for point in parted[1:]))
        if others:
            more = len(others) - _MOST_NAMED
            named = others[:_MOST_NAMED] + ([f"{more} more"] if more > 0 else [])
            lines += _wrapped("also part: ", ["; ".join(named)])
    elif not found.failure:
        lines.append(f"All {len(found.points)} compared values agree.")
    if found.failure:
        lines += ["Our step fails:", textwrap.indent(found.failure, "  ")]
    if found.selftest:
        lines += _wrapped("", [f"As accelerate() runs it, {found.selftest}."])
    elif not found.failure:
        lines.append("The self-test of accelerate() passes.")
    return lines


def _wrapped(label: str, texts: Iterable[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += textwrap.wrap(
            label + text,
            _WIDTH,
            subsequent_indent=" " * min(len(label), 10),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


__all__ = ["format_comparison"]
