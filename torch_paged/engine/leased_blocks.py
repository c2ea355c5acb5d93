"""Blocks of rows that have ended, kept for whoever may read them or go on from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.pool import KVPool
from torch_paged.decoder.transfer import to_device
from torch_paged.engine.core import EngineCore
from torch_paged.engine.held_blocks import HeldBlocks
from torch_paged.engine.packed_prompts import slot_mapping


class LeasedBlocks:
    """Blocks with the first tokens of rows; nobody writes to these tokens while they are held.

    Outlives the core that it came from: it refers to the pool, not to the model.

    Attributes:
        held: by row and kind.
        lengths: tokens of each row.
    """

    def __init__(
        self,
        pool: KVPool,
        allocator: BlockAllocator,
        places: Sequence[tuple[int, int]],
        held: Sequence[Sequence[HeldBlocks]],
        lengths: Sequence[int],
    ) -> None:
        self.pool = pool
        self.allocator = allocator
        self.held = held
        self.lengths = tuple(lengths)
        self._places = places

    @classmethod
    def of_core(
        cls, core: EngineCore, held: Sequence[Sequence[HeldBlocks]], lengths: Sequence[int]
    ) -> LeasedBlocks:
        """Take over blocks of a core's allocator."""
        return cls(core.pool, core.allocator, core.layout.places, held, lengths)

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def num_layers(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> list[int]:
        """All blocks, those that rows share once for each row."""
        return [block for row in self.held for held in row for block in held.ids]

    def num_own(self) -> int:
        """Return how many blocks would be free without this."""
        counts = Counter(self.ids)
        return sum(self.allocator.refcount(block) == n for block, n in counts.items())

    def fork(self) -> LeasedBlocks:
        """Return the same blocks, held once more."""
        self.allocator.fork(self.ids)
        held = [[HeldBlocks(h.kind, h.first, list(h.ids)) for h in row] for row in self.held]
        return LeasedBlocks(self.pool, self.allocator, self._places, held, self.lengths)

    def shapes(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (num_kv_heads, head_dim) of the keys and of the values of a layer."""
        shape = self.pool.layers[self._places[layer][1]]
        return (shape.num_kv_heads, shape.head_dim), (shape.num_kv_heads, shape.v_head_dim)

    def reader(self, starts: Sequence[int], stops: Sequence[int]) -> LeaseReader:
        """Return what reads the tokens from `starts[row]` to `stops[row]` of each row."""
        return LeaseReader(self.pool, self._places, self._tables(starts, stops))

    def _tables(self, starts: Sequence[int], stops: Sequence[int]) -> list[Tensor]:
        """Return for each block table the places [num_tokens] of the tokens, row by row."""
        bounds = zip(starts, stops, strict=True)
        group = [(row, a, b - a) for row, (a, b) in enumerate(bounds) if b > a]
        rows = [self.held[row] for row, _, _ in group]
        size = self.pool.block_size
        num_tables = 1 + max(table for table, _ in self._places)
        if not group:
            return [torch.empty(0, dtype=torch.int64, device=self.device)] * num_tables
        return [
            to_device(slot_mapping(group, rows, table, size), self.device)
            for table in range(num_tables)
        ]


class LeaseReader:
    """Reads tokens out of blocks, layer by layer."""

    def __init__(
        self, pool: KVPool, places: Sequence[tuple[int, int]], tables: Sequence[Tensor]
    ) -> None:
        self._pool = pool
        self._places = places
        size = pool.block_size
        self._index = [(table // size, table % size) for table in tables]

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [num_tokens, num_kv_heads, head_dim], rows one after another."""
        table, tensor = self._places[layer]
        blocks, offsets = self._index[table]
        caches = self._pool.keys[tensor], self._pool.values[tensor]
        if caches[0].is_cuda and not self._pool.is_virtual:
            # The pool may go before this has run, in another stream than the one it came from.
            for cache in caches:
                cache.record_stream(torch.cuda.current_stream(cache.device))
        return caches[0][blocks, :, offsets], caches[1][blocks, :, offsets]


__all__ = ["LeaseReader", "LeasedBlocks"]
