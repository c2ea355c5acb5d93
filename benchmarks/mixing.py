"""What it is worth to let decoding rows share the forward of prompts, by arithmetic.

Runs the scheduler over the work of `benchmarks.ragged`, all of it there at the start or a fixed
number of requests in flight, and adds up what its steps take on one H200: rows and prompts of a
step in one forward, or one after the other. The times of a forward are interpolated between
figures taken there; keys and values are read at 85% of 4.6 TB/s. No GPU is needed.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.ragged import SEED, Work, ragged_work
from torch_paged.cache.blocks import BlockAllocator
from torch_paged.engine.request import Request
from torch_paged.engine.scheduler import Scheduler
from torch_paged.engine.step import ScheduledStep

_BLOCK = 16
_KV_BYTES_PER_MS = 0.85 * 4.6e9


@dataclass(frozen=True, slots=True)
class Shape:
    """Costs of one model.

    Attributes:
        forward_ms: (tokens, milliseconds) of a forward but for reading keys and values.
        kv_bytes: of a token in all layers.
    """

    forward_ms: Sequence[tuple[int, float]]
    kv_bytes: int

    def forward(self, num_tokens: int) -> float:
        """Return the milliseconds of a forward of so many tokens, 0 for none."""
        if num_tokens == 0:
            return 0.0
        sizes = [size for size, _ in self.forward_ms]
        at = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        (low, first), (high, last) = self.forward_ms[at - 1], self.forward_ms[at]
        return first + (last - first) * (num_tokens - low) / (high - low)


# Decode steps of up to 128 rows and prompts of 8,192 tokens are measured, 256 rows and chunks of
# 512 to 2,048 tokens estimated from the rates of cuBLAS.
SHAPES = {
    "0.6b": Shape(
        ((1, 0.5), (32, 1.0), (64, 1.2), (128, 1.5), (256, 2.0), (512, 2.8), (1024, 4.6))
        + ((2048, 8.0), (8192, 28.0)),
        114688,
    ),
    "1b": Shape(
        ((1, 0.66), (32, 0.95), (64, 1.05), (128, 1.25), (256, 1.7), (512, 2.6), (1024, 4.6))
        + ((2048, 8.8), (8192, 34.0)),
        32768,
    ),
    "8b": Shape(
        ((1, 3.55), (32, 4.2), (64, 4.6), (128, 5.3), (256, 7.4), (512, 13.8), (1024, 26.5))
        + ((2048, 52.0), (8192, 205.0)),
        131072,
    ),
}


class Simulation:
    """A scheduler that is fed with work, and the time that its steps take."""

    def __init__(self, shape: Shape, max_num_seqs: int, budget: int, *, mixes: bool) -> None:
        self._shape = shape
        self._mixes = mixes
        self._scheduler = Scheduler(
            BlockAllocator(1 << 17),
            block_size=_BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=1 << 16,
        )
        self._decoding: set[Request] = set()
        self.ms = 0.0
        self.num_tokens = 0
        self.gaps: list[tuple[float, int]] = []  # between tokens: (ms, rows)

    def run(self, work: Sequence[Work], in_flight: int) -> None:
        """Run the work with at most so many requests at a time."""
        waiting = [Request(i, item.prompt, item.num_tokens) for i, item in enumerate(work)][::-1]
        num_live = 0
        while waiting or num_live:
            while waiting and num_live < in_flight:
                self._scheduler.add(waiting.pop())
                num_live += 1
            step = self._scheduler.schedule()
            num_live -= len(step.finished)
            self._decoding -= set(step.finished)
            self._decoding |= set(step.started)
            self._count(step)

    def _count(self, step: ScheduledStep) -> None:
        scheduler, shape = self._scheduler, self._shape
        chunk = sum(chunk.length for chunk in step.prefills)
        rows = step.num_decoding
        context = sum(scheduler.num_computed_tokens(r) for r in self._decoding)
        ms = context * shape.kv_bytes / _KV_BYTES_PER_MS
        if self._mixes and rows:
            ms += shape.forward(rows + chunk)
        else:
            ms += shape.forward(rows) + shape.forward(chunk)
        self.ms += ms
        self.gaps.append((ms, rows))
        self.num_tokens += rows + sum(chunk.is_last for chunk in step.prefills)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return 1e3 * self.num_tokens / self.ms

    def gap(self, share: float) -> float:
        """Return the time between two tokens that this share of them does not exceed."""
        left = share * sum(rows for _, rows in self.gaps)
        for ms, rows in sorted(self.gaps):
            left -= rows
            if left <= 0:
                return ms
        return 0.0


def main() -> None:
    """Print a table: tokens a second and the 99th percentile between tokens, apart and mixed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--streams", nargs="+", type=int, default=[8, 32, 128, 512])
    parser.add_argument("--budgets", nargs="+", type=int, default=[512, 2048, 8192])
    args = parser.parse_args()
    print("model  in flight  budget   apart: tok/s  p99 ms   mixed: tok/s  p99 ms   gain")
    for name in args.models:
        for streams in [*args.streams, 0]:
            count = max(4 * streams, 128) if streams else 256
            work = ragged_work(count, SEED + 9, 1000)
            for budget in args.budgets:
                runs = []
                for mixes in (False, True):
                    runs.append(Simulation(SHAPES[name], streams or 256, budget, mixes=mixes))
                    runs[-1].run(work, streams or count)
                apart, mixed = runs
                gain = mixed.tokens_per_s / apart.tokens_per_s - 1
                figures = [f"{run.tokens_per_s:15,.0f} {run.gap(0.99):7.1f}" for run in runs]
                case = f"{name:5s} {streams or 'all 256':>10} {budget:7d}"
                print(case, *figures, f"{gain:+6.1%}", flush=True)


if __name__ == "__main__":
    main()
