"""Device-resident state of the decode loop: static tensors addressed through slot indices."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_paged.decoder.slot_table import Field, SlotTable
from torch_paged.decoder.transfer import upload
from torch_paged.ops.advance import advance
from torch_paged.ops.fused_linear.configs import NUM_COUNTERS

DEFAULT_EOS_IDS = 8
DEFAULT_RING = 1024
# Of one slot: its token, the token's log-probability, finished, failed.
_REPORT_BYTES = 8 + 4 + 1 + 1
_NOT_ROWS = ("report", "counters", "linear_counters", "num_unfinished", "table_rows")


@dataclass(frozen=True, slots=True)
class RowStart:
    """What a row needs before its first sampled token.

    Attributes:
        slot: its slot.
        num_tokens: tokens that the prefill leaves in the cache.
        max_new_tokens: the row finishes with this many sampled tokens.
        eos_ids: ids that finish the row.
        pad_token: emitted after the end, or -1 to go on with real tokens.
        num_generated: tokens that it has sampled before, in an earlier run.
    """

    slot: int
    num_tokens: int
    max_new_tokens: int
    eos_ids: Sequence[int]
    pad_token: int
    num_generated: int = 0


class SlotState:
    """State tensors for `max_num_seqs` slots on `device`; shapes as in the attribute comments."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        max_kv_heads: int,
        device: torch.device,
        *,
        num_eos_ids: int = DEFAULT_EOS_IDS,
        ring: int = DEFAULT_RING,
        num_tables: int = 1,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.device = device
        # Made under inference_mode, they could not be written outside of it.
        with torch.inference_mode(False):
            # What the host reads after a step lies together, so that one copy takes it along.
            self.report = torch.zeros(report_bytes(max_num_seqs), dtype=torch.uint8, device=device)
            self.last_token, self.token_logprobs, self.finished, self.failed = report_parts(
                self.report
            )
            # Tokens cached before the chunk of its prompt that a step computes.
            self.prefix_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
            self.output = torch.zeros((ring, max_num_seqs), dtype=torch.int64, device=device)
            self.num_unfinished = torch.zeros(1, dtype=torch.int32, device=device)
            # [num_tables, max_num_seqs, max_blocks] block ids
            self.block_tables = torch.zeros(
                (num_tables, max_num_seqs, max_blocks), dtype=torch.int32, device=device
            )
            self.table_rows = self.block_tables.view(-1, max_blocks)
            # Both zero between kernels; each kernel that counts in them leaves them so.
            self.linear_counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
            self.counters = torch.zeros(
                max_num_seqs * max_kv_heads, dtype=torch.int32, device=device
            )
        # In the order of `start_rows`.
        fields = {
            "context_lens": Field(torch.int32),
            "max_new_tokens": Field(torch.int32),
            "num_generated": Field(torch.int32),
            "pad_token": Field(torch.int64, -1),
            "eos_ids": Field(torch.int64, -1, (num_eos_ids,)),
            "positions": Field(torch.int32),
            "rotary_leads": Field(torch.int32),
            "rotary_floors": Field(torch.int32),
        }
        self._table = table = SlotTable(max_num_seqs, fields, device)
        self.context_lens = table["context_lens"]
        self.max_new_tokens = table["max_new_tokens"]
        self.num_generated = table["num_generated"]
        self.pad_token, self.eos_ids = table["pad_token"], table["eos_ids"]
        self.positions = table["positions"]
        # Where rotary frequencies depend on the length: how far the longest row of the batch is
        # ahead, and the least length to count with.
        self.rotary_leads = table["rotary_leads"]
        self.rotary_floors = table["rotary_floors"]

    @property
    def ring(self) -> int:
        """Steps that `output` holds before it wraps."""
        return self.output.shape[0]

    @property
    def num_eos_ids(self) -> int:
        return self.eos_ids.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all state tensors."""
        tensors = [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        storages = [t.untyped_storage() for t in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def start_rows(
        self,
        rows: Sequence[RowStart],
        positions: Tensor | Sequence[int],
        leads: Tensor | int = 0,
        floors: Tensor | int = 0,
    ) -> None:
        """Reset the slots of `rows` as if their last prompt token had just been fed.

        `advance` then counts the first sampled token like any other: it adds one to
        `context_lens` and `positions`, so both start one short.

        Args:
            positions: [num_rows] rotary position of each row's last prompt token.
            leads, floors: [num_rows] or one for all, see the attributes of these names.
        """
        known: dict[str, Tensor] = {}  # on the device

        def number(name: str, value: Tensor | int) -> int:
            if isinstance(value, Tensor):
                known[name] = value
                return 0
            return value

        lead, floor = number("rotary_leads", leads), number("rotary_floors", floors)
        if isinstance(positions, Tensor):
            known["positions"], positions = positions, [0] * len(rows)
        no_ids = (-1,) * self.num_eos_ids
        slots = [row.slot for row in rows]
        index = self._table.write(
            slots,
            [
                (
                    row.num_tokens - 1,
                    row.max_new_tokens,
                    row.num_generated,
                    row.pad_token,
                    (*row.eos_ids, *no_ids[len(row.eos_ids) :]),
                    position,
                    lead,
                    floor,
                )
                for row, position in zip(rows, positions, strict=True)
            ],
        )
        for name, values in known.items():
            self._table[name].index_copy_(0, index, values.to(torch.int32).expand(len(rows)))
        # Assigned to an index, a number is copied from the host, which waits for the device.
        self.finished.index_fill_(0, index, False)

    def advance(self, tokens: Tensor, slots: Tensor) -> None:
        """Append `tokens` [num_rows] int64 to the rows of `slots` [num_rows] int32."""
        advance(
            tokens,
            slots,
            self.last_token,
            self.positions,
            self.context_lens,
            self.num_generated,
            self.max_new_tokens,
            self.finished,
            self.eos_ids,
            self.pad_token,
            self.output,
            self.num_unfinished,
        )

    def set_prefix(self, slots: Sequence[int], num_cached: Sequence[int]) -> None:
        """Set how many tokens of `slots`, each once, are cached before a prefill chunk."""
        index, values = np.array(slots, dtype=np.int64), np.array(num_cached, dtype=np.int32)
        self.prefix_lens.index_copy_(0, *upload([index, values], self.device))

    def put_last_tokens(self, slots: Tensor, ids: Tensor, positions: Tensor) -> None:
        """Write what `slots` [num_rows] int32 feed next to the front of ids and positions.

        Padding rows, of slot -1, write something valid.
        """
        count, index = slots.shape[0], slots.clamp(min=0)
        ids[:count].copy_(self.last_token.index_select(0, index))
        positions[:count].copy_(self.positions.index_select(0, index))

    def take_rows(self, old: SlotState) -> None:
        """Copy the rows of a smaller state; its counters are zero and stay behind."""
        for name, source in vars(old).items():
            if not isinstance(source, torch.Tensor) or name in _NOT_ROWS:
                continue
            target = getattr(self, name)
            if name == "output":
                target, source = target.T, source.T
            if name == "block_tables":
                target, source = target.transpose(0, 1), source.transpose(0, 1)
            if source.dim() > 1:
                target = target[..., : source.shape[-1]]
            target[: source.shape[0]].copy_(source)

    @property
    def max_blocks(self) -> int:
        """Columns of the block tables."""
        return self.block_tables.shape[2]

    def widen_block_tables(self, max_blocks: int) -> None:
        """Give every row of the tables `max_blocks` columns; the tensor is a new one."""
        old = self.block_tables
        with torch.inference_mode(False):
            wide = old.new_zeros((*old.shape[:2], max_blocks))
            wide[..., : old.shape[2]].copy_(old)
            self.table_rows = wide.view(-1, max_blocks)
        self.block_tables = wide

    def write_blocks(self, updates: Sequence[tuple[int, int, Sequence[int], int]]) -> None:
        """Write block ids into the tables: (slot, first column, ids, table) each."""
        if not updates:
            return
        # Most updates are of one block, and most steps have some: an array makes a tensor sooner
        # than lists of lists do.
        size, width = self.max_num_seqs, self.max_blocks
        places, blocks = array("q"), array("i")
        for slot, first, ids, table in updates:
            start = (table * size + slot) * width + first
            places.extend(range(start, start + len(ids)))
            blocks.extend(ids)
        if not places:
            return
        index, values = upload([np.asarray(places), np.asarray(blocks)], self.device)
        self.table_rows.view(-1).index_copy_(0, index, values)


def report_bytes(num_slots: int) -> int:
    """Return the size of a report: a multiple of 8, so that reports may lie in rows."""
    return -(-num_slots * _REPORT_BYTES // 8) * 8


def report_parts(report: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """View reports [..., report_bytes] uint8 as their parts, [..., num_slots] each.

    Tokens int64, log-probabilities float32, finished bool, failed bool.
    """
    size = report.shape[-1] // _REPORT_BYTES
    ends = (0, 8 * size, 12 * size, 13 * size, 14 * size)
    tokens, logprobs, finished, failed = (
        report[..., start:end] for start, end in zip(ends, ends[1:], strict=False)
    )
    return (
        tokens.view(torch.int64),
        logprobs.view(torch.float32),
        finished.view(torch.bool),
        failed.view(torch.bool),
    )
