"""Prefill chunks of requests, packed into the inputs of one step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_paged.decoder.inputs import StepInputs
from torch_paged.decoder.transfer import upload
from torch_paged.engine.packed_prompts import int64_tensor, slot_mapping, token_indices
from torch_paged.engine.step import PrefillChunk


class PackedChunks(NamedTuple):
    """Packed chunks on the device.

    Attributes:
        inputs: of the step.
        prefix: [num_chunks] int32 tokens cached before each chunk.
        slots: [num_chunks] int64 slots.
        sampled: int32 slots of those whose next token the step samples, [num_chunks], -1 for
            chunks that do not end their prompt; the decoding rows in front.
        targets: [num_scored] int64 prompt tokens that follow the scored ones.
    """

    inputs: StepInputs
    prefix: Tensor
    slots: Tensor
    sampled: Tensor
    targets: Tensor


def pack_chunks(
    chunks: Sequence[PrefillChunk],
    block_size: int,
    num_tables: int,
    device: torch.device,
    scored: Sequence[tuple[int, int]] = (),
    decoding: Sequence[int] = (),
    *,
    has_spans: bool = False,
) -> PackedChunks:
    """Pack chunks, in order, with a single transfer.

    Args:
        num_tables: block tables of the layers.
        decoding: slots of the rows that decode in the same step.
        scored: for each chunk, how many of its tokens are skipped and then scored, that is, have
            their logits computed too, for what these say of the prompt token that follows; ()
            for none.
        has_spans: the model's keys depend on lengths. A request is as long as if it were alone:
            its prompt is computed in one go, each later token on its own.
    """
    count = len(decoding)
    pieces = [(0, chunk.start, chunk.length) for chunk in chunks]
    per_row = _per_row(chunks, scored, decoding)
    index = token_indices(pieces)
    held = [chunk.request.blocks for chunk in chunks]
    per_token = [(_token_ids(chunks), np.int64), (index, np.int32)]
    for table in range(num_tables):
        per_token.append((slot_mapping(pieces, held, table, block_size, index), np.int64))
    if has_spans:
        per_token.append((_spans(chunks, index), np.int32))
    parts = [np.array(values, dtype=dtype) for values, dtype in per_row]
    for values, dtype in per_token:
        part = np.full(count + len(index), -1, dtype=dtype)
        part[count:] = values.numpy()
        parts.append(part)
    rows, slots, prefix, cu_seqlens, last_index, ends, targets, *tokens = upload(parts, device)
    spans = tokens.pop() if has_spans else None
    ids, positions, *mappings = tokens
    inputs = StepInputs(
        slots=slots,
        ids=ids,
        positions=positions,
        cu_seqlens=cu_seqlens,
        slot_mappings=tuple(mappings),
        last_index=last_index,
        max_query_len=max(chunk.length for chunk in chunks),
        lengths=tuple(chunk.length for chunk in chunks),
        decoding=ends[:count] if count else None,
        spans=spans,
    )
    return PackedChunks(inputs, prefix, rows, ends, targets)


def _per_row(
    chunks: Sequence[PrefillChunk], scored: Sequence[tuple[int, int]], decoding: Sequence[int]
) -> list[tuple[list[int], npt.DTypeLike]]:
    """Return what has an entry a row, in the order of `pack_chunks`, and its dtype."""
    count = len(decoding)
    # Decoding rows are a row without a slot for the attention of prompts.
    hole, origin = ([-1], [0]) if count else ([], [])
    slots = [_slot(chunk) for chunk in chunks]
    starts = [chunk.start for chunk in chunks]
    bounds = [*accumulate((chunk.length for chunk in chunks), initial=count)]
    sampled = [slot if c.is_last else -1 for c, slot in zip(chunks, slots, strict=True)]
    more, targets = _scored(chunks, bounds, scored)
    wanted = [*range(count), *(bound - 1 for bound in bounds[1:]), *more]
    return [
        (slots, np.int64),
        (hole + slots, np.int32),
        (starts, np.int32),
        (origin + bounds, np.int32),
        (wanted, np.int64),
        ([*decoding, *sampled], np.int32),
        (targets, np.int64),
    ]


def _spans(chunks: Sequence[PrefillChunk], index: Tensor) -> Tensor:
    """Return the length of its row [num_tokens] that each token is computed at."""
    prompts = torch.tensor([chunk.request.num_prompt_tokens for chunk in chunks], device="cpu")
    lengths = torch.tensor([chunk.length for chunk in chunks], device="cpu")
    return torch.maximum(index + 1, prompts.repeat_interleave(lengths))


def _slot(chunk: PrefillChunk) -> int:
    slot = chunk.request.slot
    assert slot is not None, "a request is prefilled in a slot"
    return slot


def _scored(
    chunks: Sequence[PrefillChunk], bounds: Sequence[int], scored: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Return the indices of the scored tokens in the packing, and the tokens that follow them."""
    index: list[int] = []
    targets: list[int] = []
    for chunk, first, (skipped, count) in zip(chunks, bounds, scored, strict=False):
        assert chunk.request.prompt_ids is not None
        index += range(first + skipped, first + skipped + count)
        begin = chunk.start + skipped + 1
        targets += chunk.request.prompt_ids[begin : begin + count]
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
