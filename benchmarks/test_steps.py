"""One decode step, and one prefill, below `generate()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import decode, prefill
from benchmarks.bench import Bench
from benchmarks.runs import fresh_ids, open_run
from benchmarks.timing import synchronize
from torch_paged.engine.sampler import GreedySampler

_ROUNDS = 50


def test_decode_step(benchmark: Any, bench: Bench, shape: str, batch: int) -> None:
    model, prompt = bench.checked(shape, "decode", [batch]), bench.scale.prompt
    sampler = GreedySampler()
    with torch.no_grad(), open_run(model, fresh_ids(model, batch, prompt), 2 * _ROUNDS) as run:
        run.first_tokens(run.prefill(), sampler)

        def step() -> None:
            run.launch(sampler)
            synchronize(bench.device)

        benchmark.pedantic(step, rounds=_ROUNDS, warmup_rounds=4)
    if benchmark.stats is not None:  # None with --benchmark-disable
        nbytes = decode.step_bytes(model, batch, prompt, _ROUNDS)
        benchmark.extra_info.update(bench.rate(nbytes, 1e3 * benchmark.stats.stats.median))


@pytest.mark.parametrize("part", [0, 1, 2], ids=["short", "middle", "long"])
def test_prefill(benchmark: Any, bench: Bench, shape: str, part: int) -> None:
    length = bench.scale.prefill[part]
    model = bench.checked(shape, "prefill", [length])

    def run() -> None:
        prefill.prefill_once(model, 1, length)

    benchmark.pedantic(run, rounds=5, warmup_rounds=3)
    if benchmark.stats is not None:  # None with --benchmark-disable
        flops = prefill.prefill_flops(model, 1, length)
        rate = bench.arithmetic(flops, 1e3 * benchmark.stats.stats.median)
        benchmark.extra_info.update(rate, tokens=length)
