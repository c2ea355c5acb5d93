"""Ownership of KV blocks: reference counts, the free queue and the cached blocks.

Every block is in exactly one of three states, and all operations keep it so:

* *live*: its refcount is at least 1;
* *cached*: its refcount is 0, but its contents are still findable by the prefix cache;
* *empty*: its refcount is 0 and nobody can find its contents.

A block is free iff its refcount is 0: cached blocks are handed out too, after the empty ones,
least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from torch_paged.errors import OutOfBlocks, TorchPagedError


class BlockAllocator:
    """Hand out block ids ``0 .. num_blocks - 1``; each operation is O(1) per block.

    Not thread-safe: callers hold the model's lock.

    Attributes:
        on_evict: called with a block id when the contents of a cached block are given up.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks must not be negative, got {num_blocks}")
        self.on_evict: Callable[[int], None] | None = None
        self._refcounts: list[int] = []
        self._findable: set[int] = set()  # live or cached, known to the prefix cache
        self._empty: deque[int] = deque()  # oldest first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.grow(num_blocks)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all."""
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        """Number of blocks with refcount 0, the cached ones among them."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of free blocks whose contents can still be found."""
        return len(self._cached)

    @property
    def num_live(self) -> int:
        """Number of blocks with refcount 1 or more."""
        return self.num_blocks - self.num_free

    def refcount(self, block: int) -> int:
        """Return how many owners `block` has."""
        return self._refcounts[self._checked(block)]

    def is_findable(self, block: int) -> bool:
        """Say whether the prefix cache has registered the contents of `block`."""
        return block in self._findable

    def allocate(self, n: int = 1) -> list[int]:
        """Take `n` free blocks, each with refcount 1; their contents are undefined.

        Raises:
            OutOfBlocks: fewer than `n` blocks are free; nothing was taken.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        if n > self.num_free:
            raise OutOfBlocks(
                f"{n} blocks asked for, {self.num_free} of {self.num_blocks} are free; "
                "grow the pool, free sequences or wait for some to finish"
            )
        if n > len(self._empty):
            self.evict(n - len(self._empty))
        blocks = [self._empty.popleft() for _ in range(n)]
        for block in blocks:
            self._refcounts[block] = 1
        return blocks

    def fork(self, blocks: Sequence[int]) -> None:
        """Add one owner to each live or cached block.

        Raises:
            ValueError: a block is empty or unknown; nothing was changed.
        """
        for block in blocks:
            if self._refcounts[self._checked(block)] == 0 and block not in self._cached:
                raise ValueError(f"block {block} is empty and cannot be shared; allocate it")
        for block in blocks:
            if self._refcounts[block] == 0:
                del self._cached[block]
            self._refcounts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one owner from each block.

        Blocks without owners join the end of their queue, so they are reused last. Within one
        call the last block is evicted first: a prefix is worth nothing without its head.

        Raises:
            ValueError: a block has no owner left to remove; nothing was changed.
        """
        ownerless: list[int] = []
        for done, block in enumerate(blocks):
            if not 0 <= block < self.num_blocks or self._refcounts[block] == 0:
                for undo in blocks[:done]:
                    self._refcounts[undo] += 1
                raise ValueError(f"block {block} is not live and cannot be freed")
            self._refcounts[block] -= 1
            if self._refcounts[block] == 0:
                ownerless.append(block)
        for block in reversed(ownerless):
            if block in self._findable:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def make_writable(self, block: int) -> tuple[int, int | None]:
        """Give one owner of a live block a block that it may write: ``(block, copy_from)``.

        A block with one owner is returned as it is, with None, and is findable no longer. Of a
        shared block the owner gives up its share for a new block, into which the caller copies
        `copy_from` before the next call to `free` or `allocate` that might hand it out.

        Raises:
            OutOfBlocks: no block is free; nothing was changed.
        """
        owners = self.refcount(block)
        if owners == 0:
            raise ValueError(f"block {block} is not live and cannot be written")
        if owners == 1:
            self.set_findable(block, False)
            return block, None
        (new,) = self.allocate(1)
        self._refcounts[block] -= 1
        return new, block

    def set_findable(self, block: int, findable: bool) -> None:
        """Record that the contents of `block` can, or can no longer, be found by their hash.

        Called by the prefix cache. Taking the mark away reports the block to `on_evict`.
        """
        if findable:
            self.mark_findable([block])
            return
        if self._checked(block) not in self._findable:
            return
        self._findable.remove(block)
        if block in self._cached:
            del self._cached[block]
            self._empty.append(block)
        if self.on_evict is not None:
            self.on_evict(block)

    def mark_findable(self, blocks: Collection[int]) -> None:
        """Record that the contents of live blocks can be found by their hashes.

        Raises:
            ValueError: a block is not live; nothing was changed.
        """
        refcounts, count = self._refcounts, len(self._refcounts)
        for block in blocks:
            if not 0 <= block < count or refcounts[block] == 0:
                self._checked(block)
                raise ValueError(f"block {block} is not live; only live blocks become findable")
        self._findable.update(blocks)

    def evict(self, n: int) -> int:
        """Empty up to `n` cached blocks, least recently used first; return how many."""
        evicted = min(n, len(self._cached))
        for _ in range(evicted):
            self.set_findable(next(iter(self._cached)), False)
        return evicted

    def grow(self, num_blocks: int) -> None:
        """Raise the number of blocks to `num_blocks`; the new ones are empty."""
        if num_blocks < self.num_blocks:
            raise ValueError(f"cannot shrink from {self.num_blocks} to {num_blocks} blocks")
        self._empty.extend(range(self.num_blocks, num_blocks))
        self._refcounts.extend([0] * (num_blocks - self.num_blocks))

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` unless every block is live, cached or empty, and only one."""
        empty = set(self._empty)
        problems = []
        if len(empty) != len(self._empty):
            problems.append("a block is queued as empty twice")
        if empty & self._cached.keys():
            problems.append("a block is both empty and cached")
        if empty & self._findable:
            problems.append("an empty block is findable")
        if not self._cached.keys() <= self._findable:
            problems.append("a cached block is not findable")
        for block, owners in enumerate(self._refcounts):
            queued = block in empty or block in self._cached
            if owners < 0 or (owners == 0) != queued:
                problems.append(f"block {block} has refcount {owners}, queued as free: {queued}")
        if problems:
            raise TorchPagedError("block allocator is inconsistent: " + "; ".join(problems))

    def _checked(self, block: int) -> int:
        if not 0 <= block < len(self._refcounts):
            raise ValueError(f"block must be in [0, {len(self._refcounts)}), got {block}")
        return block


__all__ = ["BlockAllocator"]
