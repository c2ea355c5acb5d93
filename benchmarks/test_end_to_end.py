"""Whole calls, prompt to last token, on ids that nothing has seen."""

from __future__ import annotations

from typing import Any

import pytest

import torch_paged
from benchmarks import decode, ragged, serving
from benchmarks.bench import Bench
from benchmarks.runs import fresh_ids
from benchmarks.timing import synchronize

_MODES = {"greedy": decode.GREEDY, "sampled": decode.SAMPLE}


@pytest.mark.parametrize("mode", _MODES)
def test_generate(benchmark: Any, bench: Bench, shape: str, batch: int, mode: str) -> None:
    kind = "decode" if mode == "greedy" else "sampling"
    model, scale = bench.checked(shape, kind, [batch]), bench.scale

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (fresh_ids(model, batch, scale.prompt),), {}

    def call(ids: Any) -> None:
        decode.generate(model, ids, scale.new, **_MODES[mode])
        synchronize(bench.device)

    benchmark.pedantic(call, setup=fresh, rounds=scale.repeats, warmup_rounds=1)
    benchmark.extra_info.update(tokens=batch * scale.new)


@pytest.mark.parametrize("mode", _MODES)
def test_engine(benchmark: Any, bench: Bench, shape: str, batch: int, mode: str) -> None:
    model, scale = bench.checked(shape, "engine", [batch]), bench.scale
    kwargs = _MODES[mode] | ({"seed": 1} if mode == "sampled" else {})
    with torch_paged.Engine(model) as engine:

        def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (fresh_ids(model, batch, scale.prompt),), {}

        def call(ids: Any) -> None:
            serving.generate(engine, ids, scale.new, **kwargs)

        benchmark.pedantic(call, setup=fresh, rounds=scale.repeats, warmup_rounds=1)
    benchmark.extra_info.update(tokens=batch * scale.new)


def test_ragged_work(benchmark: Any, bench: Bench, shape: str) -> None:
    model, settings = bench.accelerated(shape), bench.scale.ragged
    vocab_size = model.config.vocab_size
    seeds = iter(range(100, 200))
    with torch_paged.Engine(model, max_num_seqs=settings.max_num_seqs) as engine:
        ragged.check(engine, model, ragged.ragged_work(8, 1, vocab_size, settings.scale))

        def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
            count = settings.requests
            work = ragged.ragged_work(count, next(seeds), vocab_size, settings.scale)
            return (engine, work), {}

        benchmark.pedantic(
            ragged.throughput, setup=fresh, rounds=bench.scale.repeats, warmup_rounds=1
        )
