"""The sections of a report over torch_paged: what is measured, in which order, into which rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import torch_paged
from benchmarks import decode, prefill, ragged, serving, shapes, startup
from benchmarks.bench import OURS, Bench
from benchmarks.op_cases import op_case, op_names
from benchmarks.record import Row
from benchmarks.runs import fresh_ids, open_run, step_ms
from benchmarks.timeline import idle_between_steps
from benchmarks.timing import Timing, default_device, graph_ms, summarize
from torch_paged.engine.sampler import GreedySampler
from torch_paged.graphs.buckets import default_buckets

# Roughly milliseconds of a decode step, by which measurements are planned.
_STEP_MS = {"0.6b": 1.5, "1b": 1.5, "8b": 6.0, shapes.TINY: 5.0}


class Unit(NamedTuple):
    """One measurement: it is made whole or not at all.

    Attributes:
        seconds: roughly what it takes, the start-up of its model left out.
        is_ours: a failure of it is a failure of torch_paged.
        needs_model: it waits for the start-up of its model, if that is not there yet.
    """

    key: str
    model: str
    seconds: float
    run: Callable[[], list[Row]]
    is_ours: bool = True
    needs_model: bool = True


def calls_s(bench: Bench, name: str, calls: float = 1.0) -> float:
    """Return roughly the seconds of differenced calls of `generate()`."""
    scale = bench.scale
    return calls * (scale.repeats + 1) * scale.new * _STEP_MS[name] / 1e3 + 0.5


def decode_section(bench: Bench) -> Iterator[Unit]:
    """Greedy `generate()` at every shape and batch."""
    for name in bench.models:
        for batch in bench.batches:
            run = partial(_decode, bench, name, batch)
            yield Unit(f"decode/{name}/batch {batch}", name, calls_s(bench, name), run)


def _decode(bench: Bench, name: str, batch: int) -> list[Row]:
    scale, key = bench.scale, f"decode/{name}/batch {batch}"
    model = bench.checked(name, "decode", bench.batches)
    times = decode.measure(model, batch, scale.new, scale.repeats, scale.prompt, **decode.GREEDY)
    extra: dict[str, float | str | None] = {"ran_on": str(torch_paged.explain(model).last_call)}
    if batch == 1 and bench.device.type == "cuda":
        ids = fresh_ids(model, batch, scale.prompt)
        extra["idle_between_steps"] = idle_between_steps(
            lambda: decode.generate(model, ids, scale.new, **decode.GREEDY)
        )
    return [bench.step_row(key, f"batch {batch}", model, batch, times, extra=extra)]


def sampling_section(bench: Bench) -> Iterator[Unit]:
    """Sampling over greedy: in the order of Hugging Face, then by counters in an engine."""
    batches = [batch for batch in bench.batches if batch != 8] or list(bench.batches)
    for name in bench.models:
        for batch in batches:
            run = partial(_sampling, bench, name, batch, batches)
            yield Unit(f"sampling/{name}/generate, batch {batch}", name, calls_s(bench, name), run)
    for name in bench.models:
        for batch in batches:
            run = partial(_engine_sampling, bench, name, batch, batches)
            key = f"sampling/{name}/engine, batch {batch}"
            yield Unit(key, name, calls_s(bench, name, 2.2), run)


def _sampling(bench: Bench, name: str, batch: int, batches: list[int]) -> list[Row]:
    scale, key = bench.scale, f"sampling/{name}/generate, batch {batch}"
    model = bench.checked(name, "sampling", batches)
    size = (batch, scale.new, scale.repeats, scale.prompt)
    times = decode.measure(model, *size, **decode.SAMPLE)
    greedy = bench.record.find("decode", name, OURS, f"batch {batch}")
    greedy_ms = greedy.value if greedy else decode.measure(model, *size, **decode.GREEDY)["ms"]
    over = over_greedy(times["ms"], greedy_ms)
    case = f"batch {batch}, generate(), drawn as Hugging Face does"
    return [bench.step_row(key, case, model, batch, times, extra=over)]


def _engine_sampling(bench: Bench, name: str, batch: int, batches: list[int]) -> list[Row]:
    scale, key = bench.scale, f"sampling/{name}/engine, batch {batch}"
    model = bench.checked(name, "engine", batches)
    with torch_paged.Engine(model) as engine:
        size = (engine, model, batch, scale.new // 2, scale.repeats, scale.prompt)
        greedy = serving.measure(*size, **decode.GREEDY)
        times = serving.measure(*size, seed=1, **decode.SAMPLE)
    over = over_greedy(times["ms"], greedy["ms"])
    case = f"batch {batch}, engine"
    return [
        bench.step_row(key, f"{case}, greedy", model, batch, greedy),
        bench.step_row(key, f"{case}, drawn by counter", model, batch, times, extra=over),
    ]


def over_greedy(ms: float, greedy_ms: float) -> dict[str, float]:
    """Return the figures of a step that samples beside one that does not."""
    return {
        "over_greedy_ms": ms - greedy_ms,
        "greedy_ms": greedy_ms,
        "times_greedy": ms / greedy_ms,
    }


def prefill_section(bench: Bench) -> Iterator[Unit]:
    """Device time of one prompt, and of Hugging Face's own prefill of as many tokens."""
    for name in bench.models:
        for length in bench.scale.prefill:
            seconds = (3 + length / 1500 * _STEP_MS[name] / 6) * bench.scale.expected_s
            run = partial(_prefill, bench, name, length)
            yield Unit(f"prefill/{name}/{length} tokens", name, seconds, run)


