"""Rows share full blocks, own what they write, and give everything back."""

from __future__ import annotations

import random

import pytest

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.engine.row_blocks import RowBlocks
from torch_paged.engine.slot_pool import SlotPool
from torch_paged.errors import OutOfBlocks

SIZE = 4


def rows_over(num_blocks: int, num_rows: int, *, grows: bool = False):
    allocator = BlockAllocator(num_blocks)

    def make_room(count: int) -> bool:
        if grows:
            allocator.grow(allocator.num_blocks + count)
        return grows

    rows = RowBlocks(allocator, SlotPool(num_rows), SIZE, make_room)
    rows.open(num_rows)
    return allocator, rows


class Contents:
    """What the blocks hold and what the table says, as the device would have it."""

    def __init__(self, num_slots: int) -> None:
        self.blocks: dict[int, list[object]] = {}
        self.table: list[list[int]] = [[] for _ in range(num_slots)]

    def apply(self, updates) -> None:
        for slot, first, ids, _ in updates:
            self.table[slot][first : first + len(ids)] = ids

    def copy(self, pairs) -> None:
        assert not {a for a, _ in pairs} & {b for _, b in pairs}
        assert len({b for _, b in pairs}) == len(pairs)
        for source, target in pairs:
            self.blocks[target] = list(self.blocks.get(source, [None] * SIZE))

    def write(self, slot: int, index: int, value: object) -> None:
        block = self.table[slot][index // SIZE]
        self.blocks.setdefault(block, [None] * SIZE)[index % SIZE] = value

    def read(self, slot: int, count: int) -> list[object]:
        return [self.blocks[self.table[slot][i // SIZE]][i % SIZE] for i in range(count)]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_equal_rows_share_full_blocks(length) -> None:
    allocator, rows = rows_over(20, 3)
    rows.grow([length, 0, 0])
    updates, copies = rows.reorder([0, 0, 0], [length] * 3)
    full = length // SIZE
    assert allocator.num_live == full + (3 if length % SIZE else 0)
    assert len(copies) == (2 if length % SIZE else 0)
    ids = [held.ids for (held,) in rows.held]
    assert [own[:full] for own in ids] == [ids[0][:full]] * 3
    assert len(updates) >= 2
    rows.close()
    assert allocator.num_live == 0
    allocator.check_integrity()


def test_rows_in_place_cost_nothing() -> None:
    allocator, rows = rows_over(20, 3)
    rows.grow([5, 9, 2])
    before = allocator.num_live
    assert rows.reorder([0, 1, 2], [5, 9, 2]) == ((), ())
    assert allocator.num_live == before


def test_no_room_changes_nothing() -> None:
    allocator, rows = rows_over(3, 3)
    rows.grow([5, 0, 0])
    with pytest.raises(OutOfBlocks):
        rows.reorder([0, 0, 0], [5] * 3)
    with pytest.raises(OutOfBlocks):
        rows.grow([5, 5, 5])
    assert [len(held.ids) for (held,) in rows.held] == [2, 0, 0]
    assert allocator.num_live == 2
    allocator.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_beams_read_what_their_ancestors_wrote(seed) -> None:
    chance = random.Random(seed)
    groups, beams = chance.randint(1, 3), chance.randint(2, 5)
    count = groups * beams
    starts = [chance.randint(1, 13) for _ in range(groups)]
    lengths = [starts[row // beams] for row in range(count)]
    allocator, rows = rows_over(0, count, grows=True)
    device = Contents(count)
    first = [row - row % beams for row in range(count)]
    device.apply(rows.grow([n if row in first else 0 for row, n in enumerate(lengths)]))
    history: list[list[object]] = []
    for row in range(count):
        history.append([(first[row], i) for i in range(lengths[row])])
        if row in first:
            for i in range(lengths[row]):
                device.write(rows.slots[row], i, (row, i))
    order = first
    for step in range(chance.randint(5, 25)):
        updates, copies = rows.reorder(order, lengths)
        device.apply(updates)
        device.copy(copies)
        history = [list(history[source]) for source in order]
        ahead = chance.randint(1, 3)
        device.apply(rows.grow([n + ahead for n in lengths]))
        for row in range(count):
            block = rows.held[row][0].ids[lengths[row] // SIZE]
            assert allocator.refcount(block) == 1, "a block to be written has one owner"
            device.write(rows.slots[row], lengths[row], (row, step))
            history[row].append((row, step))
            lengths[row] += 1
        for row in range(count):
            assert device.read(rows.slots[row], lengths[row]) == history[row]
        allocator.check_integrity()
        order = [f + chance.randrange(beams) for f in first]
    rows.close()
    assert allocator.num_live == 0
