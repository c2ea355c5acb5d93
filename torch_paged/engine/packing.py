"""Prefill chunks of requests, packed into the inputs of one step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged.decoder.inputs import StepInputs
from torch_paged.decoder.state import to_device
from torch_paged.engine.packed_prompts import int64_tensor, slot_mapping, token_indices
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
) -> PackedChunks:
    """Pack chunks, in order, with a single transfer.

    Args:
        num_tables: block tables of the layers.
        num_scored: for each chunk, how many of its first tokens are scored, that is, have their
            logits computed too, for what these say of the prompt token that follows; () for none.
    """
    slots = [chunk.request.slot for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    lengths = [chunk.length for chunk in chunks]
    bounds = [0, *accumulate(lengths)]
    sampled = [c.request.slot if c.is_last else -1 for c in chunks]
    last = [c.start + c.length - 1 for c in chunks if c.is_last]
    rows, tokens = len(chunks), bounds[-1]
    pieces = [(0, start, length) for start, length in zip(starts, lengths, strict=True)]
    positions = token_indices(pieces)
    scored, targets = _scored(chunks, bounds, num_scored)
    last_index = [bound - 1 for bound in bounds[1:]]
    per_chunk = torch.tensor(
        [*slots, *starts, *bounds, *last_index, *scored, *sampled, *last, *targets]
    )
    ids = _token_ids(chunks)
    held = [chunk.request.blocks for chunk in chunks]
    mappings = [
        slot_mapping(pieces, held, table, block_size, positions) for table in range(num_tables)
    ]
    packed = to_device(torch.cat([per_chunk, ids, positions, *mappings]), device)
    sizes = [rows, rows, rows + 1, rows + len(scored), rows, len(last), len(targets)]
    index, prefix, cu_seqlens, wanted, ends, last_positions, following, *per_token = packed.split(
        [*sizes, *[tokens] * (2 + num_tables)]
    )
    ids, positions, *mappings = per_token
    inputs = StepInputs(
        slots=index.to(torch.int32),
        ids=ids,
        positions=positions.to(torch.int32),
        cu_seqlens=cu_seqlens.to(torch.int32),
        slot_mappings=tuple(mappings),
        last_index=wanted,
        max_query_len=max(lengths),
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


def _token_ids(chunks: Sequence[PrefillChunk]) -> Tensor:
    """Return the ids [num_tokens] of all chunks, of prompt and output."""
    ids = array("q")
    for request, start, length, _ in chunks:
        assert request.prompt_ids is not None
        stop, prompt, before = start + length, request.num_prompt_tokens, len(ids)
        ids.extend(array("q", request.prompt_ids[start : min(stop, prompt)]))
        if stop > prompt:
            ids.extend(array("q", request.output_ids[max(start - prompt, 0) : stop - prompt]))
        if len(ids) - before != length:
            raise AssertionError("the tokens of a request must be known before it is prefilled")
    return int64_tensor(ids)


__all__ = ["PackedChunks", "pack_chunks"]
