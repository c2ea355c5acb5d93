"""Throughput and latency of an engine under ragged work: `python -m benchmarks.ragged --help`.

Throughput: 256 requests, prompts of 32 to 1024 tokens and outputs of 32 to 512, all there at the
start; output tokens a second over the whole run, and the share of the KV blocks held that hold
tokens. Latency: the same kind of requests, of which a fixed number is in flight at any time; time
to first token and between tokens as a caller of `step()` sees them. Response: 128 requests of
128 + 128 tokens at once; mean time until a request has ended.

Weights are random, so outputs run to their limit. A few requests are checked
first, and the whole work runs twice before it is timed: there the KV use is taken.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_paged
from benchmarks import shapes
from benchmarks.decode import GREEDY
from benchmarks.parity import Oracle, WrongResult
from benchmarks.runs import core_of
from benchmarks.timeline import Timeline, timeline
from benchmarks.timing import default_device, summarize, synchronize
from torch_paged.engine.engine import ServingEngine

SEED = 0
RESPONSE_REQUESTS = 128


@dataclass(frozen=True, slots=True)
class Work:
    """One request of the work."""

    prompt: list[int]
    num_tokens: int


def ragged_work(count: int, seed: int, vocab_size: int, scale: float = 1.0) -> list[Work]:
    """Return requests whose lengths depend on the seed alone; `scale` shrinks them for tests."""
    draw = random.Random(seed)

    def between(low: int, high: int) -> int:
        return max(1, int(scale * draw.randint(low, high)))

    work = []
    for _ in range(count):
        length, num_tokens = between(32, 1024), between(32, 512)
        prompt = [draw.randrange(vocab_size) for _ in range(length)]
        work.append(Work(prompt, num_tokens))
    return work


def check(engine: torch_paged.Engine, model: Any, work: list[Work]) -> None:
    """Check the tokens of a few requests, of several lengths, that run beside each other."""
    some = sorted(work, key=lambda w: len(w.prompt) + w.num_tokens)[:3]
    names = [engine.add_request(w.prompt, max_new_tokens=w.num_tokens, **GREEDY) for w in some]
    outputs = engine.run()
    with Oracle(model) as oracle:
        for item, name in zip(some, names, strict=True):
            ids = torch.tensor([item.prompt + list(outputs[name].token_ids)], device=model.device)
            what = f"engine, {len(item.prompt)} + {item.num_tokens} tokens"
            if ids.shape[1] != len(item.prompt) + item.num_tokens:
                raise WrongResult(f"{what}: {ids.shape[1] - len(item.prompt)} tokens came back")
            oracle.check_greedy(ids, len(item.prompt), what)


def throughput(engine: torch_paged.Engine, work: list[Work]) -> dict[str, float]:
    """Return output tokens a second, the KV use, and preemptions."""
    synchronize()
    before = engine.num_preemptions
    started = time.perf_counter()
    for item in work:
        engine.add_request(item.prompt, max_new_tokens=item.num_tokens, **GREEDY)
    outputs = engine.run()
    synchronize()
    seconds = time.perf_counter() - started
    num_tokens = sum(len(out.token_ids) for out in outputs.values())
    expected = sum(item.num_tokens for item in work)
    if num_tokens != expected or any(out.error for out in outputs.values()):
        raise WrongResult(f"{num_tokens} tokens came back, {expected} were asked for")
    return {
        "tokens_per_s": num_tokens / seconds,
        "seconds": seconds,
        "preemptions": engine.num_preemptions - before,
    }


def kv_use(engine: torch_paged.Engine, work: list[Work]) -> float:
    """Return the mean share of the held KV slots that hold a token, over a run of the work."""
    core, shares = core_of(engine._target), []
    for item in work:
        engine.add_request(item.prompt, max_new_tokens=item.num_tokens, **GREEDY)
    while not engine.is_idle:
        engine._service.advance(tokens=False)
        held = core.allocator.num_live * core.config.block_size
        if held:
            shares.append(engine._service.engine.num_kv_tokens / held)
    return statistics.mean(shares)


def latency(engine: torch_paged.Engine, work: list[Work], streams: int) -> dict[str, float]:
    """Keep `streams` requests in flight; return percentiles of the times that callers see, ms."""
    waiting = list(reversed(work))
    added: dict[Any, float] = {}
    last: dict[Any, float] = {}
    first_token: list[float] = []
    between: list[float] = []
    synchronize()
    started = time.perf_counter()
    num_tokens = 0
    while waiting or not engine.is_idle:
        while waiting and len(added) < streams:
            item = waiting.pop()
            now = time.perf_counter()
            name = engine.add_request(item.prompt, max_new_tokens=item.num_tokens, **GREEDY)
            added[name] = now
        for out in engine.step():
            now = time.perf_counter()
            count = len(out.new_token_ids)
            num_tokens += count
            if count:
                if out.request_id in last:
                    between += [(now - last[out.request_id]) / count] * count
                else:
                    first_token.append(now - added[out.request_id])
                last[out.request_id] = now
            if out.finished:
                del added[out.request_id]
    seconds = time.perf_counter() - started
    result = {"tokens_per_s": num_tokens / seconds}
    for name, times in (("ttft", first_token), ("itl", between)):
        marks = statistics.quantiles(times, n=100) if len(times) > 1 else times * 99
        result[f"{name}_mean_ms"] = 1e3 * statistics.mean(times)
        result[f"{name}_p95_ms"] = 1e3 * marks[94]
        result[f"{name}_p99_ms"] = 1e3 * marks[98]
    return result


def response(
    engine: torch_paged.Engine, count: int, length: int, vocab_size: int, seed: int
) -> float:
    """Return the mean seconds until one of `count` equal requests, made at once, has ended.

    The prompts depend on the seed: of those seen before the engine still has the blocks.
    """
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
    synchronize()
    started = time.perf_counter()
    for prompt in prompts:
        engine.add_request(prompt, max_new_tokens=length, **GREEDY)
    times = [time.perf_counter() - started for _ in engine.stream(tokens=False)]
    assert len(times) == count
    return statistics.mean(times)


def decode_timeline(engine: torch_paged.Engine, num_seqs: int, vocab_size: int) -> Timeline:
    """Return what the GPU does while `num_seqs` requests of 128 tokens decode, prompts done."""
    draw, service = random.Random(num_seqs), engine._service
    for _ in range(num_seqs):
        prompt = [draw.randrange(vocab_size) for _ in range(128)]
        engine.add_request(prompt, max_new_tokens=192, **GREEDY)

    def decode(tokens: int) -> None:
        goal = service.engine.num_kv_tokens + tokens * num_seqs
        while service.engine.num_kv_tokens < goal and not engine.is_idle:
            service.advance(tokens=False)

    decode(128 + 48)  # prompts, and the first steps of a batch of this size
    found = timeline(lambda: decode(64))
    engine.run()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What of the work is measured.

    Attributes:
        streams: numbers of requests in flight for which latencies are taken.
        scale: shrinks all lengths.
        response: also take the time until one of 128 equal requests has ended.
        busy: also take the share of the time that a GPU is at work while all requests decode.
    """

    requests: int = 256
    streams: Sequence[int] = (32, 128, 512)
    max_num_seqs: int = 256
    repeats: int = 3
    scale: float = 1.0
    response: bool = True
    busy: bool = False
    max_num_batched_tokens: int = 8192

    @property
    def response_tokens(self) -> int:
        """Tokens of each prompt, and of each output, whose response is measured."""
        return max(2, int(128 * self.scale))


