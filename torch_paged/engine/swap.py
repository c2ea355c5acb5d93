"""Swapping to the host: what a swap space must offer, and the copies it leads to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch_paged.engine.request import Request


class SwapCopy(NamedTuple):
    """Copy KV blocks of a request between the pool and host memory, pairwise."""

    request: Request
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class SwapSpace(Protocol):
    """Host memory for the KV of preempted requests, and the choice to use it."""

    def take(self, request: Request, num_blocks: int) -> Sequence[int] | None:
        """Return `num_blocks` host blocks, or None to have the request recomputed."""
        ...

    def give_back(self, host_blocks: Sequence[int]) -> None:
        """Take back host blocks: their copy to the device is scheduled, or nobody needs it."""
        ...


__all__ = ["SwapCopy", "SwapSpace"]
