"""What was measured, on disk after every measurement: a killed run keeps what it has."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.timing import Timing
from torch_paged.environment import describe

FORMAT = 1
# A record goes on only where these are the same.
_SAME = ("torch_paged", "torch", "triton", "transformers", "gpu", "gpu 0", "device", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value.

    Attributes:
        key: the measurement that the row came from; one measurement may give several rows.
        system: what was measured: "torch_paged", "hf eager" and so on.
        case: the rest of what tells the row apart, e.g. "batch 32".
        value: median of the repetitions; `low` and `high` are the least and the greatest.
        achieved: rate of the bytes or operations that the work needs, in `achieved_unit`.
        of_ceiling: that rate over the ceiling measured in the same run.
        extra: further figures, by a name that ends in their unit.
        run: index of the run of the command that measured it.
    """

    key: str
    section: str
    model: str
    system: str
    case: str
    unit: str
    value: float
    low: float
    high: float
    repeats: int = 1
    achieved: float | None = None
    achieved_unit: str = ""
    of_ceiling: float | None = None
    extra: Mapping[str, float | str | None] = field(default_factory=dict)
    run: int = 0

    @property
    def is_unsteady(self) -> bool:
        """Whether the repetitions are so far apart that the value says little."""
        return self.high - self.low > 0.25 * abs(self.value)


class Record:
    """The JSON file of a report; every change is written at once, and never in part."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self._data = data
        self.rows = [Row(**row) for row in data["rows"]]

    @classmethod
    def create(cls, path: Path, environment: Mapping[str, str]) -> Record:
        """Start a new file.

        Raises:
            FileExistsError: there is one; measurements are not thrown away by mistake.
        """
        if path.exists():
            raise FileExistsError(f"{path} exists; pass --resume to go on, or another --out")
        data = {"format": FORMAT, "environment": dict(environment), "runs": [], "rows": []}
        return cls(path, data | {"left_out": {}, "failed": {}, "refused": {}})

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a file.

        Raises:
            ValueError: it was written by another version of this program.
        """
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise ValueError(f"{path} must have format {FORMAT}, got {data.get('format')}")
        return cls(path, data)

    @classmethod
    def resume(cls, path: Path, environment: Mapping[str, str]) -> Record:
        """Go on with a file that was written on the same machine with the same versions.

        Raises:
            ValueError: it was not.
        """
        record = cls.load(path)
        before = record.environment
        other = {
            name: (before.get(name), environment.get(name))
            for name in _SAME
            if before.get(name) != environment.get(name)
        }
        if other:
            text = ", ".join(f"{name} {a!r} then, {b!r} now" for name, (a, b) in other.items())
            raise ValueError(f"{path} cannot be resumed here: {text}; pass another --out")
        return record

    @property
    def environment(self) -> dict[str, str]:
        return self._data["environment"]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Of each run of the command: when, how, its ceilings and how long it took."""
        return self._data["runs"]

    @property
    def left_out(self) -> dict[str, str]:
        """Measurement -> why it was not made."""
        return self._data["left_out"]

    @property
    def failed(self) -> dict[str, str]:
        """Measurement -> the error that ended it."""
        return self._data["failed"]

    @property
    def refused(self) -> dict[str, dict[str, str]]:
        """Model -> the measurement ("key") that had a wrong result, and what was wrong ("why").

        It stays until that measurement is right.
        """
        return self._data["refused"]

    def start_run(self, command: str, **settings: object) -> None:
        """Note that the command runs, and forget what an earlier run left out or failed at."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.runs.append({"command": command, "started": now, **settings})
        self.left_out.clear()
        self.failed.clear()
        self.write()

    def note_run(self, **values: object) -> None:
        """Add to what is known of the present run."""
        self.runs[-1].update(values)
        self.write()

    def add(self, rows: Sequence[Row]) -> None:
        """Keep the rows of one measurement."""
        self.rows += [dataclasses.replace(row, run=len(self.runs) - 1) for row in rows]
        self.write()

    def has(self, key: str) -> bool:
        """Whether a measurement is there."""
        return any(row.key == key for row in self.rows)

    def find(self, section: str, model: str, system: str, case: str) -> Row | None:
        """Return a row, None if there is none."""
        wanted = (section, model, system, case)
        for row in self.rows:
            if (row.section, row.model, row.system, row.case) == wanted:
                return row
        return None

    def shown(self) -> list[Row]:
        """Return the rows that may be reported: none of a model with a wrong result."""
        return [row for row in self.rows if row.model not in self.refused]

    def write(self) -> None:
        """Replace the file."""
        self._data["rows"] = [dataclasses.asdict(row) for row in self.rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self._data, indent=1), encoding="utf-8")
        os.replace(scratch, self.path)


def measured(timing: Timing | Mapping[str, float], scale: float = 1.0) -> dict[str, Any]:
    """Return value, spread and repeats of a row, from a timing or from differenced calls."""
    if isinstance(timing, Timing):
        values = timing.scaled(scale)
        return dict(value=values[0], low=values[1], high=values[2], repeats=timing.repeats)
    return {
        "value": timing["ms"] * scale,
        "low": timing["low_ms"] * scale,
        "high": timing["high_ms"] * scale,
        "repeats": int(timing["repeats"]),
    }


def environment_of(device: str, dtype: str) -> dict[str, str]:
    """Return versions and devices, and the commit where this is a checkout."""
    found = {row.label: row.value for row in describe()}
    return found | {"device": device, "dtype": dtype, "commit": _commit()}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    root = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


__all__ = ["Record", "Row", "environment_of", "measured"]
