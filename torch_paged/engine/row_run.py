"""A run of one row whose caller appends tokens, several at once, and takes them back."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.engine.batch import BatchLimits, BatchRun, Keeps
from torch_paged.engine.core import EngineCore
from torch_paged.engine.extend import EXTEND_BUCKETS, Extension
from torch_paged.engine.out_of_memory import no_room_for
from torch_paged.engine.packed_prompts import PackedPrompts, slot_mapping, token_indices
from torch_paged.engine.sampler import Sampler
from torch_paged.errors import OutOfBlocks

# Tokens for which blocks are handed out at a time.
_TOKENS_AHEAD = 64
_UNLIMITED = 1 << 40


class RowRun(BatchRun):
    """Prefill one prompt, then extend and rewind it. Leaving the context frees the blocks.

    Attributes:
        num_tokens: tokens in the cache.
    """

    def __init__(
        self, core: EngineCore, prompts: PackedPrompts, *, keeps: Keeps = "nothing"
    ) -> None:
        super().__init__(core, prompts, BatchLimits(_UNLIMITED), lag=0, keeps=keeps)
        (self.num_tokens,) = self._lengths
        # A rewind goes back to here at most.
        self._settled = self.num_tokens
        self._room = self.num_tokens
        self._shift = 0  # of positions against indices

    def __enter__(self) -> RowRun:
        return self

    def prefill(self, *, captured: bool = True) -> Tensor:
        """Compute the prompt; returns logits [1, vocab_size] of its last token."""
        # Read before anything is launched that the host would wait for.
        self._shift = int(self._prompts.last_positions[0]) + 1 - self.num_tokens
        return super().prefill(captured=captured)

    def extend(self, ids: Tensor) -> Tensor:
        """Append tokens [num_tokens]; logits [num_tokens, vocab_size] until the next launch."""
        most = EXTEND_BUCKETS[-1]
        if ids.shape[0] > most:
            return torch.cat([self.extend(piece).clone() for piece in ids.split(most)])
        start, core = self.num_tokens, self._core
        self._make_room(start + ids.shape[0])
        piece, held = [(0, start, ids.shape[0])], self._blocks.held
        index, size = token_indices(piece), core.config.block_size
        tables = range(core.layout.num_tables)
        places = tuple(slot_mapping(piece, held, table, size, index) for table in tables)
        (slot,) = self.rows.slots
        logits = core.runner().extend(Extension(slot, ids, start, start + self._shift, places))
        self.num_tokens += ids.shape[0]
        core.counters.steps += 1
        return logits

    def choose(self, logits: Tensor, sampler: Sampler) -> None:
        """Choose the token behind the newest one from its logits [1, vocab_size]."""
        self._core.state.advance(sampler(logits), self.rows.index)

    def launch(self, sampler: Sampler) -> None:
        """Run the token that was chosen last and choose the one behind it; nothing waits."""
        self._make_room(self.num_tokens + 1)
        self._core.runner().decode(self.rows, sampler)
        self.num_tokens += 1
        self._core.counters.steps += 1

    def rewind(self, num_tokens: int) -> None:
        """Keep only the first tokens; an earlier rewind is never undone by going back further."""
        assert self._settled <= num_tokens <= self.num_tokens
        self.num_tokens = self._settled = num_tokens

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens <= self._room:
            return
        if self._drops:
            self._blocks.drop_behind([self._settled])
        try:
            room = num_tokens + _TOKENS_AHEAD
            updates = self._blocks.grow([room])
        except OutOfBlocks:
            # The row may end before it needs all of these.
            room = num_tokens
            with no_room_for(f"a row of {num_tokens} tokens"):
                updates = self._blocks.grow([room])
        self._core.ensure_columns(room)
        self._core.state.write_blocks(updates)
        self._room = room


__all__ = ["RowRun"]
