"""What `generate()` raises when memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torch_paged.errors import OutOfBlocks

_REMEDY = "generate for fewer rows or fewer tokens at once"


class OutOfMemory(OutOfBlocks, torch.OutOfMemoryError):
    """Caught as `OutOfBlocks` and as `torch.OutOfMemoryError`, which Hugging Face users expect."""


@contextlib.contextmanager
def no_room_for(what: str) -> Iterator[None]:
    """Say of blocks that cannot be had within the block what they were for.

    Raises:
        OutOfMemory: the KV cache has no room.
    """
    try:
        yield
    except OutOfBlocks as error:
        raise OutOfMemory(
            f"the KV cache has no room for {what}: {error}; raise kv_cache_memory, or {_REMEDY}"
        ) from error


@contextlib.contextmanager
def one_kind_of_error() -> Iterator[None]:
    """Let what torch raises for lack of memory within the block be an `OutOfMemory` as well."""
    try:
        yield
    except OutOfMemory:
        raise
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"no memory left in generate(): {error}; {_REMEDY}") from error


__all__ = ["OutOfMemory", "no_room_for", "one_kind_of_error"]
