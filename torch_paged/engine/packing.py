"""Prefill chunks of requests, packed into the inputs of one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged.decoder.inputs import StepInputs
from torch_paged.decoder.state import to_device
from torch_paged.engine.packed_prompts import token_places
from torch_paged.engine.request import Request
from torch_paged.engine.step import PrefillChunk


class PackedChunks(NamedTuple):
    """Packed chunks on the device.

    Attributes:
        inputs: of the step.
        prefix: [num_chunks] tokens cached before each chunk.
        slots: [num_chunks] slots as an index.
        sampled: [num_chunks] int32 slots of the chunks that end their prompt, -1 for others.
        last_positions: [num_ending] positions of the last tokens of these.
        targets: [num_scored] int64 prompt tokens that follow the scored ones.
    """

    inputs: StepInputs
    prefix: Tensor
    slots: Tensor
    sampled: Tensor
    last_positions: Tensor
    targets: Tensor


def pack_chunks(
    chunks: Sequence[PrefillChunk],
    block_size: int,
    num_tables: int,
    device: torch.device,
    num_scored: Sequence[int] = (),
    *,
    has_spans: bool = False,
) -> PackedChunks:
    """Pack chunks, in order, with a single transfer.

    Args:
        num_tables: block tables of the layers.
        num_scored: for each chunk, how many of its first tokens are scored, that is, have their
            logits computed too, for what these say of the prompt token that follows; () for none.
        has_spans: the model's keys depend on lengths. A request is as long as if it were alone:
            its prompt is computed in one go, each later token on its own.
    """
    slots = [chunk.request.slot for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    lengths = [chunk.length for chunk in chunks]
    bounds = [0, *accumulate(lengths)]
    sampled = [c.request.slot if c.is_last else -1 for c in chunks]
    last = [c.start + c.length - 1 for c in chunks if c.is_last]
    rows, tokens = len(chunks), bounds[-1]
    positions = torch.cat(
        [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    )
    scored, targets = _scored(chunks, bounds, num_scored)
    last_index = [bound - 1 for bound in bounds[1:]]
    per_chunk = torch.tensor(
        [*slots, *starts, *bounds, *last_index, *scored, *sampled, *last, *targets]
    )
    ids = torch.cat([_token_ids(*chunk[:3]) for chunk in chunks])
    mappings = [_slot_mapping(chunks, table, block_size) for table in range(num_tables)]
    if has_spans:
        prompts = [chunk.request.num_prompt_tokens for chunk in chunks]
        least = torch.tensor(prompts).repeat_interleave(torch.tensor(lengths))
        mappings.append(torch.maximum(positions + 1, least))
    packed = to_device(torch.cat([per_chunk, ids, positions, *mappings]), device)
    sizes = [rows, rows, rows + 1, rows + len(scored), rows, len(last), len(targets)]
    index, prefix, cu_seqlens, wanted, ends, last_positions, following, *per_token = packed.split(
        [*sizes, *[tokens] * (2 + len(mappings))]
    )
    ids, positions, *mappings = per_token
    spans = mappings.pop().to(torch.int32) if has_spans else None
    inputs = StepInputs(
        slots=index.to(torch.int32),
        ids=ids,
        positions=positions.to(torch.int32),
        cu_seqlens=cu_seqlens.to(torch.int32),
        slot_mappings=tuple(mappings),
        last_index=wanted,
        max_query_len=max(lengths),
        spans=spans,
    )
    return PackedChunks(inputs, prefix, index, ends.to(torch.int32), last_positions, following)


def _scored(
    chunks: Sequence[PrefillChunk], bounds: Sequence[int], num_scored: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the indices of the scored tokens in the packing, and the tokens that follow them."""
    index: list[int] = []
    targets: list[int] = []
    for chunk, first, count in zip(chunks, bounds, num_scored, strict=False):
        assert chunk.request.prompt_ids is not None
        index += range(first, first + count)
        targets += chunk.request.prompt_ids[chunk.start + 1 : chunk.start + 1 + count]
    return index, targets


def _token_ids(request: Request, start: int, length: int) -> Tensor:
    """Return ids [length] of prompt and output from `start` on."""
    assert request.prompt_ids is not None
    stop, prompt = start + length, request.num_prompt_tokens
    ids = list(request.prompt_ids[start : min(stop, prompt)])
    if stop > prompt:
        ids += request.output_ids[max(start - prompt, 0) : stop - prompt]
    assert len(ids) == length, "the tokens of a request must be known before it is prefilled"
    return torch.tensor(ids)


def _slot_mapping(chunks: Sequence[PrefillChunk], table: int, block_size: int) -> Tensor:
    """Return the flat cache index [num_tokens] int64 of all tokens of the chunks."""
    return torch.cat(
        [
            token_places(chunk.request.blocks, chunk.start, chunk.length, table, block_size)
            for chunk in chunks
        ]
    )


__all__ = ["PackedChunks", "pack_chunks"]
