"""What `explain()` and `stats()` return: plain records that print as tables of 80 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

_WIDTH = 80
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class SlotRow:
    """How one module of the model is executed.

    Attributes:
        module: dotted name in the model.
        kind: "fused" (read by one of our fused kernels), "generic" (one of our ops, unfused) or
            "opaque" (the module found there is called).
        why: the reason where the kind is not "fused", or the adapters that are; may be empty.
    """

    module: str
    kind: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class CallReport:
    """How the last call of `generate()` ran.

    Attributes:
        path: "fused", "patched" or "eager".
        loop: "device", "lagged" or "stepped"; None where Hugging Face's own loop ran.
        reasons: why the call did not take a faster path or loop.
    """

    path: str
    loop: str | None = None
    reasons: Sequence[str] = ()

    def __str__(self) -> str:
        loop = f", {self.loop} loop" if self.loop else ""
        return f"{self.path} path{loop}" + "".join(f"; {reason}" for reason in self.reasons)


@dataclass(frozen=True, slots=True)
class Report:
    """How a model is accelerated; `str()` is a table, followed by the plan.

    Attributes:
        tier: "fused", "patched" or "eager".
        slots: a row for each module of the decoder.
        reasons: why the model has no higher tier.
        plan: the lowered step, one op a line; empty in the eager tier.
        last_call: how the last `generate()` ran; None before the first.
    """

    tier: Literal["fused", "patched", "eager"]
    slots: Sequence[SlotRow] = ()
    reasons: Sequence[str] = ()
    plan: str = ""
    last_call: CallReport | None = None

    def __str__(self) -> str:
        lines = _labelled("tier", [self.tier])
        if self.reasons:
            lines += _labelled("reasons", self.reasons)
        if self.last_call is None:
            lines += _labelled("last call", ["none yet"])
        else:
            lines += _labelled("last call", [str(self.last_call)])
        if self.slots:
            rows = [(row.module, row.kind, row.why) for row in merge_layers(self.slots)]
            lines += ["", *_table(("module", "kind", "why"), rows)]
        if self.plan:
            lines += ["", "plan", textwrap.indent(self.plan.rstrip("\n"), "  ")]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of an accelerated model since `accelerate()`.

    Attributes:
        tokens: tokens handed out.
        steps: decode steps run.
        ms_per_step: mean time of a decode step; None before the first.
        kv_blocks_total: blocks the pool holds now; each serves one block table's layers.
        kv_blocks_used: blocks that sequences hold now.
        kv_blocks_leased: blocks that only returned caches hold; they are taken back as needed.
        kv_bytes: memory of the pool, also where torch's own counters do not see it.
        preemptions: how often a request of an `Engine` was sent back in line for lack of blocks.
        swaps: of these, how often its blocks were copied to the host, not computed again.
        host_bytes: host memory held for such blocks.
        graphs: CUDA graphs held.
        graph_bytes: memory of the graphs' shared pool.
        capture_seconds: time spent on capturing.
        fallbacks: reason -> number of calls that ran Hugging Face's code for it, without having
            asked for that.
        recaptures: captures made again because parameters or the KV pool had moved.
        not_captured: what runs without a graph although graphs are on -> why.
    """

    tokens: int = 0
    steps: int = 0
    ms_per_step: float | None = None
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_leased: int = 0
    kv_bytes: int = 0
    preemptions: int = 0
    swaps: int = 0
    host_bytes: int = 0
    graphs: int = 0
    graph_bytes: int = 0
    capture_seconds: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    recaptures: int = 0
    not_captured: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        speed = "" if self.ms_per_step is None else f", {self.ms_per_step:.3f} ms a step"
        used, total = self.kv_blocks_used, self.kv_blocks_total
        kept = self.kv_blocks_leased
        leased = f", {kept:,} leased to returned caches" if kept else ""
        lines = _labelled("decode", [f"{self.tokens:,} tokens in {self.steps:,} steps{speed}"])
        lines += _labelled(
            "kv cache",
            [f"{used:,} of {total:,} blocks used{leased}, {format_bytes(self.kv_bytes)}"],
        )
        if self.preemptions:
            swaps = f"{self.swaps:,} swapped to {format_bytes(self.host_bytes)} of host memory"
            lines += _labelled("preempted", [f"{self.preemptions:,} times, {swaps}"])
        lines += _labelled(
            "graphs",
            [
                f"{self.graphs:,} held, {format_bytes(self.graph_bytes)}, captured in "
                f"{self.capture_seconds:.2f} s, {self.recaptures:,} captured again",
                *(f"none for {what}: {why}" for what, why in self.not_captured.items()),
            ],
        )
        fallbacks = [f"{count:,}x {reason}" for reason, count in self.fallbacks.items()]
        return "\n".join(lines + _labelled("fallbacks", fallbacks or ["none"]))


def merge_layers(rows: Iterable[SlotRow]) -> list[SlotRow]:
    """Merge rows that differ only in a layer's index, e.g. to ``model.layers.0-29.mlp``.

    Order of first appearance is kept. Only the first index of a name is merged, so that numbered
    experts stay apart.
    """
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for row in rows:
        match = _LAYER_INDEX.search(row.module)
        if match is None:
            groups.setdefault((row.module, "", row.kind, row.why), [])
        else:
            head, tail = row.module[: match.start()], row.module[match.end() :]
            groups.setdefault((head, tail, row.kind, row.why), []).append(int(match.group()))
    return [
        SlotRow(head + _ranges(indices) + tail, kind, why)
        for (head, tail, kind, why), indices in groups.items()
    ]


def format_bytes(num_bytes: int) -> str:
    """Format a size with a binary unit: ``1.5 GiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _ranges(indices: Sequence[int]) -> str:
    """Write sorted runs of integers: [0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _labelled(label: str, values: Sequence[str]) -> list[str]:
    """Write `values`, wrapped, right of a label that stands on the first line."""
    lines: list[str] = []
    for value in values:
        lines += textwrap.wrap(value, _WIDTH - 12) or [""]
    return [f"{label if i == 0 else '':<12}{line}".rstrip() for i, line in enumerate(lines)]


def _table(header: tuple[str, str, str], rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Write a table of three columns; the last one takes the rest of the width and wraps."""
    cells = [header, *rows]
    first, second = (max(len(row[i]) for row in cells) for i in (0, 1))
    indent = " " * (first + second + 4)
    # A long module name must not squeeze the reasons to nothing; the table grows wider instead.
    width = max(_WIDTH - len(indent), 24)
    lines = []
    for row in cells:
        why = textwrap.wrap(row[2], width) or [""]
        lines.append(f"{row[0]:<{first}}  {row[1]:<{second}}  {why[0]}".rstrip())
        lines += [indent + line for line in why[1:]]
    rule = f"{'-' * first}  {'-' * second}  {'-' * width}"
    return [lines[0], rule, *lines[1:]]


__all__ = ["CallReport", "Report", "SlotRow", "Stats", "format_bytes", "merge_layers"]
