"""Which blocks outlive their rows, and how they come back: revoked, or dropped by their holder."""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.pool import is_lack_of_memory
from torch_paged.engine.turns import Turns
from torch_paged.errors import OutOfBlocks, TorchPagedError

logger = logging.getLogger("torch_paged")

# A lease that gives back less than this share of its blocks is revoked behind the others.
_WORTHWHILE = 0.5


class Holder(Protocol):
    """Who holds leased blocks, and can do without them."""

    def materialise(self) -> None:
        """Copy out what the blocks hold, and end the lease.

        Raises:
            OutOfMemory: there is no memory for the copy; the lease goes on.
        """
        ...

    def num_own(self) -> int:
        """Return how many blocks would be free without the lease."""
        ...


@dataclass(frozen=True, slots=True)
class _Lease:
    holder: Callable[[], Holder | None]
    finalizer: weakref.finalize[[int], Holder]
    allocator: BlockAllocator
    ids: tuple[int, ...]


class Leases:
    """The leases on the blocks of one core.

    A holder that becomes garbage leaves word, from whatever thread and wherever that happens; its
    blocks are freed at the next `collect`. Whoever calls anything else holds the lock of `turns`.
    Refers neither to the core nor to the pool.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self._leases: dict[int, _Lease] = {}  # oldest first
        self._dropped: deque[int] = deque()
        self._next = 0

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, holder: Holder, allocator: BlockAllocator, ids: Sequence[int]) -> int:
        """Note that `holder` has taken over these shares of blocks; return the lease's number."""
        self.collect()
        number, self._next = self._next, self._next + 1
        finalizer = weakref.finalize(holder, self._dropped.append, number)
        finalizer.atexit = False
        self._leases[number] = _Lease(weakref.ref(holder), finalizer, allocator, tuple(ids))
        return number

    def end(self, number: int) -> None:
        """Free the blocks of a lease; no effect if it has ended."""
        lease = self._leases.pop(number, None)
        if lease is not None:
            lease.finalizer.detach()
            lease.allocator.free(lease.ids)

    def collect(self) -> None:
        """Free what holders have held that are gone."""
        while self._dropped:
            self.end(self._dropped.popleft())

    def free_up(self, num_blocks: int, allocator: BlockAllocator) -> bool:
        """Revoke leases until so many more blocks are free; False, and no more, if they cannot be.

        The oldest goes first, those whose blocks are mostly used by others behind the rest.
        """
        wanted = allocator.num_free + num_blocks
        self.collect()
        if allocator.num_free + self.num_leased(allocator) < wanted:
            return False
        late = []
        for number, holder in self._holders():
            if allocator.num_free >= wanted:
                return True
            if holder.num_own() < _WORTHWHILE * len(set(self._leases[number].ids)):
                late.append(holder)
            elif not self._revoke(holder):
                return False
        for holder in late:
            if allocator.num_free >= wanted:
                break
            if not self._revoke(holder):
                return False
        return allocator.num_free >= wanted

    def revoke_all(self) -> None:
        """Have everything copied out.

        Raises:
            OutOfMemory: there is no memory for a copy; that lease and younger ones go on.
        """
        self.collect()
        for _, holder in self._holders():
            holder.materialise()

    def end_of_model(self) -> None:
        """Let go of the pool, if that can be done here: called by a finalizer, so anywhere.

        What cannot be copied out now keeps the pool, and is copied when somebody reads it.
        """
        if not self._leases or not self.turns.lock.acquire(blocking=False):
            return
        try:
            captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            if not captures:
                self.revoke_all()
        except Exception as error:
            logger.debug("a returned cache keeps the KV pool of a deleted model: %s", error)
        finally:
            self.turns.lock.release()

    def num_leased(self, allocator: BlockAllocator) -> int:
        """Return how many blocks leases alone hold; needs no lock if it need not be exact."""
        leases = [lease for lease in list(self._leases.values()) if lease.allocator is allocator]
        counts = Counter(block for lease in leases for block in lease.ids)
        return sum(allocator.refcount(block) <= n for block, n in counts.items())

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` if a block has fewer owners than leases hold it."""
        self.collect()
        held: Counter[tuple[int, int]] = Counter()
        for lease in self._leases.values():
            held.update((id(lease.allocator), block) for block in lease.ids)
        allocators = {id(lease.allocator): lease.allocator for lease in self._leases.values()}
        for (allocator, block), count in held.items():
            owners = allocators[allocator].refcount(block)
            if owners < count:
                raise TorchPagedError(f"block {block} is leased {count} times by {owners} owners")

    def _holders(self) -> list[tuple[int, Holder]]:
        pairs = [(number, lease.holder()) for number, lease in self._leases.items()]
        return [(number, holder) for number, holder in pairs if holder is not None]

    def _revoke(self, holder: Holder) -> bool:
        try:
            holder.materialise()
        except (OutOfBlocks, RuntimeError, MemoryError) as error:
            if not isinstance(error, OutOfBlocks) and not is_lack_of_memory(error):
                raise
            logger.debug("cannot revoke a lease: %s", error)
            return False
        return True


__all__ = ["Holder", "Leases"]
