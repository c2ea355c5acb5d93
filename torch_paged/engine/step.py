"""What the scheduler hands out: the record of one step, its parts, and its draft."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch_paged.engine.held_blocks import BlockUpdate
from torch_paged.engine.request import Request
from torch_paged.engine.swap import SwapCopy

_T = TypeVar("_T")


class PrefillChunk(NamedTuple):
    """Compute tokens ``[start, start + length)`` of prompt and output.

    After the last chunk the next token is sampled, and the row decodes from the next step on.
    """

    request: Request
    start: int
    length: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step, to be launched in the order of the fields, all of it on one stream.

    Attributes:
        stopped: slots whose row decodes no longer. A slot may have a new owner already.
        started: rows that decode from this step on, next to those of the step before.
        num_decoding: rows that decode in this step.
        prefills: in this order; a chunk may read blocks that one before it writes.
        preempted: sent back in line. Their tokens in flight are valid, and needed when they are
            prefilled again.
        finished: ended since the last step; their last tokens may still be in flight.
    """

    swap_outs: tuple[SwapCopy, ...]
    swap_ins: tuple[SwapCopy, ...]
    block_updates: tuple[BlockUpdate, ...]
    stopped: tuple[int, ...]
    started: tuple[Request, ...]
    num_decoding: int
    prefills: tuple[PrefillChunk, ...]
    preempted: tuple[Request, ...]
    finished: tuple[Request, ...]


@dataclass(slots=True)
class StepDraft:
    """Changes gathered for the next step; handing them out empties it."""

    swap_outs: list[SwapCopy] = field(default_factory=list)
    swap_ins: list[SwapCopy] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    started: dict[Hashable, Request] = field(default_factory=dict)  # by request id
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    def take(
        self, num_decoding: int, prefills: tuple[PrefillChunk, ...], *, decode: bool
    ) -> ScheduledStep:
        """Return the step; without `decode` the started rows stay for a later one."""
        started = tuple(self.started.values()) if decode else ()
        if decode:
            self.started.clear()
        return ScheduledStep(
            swap_outs=_drain(self.swap_outs),
            swap_ins=_drain(self.swap_ins),
            block_updates=_drain(self.block_updates),
            stopped=_drain(self.stopped),
            started=started,
            num_decoding=num_decoding,
            prefills=prefills,
            preempted=_drain(self.preempted),
            finished=_drain(self.finished),
        )

    def take_block_updates(self) -> tuple[BlockUpdate, ...]:
        """Return the block updates alone."""
        return _drain(self.block_updates)

    def withdraw(self, request: Request) -> None:
        """A running request gives up its slot: drop what was to be reported for it."""
        # The slot may find a new owner before they are written, and no entry is written twice.
        self.block_updates = [u for u in self.block_updates if u.slot != request.slot]
        if self.started.pop(request.request_id, None) is None and request.decode_since >= 0:
            assert request.slot is not None
            self.stopped.append(request.slot)


def _drain(items: list[_T]) -> tuple[_T, ...]:
    drained = tuple(items)
    items.clear()
    return drained


__all__ = ["BlockUpdate", "PrefillChunk", "ScheduledStep", "StepDraft"]
