"""What the CUDA graphs of a device share: memory pool, capture stream and cuBLAS workspaces.

Importing this, or constructing its classes, does not initialise CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from torch_paged.driver import new_stream
from torch_paged.errors import TorchPagedError

Outputs = TypeVar("Outputs")

# One capture at a time in the process: torch's allocator and generators are shared by all.
CAPTURE_LOCK = threading.RLock()

# Graphs whose capture was invalidated. torch's host allocator keeps a callback into them, so they
# must never be destroyed; each is a few hundred bytes without any device memory.
_INVALIDATED: list[torch.cuda.CUDAGraph] = []


class _Lane:
    """A capture stream, and a memory pool that keeps the cuBLAS workspaces used on it.

    torch keeps one workspace per stream and frees them all when anyone asks it to
    (``torch.compile`` does). Graphs have the address of theirs built in, so it is allocated in a
    pool that stays reserved while there are graphs. Lanes are never destroyed, but pass from one
    `GraphPool` to the next.
    """

    def __init__(self, device: torch.device) -> None:
        # One that nobody else gets, who would write the same workspace.
        self.stream = new_stream(device)
        self._handle: torch.cuda._POOL_HANDLE | None = None

    def prepare_cublas(self) -> None:
        """Make sure that this thread's workspace of the stream, which is current, exists."""
        index = self.stream.device.index
        handle = torch.cuda.graph_pool_handle() if self._handle is None else self._handle
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, handle)
        try:
            with torch.no_grad():
                x = torch.zeros(16, 16, dtype=torch.float16, device=self.stream.device)
                torch.mm(x, x)
                torch.addmm(x[0], x, x)  # cuBLASLt
        finally:
            torch._C._cuda_endAllocateToPool(index, handle)
            if self._handle is not None:
                torch._C._cuda_releasePool(index, handle)
            # The first use is not released, which keeps the pool reserved.
            self._handle = handle

    def forget_cublas(self) -> None:
        """Let the pool of the workspaces go, which must have been freed."""
        if self._handle is not None:
            torch._C._cuda_releasePool(self.stream.device.index, self._handle)
            self._handle = None


# Lanes whose GraphPool is gone, by device index.
_IDLE_LANES: defaultdict[int, list[_Lane]] = defaultdict(list)


_POOLS: weakref.WeakSet[GraphPool] = weakref.WeakSet()


def _give_back_workspaces() -> None:
    """Free the cuBLAS workspaces, some 32 MiB each, once the last graph of the process is gone.

    torch can only free those of all threads at once. One that is about to launch a product would
    still write to its own, so they are kept, for the next graphs, while other threads live.
    """
    with CAPTURE_LOCK:
        pools = list(_POOLS)
        if any(pool.num_graphs for pool in pools) or _other_threads():
            return
        lanes = [pool._lane for pool in pools if pool._lane is not None]
        lanes += [lane for idle in _IDLE_LANES.values() for lane in idle]
        if lanes:
            torch._C._cuda_clearCublasWorkspaces()
        for lane in lanes:
            lane.forget_cublas()


def _other_threads() -> bool:
    """Whether a thread other than this one may be using the device."""
    monitor = getattr(sys.modules.get("tqdm"), "TMonitor", ())  # wakes up progress bars
    current = threading.current_thread()
    return any(
        thread is not current and not isinstance(thread, monitor)
        for thread in threading.enumerate()
    )


