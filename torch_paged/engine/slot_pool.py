"""The slots of one decode state, shared by all who run rows in it."""

from __future__ import annotations

from heapq import heappop, heappush

from torch_paged.errors import TorchPagedError


class SlotPool:
    """Hand out slots ``0 .. num_slots - 1``, the lowest free one first; O(log n) each.

    Not thread-safe: callers hold the model's lock.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = 0
        self._free: list[int] = []  # heap
        self.grow(num_slots)

    @property
    def num_slots(self) -> int:
        """Number of slots in all."""
        return self._num_slots

    @property
    def num_free(self) -> int:
        """Number of slots that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """Return the lowest free slot; there must be one."""
        return heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Take back a slot."""
        heappush(self._free, slot)

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots to `num_slots`; a smaller number changes nothing."""
        # In one go, whatever interrupts it. Behind smaller numbers the new ones keep the heap.
        free = [*self._free, *range(self._num_slots, num_slots)]
        self._free, self._num_slots = free, max(self._num_slots, num_slots)

    def check_integrity(self, held: list[int]) -> None:
        """Raise `TorchPagedError` unless each of the caller's slots is held once, and by it."""
        both = sorted(held + self._free)
        if any(a == b for a, b in zip(both, both[1:], strict=False)):
            raise TorchPagedError(f"slots are held twice, or held and free: {both}")
        if both and not 0 <= both[0] <= both[-1] < self._num_slots:
            raise TorchPagedError(f"slots must be in [0, {self._num_slots}), got {both}")


__all__ = ["SlotPool"]
