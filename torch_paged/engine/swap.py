"""Swapping to the host: what a swap space must offer, and the copies it leads to."""

from __future__ import annotations

from collections.abc import Container, Sequence
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


class Swaps:
    """Sends the KV of requests to the host and back; without a space nothing is ever sent."""

    def __init__(self, space: SwapSpace | None) -> None:
        self._space = space

    def take_out(self, request: Request, device_blocks: tuple[int, ...]) -> SwapCopy | None:
        """Return the copy to make before the blocks are written, None to have them recomputed."""
        if self._space is None or not device_blocks:
            return None
        host_blocks = self._space.take(request, len(device_blocks))
        if host_blocks is None:
            return None
        request.host_block_ids = tuple(host_blocks)
        return SwapCopy(request, device_blocks, request.host_block_ids)

    def bring_in(
        self, request: Request, device_blocks: tuple[int, ...], shared: Container[int] = ()
    ) -> SwapCopy | None:
        """Return the copy that makes a request's KV readable again, None if `shared` has it all.

        Args:
            device_blocks: in the order in which they were sent out.
            shared: those that were found and hold it already.
        """
        pairs = zip(device_blocks, request.host_block_ids, strict=True)
        missing = [pair for pair in pairs if pair[0] not in shared]
        self.drop(request)
        if not missing:
            return None
        blocks, hosts = zip(*missing, strict=True)
        return SwapCopy(request, blocks, hosts)

    def drop(self, request: Request) -> None:
        """Give host blocks back, if the request has any."""
        if request.host_block_ids:
            assert self._space is not None
            self._space.give_back(request.host_block_ids)
            request.host_block_ids = ()


__all__ = ["SwapCopy", "SwapSpace", "Swaps"]
