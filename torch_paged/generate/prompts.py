"""The prompts of a call as our runs take them: without padding, equal ones once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.batch import PackedPrompts
from torch_paged.engine.core import EngineCore
from torch_paged.generate.call import Call
from torch_paged.generate.leased_cache import CacheLease, reusable
from torch_paged.generate.masks import MaskFacts, with_last
from torch_paged.generate.past import (
    Columns,
    cached_kv,
    full_width,
    num_past_columns,
    text_positions,
)
from torch_paged.patches import seams
from torch_paged.patches.patched_step import PatchedStep


class Prompts(NamedTuple):
    """Packed prompts, and where their tokens stood."""

    packed: PackedPrompts
    columns: Columns


def pack(
    step: DecoderStep | PatchedStep,
    core: EngineCore,
    call: Call,
    input_ids: Tensor,
) -> Prompts:
    """Drop the padding: rows one after the other, with the positions that generate gave them.

    Args:
        input_ids: what is to be run; for drafts other ids than those of the call.
    """
    device, kwargs, config = step.device, call.model_kwargs, call.generation_config
    embeds, mask = kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    tokens = input_ids if embeds is None else embeds
    positions, cache = text_positions(kwargs.get("position_ids")), seams.call_cache(kwargs)
    past = num_past_columns(cache)
    if past and full_width(mask, config, positions) == tokens.shape[1]:
        tokens = tokens[:, past:]
    rows, width = tokens.shape[:2]
    if positions is None:
        positions = torch.arange(past, past + width, device="cpu").expand(rows, width)
    positions = positions[:, -width:].to(device).expand(rows, width)
    facts = call.mask_facts
    copies = _copies(tokens, facts, positions) if not past and rows > 1 else None
    if copies is not None:
        firsts = [copies.index(prompt) for prompt in range(max(copies) + 1)]
        index = torch.tensor(firsts, device=tokens.device)
        tokens, positions = tokens[index], positions[index.to(device)]
        rows = len(firsts)
    lease = reusable(cache, step.cache_layers, core) if past else None
    real, lengths, cached = None, (past + width,) * rows, (past,) * rows
    if facts is not None:
        facts = facts if copies is None else facts.of_rows(firsts)
        real, lengths = _real_and_lengths(facts, device)
    if real is None:
        if lease is not None and lease.view.real is not None:
            lease = None
    elif past:
        counts = [real[:, :past].sum(-1)]
        if lease is not None:
            counts.append(_differences(real, lease, past))
        cached, *differing = map(tuple, torch.stack(counts).tolist())
        lease = lease if differing and not any(differing[0]) else None
    columns = Columns(past, width, real, lease)
    index_of_new = columns.new_index

    def packed(values: Tensor) -> Tensor:
        values = values.to(device).reshape(rows * width, *values.shape[2:]).contiguous()
        return values if index_of_new is None else values.index_select(0, index_of_new)

    prompts = PackedPrompts(
        lengths=lengths,
        ids=packed(tokens) if embeds is None else None,
        embeddings=None if embeds is None else packed(tokens),
        positions=packed(positions).to(torch.int32),
        last_positions=positions[:, -1],
        rows=copies,
        cached=cached if past else None,
        cached_kv=cached_kv(cache, columns) if past and lease is None else None,
        held=None if lease is None else lease.blocks.held,
    )
    if copies is not None and real is not None:
        columns = Columns(past, width, real[torch.tensor(copies, device=device)])
    return Prompts(prompts, columns)


def _real_and_lengths(
    facts: MaskFacts, device: torch.device
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return where a mask has tokens, None where they are everywhere, and those of each row."""
    if min(facts.lengths) == facts.real.shape[1]:
        return None, facts.lengths
    real = facts.real.to(device)
    if 0 in facts.lengths:
        real = with_last(real)
    return real, tuple(max(length, 1) for length in facts.lengths)


def _differences(real: Tensor, lease: CacheLease, num_columns: int) -> Tensor:
    """Count in each row the columns that are real here and not in a lease, or the reverse."""
    known = lease.view.real
    here = real[:, :num_columns]
    return (~here if known is None else here != known[:, :num_columns]).sum(-1)


def _copies(tokens: Tensor, mask: MaskFacts | None, positions: Tensor) -> tuple[int, ...] | None:
    """Number the prompts and return that of each row; None if no two are equal.

    Embeddings are compared with those of the row before, where they are.
    """
    if tokens.is_floating_point():
        same = (tokens[1:] == tokens[:-1]).flatten(1).all(-1)
        starts = [0, *torch.cumsum(~same, 0).tolist()]
        keys = [(start,) for start in starts]
    else:
        keys = [(row.tobytes(),) for row in tokens.cpu().numpy()]
    if len(set(keys)) == len(keys):
        return None
    others = [positions.cpu().numpy()]
    if mask is not None:
        others.append(mask.on_host.numpy())
    numbers: dict[tuple[Any, ...], int] = {}
    copies = []
    for row, key in enumerate(keys):
        full = (key, *(values[row].tobytes() for values in others))
        copies.append(numbers.setdefault(full, len(numbers)))
    return tuple(copies) if len(numbers) < len(copies) else None


__all__ = ["Prompts", "pack"]
