"""What a closed batch is given: packed prompts and limits.

Indices of tokens are worked out with numpy, on the calling thread: torch shares some of these
operations out among threads, which takes milliseconds where the processor has other work.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_paged.engine.held_blocks import HeldBlocks, holder_of

# Of a layer: keys and values [num_tokens, num_kv_heads, head_dim], prompts one after the other.
CachedKV = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """Prompts without their padding, one after the other, on the model's device.

    Attributes:
        lengths: tokens of each prompt, those in `cached` included; without `logits` at least 1 is
            not in there.
        ids: [num_tokens] int64, or None where `embeddings` [num_tokens, hidden_size] is given.
        positions: [num_tokens] int32 rotary positions.
        last_positions: [num_prompts] rotary position of each prompt's last token.
        rows: the prompt of each row; None: one row for each prompt.
        cached: first tokens of each prompt whose keys and values are there already: `cached_kv`
            has them, or `held`; None: no such.
        held: blocks that others hold, by prompt and kind.
        logits: [num_prompts, vocab_size] of the last tokens, where all tokens are in `cached`.
    """

    lengths: tuple[int, ...]
    ids: Tensor | None
    embeddings: Tensor | None
    positions: Tensor
    last_positions: Tensor
    rows: tuple[int, ...] | None = None
    cached: tuple[int, ...] | None = None
    cached_kv: CachedKV | None = None
    held: Sequence[Sequence[HeldBlocks]] | None = None
    logits: Tensor | None = None


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


def token_indices(group: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return [num_tokens] int64, the index in its own row of every token (_, start, length)."""
    bounds = running_sums([length for _, _, length in group])
    shifts = [start - bound for (_, start, _), bound in zip(group, bounds, strict=False)]
    return torch.from_numpy(np.arange(bounds[-1], dtype=np.int64) + _of_tokens(shifts, group))


def slot_mapping(
    group: Sequence[tuple[int, int, int]],
    rows: Sequence[Sequence[HeldBlocks]],
    table: int,
    block_size: int,
    index: Tensor | None = None,
) -> Tensor:
    """Return the flat cache index [num_tokens] int64 of every token (_, start, length).

    Args:
        index: what `token_indices` returns, if it is here already.
    """
    if index is None:
        index = token_indices(group)
    ids = array("q")
    shifts: list[int] = []  # of each piece: where the block of its row's first token would be
    for (_, start, length), row in zip(group, rows, strict=True):
        held = holder_of(row, table)
        first, stop = start // block_size, (start + length - 1) // block_size + 1
        shifts.append(len(ids) - first)
        columns = held.columns(first, stop)
        ids.extend(columns[table - held.kind.first_table :: held.kind.num_tables])
    column, inside = np.divmod(index.numpy(), block_size)
    blocks = np.asarray(ids)[column + _of_tokens(shifts, group)]
    return torch.from_numpy(blocks * block_size + inside)


def int64_tensor(values: array[int]) -> Tensor:
    """Return a tensor over the memory of an array: made sooner than one of a list."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(values, dtype=torch.int64)


def _of_tokens(
    values: Sequence[int], group: Sequence[tuple[int, int, int]]
) -> npt.NDArray[np.int64]:
    """Repeat the value of each piece for its tokens."""
    lengths = [length for _, _, length in group]
    return np.repeat(np.array(values, dtype=np.int64), np.array(lengths, dtype=np.int64))


__all__ = [
    "BatchLimits",
    "CachedKV",
    "PackedPrompts",
    "int64_tensor",
    "running_sums",
    "slot_mapping",
    "token_indices",
]
