"""Tests of this folder need a CUDA device; without one none of them is collected.

On a GPU machine they must all run: a file that collects another number of tests than it is pinned
to here fails, and so does a test that skips.

test_parity.py, test_parity_grid.py and test_patched_types.py may run in parallel (`-n 8`). The
others measure memory or wait for a busy device, and run alone. sanitize.py is a program.
"""

import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
import transformers

from torch_paged.engine import prompt_graphs

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]

_HERE = Path(__file__).parent
# One test for each type that is accelerated, by release of transformers.
_TYPES = {"5.17": 124, "5.24": 136}
_PINNED = {
    "test_assisted.py": 7,
    "test_engine.py": 18,
    "test_leases.py": 6,
    "test_levels.py": 1,
    "test_logprobs.py": 9,
    "test_loop.py": 12,
    "test_memory.py": 3,
    "test_parity.py": 34,
    "test_parity_grid.py": 30,
    "test_patched_types.py": _TYPES.get(".".join(transformers.__version__.split(".")[:2])),
}
# Types on the patched tier that must have been captured and replayed, where all were run.
_LEAST_PATCHED = 60
# Where the record of captured types goes.
_RECORD = "TORCH_PAGED_CAPTURED_TYPES"

_captured = defaultdict(list)
_failed = {}
_wrong_pins = []


def pytest_collection_modifyitems(config, items):
    """Compare whole files with their pinned number of tests."""
    if config.option.keyword or config.option.markexpr:
        return
    whole = {Path(arg).resolve() for arg in config.args if "::" not in arg}
    counts = Counter(item.path.name for item in items if item.path.parent == _HERE)
    expected = {
        name: number
        for name, number in _PINNED.items()
        if any(path in (_HERE / name, *(_HERE / name).parents) for path in whole)
    }
    found = {name: counts[name] for name in counts if name in expected or name not in _PINNED}
    if counts and found != expected:
        message = f"tests/gpu pins {expected}, collected {found}"
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError(message)
        _wrong_pins.append(message)  # a worker of xdist that ends here cannot say why


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Turn a skip into a failure."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.path.parent == _HERE:
        report.outcome = "failed"
        report.longrepr = f"skipped on a GPU machine: {report.longrepr}"


def pytest_runtest_logreport(report):
    """Collect what test_patched_types.py recorded; with xdist this runs in the controller."""
    if "test_patched_types.py::test_captured_type" not in report.nodeid or report.when != "call":
        return
    for name, value in report.user_properties:
        if name.startswith("captured "):
            _captured[name.removeprefix("captured ")].append(value)
    if report.failed:
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr)
        _failed[report.nodeid.partition("[")[2][:-1]] = str(reason)[:500]


def pytest_sessionfinish(session):
    """Write the record, and fail if too few types were captured."""
    if hasattr(session.config, "workerinput") or not (_captured or _failed):
        return
    record = {tier: sorted(names) for tier, names in sorted(_captured.items())}
    record |= {"either": sorted(set().union(*_captured.values())), "failed": _failed}
    record |= {"transformers": transformers.__version__, "torch": torch.__version__}
    if path := os.environ.get(_RECORD):
        Path(path).write_text(json.dumps(record, indent=1))
    patched = len(_captured["patched"])
    if patched < _LEAST_PATCHED <= patched + len(_failed):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say how many types were captured, and why others were not."""
    if not (_captured or _failed):
        return
    terminalreporter.section("captured types")
    for tier, names in sorted(_captured.items()):
        terminalreporter.write_line(f"{tier}: {len(names)}")
    terminalreporter.write_line(f"either: {len(set().union(*_captured.values()))}")
    for name, reason in sorted(_failed.items()):
        terminalreporter.write_line(f"{name} failed: {reason.splitlines()[0] if reason else ''}")


@pytest.fixture(autouse=True)
def _fresh_device():
    if _wrong_pins:
        pytest.fail(_wrong_pins[0])
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _sizes_are_captured_when_met_again(monkeypatch):
    """Let short tests see a step with prompts launched op by op, captured and replayed."""
    monkeypatch.setattr(prompt_graphs, "_MEETINGS", 2)


@pytest.fixture(autouse=True)
def _exact_float32():
    """Keep TF32 out of our runs and out of Hugging Face's."""
    modules = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [module.allow_tf32 for module in modules]
    for module in modules:
        module.allow_tf32 = False
    yield
    for module, allowed in zip(modules, before, strict=True):
        module.allow_tf32 = allowed
