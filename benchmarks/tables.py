"""A record as Markdown: goals first, then every row with spread and share of the ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.goals import GOAL_GPU, GOALS
from benchmarks.record import Record, Row

_TITLES = {
    "decode": "Decode steps, greedy `generate()`",
    "sampling": "Sampling: temperature 0.8, top-p 0.9, top-k 50",
    "prefill": "Prefill of one prompt, device time",
    "long_context": "Decode behind a long prompt",
    "startup": "Start-up, graphs, memory",
    "ragged": "Ragged work through an engine",
    "ops": "Ops alone, each from memory",
    "hf_eager": "Hugging Face, `generate()`",
    "hf_generate_batch": "Hugging Face, `generate_batch()`",
    "hf_static": "Hugging Face, static cache",
    "vllm": "vLLM",
}


def markdown(record: Record) -> str:
    """Return the whole report."""
    parts = ["# torch_paged: benchmark report", _head(record)]
    parts += [_problems(record), _goals(record)]
    rows = record.shown()
    for section, title in _TITLES.items():
        own = [row for row in rows if row.section == section]
        if own:
            parts.append(f"## {title}\n\n{_section(own)}")
    parts.append(_left_out(record))
    return "\n\n".join(part for part in parts if part) + "\n"


def device_line(record: Record) -> str:
    """Return what it ran on, in a line."""
    found = record.environment
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "transformers"))
    gpu = found.get("gpu 0", "").split(",")[0]
    device = gpu if found["device"].startswith("cuda") and gpu else "CPU"
    return f"{device}, {found['dtype']}, torch_paged {found['torch_paged']}, {versions}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, its first column to the left, the rest to the right."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)


def number(value: float | None) -> str:
    """Write a value with three digits or more."""
    if value is None:
        return "-"
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}"


def _head(record: Record) -> str:
    lines = [f"- {device_line(record)}", f"- commit {record.environment['commit']}"]
    for index, run in enumerate(record.runs):
        ceilings = "ceilings not measured"
        if "read_tbps" in run:
            ceilings = (
                f"read ceiling {number(run['read_tbps'])} TB/s, "
                f"arithmetic {number(run['peak_tflops'])} TFLOP/s"
            )
        state = "" if run.get("finished") else "; ended before its end"
        lines.append(f"- run {index + 1}: `{run['command']}`, {run['started']}: {ceilings}{state}")
    lines.append(
        "- weights are random; every repetition has fresh ids; results were checked against "
        "Hugging Face's eager attention in float32 before they were timed"
    )
    return "\n".join(lines)


def _problems(record: Record) -> str:
    lines = [f"- **{model}: {refusal['why']}**" for model, refusal in record.refused.items()]
    lines += [f"- {key}: {why}" for key, why in record.failed.items()]
    if not lines:
        return ""
    said = "Models with a wrong result are left out of all tables." if record.refused else ""
    return "\n\n".join(filter(None, ["## Wrong or failed", said, "\n".join(lines)]))


def _goals(record: Record) -> str:
    rows, cells = record.shown(), []
    if GOAL_GPU not in device_line(record):
        return f"## Goals\n\nThey are set for one {GOAL_GPU}; this was measured elsewhere."
    for goal in GOALS:
        unit = goal.figure.replace("_", " ") or goal.unit
        aim = f"{'>=' if goal.at_least else '<='} {number(goal.value)} {unit}"
        name = f"{goal.section} {goal.model}, {goal.case}"
        row = next((row for row in rows if goal.finds(row)), None)
        value = None if row is None else goal.measured(row)
        if row is None or value is None:
            cells.append([name, aim, "-", "not measured"])
            continue
        met = "met" if goal.is_met(value) else "**not met**"
        cells.append([name, aim, number(value) if goal.figure else _value(row), met])
    return f"## Goals\n\n{table(['what', 'goal', 'measured', ''], cells)}"


def _section(rows: Sequence[Row]) -> str:
    units = sorted({row.unit for row in rows})
    parts = []
    for unit in units:
        own = [row for row in rows if row.unit == unit]
        names = list(dict.fromkeys(name for row in own for name in row.extra))
        rated = any(row.achieved is not None for row in own)
        header = ["what", f"{unit} (least to most)"]
        header += ["rate", "of ceiling"] if rated else []
        header += [name.replace("_", " ") for name in names]
        parts.append(table(header, [_cells(row, names, rated) for row in own]))
    return "\n\n".join(parts)


def _cells(row: Row, names: Sequence[str], rated: bool) -> list[str]:
    cells = [f"{row.model}, {row.case}{_system(row)}", _value(row)]
    if rated:
        share = "-" if row.of_ceiling is None else f"{row.of_ceiling:.0%}"
        cells += [f"{number(row.achieved)} {row.achieved_unit}".strip(), share]
    for name in names:
        value = row.extra.get(name)
        cells.append(value if isinstance(value, str) else number(value))
    return cells


def _system(row: Row) -> str:
    return "" if row.system == "torch_paged" else f" ({row.system})"


def _value(row: Row) -> str:
    if row.repeats == 1:
        return number(row.value)
    mark = " unsteady" if row.is_unsteady else ""
    return f"{number(row.value)} ({number(row.low)} to {number(row.high)}){mark}"


def _left_out(record: Record) -> str:
    if not record.left_out:
        return ""
    reasons: dict[str, list[str]] = {}
    for key, why in record.left_out.items():
        reasons.setdefault(why, []).append(key)
    lines = [f"- {why}: {', '.join(keys)}" for why, keys in reasons.items()]
    return "## Not measured\n\n" + "\n".join(lines)


__all__ = ["device_line", "markdown", "number", "table"]
