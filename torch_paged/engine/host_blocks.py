"""Host memory for KV blocks, and their copies out of a pool and into it.

A host block holds a block of all tensors of the pool, one behind the other. So a run of host
blocks is one transfer for all layers: on the device the blocks are gathered into a staging tensor
of the same layout, or scattered out of it.

Copies go to the current stream and nobody waits for them. All users of a core are in order, also
across streams, and nothing else touches host blocks: one that is given back may be handed on at
once, whatever copies of it are still to run.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_paged.cache.pool import KVPool
from torch_paged.decoder.transfer import to_device
from torch_paged.engine.host_memory import available_bytes

logger = logging.getLogger("torch_paged")

# Memory comes in pieces of this size, and so much is staged on the device. A power of two, because
# torch rounds pinned memory up to one.
_PIECE_BYTES = 64 << 20
# Share of the machine's free memory that is left to others.
_HEADROOM = 0.1
# Blocks are copied in words, whatever their dtype: a row of one has at least 8 elements.
_WORD = torch.int64


class HostBlocks:
    """Blocks of host memory, taken when they are first needed; pinned beside a CUDA device.

    Args:
        pool: whose blocks are copied. It may grow, and be released, meanwhile.
    """

    def __init__(self, pool: KVPool) -> None:
        self._block_bytes = pool.block_bytes
        self._device = pool.device
        self._pieces: list[Tensor] = []  # [num_blocks, words]
        self._firsts: list[int] = []  # id of the first block of each piece
        self._staging: Tensor | None = None  # [blocks of the first piece, words], on the device
        self._free: list[int] = []  # increasing, so that neighbours are taken together
        self._is_released = False
        self._was_refused = False  # by the driver or the allocator
        self._told: set[int] = set()  # levels of the messages logged

    @property
    def num_blocks(self) -> int:
        return self._firsts[-1] + len(self._pieces[-1]) if self._pieces else 0

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(piece.nbytes for piece in self._pieces)

    def take(self, count: int, max_bytes: int) -> list[int] | None:
        """Return `count` blocks; None where they are not free and more memory cannot be had.

        Args:
            max_bytes: what all blocks together may grow to.
        """
        missing = count - len(self._free)
        if missing > 0 and not self._grow(self.num_blocks + missing, max_bytes):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take blocks back; copies that were launched before are not disturbed."""
        if not self._is_released:
            self._free = sorted([*self._free, *blocks])

    def copy_out(self, pool: KVPool, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the pool to host blocks: (block, host block) each."""
        for blocks, staging, runs in self._batches(pairs):
            for cache, part in _parts(pool, staging):
                torch.index_select(cache, 0, blocks, out=part)
            for host, staged in runs:
                host.copy_(staged, non_blocking=True)

    def copy_in(self, pool: KVPool, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks to blocks of the pool: (block, host block) each, no block twice."""
        for blocks, staging, runs in self._batches(pairs):
            for host, staged in runs:
                staged.copy_(host, non_blocking=True)
            for cache, part in _parts(pool, staging):
                cache.index_copy_(0, blocks, part)

    def release(self) -> None:
        """Give the memory back for good; torch keeps it until copies under way have ended."""
        self._is_released = True
        self._pieces.clear()
        self._firsts.clear()
        self._free = []
        self._staging = None
        if self._device.type == "cuda":
            _drop_unused_pinned_memory()

    def _batches(
        self, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]]:
        """Divide pairs into what fits in the staging tensor, in the order of the host blocks.

        Yields their blocks on the device [n], their part of the staging tensor [n, words], and
        pairs of host memory and rows of that part which stand for the same blocks.
        """
        if not pairs:
            return
        assert self._staging is not None, "nobody can hold a host block before there is one"
        ordered = sorted(pairs, key=lambda pair: pair[1])
        ids = torch.tensor([block for block, _ in ordered], device="cpu")
        blocks, hosts = to_device(ids, self._device), [host for _, host in ordered]
        size = len(self._staging)
        for start in range(0, len(hosts), size):
            batch = hosts[start : start + size]
            staging = self._staging[: len(batch)]
            runs = [(self._rows(batch[a], b - a), staging[a:b]) for a, b in self._runs(batch)]
            yield blocks[start : start + size], staging, runs

    def _runs(self, hosts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield index ranges in which host blocks are neighbours in one piece of memory."""
        firsts, start = set(self._firsts), 0
        for i in range(1, len(hosts) + 1):
            if i == len(hosts) or hosts[i] != hosts[i - 1] + 1 or hosts[i] in firsts:
                yield start, i
                start = i

    def _rows(self, first: int, count: int) -> Tensor:
        piece = bisect_right(self._firsts, first) - 1
        start = first - self._firsts[piece]
        return self._pieces[piece][start : start + count]

    def _grow(self, num_blocks: int, max_bytes: int) -> bool:
        most = max_bytes // self._block_bytes
        if most == 0:
            size = self._block_bytes
            self._tell(logging.WARNING, f"cpu_offload_space holds no block, of {size} bytes")
            return False
        if num_blocks > most:
            self._tell(logging.INFO, f"the {most} blocks of cpu_offload_space are too few")
            return False
        per_piece = max(_PIECE_BYTES // self._block_bytes, 1)
        while self.num_blocks < num_blocks:
            if not self._add_piece(min(per_piece, most - self.num_blocks)):
                return False
        return True

    def _add_piece(self, num_blocks: int) -> bool:
        if self._is_released or self._was_refused:
            return False
        available, held = available_bytes(), self.nbytes
        wanted = held + num_blocks * self._block_bytes
        # Our own share counts as free: else small steps would eat up the headroom.
        if available is not None and wanted > (available + held) * (1 - _HEADROOM):
            why = f"{available} bytes of memory are left on this machine"
            self._tell(logging.WARNING, f"cpu_offload_space stays at {held} bytes: {why}")
            return False
        try:
            self._allocate(num_blocks)
        except (RuntimeError, MemoryError) as error:
            # Asking again takes long where a driver looks for memory.
            self._was_refused = True
            self._tell(logging.WARNING, f"cpu_offload_space stays at {held} bytes: {error}")
            return False
        return True

    def _allocate(self, num_blocks: int) -> None:
        shape = (num_blocks, self._block_bytes // _WORD.itemsize)
        pinned = self._device.type == "cuda"
        with torch.inference_mode(False):
            if self._staging is None:
                self._staging = torch.empty(shape, dtype=_WORD, device=self._device)
            piece = torch.empty(shape, dtype=_WORD, device="cpu", pin_memory=pinned)
        first = self.num_blocks
        self._pieces.append(piece)
        self._firsts.append(first)
        self._free += range(first, first + num_blocks)

    def _tell(self, level: int, what: str) -> None:
        """Say why preempted requests are computed again, once for each level."""
        if level not in self._told:
            self._told.add(level)
            logger.log(level, "%s; preempted requests that do not fit are computed again", what)


def _parts(pool: KVPool, staging: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the tensors of the pool [num_blocks, words] with their columns of the staging one."""
    start = 0
    for cache in (*pool.keys, *pool.values):
        if cache.shape[1:].numel():
            words = cache.flatten(1).view(_WORD)
            stop = start + words.shape[1]
            yield words, staging[:, start:stop]
            start = stop


def _drop_unused_pinned_memory() -> None:
    # torch keeps freed pinned memory for its own use; older releases have the name without a door.
    drop = getattr(torch.accelerator, "empty_host_cache", None)
    drop = drop or getattr(torch._C, "_host_emptyCache", None)
    if drop is not None:
        drop()


__all__ = ["HostBlocks"]
