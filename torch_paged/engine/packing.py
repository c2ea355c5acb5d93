"""Prefill chunks of requests, packed into the inputs of one step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_paged.engine.packed_prompts import int64_tensor, slot_mapping, token_indices
from torch_paged.engine.prompt_inputs import Array, PromptInputs
from torch_paged.engine.step import PrefillChunk


def pack_chunks(
    chunks: Sequence[PrefillChunk],
    block_size: int,
    num_tables: int,
    scored: Sequence[tuple[int, int]] = (),
    decoding: Sequence[int] = (),
    *,
    has_spans: bool = False,
) -> PromptInputs:
    """Pack chunks, in order.

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
    held = [chunk.request.blocks for chunk in chunks]
    index = token_indices(pieces)
    # Decoding rows are a row without a slot for the attention of prompts.
    hole, origin = ([-1], [0]) if count else ([], [])
    slots = [_slot(chunk) for chunk in chunks]
    bounds = [*accumulate((chunk.length for chunk in chunks), initial=count)]
    sampled = [slot if c.is_last else -1 for c, slot in zip(chunks, slots, strict=True)]
    more, targets = _scored(chunks, bounds, scored)
    wanted = [*range(count), *(bound - 1 for bound in bounds[1:]), *more]

    def per_token(values: Tensor, dtype: npt.DTypeLike) -> Array:
        array = np.full(count + len(index), -1, dtype=dtype)
        array[count:] = values.numpy()
        return array

    return PromptInputs(
        slots=np.array(hole + slots, dtype=np.int32),
        cu_seqlens=np.array(origin + bounds, dtype=np.int32),
        last_index=np.array(wanted, dtype=np.int64),
        slot_mappings=tuple(
            per_token(slot_mapping(pieces, held, table, block_size, index), np.int64)
            for table in range(num_tables)
        ),
        ids=per_token(_token_ids(chunks), np.int64),
        positions=per_token(index, np.int32),
        spans=per_token(_spans(chunks, index), np.int32) if has_spans else None,
        ends=np.array([*decoding, *sampled], dtype=np.int32),
        targets=np.array(targets, dtype=np.int64),
        num_decoding=count,
        lengths=tuple(chunk.length for chunk in chunks),
    )


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


__all__ = ["pack_chunks"]
