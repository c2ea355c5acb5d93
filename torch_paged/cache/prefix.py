"""Prefix reuse: full blocks are found again by the hash of all tokens up to their end.

A block's key covers its own tokens, those of every block before it and a salt, so equal keys mean
equal contents under equal weights. The salt names whatever else the contents depend on: the
adapter, input embeddings. Only full blocks have keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.errors import TorchPagedError

_KEY_BYTES = 16  # a chance collision would need about 2**64 blocks


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    *,
    salt: bytes = b"",
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Return the keys of all full blocks of `token_ids`.

    `known` holds the keys of the first blocks, from an earlier call with the same salt and the
    same leading tokens, so that a sequence that grows hashes each block once.
    """
    keys = list(known)
    parent = keys[-1] if keys else blake2b(salt, digest_size=_KEY_BYTES).digest()
    first, stop = len(keys) * block_size, len(token_ids) // block_size * block_size
    if first >= stop:
        return keys
    packed = array("q", token_ids[first:stop])
    data, size = packed.tobytes(), block_size * packed.itemsize
    for start in range(0, len(data), size):
        parent = blake2b(parent + data[start : start + size], digest_size=_KEY_BYTES).digest()
        keys.append(parent)
    return keys


class PrefixCache:
    """Index of findable blocks over one `BlockAllocator`.

    A registered block stays findable while it has owners and, afterwards, until the allocator
    hands it out again. Evicting a block makes its followers unreachable; `BlockAllocator.free`
    orders the blocks of a sequence so that followers go first.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        if allocator.on_evict is not None:
            raise ValueError("the allocator already serves another prefix cache")
        self._allocator = allocator
        # Invariant: each is the inverse of the other, over exactly the findable blocks.
        blocks: dict[bytes, int] = {}
        keys: dict[int, bytes] = {}

        def forget(block: int) -> None:
            del blocks[keys.pop(block)]

        self._blocks, self._keys = blocks, keys
        allocator.on_evict = forget  # refers to the tables alone: no reference cycle

    def __len__(self) -> int:
        """Number of blocks that can be found."""
        return len(self._blocks)

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of `keys` that is held.

        Nothing is owned yet: `fork` the blocks before anything else is allocated. To leave a
        token to run, pass the keys of at most ``(num_tokens - 1) // block_size`` blocks.
        """
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Register live, fully written blocks under their keys; return how many were new.

        A key that is held already keeps its first block, and a block that is registered stays
        as it is, so a sequence may pass its whole list each time or only what it added.

        Raises:
            ValueError: the lengths differ, a block is not live, or it has another key (its
                contents changed without `make_writable`).
        """
        if len(keys) != len(blocks):
            raise ValueError(f"{len(keys)} keys for {len(blocks)} blocks")
        known, held = self._keys, self._blocks
        fresh: dict[bytes, int] = {}
        for key, block in zip(keys, blocks, strict=True):
            if known.get(block, key) != key:
                raise ValueError(f"block {block} is registered under another key")
            if key not in held:
                fresh.setdefault(key, block)
        self._allocator.mark_findable(fresh.values())
        held.update(fresh)
        known.update(zip(fresh.values(), fresh, strict=True))
        return len(fresh)

    def evict(self, n: int) -> int:
        """Forget up to `n` blocks without owners, least recently used first; return how many."""
        return self._allocator.evict(n)

    def reset(self) -> None:
        """Forget all blocks, for instance because the weights changed. Owners keep theirs."""
        for block in list(self._keys):
            self._allocator.set_findable(block, False)

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` unless index and allocator agree."""
        findable = {
            block
            for block in range(self._allocator.num_blocks)
            if self._allocator.is_findable(block)
        }
        if findable != self._keys.keys():
            raise TorchPagedError("the allocator and the prefix cache differ in what is findable")
        if {key: block for block, key in self._keys.items()} != self._blocks:
            raise TorchPagedError("the tables of the prefix cache are not inverses")


__all__ = ["PrefixCache", "block_keys"]
