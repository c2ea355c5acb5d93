"""The blocks that a row holds in the layers of one kind, and their way into the block tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch_paged.cache.layout import LayerKind


class BlockUpdate(NamedTuple):
    """Write ``block_tables[table, slot, first_index : first_index + len(block_ids)] = block_ids``.

    What the last owner of the slot left around the entries of a new one is void, and so are
    entries behind the window of their layers. The updates of one step, or of one
    `ensure_decode_blocks`, write no entry twice.
    """

    slot: int
    first_index: int
    block_ids: tuple[int, ...]
    table: int = 0


@dataclass(slots=True)
class HeldBlocks:
    """Columns ``first .. end - 1`` of a row; those before were given back or never taken.

    Attributes:
        ids: `kind.num_tables` for each column, those of one column next to each other.
    """

    kind: LayerKind
    first: int = 0
    ids: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The column behind the last one."""
        return self.first + len(self.ids) // self.kind.num_tables

    def columns(self, start: int, stop: int) -> list[int]:
        """Return the ids of columns ``start .. stop - 1`` as far as they are held."""
        size, first = self.kind.num_tables, self.first
        return self.ids[max(start - first, 0) * size : max(stop - first, 0) * size]

    def drop_before(self, column: int) -> list[int]:
        """Let go of the columns before `column`; return their ids, for the caller to free."""
        count = min(column, self.end) - self.first
        if count <= 0:
            return []
        dropped = self.ids[: count * self.kind.num_tables]
        del self.ids[: len(dropped)]
        self.first += count
        return dropped

    def updates(self, slot: int, since: int) -> Iterator[BlockUpdate]:
        """Write the columns from `since` on."""
        since, size = max(since, self.first), self.kind.num_tables
        ids = self.ids[(since - self.first) * size :]
        if ids:
            for table in range(size):
                yield BlockUpdate(
                    slot, since, tuple(ids[table::size]), self.kind.first_table + table
                )


def holder_of(row: Sequence[HeldBlocks], table: int) -> HeldBlocks:
    """Return what a row holds in the kind that `table` belongs to."""
    return next(h for h in row if table < h.kind.first_table + h.kind.num_tables)


def no_blocks(kinds: Sequence[LayerKind]) -> list[HeldBlocks]:
    """Return what a row without blocks holds."""
    return [HeldBlocks(kind) for kind in kinds]


__all__ = ["BlockUpdate", "HeldBlocks", "holder_of", "no_blocks"]
