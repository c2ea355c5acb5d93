"""Leases on blocks: who goes first, who is left alone, and how blocks come back."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.engine.leases import Leases
from torch_paged.engine.turns import Turns
from torch_paged.errors import OutOfBlocks, TorchPagedError


class Holder:
    """Holds blocks, and notes when it was asked to do without them."""

    def __init__(self, leases: Leases, allocator: BlockAllocator, ids: list[int]) -> None:
        self.leases, self.allocator, self.ids = leases, allocator, ids
        self.number = leases.add(self, allocator, ids)
        self.is_over = False
        self.error: Exception | None = None

    def num_own(self) -> int:
        return sum(self.allocator.refcount(block) == 1 for block in self.ids)

    def materialise(self) -> None:
        if self.error is not None:
            raise self.error
        self.is_over = True
        self.leases.end(self.number)


@pytest.fixture
def allocator() -> BlockAllocator:
    return BlockAllocator(8)


@pytest.fixture
def leases() -> Leases:
    return Leases(Turns())


@pytest.fixture
def holders(leases: Leases, allocator: BlockAllocator) -> list[Holder]:
    """Three leases of two blocks; two blocks are free."""
    return [Holder(leases, allocator, allocator.allocate(2)) for _ in range(3)]


def over(holders: list[Holder]) -> list[bool]:
    return [holder.is_over for holder in holders]


@pytest.mark.parametrize("num_blocks, gone", [(1, 1), (2, 1), (3, 2), (6, 3)])
def test_the_oldest_goes_first_and_no_more_than_needed(
    num_blocks, gone, leases, allocator, holders
) -> None:
    assert leases.num_leased(allocator) == 6
    assert leases.free_up(num_blocks, allocator)
    assert over(holders) == [True] * gone + [False] * (3 - gone)
    assert allocator.num_free == 2 + 2 * gone
    leases.check_integrity()


def test_what_would_not_be_enough_is_left_alone(leases, allocator, holders) -> None:
    assert not leases.free_up(7, allocator)
    assert not any(over(holders)) and allocator.num_free == 2


def test_shared_blocks_go_last(leases, allocator, holders) -> None:
    allocator.fork(holders[0].ids)  # rows go on from it
    assert leases.num_leased(allocator) == 4
    assert leases.free_up(3, allocator)
    assert over(holders) == [False, True, True]
    assert not leases.free_up(1, allocator)
    assert not holders[0].is_over
    allocator.free(holders[0].ids)
    assert leases.free_up(2, allocator)
    assert holders[0].is_over and allocator.num_free == 8


def test_two_leases_on_the_same_blocks(leases, allocator) -> None:
    first = Holder(leases, allocator, allocator.allocate(4))
    allocator.fork(first.ids)
    second = Holder(leases, allocator, first.ids)
    assert leases.num_leased(allocator) == 4
    leases.check_integrity()
    assert leases.free_up(1, allocator)
    assert over([first, second]) == [True, True] and allocator.num_free == 8


def test_a_dropped_holder_is_collected_not_asked(leases, allocator, holders) -> None:
    del holders[0]
    assert leases.num_leased(allocator) == 6  # nobody has come by
    assert leases.free_up(2, allocator)
    assert not any(over(holders)) and allocator.num_free == 4
    assert leases.num_leased(allocator) == 4
    holders.clear()
    leases.collect()
    leases.collect()
    assert len(leases) == 0 and allocator.num_free == 8


def test_a_holder_dropped_while_another_thread_has_the_lock(leases, allocator, holders) -> None:
    with leases.turns.lock:
        thread = threading.Thread(target=holders.clear)
        thread.start()
        thread.join(30)
        assert not thread.is_alive() and allocator.num_free == 2
        leases.collect()
    assert allocator.num_free == 8


@pytest.mark.parametrize("error", [OutOfBlocks("none"), torch.OutOfMemoryError("none")])
def test_no_memory_for_a_copy(error, leases, allocator, holders) -> None:
    holders[1].error = error
    assert not leases.free_up(4, allocator)
    assert over(holders) == [True, False, False]
    with pytest.raises(type(error)):
        leases.revoke_all()
    assert not holders[2].is_over
    holders[1].error = ValueError("a fault")
    with pytest.raises(ValueError, match="a fault"):
        leases.free_up(2, allocator)


def test_the_end_of_a_model(leases, allocator, holders) -> None:
    holders[2].error = torch.OutOfMemoryError("none")
    leases.end_of_model()
    assert over(holders) == [True, True, False]

    holders[2].error = None
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with leases.turns.lock:
            taken.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(30)
    leases.end_of_model()  # returns at once
    assert not holders[2].is_over
    done.set()
    thread.join(30)
    leases.end_of_model()
    assert holders[2].is_over


def test_books_that_do_not_agree(leases, allocator, holders) -> None:
    allocator.free(holders[1].ids[:1])
    with pytest.raises(TorchPagedError, match="leased 1 times by 0 owners"):
        leases.check_integrity()


def test_blocks_of_another_allocator_do_not_count(leases, allocator, holders) -> None:
    other = BlockAllocator(4)
    assert leases.num_leased(other) == 0
    assert not leases.free_up(5, other)
    assert not any(over(holders))
