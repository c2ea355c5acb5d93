"""Every hot op at the shapes of a model, as it runs in a captured step."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bench import SMALL, TRUE, Bench
from benchmarks.op_cases import op_case, op_names
from benchmarks.timing import default_device, replayable, synchronize

_SCALE = TRUE if default_device().type == "cuda" else SMALL
_CONTEXT = _SCALE.prompt + _SCALE.new // 2
_NAMES = [name for rows in (1, 32) for name in op_names(rows, _CONTEXT, _SCALE.prefill_op)]


@pytest.mark.parametrize("name", _NAMES)
def test_op(benchmark: Any, bench: Bench, shape: str, name: str) -> None:
    case = op_case(shape, name, _SCALE.cold_bytes)
    case.check()
    replay = replayable(case.run, bench.device)

    def run() -> None:
        replay()
        synchronize(bench.device)

    benchmark.pedantic(run, rounds=20, warmup_rounds=2)
    if benchmark.stats is not None:  # None with --benchmark-disable
        ms = 1e3 * benchmark.stats.stats.median / len(case.launches)
        rate = bench.arithmetic(case.flops, ms) if case.flops else bench.rate(case.nbytes, ms)
        benchmark.extra_info.update(rate, launches=len(case.launches))
