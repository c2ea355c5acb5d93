"""Plots of a record, as PNG and SVG; needs matplotlib (`pip install -e '.[bench]'`)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import Record, Row
from benchmarks.tables import device_line

_COLOURS = {
    "torch_paged": "#3f51b5",
    "hf eager": "#bdbdbd",
    "hf sdpa": "#bdbdbd",
    "hf static cache": "#9e9e9e",
    "hf static cache + compile": "#9e9e9e",
    "vllm": "#ff9800",
}
_STEPS = ("decode", "hf_eager", "hf_static", "vllm")


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw what the record has; return the files.

    Raises:
        ImportError: matplotlib is missing; the message says how to get it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"plots need matplotlib, which cannot be imported ({error}); "
            "pip install -e '.[bench]', then python -m benchmarks.report --render"
        ) from error
    # Differences of noise may be negative: in the tables, not on a logarithmic axis.
    rows = [row for row in record.shown() if row.low > 0]
    steps = [row for row in rows if row.section in _STEPS]
    prefills = [row for row in rows if row.section == "prefill"]
    files = []
    for name, own, label in (
        ("decode", steps, "ms per token"),
        ("prefill", prefills, "ms"),
    ):
        if not own:
            continue
        models = list(dict.fromkeys(row.model for row in own))
        figure: Any = Figure(figsize=(4.2 * len(models), 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        for index, model in enumerate(models):
            axes = figure.add_subplot(1, len(models), index + 1)
            _bars(axes, [row for row in own if row.model == model])
            axes.set_title(f"{model}, {name}")
            axes.set_ylabel(label if index == 0 else "")
        title = textwrap.fill(device_line(record), 62 * len(models))
        figure.suptitle(f"{title}\nmedian; bars from least to most", fontsize=8)
        for kind in ("png", "svg"):
            files.append(folder / f"{name}.{kind}")
            # Without a date, equal records give equal files.
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(files[-1], dpi=150, metadata=metadata)
    return files


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    cases = sorted(dict.fromkeys(row.case for row in rows), key=_size)
    systems = list(dict.fromkeys(row.system for row in rows))
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        own = {row.case: row for row in rows if row.system == system}
        at = [
            i + (index - (len(systems) - 1) / 2) * width for i, c in enumerate(cases) if c in own
        ]
        found = [own[case] for case in cases if case in own]
        values = [row.value for row in found]
        spread = [
            [max(row.value - row.low, 0) for row in found],
            [max(row.high - row.value, 0) for row in found],
        ]
        colour = _COLOURS.get(system)
        axes.bar(at, values, width, yerr=spread, capsize=2, label=system, color=colour)
        if system == "torch_paged":
            _floors(axes, at, found, width)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), cases)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(_minor_label)
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.legend(fontsize=7, loc="upper left")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 3)  # room for the legend


def _minor_label(value: float, at: int) -> str:
    """Write out 0.2, 0.5, 2, 5 and so on."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _floors(axes: Any, at: Sequence[float], rows: Sequence[Row], width: float) -> None:
    """Mark where the ceiling of the same run would be."""
    label = "at the ceiling"
    for x, row in zip(at, rows, strict=True):
        if row.of_ceiling is not None:
            ends = (x - width / 2, x + width / 2)
            axes.hlines(row.value * row.of_ceiling, *ends, colors="black", label=label)
            label = ""


def _size(case: str) -> tuple[int, str]:
    digits = [int(word) for word in case.split() if word.isdigit()]
    return (digits[0] if digits else 0, case)


__all__ = ["draw"]