def measure(model: Any, settings: Settings) -> dict[str, Any]:
    """Run all parts on one model; the first runs of the work warm up and show the KV use."""
    vocab, scale = model.config.vocab_size, settings.scale
    result: dict[str, Any] = {}
    with torch_paged.Engine(
        model,
        max_num_seqs=max([settings.max_num_seqs, *settings.streams]),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        on_unsupported="raise",
    ) as engine:
        check(engine, model, ragged_work(8, SEED + 1, vocab, scale))
        for seed in (SEED, SEED + 2):  # a shape is captured when it is met again
            work = ragged_work(settings.requests, seed, vocab, scale)
            result["kv_use"] = kv_use(engine, work)
        runs = [
            throughput(engine, ragged_work(settings.requests, SEED + 3 + i, vocab, scale))
            for i in range(settings.repeats)
        ]
        speed = summarize([run["tokens_per_s"] for run in runs])
        result |= {"tokens_per_s": speed.median, "low": speed.low, "high": speed.high}
        result["spread"] = speed.spread
        result["preemptions"] = sum(run["preemptions"] for run in runs)
        for streams in settings.streams:
            # The last counts. A size is captured when it is met the fourth time: many streams,
            # whose steps are full, have met all after shorter requests, a few not so soon.
            shares = (0.25, 1.0) if streams > 128 else (1.0, 1.0, 1.0)
            for seed, share in enumerate(shares, start=9):  # prompts seen have their blocks still
                count = streams + min(max(streams, 32), 128)
                some = ragged_work(count, 100 * seed + streams, vocab, share * scale)
                result[f"streams_{streams}"] = latency(engine, some, streams)
        if settings.response:
            size = (RESPONSE_REQUESTS, settings.response_tokens, vocab)
            # What is met the fourth time is captured.
            times = [response(engine, *size, seed) for seed in range(4 + settings.repeats)]
            result["response_s"] = statistics.median(times[4:])
        if settings.busy:
            seen = decode_timeline(engine, settings.max_num_seqs, vocab)
            result["gpu_busy"], result["kernels_ms"] = seen.busy, seen.kernels
        result["stats"] = str(torch_paged.stats(model))
    return result


def main() -> None:
    """Measure the models asked for, print a table, write JSON to --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(shapes.NAMES), choices=shapes.NAMES)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--streams", nargs="*", type=int, default=[32, 128, 512])
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink all lengths")
    parser.add_argument("--budget", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--apart", action="store_true", help="prompts in forwards of their own")
    parser.add_argument("--busy", action="store_true", help="share of the time the GPU works")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    ServingEngine.mixes = not args.apart
    settings = Settings(
        requests=args.requests,
        streams=args.streams,
        max_num_seqs=args.max_num_seqs,
        repeats=args.repeats,
        scale=args.scale,
        max_num_batched_tokens=args.budget,
        busy=args.busy,
    )
    rows: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    for name in args.models:
        model = shapes.build(name, device=default_device())
        rows[name] = measure(model, settings)
        print(f"{name}: {rows[name]['tokens_per_s']:,.0f} tokens/s", flush=True)
        print(json.dumps(rows[name], indent=2), flush=True)
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
