"""The prompts of a closed batch, cut into forwards of a bounded number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from torch_paged.engine.core import EngineCore
from torch_paged.engine.held_blocks import HeldBlocks
from torch_paged.engine.packed_prompts import (
    PackedPrompts,
    running_sums,
    slot_mapping,
    token_indices,
)
from torch_paged.engine.prompt_inputs import PromptInputs

# Of a prompt: its number, the first token of the piece and the tokens of it.
Piece = tuple[int, int, int]


def cut_prompts(
    lengths: Sequence[int], cached: Sequence[int], budget: int
) -> Iterator[list[Piece]]:
    """Yield the pieces of one forward after the other, each of `budget` tokens but the last.

    Only the first piece of a group can continue a prompt, and only the last can stop short.

    Args:
        cached: first tokens of each prompt that are left out.
    """
    group: list[Piece] = []
    used = 0
    for prompt, length in enumerate(lengths):
        start = cached[prompt]
        while start < length:
            part = min(length - start, budget - used)
            group.append((prompt, start, part))
            used += part
            start += part
            if used == budget:
                yield group
                group, used = [], 0
    if group:
        yield group


def group_inputs(
    core: EngineCore,
    prompts: PackedPrompts,
    cached: Sequence[int],
    group: Sequence[Piece],
    slots: Sequence[int],
    held: Sequence[Sequence[HeldBlocks]],
    span: Tensor | None,
) -> PromptInputs:
    """Return what a forward over a group takes, and tell the state how much is cached before it.

    Args:
        slots: of each piece.
        held: blocks of each piece's row, by kind.
        span: [] the length that keys are to depend on, where they do.
    """
    starts = [start for _, start, _ in group]
    firsts = running_sums([n - old for n, old in zip(prompts.lengths, cached, strict=True)])
    lo = firsts[group[0][0]] + group[0][1] - cached[group[0][0]]
    bounds = running_sums([length for _, _, length in group])
    hi = lo + bounds[-1]
    index = token_indices(group)
    mappings = [
        slot_mapping(group, held, table, core.config.block_size, index).numpy()
        for table in range(core.layout.num_tables)
    ]
    core.state.set_prefix(slots, starts)
    return PromptInputs(
        slots=np.array(slots, dtype=np.int32),
        cu_seqlens=np.array(bounds, dtype=np.int32),
        last_index=np.array(bounds[1:], dtype=np.int64) - 1,
        slot_mappings=tuple(mappings),
        ids=None if prompts.ids is None else prompts.ids[lo:hi],
        positions=prompts.positions[lo:hi],
        spans=None if span is None else span.to(torch.int32).expand(hi - lo).contiguous(),
        embeddings=None if prompts.embeddings is None else prompts.embeddings[lo:hi],
        lengths=tuple(length for _, _, length in group),
        whole_prompt=starts == [0],
    )


__all__ = ["Piece", "cut_prompts", "group_inputs"]
