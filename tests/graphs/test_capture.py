"""The cache of graphs: its book-keeping, without a device."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_paged.graphs.capture import GraphCache

MIB = 2**20


class FakeGraph:
    def __init__(self, fn):
        self.fn = fn

    def replay(self):
        self.fn()


class FakePool:
    """Stands for `GraphPool`; a capture takes 3 MiB for the pool and 1 MiB for the driver."""

    def __init__(self):
        self.reserved_bytes = 0
        self.free = 100 * MIB
        self.log = []
        self.held = 0

    def record(self, fn, generators=()):
        self.log.append("record")
        outputs = fn()
        self.reserved_bytes += 3 * MIB
        self.free -= 4 * MIB
        self.held += 1
        return FakeGraph(fn), outputs

    def warm_up(self, warmup, generators=()):
        self.log.append("warm_up")
        warmup()

    def forget(self, graphs):
        self.held -= len(graphs)
        if not self.held:
            self.reserved_bytes = 0

    def free_bytes(self):
        return self.free

    def trim(self):
        self.log.append("trim")


@pytest.fixture
def cache():
    return GraphCache(FakePool(), max_graphs=3)


def test_first_run_captures_and_later_runs_only_replay(cache):
    calls = []
    for _ in range(3):
        assert cache.run("k", lambda: calls.append(1) or "out") == "out"
    assert cache.pool.log == ["record"]
    assert len(calls) == 1 + 3  # one capture, three replays
    assert (cache.num_graphs, cache.num_captures, cache.recaptures) == (1, 1, 0)


def test_warm_up_comes_before_the_capture_and_only_once(cache):
    for _ in range(2):
        cache.run("k", lambda: None, warmup=lambda: None)
    assert cache.pool.log == ["warm_up", "record"]


def test_least_recently_replayed_graph_makes_room(cache):
    for key in "abc":
        cache.run(key, lambda: None)
    cache.run("a", lambda: None)
    cache.run("d", lambda: None)
    assert cache.keys() == ["c", "a", "d"] and cache.pool.held == 3


def test_capture_does_not_replay_and_is_not_repeated(cache):
    calls = []
    first = cache.capture("k", lambda: calls.append(1))
    assert cache.capture("k", lambda: calls.append(1)) is first
    assert calls == [1] and cache.get("k") is first and "k" in cache


def test_unknown_key_cannot_be_replayed(cache):
    assert cache.get("k") is None and "k" not in cache
    with pytest.raises(KeyError):
        cache.replay("k")


@pytest.mark.parametrize("where", ["fn", "warmup"])
def test_failed_capture_changes_nothing(cache, where):
    cache.run("good", lambda: None)

    def fail():
        raise MemoryError("no memory")

    with pytest.raises(MemoryError):
        cache.run("bad", fail if where == "fn" else lambda: None, warmup=fail)
    assert cache.keys() == ["good"] and cache.num_captures == 1


def test_failed_capture_evicts_nothing(cache):
    for key in "abc":
        cache.run(key, lambda: None)
    with pytest.raises(ZeroDivisionError):
        cache.run("d", lambda: 1 / 0)
    assert cache.keys() == ["a", "b", "c"]


def test_a_kind_that_cannot_be_captured_is_not_tried_again(cache):
    tries = []

    def first():
        tries.append("captured")
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    assert not cache.prepare("a step", "a", first, warmup=lambda: tries.append("warm"))
    assert not cache.prepare("a step", "b", first, warmup=lambda: tries.append("warm"))
    assert tries == ["warm", "captured"]
    assert cache.refusals == {"a step": "operation not permitted when stream is capturing"}
    assert cache.prepare("a prefill", "c", lambda: "out", warmup=lambda: None)
    assert cache.replay("c") == "out"
    assert cache.prepare("a prefill", "c", first)


def test_a_failing_warm_up_is_the_callers(cache):
    def fail():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        cache.prepare("a step", "a", fail, warmup=fail)
    assert cache.refusals == {} and "a" not in cache


@pytest.mark.parametrize("where", ["warm-up", "capture"])
def test_what_lacks_memory_runs_without_a_graph_until_all_are_cleared(cache, where, caplog):
    tries = []

    def fail():
        tries.append(where)
        raise torch.OutOfMemoryError(f"no memory in the {where}\nmore")

    warmup = fail if where == "warm-up" else None
    for _ in range(2):
        assert not cache.prepare("a large step", "a", fail, warmup=warmup)
    assert len(tries) == 1 and cache.refusals == {}
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.endswith(
        f"a large step runs without a CUDA graph, which is slower: no memory in the {where}"
    )
    assert cache.prepare("a large step", "b", lambda: "out")
    cache.clear()
    assert cache.prepare("a large step", "a", lambda: "out") and cache.replay("a") == "out"


def test_dropped_keys_are_counted_as_recaptures(cache):
    for key in (1, 2, 3):
        cache.run(key, lambda: None)
    assert cache.drop(lambda key: key > 1) == 2
    assert cache.keys() == [1]
    cache.run(2, lambda: None)
    assert (cache.num_captures, cache.recaptures) == (4, 1)


def test_clear_drops_all_and_trims_once(cache):
    cache.run("a", lambda: None)
    cache.clear()
    cache.clear()
    assert cache.num_graphs == 0 and cache.pool.log.count("trim") == 1


def test_bytes_are_those_of_pool_and_driver(cache):
    assert cache.nbytes == 0
    cache.run("a", lambda: None)
    cache.run("b", lambda: None)
    assert cache.nbytes == 2 * (3 + 1) * MIB
    cache.drop(lambda key: key == "a")
    assert cache.nbytes == (2 * 3 + 1) * MIB  # the pool keeps its memory for b
    cache.clear()
    assert cache.nbytes == 0


def test_capture_time_is_summed(cache):
    cache.run("a", lambda: None)
    first = cache.capture_seconds
    cache.run("a", lambda: None)
    assert cache.capture_seconds == first > 0
    cache.run("b", lambda: None)
    assert cache.capture_seconds > first


def test_threads_capture_one_at_a_time():
    cache = GraphCache(FakePool(), max_graphs=100)
    inside, overlaps = [], []
    barrier = threading.Barrier(4)

    def work(number):
        def fn():
            overlaps.append(len(inside))
            inside.append(number)
            threading.Event().wait(0.002)
            inside.pop()

        barrier.wait()
        for step in range(5):
            cache.capture(("shared", step), fn)
            cache.capture((number, step), fn)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(overlaps) == {0}
    assert cache.num_captures == 5 + 4 * 5


def test_no_graph_at_all_is_refused():
    with pytest.raises(ValueError, match="max_graphs"):
        GraphCache(FakePool(), max_graphs=0)
