"""The pool that graphs share: capture, replay and recovery on a device, through a cache."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import tqdm

from torch_paged.errors import TorchPagedError
from torch_paged.graphs import pool as pool_module
from torch_paged.graphs.capture import GraphCache
from torch_paged.graphs.pool import GraphPool, _other_threads

MIB = 2**20
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_pool_wants_a_cuda_device():
    with pytest.raises(ValueError, match="CUDA"):
        GraphPool("cpu")


def test_garbage_collection_is_off_during_capture_and_back_after():
    with pool_module._no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with pool_module._no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def cuda_cache():
    cache = GraphCache(GraphPool("cuda"), max_graphs=8)
    yield cache
    cache.clear()


def step(x, weight):
    """A step with a library call, intermediates and a static output."""
    return torch.nn.functional.silu(x @ weight).sum(-1, keepdim=True) + x


def check_device_is_usable(cache):
    """Eager work, random numbers, allocation and a further capture must all work."""
    torch.cuda.synchronize()
    assert torch.rand(4, device="cuda").min() >= 0
    generator = torch.Generator("cuda").manual_seed(1)
    assert torch.rand(4, device="cuda", generator=generator).min() >= 0
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    x = torch.zeros(4, device="cuda")
    assert cache.run(("usable", cache.num_captures), lambda: x + torch.rand_like(x)).sum() > 0
    block = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    del block


@needs_cuda
@pytest.mark.parametrize("warm", [True, False])
def test_replay_equals_eager_bit_by_bit(cuda_cache, warm):
    torch.manual_seed(0)
    weight = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    static = torch.zeros(16, 256, device="cuda", dtype=torch.bfloat16)
    step(static, weight)  # without a warm-up the library handles must exist
    for _ in range(3):
        static.normal_()
        out = cuda_cache.run(
            "step",
            lambda: step(static, weight),
            warmup=(lambda: step(static, weight)) if warm else None,
        )
        assert torch.equal(out, step(static, weight))
    assert cuda_cache.num_captures == 1


@needs_cuda
def test_capture_runs_nothing_and_each_replay_runs_once(cuda_cache):
    counter = torch.zeros(1, device="cuda")
    cuda_cache.capture("k", lambda: counter.add_(1))
    assert counter.item() == 0
    for _ in range(5):
        cuda_cache.replay("k")
    assert counter.item() == 5


@needs_cuda
def test_replay_runs_on_the_callers_stream(cuda_cache):
    x = torch.zeros(1, device="cuda")
    cuda_cache.capture("k", lambda: x.add_(1))
    torch.cuda.synchronize()
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        cuda_cache.replay("k")
        done.record()
    assert not done.query()
    torch.cuda.current_stream().synchronize()
    assert not done.query(), "the default stream did not wait for the replay"
    side.synchronize()
    assert x.item() == 1


@needs_cuda
def test_replay_does_not_synchronise(cuda_cache):
    x = torch.zeros(1, device="cuda")
    cuda_cache.capture("k", lambda: x.add_(1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            cuda_cache.run("k", lambda: x.add_(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.item() == 3


@needs_cuda
def test_graphs_of_one_cache_share_memory(cuda_cache):
    x = torch.zeros(1024, 1024, device="cuda")

    def big():
        return ((x + 1) * 2 + 3).sum()

    cuda_cache.run(0, big)
    first = cuda_cache.pool.reserved_bytes
    for key in range(1, 6):
        assert cuda_cache.run(key, big).item() == 5 * 2**20
    assert cuda_cache.pool.reserved_bytes <= first + 4 * MIB
    assert cuda_cache.nbytes >= first > 0


class _Raises(Exception):
    pass


def _failures():
    x = torch.zeros(4, device="cuda")

    def plain():
        x.add_(1)
        raise _Raises

    def synchronises():
        x.add_(1)
        x.sum().item()

    def swallowed():
        x.add_(1)
        try:
            x.sum().item()
        except RuntimeError:
            return x

    def out_of_memory():
        x.add_(1)
        return torch.empty(2**45, dtype=torch.uint8, device="cuda")

    def unjoined():
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            x.add_(1)

    def interrupted():
        x.add_(1)
        raise KeyboardInterrupt

    return {
        "raises": (plain, _Raises),
        "synchronises": (synchronises, RuntimeError),
        "swallowed": (swallowed, RuntimeError),
        "out_of_memory": (out_of_memory, torch.OutOfMemoryError),
        "unjoined": (unjoined, RuntimeError),
        "interrupted": (interrupted, KeyboardInterrupt),
    }


FAILURES = ["raises", "synchronises", "swallowed", "out_of_memory", "unjoined", "interrupted"]


@needs_cuda
@pytest.mark.parametrize("first", [True, False], ids=["alone", "beside_another"])
@pytest.mark.parametrize("kind", FAILURES)
def test_failed_capture_leaves_everything_usable(cuda_cache, kind, first):
    y = torch.zeros(4, device="cuda")
    if not first:
        cuda_cache.run("other", lambda: y.add_(torch.rand_like(y).ceil()))
    fn, error = _failures()[kind]
    for _ in range(2):
        with pytest.raises(error):
            cuda_cache.run("bad", fn)
        assert "bad" not in cuda_cache
    check_device_is_usable(cuda_cache)
    if not first:
        cuda_cache.replay("other")
        assert y.tolist() == [2.0] * 4


@needs_cuda
def test_registered_generator_survives_a_failed_capture(cuda_cache):
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.zeros(4, device="cuda")

    def fail():
        torch.rand(4, device="cuda", generator=generator)
        x.sum().item()

    with pytest.raises(RuntimeError):
        cuda_cache.run("bad", fail, generators=[generator])
    expected = torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    assert torch.equal(torch.rand(4, device="cuda", generator=generator), expected)


@needs_cuda
@pytest.mark.parametrize("warm", [True, False])
def test_capture_inside_a_capture_is_refused(cuda_cache, warm):
    x = torch.zeros(1, device="cuda")

    def inner():
        x.add_(1)

    with pytest.raises(TorchPagedError, match="under way"):
        cuda_cache.run(
            "outer", lambda: cuda_cache.capture("inner", inner, warmup=inner if warm else None)
        )
    check_device_is_usable(cuda_cache)


@needs_cuda
@pytest.mark.parametrize("batch", [1, 32])
def test_captured_multinomial_draws_what_eager_draws(cuda_cache, batch):
    probabilities = torch.rand(batch, 1000, device="cuda")

    def draw():
        return torch.multinomial(probabilities, 1)

    torch.manual_seed(11)
    expected = [draw() for _ in range(4)]
    offset = torch.cuda.default_generators[0].get_state()
    torch.manual_seed(11)
    drawn = [cuda_cache.run("draw", draw, warmup=draw).clone() for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    assert torch.equal(torch.cuda.default_generators[0].get_state(), offset)


@needs_cuda
def test_captured_private_generator_draws_what_eager_draws(cuda_cache):
    generator = torch.Generator("cuda")

    def draw():
        return torch.rand(8, device="cuda", generator=generator)

    generator.manual_seed(5)
    expected = [draw() for _ in range(3)]
    generator.manual_seed(5)
    drawn = [
        cuda_cache.run("draw", draw, warmup=draw, generators=[generator]).clone() for _ in range(3)
    ]
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


@needs_cuda
def test_a_capture_leaves_the_offsets_of_draws_alone(cuda_cache):
    """torch writes an offset of zero as a capture begins: not into a replay that runs."""

    def draw():
        torch.cuda._sleep(200_000_000)
        return torch.rand(8, device="cuda")

    torch.manual_seed(7)
    expected = [torch.rand(8, device="cuda") for _ in range(3)]
    torch.manual_seed(7)
    drawn = [torch.rand(8, device="cuda")]
    with torch.cuda.stream(cuda_cache.pool.stream):
        torch.cuda._sleep(100_000_000)  # what the capture launches comes late
    drawn.append(cuda_cache.run("draw", draw).clone())
    again = cuda_cache.replay("draw")
    cuda_cache.capture("other", lambda: torch.rand(4, device="cuda"))
    drawn.append(again.clone())
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


@needs_cuda
def test_clear_returns_the_memory_to_the_device():
    x = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    weight = torch.zeros(512, 512, device="cuda", dtype=torch.bfloat16)
    weight @ weight
    cache = GraphCache(GraphPool("cuda"))
    cache.run("small", lambda: x[:4] + 1)
    cache.clear()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(3):
        for key in range(4):
            cache.run(key, lambda: (x + 1, weight @ weight))
        taken = free - torch.cuda.mem_get_info()[0]
        assert taken >= 64 * MIB
        assert 0.8 * taken <= cache.nbytes <= 1.2 * taken + 4 * MIB
        cache.clear()
        assert torch.cuda.mem_get_info()[0] >= free - 4 * MIB
        assert cache.nbytes == 0 and cache.pool.num_graphs == 0


@needs_cuda
def test_a_step_that_reads_back_is_refused_and_the_rest_is_captured(cuda_cache):
    x = torch.ones(4, device="cuda")
    assert not cuda_cache.prepare("a step", "a", lambda: x * x.sum().item(), warmup=x.sum)
    assert "captur" in cuda_cache.refusals["a step"]
    check_device_is_usable(cuda_cache)
    assert cuda_cache.prepare("another", "b", lambda: x + 1, warmup=lambda: x + 1)
    assert torch.equal(cuda_cache.replay("b"), x + 1)


@needs_cuda
def test_graphs_can_be_captured_after_all_were_dropped(cuda_cache):
    x = torch.zeros(8, device="cuda")
    for _ in range(3):
        out = cuda_cache.run("k", lambda: x + 1)
        assert out.sum().item() == 8
        cuda_cache.drop()
    other = GraphCache(cuda_cache.pool)
    other.run("k", lambda: x + 1)
    del other, out  # collected without being cleared
    gc.collect()
    assert cuda_cache.run("k", lambda: x + 2).sum().item() == 16


@needs_cuda
def test_drop_waits_for_replays_that_are_running(cuda_cache):
    x = torch.zeros(1, device="cuda")
    cuda_cache.capture("k", lambda: x.add_(1))
    torch.cuda._sleep(500_000_000)
    cuda_cache.replay("k")
    cuda_cache.drop()
    assert x.item() == 1


@needs_cuda
def test_graph_survives_a_reset_of_the_cublas_workspaces(cuda_cache):
    torch.manual_seed(0)
    weight = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16)  # long K: split-K
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    expected = (x @ weight).clone()
    cuda_cache.capture("k", lambda: x @ weight, warmup=lambda: x @ weight)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for _ in range(3):
        assert torch.equal(cuda_cache.replay("k"), expected)


@needs_cuda
def test_pools_that_come_and_go_take_no_more_memory():
    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)

    def use_and_clear():
        cache = GraphCache(GraphPool("cuda"))
        cache.run("k", lambda: x @ x, warmup=lambda: x @ x)
        cache.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    first = use_and_clear()
    for _ in range(5):
        last = use_and_clear()
    assert last >= first - 2 * MIB


def test_a_thread_beside_this_one_may_use_the_device_a_progress_bar_does_not():
    before = _other_threads()
    if threading.active_count() == 1:
        assert not before
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    assert _other_threads()
    stop.set()
    other.join()
    monitor = tqdm.TMonitor(tqdm.tqdm, 10)
    try:
        assert _other_threads() == before
    finally:
        monitor.exit()


@needs_cuda
def test_live_pools_have_streams_of_their_own():
    pools = [GraphPool("cuda") for _ in range(3)]
    assert len({pool.stream.cuda_stream for pool in pools}) == 3
    kept = pools[1].stream.cuda_stream
    del pools[1]
    assert GraphPool("cuda").stream.cuda_stream == kept


@needs_cuda
def test_cache_keeps_no_reference_to_the_callable(cuda_cache):
    class Model:
        def __init__(self):
            self.x = torch.zeros(1, device="cuda")

        def __call__(self):
            return self.x + 1

    model = Model()
    gone = weakref.ref(model)
    cuda_cache.run("k", model, warmup=model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@needs_cuda
def test_threads_capture_and_work_side_by_side():
    failures, stop = [], threading.Event()

    def background():
        """A trainer that allocates and multiplies on its own stream all the while.

        It draws nothing: up to torch 2.11, random numbers fail while another thread captures.
        """
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    a = torch.ones(256, 256, device="cuda")
                    (a @ a).sum().item()
        except Exception as error:
            failures.append(error)

    def capture(number):
        try:
            cache = GraphCache(GraphPool("cuda"))
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.full((64, 64), float(number), device="cuda")
                for key in range(5):
                    out = cache.run(key, lambda: x * 2, warmup=lambda: x * 2)
                    if out.sum().item() != 2 * number * 64 * 64:
                        raise AssertionError(f"graph {key} of thread {number} is wrong")
                cache.clear()
        except Exception as error:
            failures.append(error)

    trainer = threading.Thread(target=background)
    workers = [threading.Thread(target=capture, args=(n,)) for n in range(1, 4)]
    for thread in (trainer, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    trainer.join()
    assert failures == []


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_other_current_device_does_not_matter():
    cache = GraphCache(GraphPool("cuda:1"))
    x = torch.zeros(4, device="cuda:1")
    with torch.cuda.device(0):
        out = cache.run("k", lambda: x + 1, warmup=lambda: x + 1)
        assert out.device == x.device and out.sum().item() == 4
        assert torch.cuda.current_device() == 0
        cache.clear()


@needs_cuda
def test_current_stream_and_device_are_left_as_they_were(cuda_cache):
    x = torch.zeros(1, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cuda_cache.run("k", lambda: x + 1, warmup=lambda: x + 1)
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
