"""Tests of this folder need a CUDA device; without one none of them is collected.

On a GPU machine they must all run: a file that collects another number of tests than it is pinned
to here fails, and so does a test that skips.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

_HERE = Path(__file__).parent
_PINNED = {"test_engine.py": 9, "test_loop.py": 12, "test_memory.py": 3, "test_parity.py": 12}


def pytest_collection_modifyitems(config, items):
    """Compare whole files with their pinned number of tests."""
    whole = {Path(arg).resolve() for arg in config.args if "::" not in arg}
    selected = config.option.keyword or config.option.markexpr
    if selected or not any(_HERE == path or path in _HERE.parents for path in whole):
        return
    counts = Counter(item.path.name for item in items if item.path.parent == _HERE)
    if counts and counts != _PINNED:
        raise pytest.UsageError(f"tests/gpu pins {_PINNED}, collected {dict(counts)}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Turn a skip into a failure."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.path.parent == _HERE:
        report.outcome = "failed"
        report.longrepr = f"skipped on a GPU machine: {report.longrepr}"


@pytest.fixture(autouse=True)
def _fresh_device():
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
