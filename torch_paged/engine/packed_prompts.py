"""What a closed batch is given: packed prompts and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_paged.engine.held_blocks import HeldBlocks, holder_of

# Of a layer: keys and values [num_tokens, num_kv_heads, head_dim], prompts one after the other.
CachedKV = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Prompts without their padding, one after the other, on the model's device.

    Attributes:
        lengths: tokens of each prompt, those in `cached` included; at least 1 is not in there.
        ids: [num_tokens] int64, or None where `embeddings` [num_tokens, hidden_size] is given.
        positions: [num_tokens] int32 rotary positions.
        last_positions: [num_prompts] rotary position of each prompt's last token.
        rows: the prompt of each row; None: one row for each prompt.
        cached: first tokens of each prompt whose keys and values `cached_kv` has; None: no such.
    """

    lengths: tuple[int, ...]
    ids: Tensor | None
    embeddings: Tensor | None
    positions: Tensor
    last_positions: Tensor
    rows: tuple[int, ...] | None = None
    cached: tuple[int, ...] | None = None
    cached_kv: CachedKV | None = None


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When rows end: after `max_new_tokens`, or with one of `eos_ids`, then filled with pad."""

    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    pad_token: int = -1


def running_sums(lengths: Sequence[int]) -> list[int]:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def slot_mapping(
    group: Sequence[tuple[int, int, int]],
    rows: Sequence[Sequence[HeldBlocks]],
    table: int,
    block_size: int,
) -> Tensor:
    """Return the flat cache index [num_tokens] int64 of every token (_, start, length)."""
    parts = [
        token_places(held, start, length, table, block_size)
        for (_, start, length), held in zip(group, rows, strict=True)
    ]
    return torch.cat(parts)


def token_places(
    row: Sequence[HeldBlocks], start: int, length: int, table: int, block_size: int
) -> Tensor:
    """Return the flat cache index [length] int64 of the tokens of a row from `start` on."""
    held = holder_of(row, table)
    first, stop = start // block_size, (start + length - 1) // block_size + 1
    ids = held.columns(first, stop)[table - held.kind.first_table :: held.kind.num_tables]
    index = torch.arange(start, start + length)
    return torch.tensor(ids)[index // block_size - first] * block_size + index % block_size


__all__ = [
    "BatchLimits",
    "CachedKV",
    "PackedPrompts",
    "running_sums",
    "slot_mapping",
    "token_places",
]
