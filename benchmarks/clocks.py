"""The clock and the power of a GPU while something is measured, as nvidia-smi tells them.

A GPU at its power limit lowers its clock: then a step takes what its energy takes.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

_QUERY = "clocks.sm,power.draw,enforced.power.limit"
_PERIOD_MS = 250


class Sample(NamedTuple):
    """What nvidia-smi said at a `time.perf_counter()`."""

    at: float
    mhz: float
    watts: float
    limit_watts: float


class Clocks:
    """Watches a GPU from a thread, until it is closed; elsewhere it sees nothing."""

    def __init__(self, device: torch.device) -> None:
        self._samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        if device.type != "cuda" or shutil.which("nvidia-smi") is None:
            return
        uuid = torch.cuda.get_device_properties(device).uuid
        command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={_QUERY}"]
        command += ["--format=csv,noheader,nounits", f"--loop-ms={_PERIOD_MS}"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Clocks:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def since(self, started: float) -> dict[str, float]:
        """Return clock and power under load since a `time.perf_counter()`; {} if unknown."""
        return under_load([sample for sample in list(self._samples) if sample.at >= started])

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            sample = parse(line, time.perf_counter())
            if sample is not None:
                self._samples.append(sample)


def parse(line: str, at: float) -> Sample | None:
    """Read a line of nvidia-smi; None where a GPU does not tell."""
    try:
        mhz, watts, limit = map(float, line.split(","))
    except ValueError:
        return None
    return Sample(at, mhz, watts, limit)


def under_load(samples: Sequence[Sample]) -> dict[str, float]:
    """Return medians over the samples of at least 9/10 of the highest power."""
    if not samples:
        return {}
    highest = max(sample.watts for sample in samples)
    busy = [sample for sample in samples if sample.watts >= 0.9 * highest]
    return {
        "sm_mhz": statistics.median(sample.mhz for sample in busy),
        "power_w": statistics.median(sample.watts for sample in busy),
        "power_limit_w": busy[0].limit_watts,
    }


__all__ = ["Clocks", "Sample", "parse", "under_load"]
