"""Prefix reuse seen from requests: which of their tokens the cache holds already."""

from __future__ import annotations

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.prefix import PrefixCache, block_keys
from torch_paged.engine.request import Request


class PrefixReuse:
    """Find and register the full blocks of requests.

    Without a cache nothing is found; a prompt whose ids are not known takes no part.
    """

    def __init__(
        self, cache: PrefixCache | None, allocator: BlockAllocator, block_size: int
    ) -> None:
        self._cache = cache
        self._allocator = allocator
        self._block_size = block_size

    def acquire(self, request: Request) -> list[int]:
        """Return held blocks for a prefix of the request, owned by the caller from now on.

        They never cover all of its tokens: the last one is left, to be run for its logits.
        """
        if self._cache is None:
            return []
        keys = self._keys(request, (request.num_tokens - 1) // self._block_size)
        blocks = self._cache.lookup(keys)
        self._allocator.fork(blocks)
        return blocks

    def register(self, request: Request, num_computed_tokens: int, *, since: int = 0) -> None:
        """Let others find the blocks that the tokens up to `num_computed_tokens` have filled.

        Output counts as far as its tokens are known. Blocks before token `since` are registered.
        """
        if self._cache is None:
            return
        first = since // self._block_size
        keys = self._keys(request, num_computed_tokens // self._block_size)
        self._cache.insert(keys[first:], request.block_ids[first : len(keys)])

    def forget(self, request: Request) -> None:
        """Let nobody find the blocks of a request: their contents are in doubt."""
        for block in request.block_ids:
            self._allocator.set_findable(block, False)

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


__all__ = ["PrefixReuse"]
