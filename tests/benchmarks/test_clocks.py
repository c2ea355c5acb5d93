"""What a report says of the clock of a GPU."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.clocks import Clocks, Sample, parse, under_load


def test_lines_are_read_and_those_without_figures_left_out() -> None:
    assert parse("1980, 124.98, 700.00\n", 2.0) == Sample(2.0, 1980.0, 124.98, 700.0)
    assert parse("1980, [N/A], 700.00\n", 2.0) is None
    assert parse("no devices were found\n", 2.0) is None


def test_idle_samples_do_not_count() -> None:
    idle = [Sample(i, 1980.0, 130.0, 700.0) for i in range(10)]
    busy = [Sample(10 + i, mhz, 690.0, 700.0) for i, mhz in enumerate((1400.0, 1500.0, 1600.0))]
    assert under_load([*idle, *busy]) == {
        "sm_mhz": 1500.0,
        "power_w": 690.0,
        "power_limit_w": 700.0,
    }
    assert under_load([]) == {}


def test_a_gpu_is_watched_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    told = tmp_path / "told"
    program.write_text(
        f'#!/bin/sh\necho "$*" > {told}\n'
        "while true; do echo '1500, 690.0, 700.0'; sleep 0.02; done\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    properties = SimpleNamespace(uuid="1234-5")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    started = time.perf_counter()
    with Clocks(torch.device("cuda", 0)) as clocks:
        deadline = started + 10
        while not clocks.since(started) and time.perf_counter() < deadline:
            time.sleep(0.01)
        assert clocks.since(started) == {"sm_mhz": 1500, "power_w": 690, "power_limit_w": 700}
        assert clocks.since(time.perf_counter() + 100) == {}
    assert clocks._process is not None and clocks._process.poll() is not None
    assert "-i GPU-1234-5" in told.read_text()


def test_nothing_is_seen_without_a_gpu() -> None:
    with Clocks(torch.device("cpu")) as clocks:
        assert clocks.since(0.0) == {}
