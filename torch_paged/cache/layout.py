"""Which layers share a block table, and which tensors of the pool they keep their blocks in.

Layers of one kind (all tokens, or a window of so many) hold and give back their blocks together.
All kinds take block ids from one allocator, so a block must be as large for one as for another:
each table serves the same number of layers, and the i-th layer of every table keeps its keys and
values in the i-th tensors of the pool. A block belongs to one table at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# Every block that a row takes is written to all tables of its kind.
_MAX_TABLES_OF_A_KIND = 8


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that see the same tokens.

    Attributes:
        window: a query at index i sees the tokens from i - window + 1 on; 0: it sees all.
        first_table: number of its first block table.
        num_tables: how many it has, each with a block of its own in every column.
    """

    window: int = 0
    first_table: int = 0
    num_tables: int = 1

    def first_column(self, query_index: int, block_size: int) -> int:
        """Return the first column of the table that queries from `query_index` on can see."""
        if not self.window:
            return 0
        return max(query_index - self.window + 1, 0) // block_size


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where each layer of a model finds its blocks.

    Attributes:
        places: by layer, the number of its block table and of its tensors in the pool.
        representatives: by tensor of the pool, a layer whose shape it has.
    """

    kinds: tuple[LayerKind, ...]
    places: tuple[tuple[int, int], ...]
    representatives: tuple[int, ...]

    @property
    def num_tables(self) -> int:
        """Block tables of all kinds; so many blocks are one column of a row."""
        return sum(kind.num_tables for kind in self.kinds)

    @property
    def windows(self) -> tuple[int, ...]:
        """By layer, how many of the newest tokens are kept for it; 0: all."""
        by_table = [kind.window for kind in self.kinds for _ in range(kind.num_tables)]
        return tuple(by_table[table] for table, _ in self.places)


ONE_KIND = (LayerKind(),)


def make_layout(
    shapes: Sequence[Hashable], windows: Sequence[int], max_tokens: int
) -> CacheLayout:
    """Divide the layers into kinds and tables.

    Layers of unequal shapes cannot share tensors: they get one table, and keep what the widest
    window of them needs.

    Args:
        shapes: cache shape of each layer.
        windows: of each layer, 0 for none.
        max_tokens: a window that no shorter sequence fills is none.
    """
    if len(shapes) != len(windows) or not shapes:
        raise ValueError(f"{len(shapes)} layer shapes for {len(windows)} windows; pass one each")
    reached = [window if 0 < window < max_tokens else 0 for window in windows]
    if len(set(shapes)) > 1:
        reached = [0 if 0 in reached else max(reached)] * len(reached)
    layers = {window: [i for i, w in enumerate(reached) if w == window] for window in reached}
    sizes = [len(members) for members in layers.values()]
    per_table = max(min(sizes), -(-max(sizes) // _MAX_TABLES_OF_A_KIND))
    kinds: list[LayerKind] = []
    places: dict[int, tuple[int, int]] = {}
    num_tables = 0
    # The kind that keeps all tokens comes first, then from narrow to wide.
    for window, members in sorted(layers.items()):
        kinds.append(LayerKind(window, num_tables, -(-len(members) // per_table)))
        for at, layer in enumerate(members):
            places[layer] = (num_tables + at // per_table, at % per_table)
        num_tables += kinds[-1].num_tables
    by_tensor = {tensor: layer for layer, (_, tensor) in places.items()}
    return CacheLayout(
        tuple(kinds),
        tuple(places[layer] for layer in range(len(shapes))),
        tuple(by_tensor[tensor] for tensor in range(len(by_tensor))),
    )


__all__ = ["ONE_KIND", "CacheLayout", "LayerKind", "make_layout"]
