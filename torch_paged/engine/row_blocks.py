"""Slots and blocks of rows that start together and step together; rows may share blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import ONE_KIND, LayerKind
from torch_paged.engine.held_blocks import BlockUpdate, HeldBlocks, no_blocks
from torch_paged.engine.slot_pool import SlotPool


class Reordered(NamedTuple):
    """What `RowBlocks.reorder` asks for: block table entries, and blocks to copy before a write.

    Attributes:
        copies: pairs (from, to); nothing is copied to a block that another pair copies from.
    """

    updates: tuple[BlockUpdate, ...]
    copies: tuple[tuple[int, int], ...]


class RowBlocks:
    """The blocks of each row, the full ones of equal rows shared by reference count.

    A block that a row will write has that row as its only owner, but for what it has adopted.

    Args:
        make_room: asked for that many more blocks; grows the allocator and returns True, or
            returns False.
        kinds: the kinds of layer, each with blocks of its own.

    Attributes:
        held: by row and kind.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        slots: SlotPool,
        block_size: int,
        make_room: Callable[[int], bool],
        kinds: Sequence[LayerKind] = ONE_KIND,
    ) -> None:
        self._allocator = allocator
        self._pool = slots
        self._block_size = block_size
        self._make_room = make_room
        self._kinds = tuple(kinds)
        self.has_window = any(kind.window for kind in kinds)
        self.slots: list[int] = []
        self.held: list[list[HeldBlocks]] = []

    def open(self, num_rows: int) -> None:
        """Take a slot for each row; rows begin without blocks."""
        self.slots = [self._pool.take() for _ in range(num_rows)]
        self.held = [no_blocks(self._kinds) for _ in range(num_rows)]

    def close(self) -> None:
        """Give slots and blocks back; harmless when repeated."""
        for slot, row in zip(self.slots, self.held, strict=True):
            for held in row:
                self._allocator.free(held.ids)
            self._pool.give_back(slot)
        self.slots, self.held = [], []

    def hand_over(self, num_tokens: Sequence[int]) -> list[list[HeldBlocks]]:
        """Let the caller have the blocks of so many tokens of each row; free the others."""
        handed, self.held = self.held, [no_blocks(self._kinds) for _ in self.held]
        for row, tokens in zip(handed, num_tokens, strict=True):
            end = -(-tokens // self._block_size)
            for held in row:
                kept = held.columns(held.first, end)
                self._allocator.free(held.ids[len(kept) :])
                held.ids = kept
        return handed

    def adopt(
        self, heads: Sequence[Sequence[HeldBlocks]], num_tokens: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Let rows without blocks begin with so many tokens that others hold.

        Of a partial block with one holder, who looks at no more than these tokens, a row writes
        the rest; any other it copies.

        Args:
            heads: by row and kind.

        Returns:
            Blocks (from, to) to copy before anything else is done here.

        Raises:
            OutOfBlocks: no room for the copies of partial blocks.
        """
        partial = []
        for row, head, tokens in zip(self.held, heads, num_tokens, strict=True):
            end = -(-tokens // self._block_size)
            last = [block for source in head for block in source.columns(end - 1, end)]
            shared = any(self._allocator.refcount(block) > 1 for block in last)
            for held, source in zip(row, head, strict=True):
                ids = source.columns(source.first, end)
                self._allocator.fork(ids)
                held.first, held.ids = source.first, ids
            if shared and tokens % self._block_size:
                partial.append((row, end - 1))
        self._reserve(len(partial) * sum(kind.num_tables for kind in self._kinds))
        return [pair for row, column in partial for pair in self._own_column(row, column)]

    def all_updates(self) -> tuple[BlockUpdate, ...]:
        """Write everything that the rows hold."""
        return tuple(
            update
            for slot, row in zip(self.slots, self.held, strict=True)
            for held in row
            for update in held.updates(slot, held.first)
        )

    def grow(
        self, num_tokens: Sequence[int], *, windowed: bool | None = None
    ) -> tuple[BlockUpdate, ...]:
        """Give each row the blocks for `num_tokens[row]` tokens.

        Args:
            windowed: only in the layers that have a window, or only in those that have none.

        Raises:
            OutOfBlocks: not all rows got theirs; nothing was changed.
        """
        missing: list[tuple[int, HeldBlocks, int]] = []  # (slot, of a row, blocks)
        for slot, row, tokens in zip(self.slots, self.held, num_tokens, strict=True):
            end = -(-tokens // self._block_size)
            for held in row:
                if end > held.end and windowed in (None, held.kind.window > 0):
                    missing.append((slot, held, (end - held.end) * held.kind.num_tables))
        fresh = self._take(sum(count for _, _, count in missing))
        updates: list[BlockUpdate] = []
        start = 0
        for slot, held, count in missing:
            since = held.end
            held.ids += fresh[start : start + count]
            start += count
            updates += held.updates(slot, since)
        return tuple(updates)

    def drop_behind(self, query_indices: Sequence[int]) -> None:
        """Give back what no query of a row from `query_indices[row]` on can see.

        Whoever takes the blocks may write them only in launches that are still to come.
        """
        for row, query_index in zip(self.held, query_indices, strict=True):
            for held in row:
                if held.kind.window:
                    column = held.kind.first_column(query_index, self._block_size)
                    self._allocator.free(held.drop_before(column))

    def reorder(self, sources: Sequence[int], num_tokens: Sequence[int]) -> Reordered:
        """Let each row go on from the tokens of row `sources[row]`, which has as many.

        Args:
            num_tokens: in the cache for each row.

        Raises:
            OutOfBlocks: no room for the copies of partial blocks; nothing was changed.
        """
        moved = [row for row, source in enumerate(sources) if source != row]
        if not moved:
            return Reordered((), ())
        partial = [source for source in sources if num_tokens[source] % self._block_size]
        # All rows but one that go on from a partial column write a copy of it.
        columns = len(partial) - len(set(partial))
        self._reserve(columns * sum(kind.num_tables for kind in self._kinds))
        ends = [-(-num_tokens[source] // self._block_size) for source in sources]
        heads = [
            [(held.first, held.columns(held.first, end)) for held in self.held[source]]
            for source, end in zip(sources, ends, strict=True)
        ]
        for row in moved:
            for _, ids in heads[row]:
                self._allocator.fork(ids)
        for row in moved:
            for held, (first, ids) in zip(self.held[row], heads[row], strict=True):
                own = held.columns(held.first, ends[row])
                self._allocator.free(own)
                held.first, held.ids = first, ids + held.ids[len(own) :]
        copies, changed = [], set(moved)
        for row, source in enumerate(sources):
            if num_tokens[source] % self._block_size:
                own_copies = self._own_column(self.held[row], ends[row] - 1)
                copies += own_copies
                changed.update([row] if own_copies else [])
        updates: list[BlockUpdate] = []
        for row in sorted(changed):
            for held in self.held[row]:
                updates += held.updates(self.slots[row], held.first)
        return Reordered(tuple(updates), tuple(copies))

    def _own_column(self, row: Sequence[HeldBlocks], column: int) -> list[tuple[int, int]]:
        """Make a row the only owner of a column; return the blocks to copy."""
        copies = []
        for held in row:
            size = held.kind.num_tables
            at = (column - held.first) * size
            for index in range(at, at + size):
                if self._allocator.refcount(held.ids[index]) > 1:
                    block, copy_from = self._allocator.make_writable(held.ids[index])
                    assert copy_from is not None
                    copies.append((copy_from, block))
                    held.ids[index] = block
        return copies

    def _reserve(self, count: int) -> None:
        missing = count - self._allocator.num_free
        if missing > 0 and not self._make_room(missing):
            self._allocator.allocate(count)  # raises OutOfBlocks

    def _take(self, count: int) -> list[int]:
        self._reserve(count)
        return self._allocator.allocate(count)


__all__ = ["Reordered", "RowBlocks"]
