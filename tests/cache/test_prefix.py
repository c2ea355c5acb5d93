"""Prefix reuse: keys, lookup, eviction order, and random traces over simulated contents."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.prefix import PrefixCache, block_keys
from torch_paged.errors import OutOfBlocks, TorchPagedError

BLOCK = 4
tokens = st.lists(st.integers(0, 3), max_size=3 * BLOCK + 1)


def make(num_blocks=8):
    allocator = BlockAllocator(num_blocks)
    return allocator, PrefixCache(allocator)


def fill(allocator, prefix, token_ids, salt=b""):
    """Run a sequence from start to end: its full blocks stay behind, cached."""
    keys = block_keys(token_ids, BLOCK, salt=salt)
    blocks = allocator.allocate(len(keys))
    prefix.insert(keys, blocks)
    allocator.free(blocks)
    return keys, blocks


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_only_full_blocks_have_keys(length):
    assert len(block_keys(range(length), BLOCK)) == length // BLOCK


@settings(deadline=None)
@given(tokens, tokens)
def test_keys_agree_exactly_as_far_as_the_tokens_do(a, b):
    same = 0
    for key_a, key_b in zip(block_keys(a, BLOCK), block_keys(b, BLOCK), strict=False):
        start = same * BLOCK
        assert (key_a == key_b) == (a[: start + BLOCK] == b[: start + BLOCK])
        if key_a != key_b:
            break
        same += 1


@settings(deadline=None)
@given(tokens, st.integers(0, 3))
def test_keys_of_a_growing_sequence_extend_those_known(token_ids, known_blocks):
    keys = block_keys(token_ids, BLOCK, salt=b"s")
    known = keys[:known_blocks]
    assert block_keys(token_ids, BLOCK, salt=b"s", known=known) == keys


def test_salt_separates_equal_tokens():
    assert block_keys(range(BLOCK), BLOCK) != block_keys(range(BLOCK), BLOCK, salt=b"adapter")


def test_token_ids_of_64_bits_are_told_apart():
    low, high = [[token] * BLOCK for token in (5, 5 + 2**32)]
    assert block_keys(low, BLOCK) != block_keys(high, BLOCK)


def test_longest_held_prefix_is_found():
    allocator, prefix = make()
    keys, blocks = fill(allocator, prefix, range(3 * BLOCK))
    other = block_keys([*range(2 * BLOCK), 99, 99, 99, 99], BLOCK)
    assert prefix.lookup(keys) == blocks
    assert prefix.lookup(other) == blocks[:2]
    assert prefix.lookup(keys[1:]) == blocks[1:]
    assert prefix.lookup([]) == []


def test_lookup_takes_no_ownership():
    allocator, prefix = make()
    keys, blocks = fill(allocator, prefix, range(BLOCK))
    prefix.lookup(keys)
    assert allocator.refcount(blocks[0]) == 0


def test_blocks_in_use_are_found_too():
    allocator, prefix = make()
    keys = block_keys(range(BLOCK), BLOCK)
    blocks = allocator.allocate(1)
    prefix.insert(keys, blocks)
    assert prefix.lookup(keys) == blocks
    allocator.fork(prefix.lookup(keys))
    assert allocator.refcount(blocks[0]) == 2


def test_first_block_with_a_key_keeps_it():
    allocator, prefix = make()
    keys = block_keys(range(BLOCK), BLOCK)
    first, second = allocator.allocate(1), allocator.allocate(1)
    assert prefix.insert(keys, first) == 1
    assert prefix.insert(keys, second) == 0
    assert prefix.lookup(keys) == first
    allocator.free(second)
    assert not allocator.is_findable(second[0])


def test_block_is_found_until_it_is_handed_out_again():
    allocator, prefix = make(num_blocks=3)
    keys, blocks = fill(allocator, prefix, range(2 * BLOCK))
    allocator.allocate(1)
    assert prefix.lookup(keys) == blocks
    allocator.allocate(1)
    assert prefix.lookup(keys) == blocks[:1]
    allocator.allocate(1)
    assert prefix.lookup(keys) == [] and len(prefix) == 0


def test_least_recently_used_sequence_is_evicted_first():
    allocator, prefix = make(num_blocks=2)
    old, _ = fill(allocator, prefix, [1] * BLOCK)
    new, _ = fill(allocator, prefix, [2] * BLOCK)
    hit = prefix.lookup(old)
    allocator.fork(hit)
    allocator.free(hit)
    assert prefix.evict(1) == 1
    assert prefix.lookup(old) == hit and prefix.lookup(new) == []


def test_reset_forgets_everything_and_leaves_owners_alone():
    allocator, prefix = make(num_blocks=4)
    cached, _ = fill(allocator, prefix, range(BLOCK))
    live_keys = block_keys([9] * BLOCK, BLOCK)
    live = allocator.allocate(1)
    prefix.insert(live_keys, live)
    prefix.reset()
    assert prefix.lookup(cached) == prefix.lookup(live_keys) == []
    assert allocator.refcount(live[0]) == 1
    assert (allocator.num_free, allocator.num_cached) == (3, 0)
    assert prefix.insert(live_keys, live) == 1
    prefix.check_integrity()


def test_rewritten_block_is_not_found_under_its_old_key():
    allocator, prefix = make()
    keys = block_keys(range(BLOCK), BLOCK)
    blocks = allocator.allocate(1)
    prefix.insert(keys, blocks)
    allocator.make_writable(blocks[0])
    assert prefix.lookup(keys) == []


def test_second_key_for_a_block_is_refused():
    allocator, prefix = make()
    blocks = allocator.allocate(1)
    prefix.insert(block_keys([1] * BLOCK, BLOCK), blocks)
    with pytest.raises(ValueError, match="another key"):
        prefix.insert(block_keys([2] * BLOCK, BLOCK), blocks)


def test_block_without_owner_cannot_be_inserted():
    allocator, prefix = make()
    with pytest.raises(ValueError, match="not live"):
        prefix.insert(block_keys(range(BLOCK), BLOCK), [0])
    prefix.check_integrity()


def test_lists_of_different_length_are_refused():
    allocator, prefix = make()
    with pytest.raises(ValueError, match="1 keys for 2 blocks"):
        prefix.insert(block_keys(range(BLOCK), BLOCK), allocator.allocate(2))


def test_allocator_serves_one_prefix_cache():
    allocator, _ = make()
    with pytest.raises(ValueError, match="already"):
        PrefixCache(allocator)


def test_integrity_check_notices_a_stale_entry():
    allocator, prefix = make()
    fill(allocator, prefix, range(BLOCK))
    prefix._keys.clear()
    with pytest.raises(TorchPagedError, match="differ"):
        prefix.check_integrity()


def test_cache_and_allocator_form_no_reference_cycle():
    allocator, prefix = make()
    fill(allocator, prefix, range(BLOCK))
    gone = weakref.ref(prefix)
    gc.disable()
    try:
        del prefix
        assert gone() is None
    finally:
        gc.enable()


class PrefixTrace(RuleBasedStateMachine):
    """Sequences come, reuse, fork, write and go; a hit always has the contents asked for.

    `contents` plays the device memory: what the kernels wrote into each block.
    """

    def __init__(self):
        super().__init__()
        self.allocator, self.prefix = make(num_blocks=6)
        self.contents: dict[int, tuple[int, ...]] = {}
        self.sequences: list[tuple[list[int], list[int]]] = []  # token ids, blocks

    def _write(self, token_ids, blocks, first):
        for index in range(first, len(blocks)):
            self.contents[blocks[index]] = tuple(token_ids[: (index + 1) * BLOCK])
        full = block_keys(token_ids, BLOCK)
        self.prefix.insert(full, blocks[: len(full)])

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=3 * BLOCK + 1))
    def start(self, token_ids):
        keys = block_keys(token_ids, BLOCK)
        hit = self.prefix.lookup(keys[: (len(token_ids) - 1) // BLOCK])
        for index, block in enumerate(hit):
            assert self.contents[block] == tuple(token_ids[: (index + 1) * BLOCK])
        self.allocator.fork(hit)
        try:
            fresh = self.allocator.allocate(-(-len(token_ids) // BLOCK) - len(hit))
        except OutOfBlocks:
            self.allocator.free(hit)
            return
        assert not set(fresh) & {b for _, blocks in self.sequences for b in blocks}
        blocks = hit + fresh
        self._write(token_ids, blocks, len(hit))
        self.sequences.append((token_ids, blocks))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        token_ids, blocks = data.draw(st.sampled_from(self.sequences))
        self.allocator.fork(blocks)
        self.sequences.append((list(token_ids), list(blocks)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data, token):
        token_ids, blocks = data.draw(st.sampled_from(self.sequences))
        try:
            if len(token_ids) == len(blocks) * BLOCK:
                blocks += self.allocator.allocate(1)
            else:
                blocks[-1], source = self.allocator.make_writable(blocks[-1])
                if source is not None:
                    self.contents[blocks[-1]] = self.contents[source]
        except OutOfBlocks:
            return
        token_ids.append(token)
        self._write(token_ids, blocks, len(blocks) - 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data):
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.allocator.free(self.sequences.pop(index)[1])

    @rule()
    def change_weights(self):
        self.prefix.reset()

    @invariant()
    def every_sequence_sees_its_own_tokens(self):
        for token_ids, blocks in self.sequences:
            for index, block in enumerate(blocks):
                assert self.contents[block] == tuple(token_ids[: (index + 1) * BLOCK])

    @invariant()
    def owners_and_tables_agree(self):
        self.allocator.check_integrity()
        self.prefix.check_integrity()
        owners = [block for _, blocks in self.sequences for block in blocks]
        for block in range(self.allocator.num_blocks):
            assert self.allocator.refcount(block) == owners.count(block)


TestPrefixTrace = PrefixTrace.TestCase
TestPrefixTrace.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