class GraphPool:
    """The memory pool and the capture stream shared by all graphs of one device.

    Graphs in one pool reuse each other's intermediate memory. So they must not run at the same
    time, and the outputs of a replay are valid until the next replay of any graph of the pool.

    Attributes:
        reserved_bytes: device memory that torch holds for the graphs of the pool.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise ValueError(f"device must be a CUDA device, got {self._device}")
        self.reserved_bytes = 0
        self._handle: torch.cuda._POOL_HANDLE | None = None
        self._lane: _Lane | None = None
        # torch refuses a pool that lost its last graph, so the live graphs are counted here.
        self._live: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        _POOLS.add(self)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which warm-up and capture run; created on first use."""
        return self._acquire_lane().stream

    @property
    def device(self) -> torch.device:
        """The device, with its index; without one, the current device of the first use."""
        return self.stream.device

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs that hold memory of this pool."""
        return len(self._live)

    def record(
        self, fn: Callable[[], Outputs], generators: Sequence[torch.Generator] = ()
    ) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """Capture the work of one call of `fn` and return the graph with what `fn` returned.

        Nothing runs on the device. If `fn` or the capture raises, the stream, the allocator and
        the random generators are left usable and the exception goes on.
        """
        with CAPTURE_LOCK, torch.cuda.device(self.device):
            _refuse_nesting()
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            reserved = torch.cuda.memory_reserved(self.device)
            with _no_garbage_collection(), self._in_order():
                self._acquire_lane().prepare_cublas()
                outputs = self._record(graph, fn, generators)
            self._live.add(graph)
            self.reserved_bytes += max(torch.cuda.memory_reserved(self.device) - reserved, 0)
            return graph, outputs

    def _acquire_lane(self) -> _Lane:
        if self._lane is None:
            index = self._device.index
            index = torch.cuda.current_device() if index is None else index
            idle = _IDLE_LANES[index]
            lane = idle.pop() if idle else _Lane(torch.device("cuda", index))
            weakref.finalize(self, idle.append, lane).atexit = False
            self._lane = lane
        return self._lane

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Make the capture stream current, in order with the caller's stream.

        A capture launches work as well: torch writes the seed and an offset of zero to where all
        graphs read those of their random numbers. Out of order, a replay would read that offset.
        """
        stream, caller = self.stream, torch.cuda.current_stream()
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            caller.wait_stream(stream)

    def _record(
        self,
        graph: torch.cuda.CUDAGraph,
        fn: Callable[[], Outputs],
        generators: Sequence[torch.Generator],
    ) -> Outputs:
        if self._handle is None or not self._live:
            self._handle, self.reserved_bytes = torch.cuda.graph_pool_handle(), 0
        try:
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            outputs = fn()
        except BaseException:
            with contextlib.suppress(Exception):
                self._end(graph, generators)
            graph.reset()
            raise
        self._end(graph, generators)
        return outputs

    def _end(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        try:
            graph.capture_end()
        except BaseException:
            self._abandon(graph, generators)
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        """Undo what `capture_end` leaves behind when the driver has invalidated a capture."""
        index, handle = self.device.index, self._handle
        assert handle is not None
        self._handle = None
        try:
            torch._C._cuda_endAllocateToPool(index, handle)
        except RuntimeError:
            return  # torch got past that point: the graph releases the pool itself
        torch._C._cuda_releasePool(index, handle)
        _INVALIDATED.append(graph)
        # The generators still believe that they are being captured. A capture that succeeds, in
        # a pool of its own, tells them otherwise.
        with contextlib.suppress(RuntimeError):
            flag = torch.empty(1, device=self.device)
            healthy = torch.cuda.CUDAGraph()
            for generator in generators:
                healthy.register_generator_state(generator)
            healthy.capture_begin(capture_error_mode="thread_local")
            flag.zero_()
            healthy.capture_end()

    def forget(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        """Wait for the device and destroy graphs; their outputs must not be used afterwards."""
        if graphs:
            torch.cuda.synchronize(self.device)  # a replay may still be running
        for graph in graphs:
            self._live.discard(graph)
            graph.reset()
        if not self._live:
            self._handle, self.reserved_bytes = None, 0

    def warm_up(
        self, warmup: Callable[[], object], generators: Sequence[torch.Generator] = ()
    ) -> None:
        """Run `warmup` on the capture stream, in order with the caller's stream.

        The states of the default generator and of `generators` are put back afterwards.
        """
        with torch.cuda.device(self.device):
            _refuse_nesting()
            default = torch.cuda.default_generators[self.device.index]
            saved = [(generator, generator.get_state()) for generator in (default, *generators)]
            try:
                with self._in_order():
                    self._acquire_lane().prepare_cublas()
                    warmup()
            finally:
                for generator, state in saved:
                    generator.set_state(state)

    def free_bytes(self) -> int:
        """Return how much memory of the device is free."""
        return torch.cuda.mem_get_info(self.device)[0]

    def trim(self) -> None:
        """Return what torch keeps cached, the memory of dropped graphs included, to the device."""
        _give_back_workspaces()
        torch.cuda.empty_cache()


def _refuse_nesting() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise TorchPagedError("a capture is already under way on this stream")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep finalizers of unrelated objects from calling the driver during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


__all__ = ["CAPTURE_LOCK", "GraphPool"]
