"""Host microseconds of an engine step, and of a call of `generate()`, device work left out.

The model's step is replaced by one that counts; scheduling, block updates, reports and hand-out
run as they are. Prints a line per batch: mean and median CPU time of a step of `run()`, and what
each token costs on top when `step()` hands out every token, and when `stream()` does and its
caller reads them. CPU time of the thread, so that other processes disturb it less.

Then a line per number of layers, for a call of `generate()`: what transformers takes until it
calls its decoding method; what we take from there until the prompt can be laid out, i.e. whether
the call is ours, whether the model is as it was, room for its rows; and until its forward is
launched.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import GenerationMixin

import torch_paged
from benchmarks import shapes
from benchmarks.runs import core_of
from torch_paged.engine.batch import BatchRun

_WARM_UP = 40


class _Counting:
    """A runner whose decode steps only count."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def serve(self, rows: Any, tail: Any) -> None:
        """Do nothing: the report keeps saying that no row has ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Times(NamedTuple):
    """Microseconds of a step."""

    mean: float
    median: float


def microseconds(batch: int, steps: int, take: Callable[[Any], object]) -> Times:
    """Return the CPU time of a step of `batch` rows.

    Args:
        take: takes one step of an engine.
    """
    model = shapes.build(shapes.TINY, device="cpu", dtype=torch.float32)
    with torch_paged.Engine(model, max_num_seqs=batch, verify=False) as engine:
        core = core_of(model)
        core.prepare(batch, 1, 1)
        # Twice what is needed: rows get blocks ahead only while plenty are free.
        core.make_room(2 * batch * (-(-(steps + 64) // 16)))
        for i in range(batch):
            # Prompts of all lengths modulo the block size, so that blocks fill at any step.
            engine.add_request([3] * (1 + i % 16), max_new_tokens=steps + 100)
        for _ in range(4):
            take(engine)
        runner = _Counting(core.runner())
        core.runner = lambda: runner  # type: ignore[method-assign]
        times = []
        for step in range(_WARM_UP + steps):
            started = time.thread_time()
            take(engine)
            if step >= _WARM_UP:
                times.append(1e6 * (time.thread_time() - started))
            if engine.is_idle:
                raise RuntimeError("the requests ended early")
    return Times(statistics.mean(times), statistics.median(times))


class Door(NamedTuple):
    """Median microseconds of a call of `generate()`, up to its first launch."""

    transformers: float
    ours: float
    inputs: float


def door(num_layers: int, calls: int = 200, prompt: int = 128) -> Door:
    """Time the way of a call to its first launch, on a model of so many layers."""
    fields = {"num_hidden_layers": num_layers}
    model = shapes.build(shapes.TINY, device="cpu", dtype=torch.float32, fields=fields)
    torch_paged.accelerate(model, verify=False)
    ids = torch.randint(8, model.config.vocab_size, (1, prompt))
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    model.generate(ids, **arguments)
    step, marks = core_of(model).step, dict[str, float]()
    logits = torch.zeros(1, step.vocab_size)

    def marked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            marks[name] = time.perf_counter()
            return call(*args, **kwargs)

        return run

    times = []
    with (
        patch.object(GenerationMixin, "_sample", marked("called", GenerationMixin._sample)),
        patch.object(BatchRun, "prefill", marked("decided", BatchRun.prefill)),
        patch.object(step, "prefill", marked("launched", lambda inputs: logits)),
        patch.object(step, "decode", lambda slots: logits),
    ):
        for _ in range(calls):
            started = time.perf_counter()
            model.generate(ids, **arguments)
            ends = [started, *(marks[name] for name in ("called", "decided", "launched"))]
            times.append([1e6 * (end - begin) for begin, end in pairwise(ends)])
    torch_paged.restore(model)
    return Door(*(statistics.median(part) for part in zip(*times, strict=True)))


def quiet(engine: Any) -> object:
    """Take a step as `run()` does."""
    return engine._service.advance(tokens=False)


def loud(engine: Any) -> object:
    """Take a step whose tokens are handed out."""
    return engine.step()


class Reader:
    """Takes a step of `stream()` and reads the new tokens of every output."""

    def __call__(self, engine: Any) -> object:
        service = engine._service
        if not service._mailboxes:
            self._listening = service._listening(tokens=True)
            self._mailbox = self._listening.__enter__()
        service.advance(tokens=True)
        return [token for output in self._mailbox.drain() for token in output.new_token_ids]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--layers", nargs="+", type=int, default=[16, 28, 32])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("batch   us of a step of run(): mean, median   us per token: step(), stream() and read")
    for batch in args.batches:
        alone = microseconds(batch, args.steps, quiet)
        handed = microseconds(batch, args.steps, loud).mean - alone.mean
        read = microseconds(batch, args.steps, Reader()).mean - alone.mean
        print(
            f"{batch:5d} {alone.mean:29.0f} {alone.median:7.0f} {handed / batch:21.2f} "
            f"{read / batch:17.2f}"
        )
    print("layers   us of a call of generate(): transformers, our door, inputs of the prompt")
    for num_layers in args.layers:
        way = door(num_layers)
        print(f"{num_layers:6d} {way.transformers:41.0f} {way.ours:10.0f} {way.inputs:23.0f}")


if __name__ == "__main__":
    main()