def _prefill(bench: Bench, name: str, length: int) -> list[Row]:
    key = f"prefill/{name}/{length} tokens"
    model = bench.checked(name, "prefill", [length])
    repeats = bench.scale.repeats
    for _ in range(prefill.WARM_UPS):
        prefill.prefill_once(model, 1, length)
    prefill.hf_prefill_once(model, 1, length)
    times = [prefill.prefill_once(model, 1, length) for _ in range(repeats)]
    their_spans = [prefill.hf_prefill_once(model, 1, length) for _ in range(repeats)]
    ours, theirs = (
        summarize([once(model, 1, length, queued=True) for _ in range(repeats)])
        for once in (_device_ms, prefill.hf_prefill_once)
    )
    host, span, wall = (summarize([t[i] for t in times]).median for i in range(3))
    their_span = summarize(their_spans).median
    flops = prefill.prefill_flops(model, 1, length)
    extra = {"from_call_ms": span, "host_ms": host, "wall_ms": wall, "times_hf": their_span / span}
    rates = [bench.arithmetic(flops, timing.median) for timing in (ours, theirs)]
    case, their_extra = f"{length} tokens", {"from_call_ms": their_span}
    return [
        bench.row(key, case, "ms", ours, extra=extra, achieved=rates[0]),
        bench.row(key, case, "ms", theirs, system="hf sdpa", extra=their_extra, achieved=rates[1]),
    ]


def _device_ms(model: Any, rows: int, length: int, *, queued: bool) -> float:
    return prefill.prefill_once(model, rows, length, queued=queued).span


def long_context_section(bench: Bench) -> Iterator[Unit]:
    """A decode step behind a long prompt, batch 1."""
    name, length = bench.scale.long_model, bench.scale.long_context
    if name in bench.models:
        key = f"long_context/{name}/{length} tokens"
        run = partial(_long_context, bench, name, key)
        yield Unit(key, name, 12 * bench.scale.expected_s, run)


def _long_context(bench: Bench, name: str, key: str) -> list[Row]:
    scale, sampler = bench.scale, GreedySampler()
    length, steps = scale.long_context, scale.long_steps
    model = bench.checked(name, "prefill", [length])
    with torch.no_grad(), open_run(model, fresh_ids(model, 1, length), 8 + 4 * steps) as run:
        run.first_tokens(run.prefill(), sampler)
        step_ms(run, sampler, 4, bench.device)
        timing = summarize([step_ms(run, sampler, steps, bench.device) for _ in range(3)])
    nbytes = decode.step_bytes(model, 1, length + 4 + steps, steps)
    extra = {"floor_ms": bench.floor_ms(nbytes), "gigabytes_read": nbytes / 1e9}
    rate = bench.rate(nbytes, timing.median)
    case = f"batch 1 at {length} tokens"
    return [bench.row(key, case, "ms/token", timing, extra=extra, achieved=rate)]


def startup_section(bench: Bench) -> Iterator[Unit]:
    """Start-up with kernels compiled, graphs of all buckets, memory beside the weights."""
    parts = [("again", 3.0, _start_again), ("graphs", 15.0, _graphs)]
    if startup.used_bytes(bench.device) is not None:
        parts.append(("memory", 3.0, _memory))
    for name in bench.models:
        for kind, seconds, run in parts:
            key = f"startup/{name}/{kind}"
            yield Unit(key, name, seconds * bench.scale.expected_s, partial(run, bench, name, key))


