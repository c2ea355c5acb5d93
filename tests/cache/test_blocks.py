"""The block allocator against a naive model, and its documented behaviours one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.errors import OutOfBlocks, TorchPagedError


def test_new_blocks_are_handed_out_in_order():
    assert BlockAllocator(4).allocate(3) == [0, 1, 2]


def test_freed_block_is_reused_last():
    allocator = BlockAllocator(4)
    (first,) = allocator.allocate(1)
    allocator.free([first])
    assert allocator.allocate(4) == [1, 2, 3, first]


@pytest.mark.parametrize("asked", [4, 5, 1000])
def test_allocation_is_all_or_nothing(asked):
    allocator = BlockAllocator(4)
    allocator.allocate(1)
    with pytest.raises(OutOfBlocks, match=f"{asked} blocks asked for, 3 of 4"):
        allocator.allocate(asked)
    assert allocator.num_free == 3
    allocator.check_integrity()


def test_allocating_nothing_from_an_empty_pool_is_fine():
    assert BlockAllocator(0).allocate(0) == []


def test_forked_block_is_free_after_its_last_owner():
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(2)
    allocator.fork(blocks)
    allocator.free(blocks)
    assert allocator.num_free == 0
    allocator.free(blocks)
    assert allocator.num_free == 2


def test_double_free_is_refused_and_changes_nothing():
    allocator = BlockAllocator(3)
    a, b, c = allocator.allocate(3)
    allocator.free([b])
    with pytest.raises(ValueError, match="not live"):
        allocator.free([a, c, b])
    assert [allocator.refcount(block) for block in (a, b, c)] == [1, 0, 1]
    with pytest.raises(ValueError, match="not live"):
        allocator.free([a, a])
    assert allocator.refcount(a) == 1
    allocator.check_integrity()


@pytest.mark.parametrize("block", [-1, 3, 99])
def test_unknown_ids_are_refused(block):
    allocator = BlockAllocator(3)
    allocator.allocate(3)
    for call in (
        lambda: allocator.free([block]),
        lambda: allocator.fork([block]),
        lambda: allocator.refcount(block),
        lambda: allocator.make_writable(block),
        lambda: allocator.set_findable(block, True),
        lambda: allocator.set_findable(block, False),
    ):
        with pytest.raises(ValueError, match=str(block)):
            call()


def test_forking_an_empty_block_is_refused_and_changes_nothing():
    allocator = BlockAllocator(2)
    (live,) = allocator.allocate(1)
    with pytest.raises(ValueError, match="empty"):
        allocator.fork([live, 1])
    assert allocator.refcount(live) == 1


def test_writing_a_block_with_one_owner_needs_no_copy():
    allocator = BlockAllocator(1)
    (block,) = allocator.allocate(1)
    assert allocator.make_writable(block) == (block, None)


def test_writing_a_shared_block_moves_one_owner_to_a_copy():
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    allocator.fork([block])
    new, source = allocator.make_writable(block)
    assert (new, source) == (1, block)
    assert allocator.refcount(block) == allocator.refcount(new) == 1


def test_copy_on_write_without_room_changes_nothing():
    allocator = BlockAllocator(1)
    (block,) = allocator.allocate(1)
    allocator.fork([block])
    with pytest.raises(OutOfBlocks):
        allocator.make_writable(block)
    assert allocator.refcount(block) == 2


def test_written_block_is_findable_no_longer():
    allocator, evicted = BlockAllocator(1), []
    allocator.on_evict = evicted.append
    (block,) = allocator.allocate(1)
    allocator.set_findable(block, True)
    allocator.make_writable(block)
    assert evicted == [block] and not allocator.is_findable(block)


def test_cached_blocks_count_as_free_but_are_taken_after_empty_ones():
    allocator, evicted = BlockAllocator(4), []
    allocator.on_evict = evicted.append
    a, b = allocator.allocate(2)
    allocator.set_findable(a, True)
    allocator.free([a])
    allocator.free([b])
    assert (allocator.num_free, allocator.num_cached) == (4, 1)
    assert allocator.allocate(3) == [2, 3, b]
    assert evicted == []
    assert allocator.allocate(1) == [a]
    assert evicted == [a]


def test_last_block_of_a_sequence_is_evicted_first():
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(3)
    for block in blocks:
        allocator.set_findable(block, True)
    allocator.free(blocks)
    assert [allocator.allocate(1)[0] for _ in blocks] == blocks[::-1]


def test_use_of_a_cached_block_renews_it():
    allocator = BlockAllocator(2)
    a, b = allocator.allocate(2)
    for block in (a, b):
        allocator.set_findable(block, True)
        allocator.free([block])
    allocator.fork([a])
    allocator.free([a])
    assert allocator.allocate(1) == [b]


def test_growth_adds_empty_blocks_and_keeps_the_rest():
    allocator = BlockAllocator(1)
    allocator.allocate(1)
    allocator.grow(3)
    assert allocator.allocate(2) == [1, 2]
    with pytest.raises(ValueError, match="shrink"):
        allocator.grow(2)


def test_integrity_check_notices_a_leaked_block():
    allocator = BlockAllocator(2)
    allocator._empty.popleft()
    with pytest.raises(TorchPagedError, match="block 0 has refcount 0"):
        allocator.check_integrity()


class AllocatorTrace(RuleBasedStateMachine):
    """Random traces; the model keeps each queue as a plain list and predicts every id."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(5)
        self.owned: list[int] = []  # one entry per owner
        self.empty = list(range(5))
        self.cached: list[int] = []
        self.findable: set[int] = set()
        self.evicted: list[int] = []
        self.expected_evictions: list[int] = []
        self.allocator.on_evict = self.evicted.append

    def _lose(self, block):
        self.findable.discard(block)
        self.expected_evictions.append(block)

    def _take(self, n):
        while len(self.empty) < n:
            self._lose(self.cached[0])
            self.empty.append(self.cached.pop(0))
        taken, self.empty = self.empty[:n], self.empty[n:]
        return taken

    @rule(n=st.integers(0, 7))
    def allocate(self, n):
        if n > len(self.empty) + len(self.cached):
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(n)
            return
        blocks = self.allocator.allocate(n)
        assert blocks == self._take(n)
        self.owned += blocks

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        indices = data.draw(st.sets(st.integers(0, len(self.owned) - 1), min_size=1))
        blocks = [self.owned[i] for i in sorted(indices)]
        self.owned = [block for i, block in enumerate(self.owned) if i not in indices]
        self.allocator.free(blocks)
        ownerless = [b for i, b in enumerate(blocks) if b not in self.owned + blocks[i + 1 :]]
        for block in reversed(ownerless):
            (self.cached if block in self.findable else self.empty).append(block)

    @precondition(lambda self: self.owned or self.cached)
    @rule(data=st.data())
    def fork(self, data):
        blocks = data.draw(
            st.lists(st.sampled_from(sorted(set(self.owned + self.cached))), min_size=1)
        )
        self.allocator.fork(blocks)
        self.owned += blocks
        self.cached = [block for block in self.cached if block not in blocks]

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def make_writable(self, data):
        block = data.draw(st.sampled_from(self.owned))
        if self.owned.count(block) == 1:
            assert self.allocator.make_writable(block) == (block, None)
            if block in self.findable:
                self._lose(block)
        elif not self.empty and not self.cached:
            with pytest.raises(OutOfBlocks):
                self.allocator.make_writable(block)
        else:
            copy = self.allocator.make_writable(block)
            (new,) = self._take(1)
            assert copy == (new, block)
            self.owned.remove(block)
            self.owned.append(new)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), findable=st.booleans())
    def mark(self, data, findable):
        block = data.draw(st.sampled_from(self.owned))
        self.allocator.set_findable(block, findable)
        if findable:
            self.findable.add(block)
        elif block in self.findable:
            self._lose(block)

    @rule(n=st.integers(0, 3))
    def evict(self, n):
        assert self.allocator.evict(n) == min(n, len(self.cached))
        for block in self.cached[:n]:
            self._lose(block)
            self.empty.append(block)
        self.cached = self.cached[n:]

    @rule(extra=st.integers(0, 3))
    def grow(self, extra):
        before = self.allocator.num_blocks
        self.allocator.grow(before + extra)
        self.empty += range(before, before + extra)

    @invariant()
    def agrees_with_the_model(self):
        self.allocator.check_integrity()
        for block in range(self.allocator.num_blocks):
            assert self.allocator.refcount(block) == self.owned.count(block)
            assert self.allocator.is_findable(block) == (block in self.findable)
        assert self.allocator.num_free == len(self.empty) + len(self.cached)
        assert self.allocator.num_cached == len(self.cached)
        assert self.allocator.num_live == len(set(self.owned))
        assert self.evicted == self.expected_evictions


TestAllocatorTrace = AllocatorTrace.TestCase
TestAllocatorTrace.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
