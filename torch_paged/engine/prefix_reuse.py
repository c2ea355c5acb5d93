"""Prefix reuse seen from requests: which of their tokens the cache holds already.

A prefix counts as held if the next token finds all that it will look at: in a kind of layers with
a window the blocks of the last window are enough, in one without it takes all of them. Each block
table has keys of its own, so a block is found again only in the table that it was filled for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import ONE_KIND, LayerKind
from torch_paged.cache.prefix import PrefixCache, block_keys
from torch_paged.engine.held_blocks import HeldBlocks
from torch_paged.engine.request import Request


class PrefixReuse:
    """Find and register the full blocks of requests.

    Without a cache nothing is found; a prompt whose ids are not known takes no part.
    """

    def __init__(
        self,
        cache: PrefixCache | None,
        allocator: BlockAllocator,
        block_size: int,
        kinds: Sequence[LayerKind] = ONE_KIND,
    ) -> None:
        self._cache = cache
        self._allocator = allocator
        self._block_size = block_size
        self._full = [kind for kind in kinds if not kind.window]
        self._windowed = [kind for kind in kinds if kind.window]

    def acquire(self, request: Request) -> int:
        """Give a request without blocks those held for a prefix; return how many tokens that is.

        They never cover all of its tokens: the last one is left, to be run for its logits.
        """
        if self._cache is None:
            return 0
        most = request.num_tokens - 1
        if request.max_cached_tokens is not None:
            most = min(most, request.max_cached_tokens)
        keys = self._keys(request, most // self._block_size)
        count = self._num_held(self._cache, keys)
        for held in request.blocks:
            kind = held.kind
            held.first = kind.first_column(count * self._block_size, self._block_size)
            wanted = keys[held.first : count]
            tables = [self._cache.lookup(own) for own in _table_keys(kind, wanted)]
            held.ids = [block for column in zip(*tables, strict=True) for block in column]
            self._allocator.fork(held.ids)
        return count * self._block_size

    def reacquire(self, request: Request) -> frozenset[int]:
        """Give a request that was swapped out the full blocks still held for it; return these.

        In each kind they are the first from where it began.
        """
        if self._cache is None:
            return frozenset()
        keys = self._keys(request, request.num_computed_tokens // self._block_size)
        for held in request.blocks:
            wanted = _table_keys(held.kind, keys[held.first :])
            tables = [self._cache.lookup(own) for own in wanted]
            held.ids = [block for column in zip(*tables, strict=False) for block in column]
            self._allocator.fork(held.ids)
        return frozenset(request.block_ids)

    def register(self, request: Request, num_computed_tokens: int, *, since: int = 0) -> None:
        """Let others find the blocks that the tokens up to `num_computed_tokens` have filled.

        Output counts as far as its tokens are known. Blocks before token `since` are registered.
        """
        if self._cache is None:
            return
        keys = self._keys(request, num_computed_tokens // self._block_size)
        for held in request.blocks:
            self._insert(self._cache, held, keys, max(since // self._block_size, held.first))

    def forget(self, request: Request) -> None:
        """Let nobody find the blocks of a request: their contents are in doubt."""
        for block in request.block_ids:
            self._allocator.set_findable(block, False)
        if self._cache is None:
            return
        # Those that it gave back are known by their keys alone.
        for kind in self._windowed:
            for keys in _table_keys(kind, request.block_keys):
                for key in keys:
                    for block in self._cache.lookup([key]):
                        self._allocator.set_findable(block, False)

    def _insert(
        self, cache: PrefixCache, held: HeldBlocks, keys: Sequence[bytes], first: int
    ) -> None:
        size = held.kind.num_tables
        ids = held.columns(first, len(keys))
        for table, own in enumerate(_table_keys(held.kind, keys[first:])):
            cache.insert(own, ids[table::size])

    def _num_held(self, cache: PrefixCache, keys: Sequence[bytes]) -> int:
        """Return the length of the longest prefix of `keys` whose next token finds its past."""
        count = len(keys)
        for kind in self._full:
            for own in _table_keys(kind, keys[:count]):
                count = min(count, len(cache.lookup(own)))
        while count and (gap := self._last_gap(cache, keys, count)) is not None:
            # It lies in the window of every shorter prefix that reaches past it, too.
            count = gap
        return count

    def _last_gap(self, cache: PrefixCache, keys: Sequence[bytes], count: int) -> int | None:
        """Return a column in the windows behind a prefix that is not held, None if all are."""
        for kind in self._windowed:
            first = kind.first_column(count * self._block_size, self._block_size)
            for column in range(count - 1, first - 1, -1):
                for own in _table_keys(kind, keys[column : column + 1]):
                    if not cache.lookup(own):
                        return column
        return None

    def _keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """Return the keys of up to `num_blocks` first blocks, hashing each block once."""
        if request.prompt_ids is None:
            return []
        if len(request.block_keys) < num_blocks:
            tokens = request.prompt_ids
            if num_blocks * self._block_size > len(tokens):
                tokens = [*tokens, *request.output_ids]
            request.block_keys = block_keys(
                tokens, self._block_size, salt=request.cache_salt, known=request.block_keys
            )
        return request.block_keys[:num_blocks]


def _table_keys(kind: LayerKind, keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the keys for each block table of a kind; those of the first one are as they are."""
    for table in range(kind.first_table, kind.first_table + kind.num_tables):
        mark = table.to_bytes(2, "little") if table else b""
        yield [key + mark for key in keys] if mark else keys


__all__ = ["PrefixReuse"]
