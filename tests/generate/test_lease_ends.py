"""Leased blocks come back: under pressure, by every verb that needs them, and with the cache."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    CACHE_NAME,
    cache_of,
    greedy,
    prompt,
    reference,
    tiny,
)
from transformers import LlamaConfig

import torch_paged
from torch_paged.engine.leased_blocks import LeaseReader

sys.path.append(str(Path(__file__).parent))

from lease_case import (  # noqa: E402
    assert_equal,
    assert_nothing_held,
    core_of,
    immediate,
    lent,
    small_pool,
    tensors,
    turn,
)


@pytest.fixture
def case(device, accelerate):
    model = tiny(LlamaConfig, 5, device)
    return accelerate(copy.deepcopy(model)), model, prompt(13, 3, device=device)


def test_under_pressure_the_oldest_goes_first(case, device, monkeypatch) -> None:
    model, untouched, _ = case
    prompts = [prompt(20, seed, device=device) for seed in range(4)]
    with immediate(monkeypatch):
        expected = [cache_of(turn(model, ids, 5)) for ids in prompts]
    torch_paged.release(model)
    core = small_pool(model, 5)
    outs = [turn(model, ids, 5) for ids in prompts]  # of 2 blocks each
    assert [lent(cache_of(out)) for out in outs] == [False, False, True, True]
    stats = torch_paged.stats(model)
    assert (stats.kv_blocks_used, stats.kv_blocks_leased) == (0, 4)
    assert "4 leased" in str(stats)
    core.leases.check_integrity()
    # All blocks for one call: whatever is leased makes room.
    long = prompt(60, 9, device=device)
    assert torch.equal(greedy(model, long, 20), reference(untouched, long, 20).sequences)
    for out, cache in zip(outs, expected, strict=True):
        assert_equal(cache_of(out), cache)
    assert_nothing_held(model)


def test_leases_and_the_rest_of_the_pool_together_make_room(case, device) -> None:
    model, untouched, ids = case
    core = small_pool(model, 7)
    out = turn(model, ids)  # 2 blocks of 2
    assert core.num_blocks < 7
    long = prompt(100, 9, device=device)  # all blocks at once
    assert torch.equal(greedy(model, long, 8), reference(untouched, long, 8).sequences)
    assert not lent(cache_of(out))


def test_a_turn_that_takes_the_last_block_from_its_own_lease(case, device) -> None:
    model, untouched, ids = case
    small_pool(model, 3)
    out = turn(model, ids)  # 2 blocks, the second one partial
    following = torch.cat([out.sequences, prompt(6, 11, device=device)], 1)
    got = turn(model, following, 20, **{CACHE_NAME: cache_of(out)})  # 3 blocks, the old one beside
    assert torch.equal(got.sequences, reference(untouched, following, 20).sequences)
    assert lent(cache_of(got)) and cache_of(got).get_seq_length() == 47
    theirs = cache_of(turn(untouched, following, 20))
    for a, b in zip(tensors(cache_of(got)), tensors(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert_nothing_held(model)


def test_an_engine_takes_leased_blocks(device, monkeypatch) -> None:
    model = tiny(LlamaConfig, 5, device)
    untouched = copy.deepcopy(model)
    with torch_paged.Engine(model, on_unsupported="raise", max_num_seqs=2) as engine:
        with immediate(monkeypatch):
            expected = cache_of(turn(model, prompt(20, 1, device=device)))
        torch_paged.release(model)
        small_pool(model, 8)
        caches = [cache_of(turn(model, prompt(20, 1, device=device))) for _ in range(3)]
        assert torch_paged.stats(model).kv_blocks_leased == 6
        ids = [prompt(40, seed, device=device) for seed in (7, 8)]
        names = [engine.add_request(i[0].tolist(), max_new_tokens=20) for i in ids]
        outputs = engine.run()
        engine.check_integrity()
        for name, i in zip(names, ids, strict=True):
            wanted = reference(untouched, i, 20).sequences[0, 40:].tolist()
            assert list(outputs[name].token_ids) == wanted
        assert engine._service.engine.num_preemptions == 0
        assert not lent(caches[0])
        for cache in caches:
            assert_equal(cache, expected)


@pytest.mark.parametrize("end", ["release", "restore", "accelerate again", "moved"])
@pytest.mark.parametrize("copied", [False, True])
def test_the_cache_outlives_its_pool(end, copied, case, device, monkeypatch) -> None:
    model, _, ids = case
    with immediate(monkeypatch):
        expected = cache_of(turn(model, ids))
    cache = cache_of(turn(model, ids))
    caches = [cache, copy.deepcopy(cache)] if copied else [cache]
    if end == "release":
        torch_paged.release(model)
        assert torch_paged.stats(model).kv_bytes == 0
    elif end == "restore":
        torch_paged.restore(model)
    elif end == "accelerate again":
        torch_paged.accelerate(model, block_size=8)
    else:
        model.to(torch.float64)
        greedy(model.to(torch.bfloat16), ids, 2)  # read anew
    assert not any(map(lent, caches))
    for kept in caches:
        assert_equal(kept, expected)


@pytest.mark.parametrize("dropped_by", ["count", "collector"])
def test_the_cache_outlives_the_model(dropped_by, device, monkeypatch) -> None:
    model = torch_paged.accelerate(tiny(LlamaConfig, 5, device))
    ids = prompt(13, 3, device=device)
    with immediate(monkeypatch):
        expected = cache_of(turn(model, ids))
    cache = cache_of(turn(model, ids))
    lease = vars(cache.layers[0])["_lender"]
    pool = core_of(model).pool
    if dropped_by == "collector":
        cycle = [model]
        cycle.append(cycle)
        del cycle
    del model
    gc.collect()
    assert not lent(cache) and lease.is_over
    assert_equal(cache, expected)
    # Nothing but this test refers to the pool.
    del lease
    assert len(gc.get_referrers(pool)) <= 1


def test_a_model_that_ends_while_its_lock_is_held(device, monkeypatch) -> None:
    """Then nothing can be copied out at once: the cache keeps the pool."""
    model = torch_paged.accelerate(tiny(LlamaConfig, 5, device))
    ids = prompt(13, 3, device=device)
    with immediate(monkeypatch):
        expected = cache_of(turn(model, ids))
    cache = cache_of(turn(model, ids))
    turns = core_of(model).leases.turns
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    del model
    gc.collect()
    assert lent(cache)
    done.set()
    thread.join()
    assert_equal(cache, expected)


def test_weights_that_change_leave_a_cache_as_it_is(case, device, monkeypatch) -> None:
    model, untouched, ids = case
    with immediate(monkeypatch):
        expected = cache_of(turn(model, ids))
    out = turn(model, ids)
    kept = copy.deepcopy(cache_of(out))
    theirs = turn(untouched, ids)
    for m in (model, untouched):
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.mul_(1.01)
    torch_paged.weights_changed(model)
    following = torch.cat([out.sequences, prompt(6, 11, device=device)], 1)
    got = greedy(model, following, 9, **{CACHE_NAME: cache_of(out)})
    # As with Hugging Face: old states under new weights.
    assert torch.equal(got, greedy(untouched, following, 9, **{CACHE_NAME: cache_of(theirs)}))
    assert_equal(kept, expected)


def test_dropped_caches_give_their_blocks_back(case) -> None:
    model, _, ids = case
    out = turn(model, ids)
    assert torch_paged.stats(model).kv_blocks_leased == 2
    out = turn(model, ids)  # beside the one before
    blocks = torch_paged.stats(model).kv_blocks_total
    for _ in range(3 * blocks):
        out = turn(model, ids)
        held = torch_paged.stats(model)
        assert (held.kv_blocks_used, held.kv_blocks_total) == (0, blocks)
    cycle = [out]
    cycle.append(cycle)
    del out, cycle
    gc.collect()
    assert_nothing_held(model)


def no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 bytes")


@pytest.mark.parametrize("verb", ["release", "restore", "accelerate", "look"])
def test_no_memory_for_a_copy_is_said_before_anything_is_lost(
    verb, case, device, monkeypatch
) -> None:
    model, untouched, ids = case
    with immediate(monkeypatch):
        expected = cache_of(turn(model, ids))
    cache = cache_of(turn(model, ids))
    verbs = {
        "release": torch_paged.release,
        "restore": torch_paged.restore,
        "accelerate": lambda m: torch_paged.accelerate(m, block_size=8),
        "look": lambda m: cache.layers[0].keys,
    }
    with monkeypatch.context() as patch:
        patch.setattr(LeaseReader, "__call__", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="returned cache of 21 columns") as raised:
            verbs[verb](model)
        assert isinstance(raised.value, torch_paged.errors.OutOfBlocks)
        assert "drop" in str(raised.value)
    assert torch_paged.is_accelerated(model) and lent(cache)
    assert torch.equal(greedy(model, ids, 9), reference(untouched, ids, 9).sequences)
    assert lent(cache)
    verbs[verb](model)
    assert_equal(cache, expected)


def test_pressure_without_memory_for_a_copy(case, device, monkeypatch) -> None:
    model, untouched, ids = case
    small_pool(model, 3)
    cache = cache_of(turn(model, ids))
    monkeypatch.setattr(LeaseReader, "__call__", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no room for"):
        greedy(model, prompt(20, 1, device=device), 4)
    assert lent(cache) and core_of(model).allocator.num_live == 2
    monkeypatch.undo()
    following = prompt(20, 1, device=device)
    assert torch.equal(greedy(model, following, 4), reference(untouched, following, 4).sequences)
    theirs = cache_of(turn(untouched, ids))
    for a, b in zip(tensors(cache), tensors(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
