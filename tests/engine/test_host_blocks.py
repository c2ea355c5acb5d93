"""Host memory in blocks: what is handed out, when memory is taken, and copies bit for bit."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from torch_paged.cache.pool import KVPool, LayerShape
from torch_paged.engine import host_blocks
from torch_paged.engine.host_blocks import HostBlocks

ROOM = 1 << 30
SHAPES = {
    "grouped": [LayerShape(2, 16, 16), LayerShape(2, 16, 16), LayerShape(1, 8, 24)],
    "latent": [LayerShape(1, 40, 0), LayerShape(1, 40, 0)],  # keeps no values
}


def pool_of(name: str = "grouped", dtype: torch.dtype = torch.float32, blocks: int = 12) -> KVPool:
    pool = KVPool(SHAPES[name], 8, dtype, "cpu")
    pool.grow(blocks)
    generator = torch.Generator().manual_seed(1)
    for cache in (*pool.keys, *pool.values):
        # Any bits, NaN among them.
        flat = cache.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))
    return pool


def bits_of(pool: KVPool, block: int) -> list[torch.Tensor]:
    return [c[block].flatten().view(torch.uint8).clone() for c in (*pool.keys, *pool.values)]


@pytest.fixture(params=[1, 3, 100], ids="pieces of {}".format)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many blocks a piece of memory has, and how many are staged at a time."""
    monkeypatch.setattr(host_blocks, "_PIECE_BYTES", request.param * pool_of().block_bytes)
    return int(request.param)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_come_back_bit_for_bit(name: str, dtype: torch.dtype, small_pieces: int) -> None:
    pool = pool_of(name, dtype)
    blocks = HostBlocks(pool)
    filler = blocks.take(2, ROOM)
    sources, targets = [7, 0, 3, 11, 4], [1, 11, 0, 5, 7]
    hosts = blocks.take(5, ROOM)
    assert filler == [0, 1] and hosts == [2, 3, 4, 5, 6]
    expected = [bits_of(pool, source) for source in sources]
    rest = {block: bits_of(pool, block) for block in range(12) if block not in targets}
    order = [2, 0, 4, 1, 3]  # pairs in any order
    blocks.copy_out(pool, [(sources[i], hosts[i]) for i in order])
    pool.grow(20)  # moves: the copies are of whatever tensors the pool has
    blocks.copy_in(pool, [(targets[i], hosts[i]) for i in order])
    for target, bits in zip(targets, expected, strict=True):
        assert all(map(torch.equal, bits_of(pool, target), bits))
    for block, bits in rest.items():
        assert all(map(torch.equal, bits_of(pool, block), bits))


def test_nothing_to_copy_touches_nothing() -> None:
    pool = pool_of()
    blocks = HostBlocks(pool)
    blocks.copy_out(pool, [])
    blocks.copy_in(pool, [])
    assert blocks.nbytes == blocks.num_blocks == blocks.num_used == 0


def test_memory_is_taken_in_pieces_and_neighbours_are_handed_out(small_pieces: int) -> None:
    pool = pool_of()
    blocks, size = HostBlocks(pool), pool.block_bytes
    first = blocks.take(2, ROOM)
    per_piece = min(small_pieces, ROOM // size)
    assert blocks.num_blocks == -(-2 // per_piece) * per_piece
    second = blocks.take(3, ROOM)
    assert first is not None and second is not None and [*first, *second] == [*range(5)]
    assert blocks.num_used == 5 and blocks.nbytes == blocks.num_blocks * size
    blocks.give_back(first)
    blocks.give_back(second[1:])
    assert blocks.take(3, ROOM) == [0, 1, 3]
    assert blocks.num_used == 4


def test_no_more_is_taken_than_the_space_has(
    small_pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of()
    blocks, space = HostBlocks(pool), 7 * pool.block_bytes + 5
    with caplog.at_level(logging.INFO, "torch_paged"):
        assert blocks.take(8, space) is None and blocks.nbytes == 0
        assert blocks.take(5, space) == [0, 1, 2, 3, 4]
        assert blocks.take(3, space) is None
        assert caplog.records[-1].levelno == logging.INFO
        assert "the 7 blocks of cpu_offload_space are too few" in caplog.records[-1].message
        assert HostBlocks(pool).take(1, pool.block_bytes - 1) is None
    assert caplog.records[-1].levelno == logging.WARNING
    size = pool.block_bytes
    assert f"cpu_offload_space holds no block, of {size} bytes" in caplog.records[-1].message
    assert blocks.take(2, space) == [5, 6] and blocks.nbytes == 7 * pool.block_bytes
    # Another limit is that of another engine of the core.
    assert blocks.take(1, space + pool.block_bytes) == [7]
    blocks.give_back([0, 7])
    assert blocks.take(2, 0) == [0, 7]


def test_what_the_machine_lacks_is_not_taken_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of()
    size = pool.block_bytes
    monkeypatch.setattr(host_blocks, "_PIECE_BYTES", 2 * size)
    blocks, left = HostBlocks(pool), [8 * size]
    monkeypatch.setattr(host_blocks, "available_bytes", lambda: left[0] - blocks.nbytes)
    assert blocks.take(9, ROOM) is None
    # Room for 8, of which a tenth stays free.
    assert blocks.num_blocks == 6 and blocks.take(6, ROOM) == [*range(6)]
    assert blocks.take(1, ROOM) is None
    assert caplog.text.count("cpu_offload_space stays at") == 1
    assert "computed again" in caplog.text
    left[0] = 100 * size  # somebody has given memory back
    assert blocks.take(1, ROOM) == [6]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), MemoryError()])
def test_memory_that_is_refused_is_not_asked_for_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, calls = HostBlocks(pool_of()), []

    def refusing(*args: Any) -> None:
        calls.append(args)
        raise error

    monkeypatch.setattr(blocks, "_allocate", refusing)
    assert blocks.take(1, ROOM) is None and blocks.take(1, ROOM) is None
    assert len(calls) == 1 and caplog.text.count("stays at 0 bytes") == 1


def test_released_memory_is_gone_for_good() -> None:
    blocks = HostBlocks(pool_of())
    taken = blocks.take(3, ROOM)
    assert taken is not None
    blocks.release()
    assert blocks.nbytes == 0
    blocks.give_back(taken)  # by whoever did not know yet
    assert blocks.num_used == 0 and blocks.take(1, ROOM) is None
