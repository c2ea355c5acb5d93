"""How long requests wait for blocks and slots that other users of the same pool hold."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.engine.request import Request
from torch_paged.engine.request_blocks import RequestBlocks
from torch_paged.engine.slot_pool import SlotPool

logger = logging.getLogger("torch_paged")

PATIENCE = 30.0  # seconds
# A prompt that came back so often without a token may never get one.
MAX_YIELDS = 64
_WARN_AFTER = 1.0
# A longer time between two looks counts as this much: others may have had no chance to move in
# it, as where somebody held the lock of the model.
_LONGEST_GAP = 0.05


class Patience:
    """Says when to wait for other users, and notices when these do not move.

    Args:
        progress: changes whenever a user of the blocks launches something.
        now: the time in seconds.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        slots: SlotPool,
        blocks: RequestBlocks,
        progress: Callable[[], object],
        now: Callable[[], float],
    ) -> None:
        self._allocator = allocator
        self._slots = slots
        self._blocks = blocks
        self._progress = progress
        self._now = now
        self._sign: object = None
        self._last = self._waited = 0.0
        self._has_warned = False

    def refusal(self, request: Request, num_blocks: int) -> str | None:
        """Say why the only one of us that runs cannot wait for `num_blocks`; None: it can."""
        others = self._allocator.num_live - len(set(request.block_ids))
        if not others or not self._blocks.fit(num_blocks):
            return self._blocks.too_large(num_blocks)
        # A row comes back with room for its next token. A prompt may come back as it was, and so
        # may another to which it gave way.
        request.num_yields += request.decode_since < 0
        if request.num_yields <= MAX_YIELDS:
            return None
        return (
            f"the prompt gave way to other users of the model {MAX_YIELDS} times before it was "
            "computed; raise kv_cache_memory, or send fewer requests at the same time"
        )

    def end_of(self, head: Request) -> str | None:
        """Say why `head`, for which nothing of ours runs, waits no more; None: it does.

        Once others stand still for too long, this is the end of everyone until they move.
        """
        now = self._now()
        sign = (self._allocator.num_free, self._slots.num_free, self._progress())
        if sign != self._sign:
            self._sign, self._waited, self._has_warned = sign, 0.0, False
        else:
            self._waited += min(now - self._last, _LONGEST_GAP)
        self._last = now
        if self._waited >= _WARN_AFTER and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "requests wait for KV blocks or slots that other users of the model hold, e.g. "
                "another Engine, and these do not move; step or close them"
            )
        if self._waited < PATIENCE:
            return None
        return (
            f"{self._lack(head)}, and have not moved for {PATIENCE:g} s; step or close what else "
            "serves requests on the model, or raise kv_cache_memory or max_num_seqs"
        )

    def _lack(self, head: Request) -> str:
        if not self._slots.num_free:
            return f"other users of the model hold all {self._slots.num_slots} slots"
        needed, held = self._blocks.num_first(head), self._allocator.num_live
        return (
            f"the request needs {needed} KV blocks; other users of the model hold {held} of the "
            f"pool's {self._allocator.num_blocks}"
        )


__all__ = ["MAX_YIELDS", "PATIENCE", "Patience"]
