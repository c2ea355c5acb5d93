"""Capture and replay of CUDA graphs by key.

The code here knows callables, keys and streams, but no models. Importing it, or constructing its
classes, does not initialise CUDA.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from torch_paged.graphs.pool import CAPTURE_LOCK, GraphPool
from torch_paged.log import warn_once

Outputs = TypeVar("Outputs")


@dataclass(slots=True)
class CapturedGraph(Generic[Outputs]):
    """A graph with its static outputs; `nbytes` is the driver's share, outside the pool."""

    graph: torch.cuda.CUDAGraph
    outputs: Outputs
    nbytes: int


class GraphCache(Generic[Outputs]):
    """Graphs by key, captured on first use, replayed afterwards, least recently used dropped.

    Replays run on the caller's current stream. Two threads may capture through one cache, but
    they must not replay at the same time (see `GraphPool`). Other threads may use the device
    during a capture, but torch up to 2.11 refuses them random numbers until it has ended.

    Attributes:
        num_captures: captures that succeeded, over the life of the cache.
        recaptures: those among them whose key had been captured before.
        capture_seconds: host time spent in warm-up and capture.
        refusals: kind of work that could not be captured -> why (see `prepare`).
    """

    def __init__(self, pool: GraphPool, max_graphs: int = 64) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs must be at least 1, got {max_graphs}")
        self.pool = pool
        self.max_graphs = max_graphs
        self.num_captures = 0
        self.recaptures = 0
        self.capture_seconds = 0.0
        self._graphs: OrderedDict[Hashable, CapturedGraph[Outputs]] = OrderedDict()
        self._known: set[int] = set()  # hashes of the keys captured so far
        self._too_large: set[Hashable] = set()  # keys for whose graph there was no memory
        self.refusals: dict[str, str] = {}

    @property
    def num_graphs(self) -> int:
        """Number of graphs held."""
        return len(self._graphs)

    @property
    def nbytes(self) -> int:
        """Device bytes of the pool and of the graphs held, as measured around their capture."""
        held = list(self._graphs.values())
        return self.pool.reserved_bytes + sum(entry.nbytes for entry in held) if held else 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def keys(self) -> list[Hashable]:
        """Return the keys, least recently used first."""
        return list(self._graphs)

    def run(
        self,
        key: Hashable,
        fn: Callable[[], Outputs],
        *,
        warmup: Callable[[], object] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> Outputs:
        """Replay the graph of `key`, which is captured from `fn` first if there is none."""
        if key not in self._graphs:
            self.capture(key, fn, warmup=warmup, generators=generators)
        return self.replay(key)

    def get(self, key: Hashable) -> CapturedGraph[Outputs] | None:
        """Return the graph of `key`, None if there is none."""
        return self._graphs.get(key)

    def replay(self, key: Hashable) -> Outputs:
        """Launch the graph of `key` on the current stream and return its static outputs.

        Raises:
            KeyError: there is no such graph.
        """
        entry = self._graphs[key]
        self._graphs.move_to_end(key)
        entry.graph.replay()
        return entry.outputs

    def capture(
        self,
        key: Hashable,
        fn: Callable[[], Outputs],
        *,
        warmup: Callable[[], object] | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> CapturedGraph[Outputs]:
        """Capture `fn` under `key`, unless another thread just has; nothing is replayed.

        Args:
            fn: the work; it reads and writes static tensors, and must not synchronise.
            warmup: called once before the capture, on the capture stream, to compile kernels and
                create library handles. It really runs, so pass `fn` only if a run more does no
                harm. Random generators are put back afterwards.
            generators: CUDA generators other than the default one that `fn` draws from.

        Raises:
            BaseException: what `fn`, `warmup` or the capture raised; the cache is unchanged.
        """
        with CAPTURE_LOCK:
            if key in self._graphs:
                return self._graphs[key]
            start = time.perf_counter()
            if warmup is not None:
                self.pool.warm_up(warmup, generators)
            free, reserved = self.pool.free_bytes(), self.pool.reserved_bytes
            graph, outputs = self.pool.record(fn, generators)
            taken = free - self.pool.free_bytes() - (self.pool.reserved_bytes - reserved)
            entry = CapturedGraph(graph, outputs, max(taken, 0))
            self._graphs[key] = entry
            if len(self._graphs) > self.max_graphs:
                self._destroy([next(iter(self._graphs))])
            self.capture_seconds += time.perf_counter() - start
            self.num_captures += 1
            self.recaptures += hash(key) in self._known
            self._known.add(hash(key))
            return entry

    def prepare(
        self,
        kind: str,
        key: Hashable,
        fn: Callable[[], Outputs],
        *,
        warmup: Callable[[], object] | None = None,
    ) -> bool:
        """Have a graph under `key`; False where work of this kind cannot be captured.

        A model may do in its step what no graph can hold, such as reading its own data on the
        host. The first capture that fails so is the last of its kind, and `refusals` says why.
        Where memory is lacking the work itself may still run, op by op: `key` is not tried again,
        which would cost more, until all graphs have been cleared.

        Raises:
            BaseException: what `warmup` raised, but for a lack of memory.
        """
        if key in self._graphs:
            return True
        if not self.may_capture(kind, key):
            return False
        is_warm = False

        def warm_up() -> None:
            nonlocal is_warm
            if warmup is not None:
                warmup()
            is_warm = True

        try:
            self.capture(key, fn, warmup=warm_up)
        except RuntimeError as error:
            if not (is_warm or isinstance(error, torch.OutOfMemoryError)):
                raise
            self.refuse(kind, key, error)
            return False
        return True

    def may_capture(self, kind: str, key: Hashable) -> bool:
        """Say whether `prepare` would try to capture `key`, rather than return False."""
        return kind not in self.refusals and key not in self._too_large

    def refuse(self, kind: str, key: Hashable, error: RuntimeError) -> None:
        """Note that a capture failed: for lack of memory that of `key`, else all of its kind."""
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, torch.OutOfMemoryError):
            self._too_large.add(key)
        else:
            self.refusals[kind] = reason
        warn_once(f"{kind} runs without a CUDA graph, which is slower: {reason}")

    def drop(self, predicate: Callable[[Hashable], bool] | None = None) -> int:
        """Destroy the graphs whose key satisfies `predicate` (None: all); return how many.

        Waits for the device. The pool keeps its memory until its last graph is gone.
        """
        with CAPTURE_LOCK:
            doomed = [key for key in self._graphs if predicate is None or predicate(key)]
            self._destroy(doomed)
            return len(doomed)

    def clear(self) -> None:
        """Destroy all graphs and give the memory back to the device."""
        with CAPTURE_LOCK:
            self._too_large.clear()
            if self.drop():
                self.pool.trim()

    def _destroy(self, keys: Sequence[Hashable]) -> None:
        entries = [self._graphs.pop(key) for key in keys]
        self.pool.forget([entry.graph for entry in entries])


__all__ = ["CapturedGraph", "GraphCache"]
