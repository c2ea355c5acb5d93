from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_paged.log import logger, warn_once

ROOT = Path(__file__).resolve().parents[1]
# The file alone: importing the package around it would load torch in each process.
SCRIPT = """
import runpy
logger = runpy.run_path("torch_paged/log.py")["logger"]
for level in ("debug", "info", "warning", "error"):
    getattr(logger, level)("this is %s", level)
"""


def logged(level: str | None) -> list[str]:
    """Return what a fresh process writes to stderr under TORCH_PAGED_LOG=level."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_PAGED_LOG"}
    if level is not None:
        environment["TORCH_PAGED_LOG"] = level
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    return [line for line in result.stderr.splitlines() if "this is" in line or "must be" in line]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, ["this is warning", "this is error"]),
        (
            "INFO",
            [
                "torch_paged: INFO: this is info",
                "torch_paged: WARNING: this is warning",
                "torch_paged: ERROR: this is error",
            ],
        ),
        ("error", ["torch_paged: ERROR: this is error"]),
        (
            "loud",
            [
                "torch_paged: WARNING: TORCH_PAGED_LOG must be one of debug, info, warning, "
                "error, got 'loud'; using warning",
                "torch_paged: WARNING: this is warning",
                "torch_paged: ERROR: this is error",
            ],
        ),
    ],
    ids=["unset", "info", "error", "wrong"],
)
def test_variable_sets_the_level(level: str | None, expected: list[str]) -> None:
    assert logged(level) == expected


def test_same_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=logger.name):
        for message in ("first reason", "second reason", "first reason"):
            warn_once(message)
    assert [record.message for record in caplog.records] == ["first reason", "second reason"]
