"""What the books of a scheduler must agree on."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator

from torch_paged.engine.decode_clock import DecodeClock
from torch_paged.engine.request import Request, RequestStatus
from torch_paged.engine.request_blocks import RequestBlocks
from torch_paged.errors import TorchPagedError


def check_requests(
    requests: Collection[Request],
    prefilling: Collection[Hashable],
    clock: DecodeClock,
    blocks: RequestBlocks,
    num_running: int,
) -> None:
    """Raise `TorchPagedError` if requests, their places and their blocks contradict each other.

    Args:
        prefilling: ids of the requests that prefill.
        clock: knows those that decode.
    """
    problems = [*_request_problems(requests, prefilling, clock, blocks)]
    problems += blocks.owner_problems(requests)
    if num_running != len(prefilling) + len(clock.rows):
        problems.append(f"num_running is {num_running}")
    if problems:
        raise TorchPagedError("scheduler is inconsistent: " + "; ".join(problems))


def _request_problems(
    requests: Collection[Request],
    prefilling: Collection[Hashable],
    clock: DecodeClock,
    blocks: RequestBlocks,
) -> Iterator[str]:
    for request in requests:
        name, running = request.request_id, request.status is RequestStatus.RUNNING
        places = (name in prefilling) + (name in clock.rows)
        if {request.slot is not None, places} != {running}:
            yield f"{name!r} is {request.status.value}, but in {places} places"
        if running:
            num_computed = request.num_computed_tokens + clock.num_decoded(request)
            yield from blocks.problems(request, num_computed)
        elif request.block_ids:
            yield f"{name!r} is {request.status.value}, but holds blocks"


__all__ = ["check_requests"]
