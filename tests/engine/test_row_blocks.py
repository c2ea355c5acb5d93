"""Rows share full blocks, own what they write, and give everything back."""

from __future__ import annotations

import random

import pytest

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import ONE_KIND, LayerKind
from torch_paged.engine.row_blocks import RowBlocks
from torch_paged.engine.slot_pool import SlotPool
from torch_paged.errors import OutOfBlocks

SIZE = 4


# With one block table and with several, behind windows of all sizes.
LAYOUTS = [
    ONE_KIND,
    (LayerKind(6),),
    (LayerKind(), LayerKind(1, 1)),
    (LayerKind(), LayerKind(5, 1, 2), LayerKind(9, 3)),
]


def rows_over(num_blocks: int, num_rows: int, *, grows: bool = False, kinds=ONE_KIND):
    allocator = BlockAllocator(num_blocks)

    def make_room(count: int) -> bool:
        if grows:
            allocator.grow(allocator.num_blocks + count)
        return grows

    rows = RowBlocks(allocator, SlotPool(num_rows), SIZE, make_room, kinds)
    rows.open(num_rows)
    return allocator, rows


class Contents:
    """What the blocks hold and what the table says, as the device would have it."""

    def __init__(self, kinds=ONE_KIND) -> None:
        self.kinds = kinds
        self.blocks: dict[int, list[object]] = {}
        self.tables: dict[tuple[int, int], dict[int, int]] = {}  # (table, slot) -> columns

    def apply(self, updates) -> None:
        for slot, first, ids, table in updates:
            self.tables.setdefault((table, slot), {}).update(enumerate(ids, first))

    def copy(self, pairs) -> None:
        assert not {a for a, _ in pairs} & {b for _, b in pairs}
        assert len({b for _, b in pairs}) == len(pairs)
        for source, target in pairs:
            self.blocks[target] = list(self.blocks.get(source, [None] * SIZE))

    def write(self, slot: int, index: int, value: object) -> list[int]:
        """Write to all tables; return the blocks written."""
        written = []
        for table in range(sum(kind.num_tables for kind in self.kinds)):
            block = self.tables[table, slot][index // SIZE]
            self.blocks.setdefault(block, [None] * SIZE)[index % SIZE] = (table, value)
            written.append(block)
        return written

    def check(self, slot: int, expected: list[object]) -> None:
        """Check that the newest token sees what was written, in every table."""
        last = len(expected) - 1
        for kind in self.kinds:
            first = max(0, last - kind.window + 1) if kind.window else 0
            for table in range(kind.first_table, kind.first_table + kind.num_tables):
                columns = self.tables[table, slot]
                for i in range(first, last + 1):
                    found = self.blocks[columns[i // SIZE]][i % SIZE]
                    assert found == (table, expected[i]), (table, i)


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


@pytest.mark.parametrize("kinds", LAYOUTS, ids=["full", "sliding", "hybrid", "three kinds"])
@pytest.mark.parametrize("seed", range(20))
def test_random_beams_read_what_their_ancestors_wrote(seed, kinds) -> None:
    chance = random.Random(seed)
    groups, beams = chance.randint(1, 3), chance.randint(2, 5)
    count = groups * beams
    starts = [chance.randint(1, 13) for _ in range(groups)]
    lengths = [starts[row // beams] for row in range(count)]
    allocator, rows = rows_over(0, count, grows=True, kinds=kinds)
    device = Contents(kinds)
    first = [row - row % beams for row in range(count)]
    device.apply(rows.grow([n if row in first else 0 for row, n in enumerate(lengths)]))
    history: list[list[object]] = []
    for row in range(count):
        history.append([(first[row], i) for i in range(lengths[row])])
        if row in first:
            for i in range(lengths[row]):
                device.write(rows.slots[row], i, (row, i))
    order, steps_ahead = first, chance.randint(1, 9)
    for step in range(chance.randint(5, 25)):
        updates, copies = rows.reorder(order, lengths)
        device.apply(updates)
        device.copy(copies)
        history = [list(history[source]) for source in order]
        if chance.random() < 0.7:  # it may come late
            rows.drop_behind(lengths)
        device.apply(rows.grow([n + chance.randint(1, steps_ahead) for n in lengths]))
        for row in range(count):
            for block in device.write(rows.slots[row], lengths[row], (row, step)):
                assert allocator.refcount(block) == 1, "a block to be written has one owner"
            history[row].append((row, step))
            lengths[row] += 1
        for row in range(count):
            device.check(rows.slots[row], history[row])
        allocator.check_integrity()
        order = [f + chance.randrange(beams) for f in first]
    rows.close()
    assert allocator.num_live == 0


@pytest.mark.parametrize("kinds", LAYOUTS[1:], ids=["sliding", "hybrid", "three kinds"])
def test_rows_hold_their_windows_alone(kinds) -> None:
    allocator, rows = rows_over(0, 2, grows=True, kinds=kinds)
    lengths = [7, 50]
    rows.grow(lengths)
    for _ in range(40):
        rows.drop_behind(lengths)
        lengths = [n + 1 for n in lengths]
        rows.grow(lengths)
    for row, length in zip(rows.held, lengths, strict=True):
        for held in row:
            # The newest token, at length - 1, sees `window` tokens.
            first = max(0, length - held.kind.window) // SIZE if held.kind.window else 0
            assert (held.first, held.end) == (first, -(-length // SIZE))
    rows.close()
    assert allocator.num_live == 0


def test_grown_in_one_kind_rows_may_go_on_in_another() -> None:
    kinds = LAYOUTS[2]
    allocator, rows = rows_over(20, 1, kinds=kinds)
    updates = rows.grow([9], windowed=False)
    assert [(u.table, len(u.block_ids)) for u in updates] == [(0, 3)]
    updates = rows.grow([6], windowed=True)
    assert [(u.table, len(u.block_ids)) for u in updates] == [(1, 2)]
    rows.close()
    allocator.check_integrity()


@pytest.mark.parametrize("kinds", [ONE_KIND, (LayerKind(0, 0, 2),)], ids=["one table", "two"])
@pytest.mark.parametrize("kept", [1, 3, 4, 5, 8])
def test_others_go_on_from_blocks_handed_over(kept, kinds) -> None:
    allocator, rows = rows_over(0, 4, grows=True, kinds=kinds)
    device, lengths = Contents(kinds), [9, 9, 9, 9]
    device.apply(rows.grow([9, 9, 0, 9]))
    for row in (0, 1, 3):
        for i in range(9):
            device.write(rows.slots[row], i, (row, i))
    updates, copies = rows.reorder([0, 1, 1, 3], lengths)
    device.apply(updates)
    device.copy(copies)
    handed = rows.hand_over([kept] * 4)
    rows.close()
    num_tables = kinds[0].num_tables
    # Rows 1 and 2 share them.
    assert allocator.num_live == num_tables * 3 * -(-kept // SIZE)
    before = {block: list(device.blocks[block]) for row in handed for block in row[0].ids}

    for _ in range(2):  # both times from the same blocks
        rows.open(4)
        copies = rows.adopt(handed, [kept] * 4)
        # What has one holder is written on behind what that looks at.
        assert len(copies) == (2 * num_tables if kept % SIZE else 0)
        device.copy(copies)
        rows.grow([kept + 6] * 4)
        device.apply(rows.all_updates())
        for row in range(4):
            source = 1 if row == 2 else row
            history: list[object] = [(source, i) for i in range(kept)]
            for i in range(6):
                device.write(rows.slots[row], kept + i, ("new", row, i))
                history.append(("new", row, i))
            device.check(rows.slots[row], history)
        for row in range(4):  # and none has written over what another one has
            device.check(rows.slots[row], [(1 if row == 2 else row, i) for i in range(kept)])
        allocator.check_integrity()
        rows.close()
    for row in handed:
        for column in range(-(-kept // SIZE)):
            for block in row[0].columns(column, column + 1):
                known = min(kept - column * SIZE, SIZE)
                assert device.blocks[block][:known] == before[block][:known]
    for row in handed:
        allocator.free(row[0].ids)
    assert allocator.num_live == 0


def test_no_room_for_the_copy_of_a_partial_block() -> None:
    allocator, rows = rows_over(2, 1)
    rows.grow([6])
    handed = rows.hand_over([6])
    allocator.fork(handed[0][0].ids)  # by a copy of the holder
    with pytest.raises(OutOfBlocks):
        rows.adopt(handed, [6])
    rows.close()
    assert allocator.num_live == 2
    rows.open(1)
    assert rows.adopt(handed, [4]) == []
    rows.close()
    allocator.free(handed[0][0].ids)
    rows.open(1)
    assert rows.adopt(handed, [6]) == []
    rows.close()
    allocator.free(handed[0][0].ids)
    assert allocator.num_live == 0
