"""The next tokens of one row, several at once: behind what it has in the cache, logits of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged.decoder.inputs import StepInputs, TokenRows
from torch_paged.decoder.state import SlotState
from torch_paged.decoder.transfer import to_device
from torch_paged.engine.protocols import StepModel
from torch_paged.graphs.buckets import pick_bucket
from torch_paged.graphs.capture import GraphCache
from torch_paged.graphs.static import StaticInputs

# A step of so few tokens is bound by the reading of the weights: sizes between cost the same.
EXTEND_BUCKETS = (1, 2, 4, 8, 16, 32, 64)

# Up to so many, attention takes them as rows, which read the context once each.
_MAX_TOKEN_ROWS = 8

_NUM_NUMBERS = 4


class Extension(NamedTuple):
    """Tokens that a row is to have besides those in its cache.

    Attributes:
        slot: of the row.
        ids: [num_tokens] int64 on the device.
        start: tokens of the row that are in the cache.
        position: rotary position of the first token.
        places: by block table, [num_tokens] int64 flat cache index of each token, on the host.
    """

    slot: int
    ids: Tensor
    start: int
    position: int
    places: tuple[Tensor, ...]

    def packed(self, num_tokens: int) -> Tensor:
        """Return what the host knows as one tensor, places padded to `num_tokens`."""
        out = torch.full(
            (_NUM_NUMBERS + len(self.places) * num_tokens,), -1, dtype=torch.int64, device="cpu"
        )
        count = self.ids.shape[0]
        numbers = torch.tensor([self.slot, self.start, count, self.position], device="cpu")
        out[:_NUM_NUMBERS] = numbers
        out[_NUM_NUMBERS:].view(len(self.places), num_tokens)[:, :count] = torch.stack(self.places)
        return out


def extend_eagerly(step: StepModel, state: SlotState, extension: Extension) -> Tensor:
    """Launch the ops of an extension one by one; logits [num_tokens, vocab_size]."""
    count = extension.ids.shape[0]
    packed = to_device(extension.packed(count), state.device)
    # They may be a view of the caller's ids.
    ids = extension.ids.contiguous()
    return _extend(step, state, packed, ids, len(extension.places))


def _extend(
    step: StepModel, state: SlotState, packed: Tensor, ids: Tensor, num_tables: int
) -> Tensor:
    """Run an extension of up to ids [num_tokens]; nothing depends on a value on the host.

    Afterwards the state of the row is that behind a decode step of its last token, so `advance`
    appends what is chosen from the last logits.
    """
    num_tokens = ids.shape[0]
    slot, start, count, position = packed[:_NUM_NUMBERS].split(1)

    def put(target: Tensor, value: Tensor) -> None:
        target.index_copy_(0, slot, value.to(target.dtype))

    slots = slot.to(torch.int32)
    put(state.num_generated, torch.zeros_like(start))
    if num_tokens == 1:
        put(state.context_lens, start)
        put(state.positions, position)
        # Last: what decode attention reads before it waits is then behind a plain launch.
        put(state.last_token, ids)
        return step.decode(slots)
    put(state.prefix_lens, start)
    offsets = torch.arange(num_tokens, device=ids.device)
    rows = None
    if num_tokens <= min(_MAX_TOKEN_ROWS, state.max_num_seqs):
        rows = TokenRows(
            tuple(
                table.expand(num_tokens, -1) for table in state.block_tables.index_select(1, slot)
            ),
            slots=torch.where(offsets < count, offsets, -1).to(torch.int32),
            context_lens=(start + offsets).to(torch.int32),
        )
    bounds = torch.cat([torch.zeros_like(count), count]).to(torch.int32)
    logits = step.extend(
        StepInputs(
            slots=slots,
            ids=ids,
            # Last: see above.
            positions=(position + offsets).to(torch.int32),
            cu_seqlens=bounds,
            slot_mappings=packed[_NUM_NUMBERS:].view(num_tables, num_tokens).unbind(),
            last_index=offsets,
            max_query_len=num_tokens,
            token_rows=rows,
        )
    )
    put(state.context_lens, start + count - 1)
    put(state.positions, position + count - 1)
    return logits


class CapturedExtension:
    """Runs extensions as CUDA graphs, one for each bucket of tokens, captured on first use."""

    def __init__(
        self, step: StepModel, state: SlotState, graphs: GraphCache[Tensor | None]
    ) -> None:
        self._step = step
        self._state = state
        self._graphs = graphs
        self._num_tables = state.block_tables.shape[0]
        most = EXTEND_BUCKETS[-1]
        self._static = StaticInputs(_NUM_NUMBERS + self._num_tables * most, state.device)
        self._packed = self._static.add("packed", torch.int64, fill=-1)
        with torch.inference_mode(False):
            self._ids = torch.zeros(most, dtype=torch.int64, device=state.device)

    def __call__(self, extension: Extension) -> Tensor:
        """Return logits [num_tokens, vocab_size], valid until the next launch."""
        count = extension.ids.shape[0]
        bucket = pick_bucket(count, EXTEND_BUCKETS)
        if bucket is None:
            return extend_eagerly(self._step, self._state, extension)
        self._static.copy_in("packed", extension.packed(bucket))
        self._ids[:count].copy_(extension.ids)
        packed = self._packed[: _NUM_NUMBERS + self._num_tables * bucket]

        def run() -> Tensor:
            ids = self._ids[:bucket]
            return _extend(self._step, self._state, packed, ids, self._num_tables)

        key = ("extend", self._step.variant, bucket)
        # The cache is written with the values that the replay writes again.
        if not self._graphs.prepare("a step of several tokens", key, run, warmup=run):
            return run()[:count]
        logits = self._graphs.replay(key)
        assert logits is not None
        return logits[:count]


__all__ = ["EXTEND_BUCKETS", "CapturedExtension", "Extension", "extend_eagerly"]
