"""What the tests of leased caches share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from models import (
    greedy,
)

import torch_paged
from torch_paged.engine.core import EngineCore
from torch_paged.generate import returned_cache
from torch_paged.generate.registry import find_session
from torch_paged.patches.lease_seams import is_lent


@contextlib.contextmanager
def immediate(monkeypatch) -> Iterator[None]:
    """Within the block caches are filled at once, by copying."""
    with monkeypatch.context() as patch:
        patch.setattr(returned_cache, "_can_lease", lambda *args: False)
        yield


def core_of(model: Any) -> EngineCore:
    session = find_session(model)
    assert session is not None and session.core is not None
    return session.core


def lent(cache: Any) -> bool:
    """Say whether all layers are lent; they are all, or none."""
    found = {is_lent(layer) for layer in cache.layers}
    assert len(found) == 1
    return found.pop()


def turn(model: Any, ids: torch.Tensor, count: int = 9, **kwargs: Any) -> Any:
    return greedy(model, ids, count, return_dict_in_generate=True, **kwargs)


def tensors(cache: Any) -> list[torch.Tensor]:
    return [states for layer in cache.layers for states in (layer.keys, layer.values)]


def assert_equal(got: Any, expected: Any) -> None:
    """Compare two caches bit for bit."""
    assert got.get_seq_length() == expected.get_seq_length()
    assert len(got.layers) == len(expected.layers)
    for a, b in zip(tensors(got), tensors(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        assert a.is_contiguous() or not b.is_contiguous()
        assert torch.equal(a, b)
    assert not any(map(is_lent, got.layers))


def assert_nothing_held(model: Any) -> None:
    """Check that neither rows nor leases hold a block, and that the books agree."""
    core = core_of(model)
    core.leases.collect()
    core.leases.check_integrity()
    stats = torch_paged.stats(model)
    assert (stats.kv_blocks_used, stats.kv_blocks_leased) == (0, 0)
    if core.is_prepared:
        core.allocator.check_integrity()
        assert core.allocator.num_live == 0


def small_pool(model: Any, num_blocks: int) -> EngineCore:
    """Let the pool have so many blocks."""
    core = core_of(model)
    core.release()
    # Less than a device maps at once, so the pool is made of plain tensors.
    core.config = core.config.replace(kv_cache_memory=1 << 20)
    core.prepare(1, 1, 1)
    core.pool.max_bytes = num_blocks * core.pool.block_bytes
    return core


class Streamer:
    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass
