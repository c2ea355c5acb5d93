"""Fixtures of `pytest benchmarks`: true shapes on a GPU, a tiny model on a CPU.

Needs pytest-benchmark (`pip install -e '.[bench]'`). Plain `pytest` does not come here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import shapes
from benchmarks.bench import SMALL, TRUE, Bench
from benchmarks.ceiling import matmul_tflops, read_tbps
from benchmarks.record import Record, environment_of
from benchmarks.timing import default_device

_ON_GPU = default_device().type == "cuda"
BATCHES = (1, 8, 32, 128) if _ON_GPU else (1, 3)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shapes`."""
    names = (*shapes.NAMES, shapes.TINY)
    text = f"of {', '.join(names)}, with commas between; default: the first three on a GPU"
    parser.getgroup("torch_paged").addoption("--shapes", default="", help=text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a benchmark that names `shape` at each of them, one that names `batch` at each batch."""
    if "shape" in metafunc.fixturenames:
        asked = [name for name in metafunc.config.getoption("--shapes").split(",") if name]
        default = shapes.NAMES if _ON_GPU else (shapes.TINY,)
        metafunc.parametrize("shape", asked or default, scope="session")
    if "batch" in metafunc.fixturenames:
        metafunc.parametrize("batch", BATCHES, ids=lambda batch: f"b{batch}")


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The models, each checked before it is timed."""
    device = default_device()
    dtype = torch.bfloat16 if _ON_GPU else torch.float32
    environment = environment_of(str(device), str(dtype).removeprefix("torch."))
    record = Record.create(tmp_path_factory.mktemp("bench") / "record.json", environment)
    record.start_run("pytest benchmarks")
    made = Bench(
        record,
        TRUE if _ON_GPU else SMALL,
        device,
        dtype,
        shapes.NAMES,
        BATCHES,
        read_tbps=read_tbps(device),
        peak_tflops=matmul_tflops(device, dtype),
    )
    yield made
    made.drop_models()
