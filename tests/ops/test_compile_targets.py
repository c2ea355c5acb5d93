"""Every kernel compiles for every supported device, within its limits, without a GPU.

For all of them and in all its forms with `pytest --every-device`, as `.ci/run` has it; otherwise
in the first of its forms for the device that the kernels are tuned on.

Spills are read as the stack frame in the machine code: Triton's own count needs a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# The workers read the same rows, so these are plain modules in this folder.
sys.path.append(str(Path(__file__).parent))

from targets import (  # noqa: E402
    SHARED_LIMITS,
    TUNED_FOR,
    Target,
    collect,
    find_kernels,
    find_misnamed_kernels,
)

pytest.importorskip("triton", reason="no Triton on this platform")

# The first test waits for all compilations, about a minute on two idle cores.
pytestmark = pytest.mark.timeout(1200)

ROWS = collect()
# Of a kernel, unless all are asked for: more would take longer than a hundred tests that run it.
MOST_ROWS = 6
NUM_WORKERS = min(os.cpu_count() or 1, 8)


def _compile_some(jobs: deque[str], log: Path) -> list[dict[str, Any]]:
    """Take jobs until none is left and have a process of its own answer them."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    results = []
    with (
        log.open("w") as stream,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("compile_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            env=environment,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        while jobs:
            try:
                job = jobs.popleft()
            except IndexError:
                break
            process.stdin.write(job + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, f"the compiler died on job {job}:\n{log.read_text()[-3000:]}"
            results.append(json.loads(answer))
        process.stdin.close()
    return results


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each row, or of the first rows of each kernel."""
    if "target" not in metafunc.fixturenames:
        return
    most = sys.maxsize if metafunc.config.getoption("every_device") else MOST_ROWS
    taken: Counter[str] = Counter()
    rows = []
    for row in ROWS:
        taken[row.kernel] += 1
        if taken[row.kernel] <= most:
            rows.append(pytest.param(row, id=row.id))
    metafunc.parametrize("target", rows)


def _devices(row: Target, config: pytest.Config) -> tuple[int, ...]:
    """Return the devices that a row is compiled for: one, unless all are asked for."""
    if config.getoption("every_device"):
        return row.capabilities
    return (TUNED_FOR,) if TUNED_FOR in row.capabilities else row.capabilities[:1]


def _compile_rows(rows: set[str], config: pytest.Config, folder: Path) -> list[dict[str, Any]]:
    """Compile the rows with these ids in parallel processes and return their results."""
    jobs = deque(
        f"{index} {capability}"
        for index, row in enumerate(ROWS)
        if row.id in rows
        for capability in _devices(row, config)
    )
    logs = [folder / f"compile-{number}.log" for number in range(NUM_WORKERS)]
    with ThreadPoolExecutor(NUM_WORKERS) as threads:
        shares = list(threads.map(lambda log: _compile_some(jobs, log), logs))
    return [result for share in shares for result in share]


@pytest.fixture(scope="session")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], dict[str, Any]]:
    """Results of the selected rows by (row id, capability), made once for all xdist workers."""
    import fcntl

    selected = {
        item.callspec.params["target"].id
        for item in request.session.items
        if "target" in getattr(getattr(item, "callspec", None), "params", {})
    }
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    done = folder / "compiled.json"
    with (folder / "compiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            done.write_text(json.dumps(_compile_rows(selected, request.config, folder)))
    return {(r["id"], r["capability"]): r for r in json.loads(done.read_text())}


def test_kernel_compiles_within_device_limits(
    target: Target,
    compiled: dict[tuple[str, int], dict[str, Any]],
    record_property: Callable[[str, object], None],
    pytestconfig: pytest.Config,
) -> None:
    for capability in _devices(target, pytestconfig):
        result = compiled[target.id, capability]
        where = f"{target.id} on sm_{capability}"
        assert "error" not in result, f"{where} does not compile:\n{result['error']}"
        report = "{shared} B shared, {registers} registers, {stack} B stack".format(**result)
        report += f", compiled in {result['seconds']:.1f} s"
        print(f"{where}: {report}")
        record_property(f"sm_{capability}", report)
        if target.adds_lanes:
            assert result["unequal_sums"] == 0, f"{where}: see rounded_product"
        assert result["shared"] <= SHARED_LIMITS[capability], f"{where}: {report}"
        if target.hot:
            assert result["stack"] == 0, f"{where} spills registers: {report}"
        # A kernel that does not wait lets the next one run ahead of the one before it.
        assert result["gdc_wait"] == (capability >= 90), f"{where}: gdc_wait() under PDL"
        if capability < 90:
            assert not result["gdc_launch_dependents"], f"{where}: PDL needs sm_90"


def test_row_ids_are_unique() -> None:
    ids = [row.id for row in ROWS]
    assert len(ids) == len(set(ids)), sorted(i for i in set(ids) if ids.count(i) > 1)


def test_every_kernel_has_a_row() -> None:
    covered = {row.kernel for row in ROWS}
    assert find_kernels() - covered == set(), "add a row in tests/ops/targets_<name>.py"
    assert covered - find_kernels() == set(), "rows of kernels that do not exist"


def test_launched_functions_are_named_as_kernels() -> None:
    assert find_misnamed_kernels() == set()
