"""Keys and values of a closed batch on their way into blocks and out of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged.decoder.transfer import to_device
from torch_paged.engine.core import EngineCore
from torch_paged.engine.held_blocks import HeldBlocks
from torch_paged.engine.packed_prompts import CachedKV, slot_mapping
from torch_paged.ops.copy_blocks import copy_blocks


def load_kv(
    core: EngineCore,
    cached_kv: CachedKV,
    num_cached: Sequence[int],
    held: Sequence[Sequence[HeldBlocks]],
) -> None:
    """Put keys and values that are there already into the blocks of their prompts.

    Args:
        num_cached: first tokens of each prompt that `cached_kv` has.
        held: blocks of each prompt, by kind.
    """
    group = [(prompt, 0, count) for prompt, count in enumerate(num_cached) if count]
    if not group:
        return
    size = core.config.block_size
    rows = [held[prompt] for prompt, _, _ in group]
    tables = [
        to_device(slot_mapping(group, rows, table, size), core.device)
        for table in range(core.layout.num_tables)
    ]
    for layer, (table, _) in enumerate(core.layout.places):
        blocks, offsets = tables[table] // size, tables[table] % size
        for cache, states in zip(core.layer_cache(layer), cached_kv(layer), strict=True):
            cache[blocks, :, offsets] = states.to(cache)


def gather_kv(
    core: EngineCore, layer: int, rows: Sequence[tuple[int, int, int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Copy out keys and values of rows: [num_kv_heads, stop - start, head_dim] each.

    Args:
        rows: (slot, start, stop): the tokens wanted, which must not have left the window.
    """
    size = core.config.block_size
    table = core.state.block_tables[core.layout.places[layer][0]]
    out: tuple[list[Tensor], list[Tensor]] = ([], [])
    for slot, start, stop in rows:
        blocks = table[slot, : -(-stop // size)].long()
        for cache, states in zip(core.layer_cache(layer), out, strict=True):
            # [blocks, heads, size, dim] -> [heads, tokens, dim]
            states.append(cache[blocks].transpose(0, 1).flatten(1, 2)[:, start:stop])
    return out


def copy_pairs(core: EngineCore, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (from, to) in all layers that keep anything there."""
    if not pairs:
        return
    ids = to_device(torch.tensor(pairs, device="cpu").T.contiguous(), core.device)
    for cache in (*core.pool.keys, *core.pool.values):
        copy_blocks(cache, ids[0], ids[1])


__all__ = ["copy_pairs", "gather_kv", "load_kv"]
