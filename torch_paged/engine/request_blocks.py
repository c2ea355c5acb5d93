"""The blocks of running requests: taken as they grow, given back when their windows have passed.

A block goes back when the first step is scheduled whose queries cannot see it any more. Whoever
takes it writes it in that step at the earliest, behind all steps that read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import LayerKind
from torch_paged.engine.held_blocks import BlockUpdate, HeldBlocks, no_blocks
from torch_paged.engine.request import Request


class RequestBlocks:
    """Gives requests blocks of one allocator, in each kind of their layers.

    Args:
        max_chunk: most tokens of a request that one step computes.
        make_room: asked for that many more blocks; grows the allocator and returns True, or
            returns False at once.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        kinds: Sequence[LayerKind],
        max_chunk: int,
        make_room: Callable[[int], bool] | None,
    ) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._kinds = tuple(kinds)
        self.max_chunk = max_chunk
        self._make_room = make_room
        self.num_tables = sum(kind.num_tables for kind in kinds)
        self.has_window = any(kind.window for kind in kinds)

    def open(self, request: Request) -> None:
        """Let a request begin without blocks."""
        request.blocks = no_blocks(self._kinds)

    def num_first(self, request: Request) -> int:
        """Return how many blocks a request holds when it starts to run, those found included."""
        return sum(
            (end - held.first) * held.kind.num_tables
            for held, end in zip(request.blocks, self._first_ends(request), strict=True)
        )

    def admit(self, request: Request, *, keep: int) -> bool:
        """Complete what a request needs to run; False if `keep` more are not free beside it.

        In a kind with a window that is what its chunks need at a time, not the whole prompt.
        """
        return self._extend(request, self._first_ends(request), keep=keep)

    def table_rows(self, request: Request) -> Iterator[BlockUpdate]:
        """Write all that a request holds to the block tables."""
        assert request.slot is not None
        for held in request.blocks:
            yield from held.updates(request.slot, held.first)

    def grow(self, request: Request, num_tokens: int) -> list[BlockUpdate] | None:
        """Give a running request the blocks for `num_tokens` tokens; None if they are not free."""
        assert request.slot is not None
        before = [held.end for held in request.blocks]
        if not self._extend(request, [self._columns(num_tokens)] * len(before)):
            return None
        return [
            update
            for held, since in zip(request.blocks, before, strict=True)
            for update in held.updates(request.slot, since)
        ]

    def grow_all(self, rows: Sequence[tuple[Request, int]]) -> list[BlockUpdate] | None:
        """Give running requests the blocks for so many tokens each.

        None if not all of these are free: then nobody got one.
        """
        size = self._block_size
        # Slot, blocks held, first new column, and how many columns.
        missing: list[tuple[int | None, HeldBlocks, int, int]] = []
        total = 0
        for request, num_tokens in rows:
            end = -(-num_tokens // size)
            for held in request.blocks:
                num_tables = held.kind.num_tables
                since = held.first + len(held.ids) // num_tables
                if end > since:
                    missing.append((request.slot, held, since, end - since))
                    total += (end - since) * num_tables
        ids = self._take(total)
        if ids is None:
            return None
        updates: list[BlockUpdate] = []
        start = 0
        for slot, held, since, columns in missing:
            assert slot is not None
            kind = held.kind
            stop = start + columns * kind.num_tables
            fresh = ids[start:stop]
            start = stop
            held.ids += fresh
            if kind.num_tables == 1:
                updates.append(BlockUpdate(slot, since, tuple(fresh), kind.first_table))
            else:
                updates += held.updates(slot, since)
        return updates

    def whole(self, num_tokens: int) -> int:
        """Return for how many tokens the blocks of `num_tokens` have room."""
        return self._columns(num_tokens) * self._block_size

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Return how many blocks a request lacks for `num_tokens` tokens."""
        end = self._columns(num_tokens)
        return sum(max(0, end - held.end) * held.kind.num_tables for held in request.blocks)

    def num_covered(self, request: Request) -> int:
        """Return how many tokens, from the first on, a request has had blocks for."""
        return request.num_columns * self._block_size

    def drop_behind(self, request: Request, query_index: int) -> None:
        """Give back what no query from `query_index` on can see."""
        for held in request.blocks:
            if held.kind.window:
                column = held.kind.first_column(query_index, self._block_size)
                self._allocator.free(held.drop_before(column))

    def filled(self, request: Request) -> tuple[int, ...]:
        """Return the blocks held with computed tokens in them, in the order of swapping."""
        end = self._columns(request.num_computed_tokens)
        return tuple(i for held in request.blocks for i in held.columns(held.first, end))

    def close(self, request: Request) -> tuple[int, ...]:
        """Give all blocks back; where they began stays known.

        Returns the blocks that its next token would read; whoever copies them does so before they
        are written by others.
        """
        self.drop_behind(request, request.num_computed_tokens)
        filled = self.filled(request)
        for held in request.blocks:
            self._allocator.free(held.ids)
            held.ids = []
        return filled

    def fit(self, num_blocks: int) -> bool:
        """Say whether so many blocks, those in use included, are there or can be made."""
        missing = num_blocks - self._allocator.num_blocks
        return missing <= 0 or (self._make_room is not None and self._make_room(missing))

    def too_large(self, num_blocks: int) -> str:
        """Say that a request for `num_blocks` blocks can never run."""
        return (
            f"the request needs {num_blocks} KV blocks and the pool has "
            f"{self._allocator.num_blocks}, and cannot grow to so many; raise kv_cache_memory or "
            "shorten the request"
        )

    def problems(self, request: Request, num_computed: int) -> Iterator[str]:
        """Say what is wrong with the blocks of a running request."""
        name = request.request_id
        for held in request.blocks:
            spare = held.end * self._block_size - request.max_kv_tokens
            if not num_computed - request.max_kv_tokens <= spare < self._block_size:
                yield f"{name!r} has {len(held.ids)} blocks"
            if held.first > held.kind.first_column(num_computed, self._block_size):
                yield f"{name!r} has lost blocks that its window shows"

    def owner_problems(self, requests: Iterable[Request]) -> Iterator[str]:
        """Say which blocks have more holders than the allocator knows of."""
        holders = Counter(block for request in requests for block in request.block_ids)
        for block, count in holders.items():
            if self._allocator.refcount(block) < count:
                yield f"block {block} has more holders than owners: {count}"

    def _columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _first_ends(self, request: Request) -> list[int]:
        """Return the column up to which each kind has blocks when a request starts to run."""
        whole = self._columns(request.num_tokens)
        ends = []
        for held in request.blocks:
            most = whole
            if held.kind.window:
                # As many as a chunk and the window in front of it can touch.
                most = held.first + self._columns(held.kind.window - 1 + self.max_chunk) + 1
            ends.append(min(whole, max(most, held.end)))
        return ends

    def _extend(self, request: Request, ends: Sequence[int], *, keep: int = 0) -> bool:
        counts = [
            max(0, end - held.end) * held.kind.num_tables
            for held, end in zip(request.blocks, ends, strict=True)
        ]
        ids = self._take(sum(counts), keep=keep)
        if ids is None:
            return False
        start = 0
        for held, count in zip(request.blocks, counts, strict=True):
            held.ids += ids[start : start + count]
            start += count
        return True

    def _take(self, count: int, *, keep: int = 0) -> list[int] | None:
        """Allocate `count` blocks if `keep` more than these are free, or can be made."""
        missing = count + keep - self._allocator.num_free
        if missing > 0 and not (self._make_room is not None and self._make_room(missing)):
            return None
        return self._allocator.allocate(count)


__all__ = ["RequestBlocks"]
