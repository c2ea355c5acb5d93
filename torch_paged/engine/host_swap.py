"""The swap space of a serving engine: who may use host blocks, and the copies of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch_paged.engine.core import EngineCore
from torch_paged.engine.request import Request
from torch_paged.engine.step import ScheduledStep
from torch_paged.engine.swap import SwapCopy


class HostSwap:
    """A `SwapSpace` of the host blocks that all engines of a core share.

    It belongs to one life of the core: after `EngineCore.release` it takes nothing more, and what
    is given back to it is forgotten.

    Args:
        max_bytes: of host memory; what other engines hold counts.
    """

    def __init__(self, core: EngineCore, max_bytes: int) -> None:
        self._core = core
        self._blocks = core.host_blocks
        self._max_bytes = max_bytes

    def take(self, request: Request, num_blocks: int) -> Sequence[int] | None:
        """Return `num_blocks` host blocks for any request; None where they cannot be had."""
        return self._blocks.take(num_blocks, self._max_bytes)

    def give_back(self, host_blocks: Sequence[int]) -> None:
        """Take host blocks back, for the next swap."""
        self._blocks.give_back(host_blocks)

    def copy(self, scheduled: ScheduledStep) -> None:
        """Launch the copies of a step.

        To be called before anything else that the step launches, and before anybody else who uses
        the core or the space: the blocks that go out are free already, and so are the host blocks
        of what comes in. A scheduler brings nobody in before it has sent out all that a step sends
        out, so no copy in needs a host block that a copy out of the same step writes.
        """
        pool = self._core.pool
        self._blocks.copy_out(pool, _pairs(scheduled.swap_outs))
        self._blocks.copy_in(pool, _pairs(scheduled.swap_ins))


def _pairs(copies: Sequence[SwapCopy]) -> list[tuple[int, int]]:
    return [
        pair for copy in copies for pair in zip(copy.device_blocks, copy.host_blocks, strict=True)
    ]


__all__ = ["HostSwap"]