def _start_again(bench: Bench, name: str, key: str) -> list[Row]:
    bench.checked(name, "decode", [1])
    seconds = startup.first_token_s(bench.plain(name), bench.scale.prompt)
    return [bench.row(key, "to first token, kernels compiled before", "s", seconds)]


def _graphs(bench: Bench, name: str, key: str) -> list[Row]:
    model = bench.checked(name, "decode", [1])
    buckets = [b for b in default_buckets(256) if b <= bench.scale.max_bucket]
    rows = []
    for when in ("first", "kernels compiled before"):
        found = startup.capture_all(model, buckets)
        case = f"a step in {len(buckets)} buckets to {buckets[-1]}, {when}"
        rows.append(bench.row(key, case, "s", found.pop("seconds"), extra=found))
    return rows


def _memory(bench: Bench, name: str, key: str) -> list[Row]:
    batch = max(bench.batches)
    model = bench.checked(name, "decode", [batch])
    found = startup.memory(model, batch, bench.scale.new, bench.scale.prompt)
    case = f"memory beside weights, KV cache and graphs, batch {batch}"
    return [bench.row(key, case, "MB", found.pop("other_mb"), extra=found)]


def ragged_section(bench: Bench) -> Iterator[Unit]:
    """Requests of all lengths through an engine: throughput, KV use, latencies."""
    for name in bench.models:
        seconds = 15 * _STEP_MS[name] * bench.scale.expected_s
        yield Unit(f"ragged/{name}", name, seconds, partial(_ragged, bench, name))


def _ragged(bench: Bench, name: str) -> list[Row]:
    settings, key = bench.scale.ragged, f"ragged/{name}"
    model = bench.accelerated(name)
    try:
        found = ragged.measure(model, settings)
    finally:
        torch_paged.release(model)  # the cache of all these requests
        bench.tidy()
    speed = Timing(found["tokens_per_s"], found["low"], found["high"], settings.repeats)
    names = ("kv_use", "preemptions", "gpu_busy")
    extra = {figure: found[figure] for figure in names if figure in found}
    rows = [bench.row(key, f"{settings.requests} requests", "tokens/s", speed, extra=extra)]
    for streams in settings.streams:
        times = found[f"streams_{streams}"]
        speed = times.pop("tokens_per_s")
        rows.append(bench.row(key, f"{streams} in flight", "tokens/s", speed, extra=times))
    if settings.response:
        count, length = ragged.RESPONSE_REQUESTS, settings.response_tokens
        case = f"mean response to {count} requests of {length} + {length} tokens"
        rows.append(bench.row(key, case, "s", found["response_s"]))
    return rows


def ops_section(bench: Bench) -> Iterator[Unit]:
    """Ops alone, in bfloat16, under graph replay."""
    scale = bench.scale
    if bench.device.type != default_device().type:
        bench.record.left_out["ops"] = f"ops run on {default_device().type} alone here"
        return
    for name in bench.models:
        for batch in sorted({1, max(b for b in bench.batches if b <= 32)}):
            for case in op_names(batch, scale.prompt + scale.new // 2, scale.prefill_op):
                key = f"ops/{name}/{case}"
                run = partial(_op, bench, name, case, key)
                yield Unit(key, name, 0.7 * scale.expected_s, run, needs_model=False)


def _op(bench: Bench, name: str, case: str, key: str) -> list[Row]:
    made = op_case(name, case, bench.scale.cold_bytes)
    made.check()
    timing = graph_ms(made.run, 12, bench.device).scaled(1e3 / len(made.launches))
    ms = timing.median / 1e3
    rate = bench.arithmetic(made.flops, ms) if made.flops else bench.rate(made.nbytes, ms)
    return [bench.row(key, case, "us", timing, achieved=rate)]


SECTIONS: dict[str, Callable[[Bench], Iterator[Unit]]] = {
    "decode": decode_section,
    "sampling": sampling_section,
    "prefill": prefill_section,
    "long_context": long_context_section,
    "startup": startup_section,
    "ragged": ragged_section,
    "ops": ops_section,
}

__all__ = ["SECTIONS", "Unit", "calls_s"]
