"""Slots and blocks of rows that start together and step together; rows may share blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.engine.slot_pool import SlotPool
from torch_paged.engine.step import BlockUpdate


class Reordered(NamedTuple):
    """What `RowBlocks.reorder` asks for: block table entries, and blocks to copy before a write.

    Attributes:
        copies: pairs (from, to); nothing is copied to a block that another pair copies from.
    """

    updates: tuple[BlockUpdate, ...]
    copies: tuple[tuple[int, int], ...]


class RowBlocks:
    """The blocks of each row, the full ones of equal rows shared by reference count.

    A block that a row will write has that row as its only owner.

    Args:
        make_room: asked for that many more blocks; grows the allocator and returns True, or
            returns False.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        slots: SlotPool,
        block_size: int,
        make_room: Callable[[int], bool],
    ) -> None:
        self._allocator = allocator
        self._pool = slots
        self._block_size = block_size
        self._make_room = make_room
        self.slots: list[int] = []
        self.ids: list[list[int]] = []

    def open(self, num_rows: int) -> None:
        """Take a slot for each row; rows begin without blocks."""
        self.slots = [self._pool.take() for _ in range(num_rows)]
        self.ids = [[] for _ in range(num_rows)]

    def close(self) -> None:
        """Give slots and blocks back; harmless when repeated."""
        for slot, ids in zip(self.slots, self.ids, strict=True):
            self._allocator.free(ids)
            self._pool.give_back(slot)
        self.slots, self.ids = [], []

    def grow(self, num_tokens: Sequence[int]) -> tuple[BlockUpdate, ...]:
        """Give each row the blocks for `num_tokens[row]` tokens.

        Raises:
            OutOfBlocks: not all rows got theirs; nothing was changed.
        """
        missing = [
            max(0, -(-tokens // self._block_size) - len(ids))
            for tokens, ids in zip(num_tokens, self.ids, strict=True)
        ]
        fresh = self._take(sum(missing))
        updates, start = [], 0
        for slot, ids, count in zip(self.slots, self.ids, missing, strict=True):
            if count:
                blocks = fresh[start : start + count]
                updates.append(BlockUpdate(slot, len(ids), tuple(blocks)))
                ids += blocks
                start += count
        return tuple(updates)

    def reorder(self, sources: Sequence[int], num_tokens: Sequence[int]) -> Reordered:
        """Let each row go on from the tokens of row `sources[row]`, which has as many.

        Args:
            num_tokens: in the cache for each row.

        Raises:
            OutOfBlocks: no room for the copies of partial blocks; nothing was changed.
        """
        size = self._block_size
        moved = [row for row, source in enumerate(sources) if source != row]
        if not moved:
            return Reordered((), ())
        counts = [-(-num_tokens[source] // size) for source in sources]
        heads = [self.ids[source][:n] for source, n in zip(sources, counts, strict=True)]
        # All rows but one that go on from a partial block write a copy of it.
        partial = [source for source in sources if num_tokens[source] % size]
        self._reserve(len(partial) - len(set(partial)))
        for row in moved:
            self._allocator.fork(heads[row])
        for row in moved:
            self._allocator.free(self.ids[row][: counts[row]])
        copies, changed = [], set(moved)
        for row, source in enumerate(sources):
            if num_tokens[source] % size and self._allocator.refcount(heads[row][-1]) > 1:
                block, copy_from = self._allocator.make_writable(heads[row][-1])
                assert copy_from is not None
                copies.append((copy_from, block))
                heads[row][-1] = block
                changed.add(row)
        updates = []
        for row in sorted(changed):
            self.ids[row] = heads[row] + self.ids[row][counts[row] :]
            updates.append(BlockUpdate(self.slots[row], 0, tuple(heads[row])))
        return Reordered(tuple(updates), tuple(copies))

    def _reserve(self, count: int) -> None:
        missing = count - self._allocator.num_free
        if missing > 0 and not self._make_room(missing):
            self._allocator.allocate(count)  # raises OutOfBlocks

    def _take(self, count: int) -> list[int]:
        self._reserve(count)
        return self._allocator.allocate(count)


__all__ = ["Reordered", "RowBlocks"]
