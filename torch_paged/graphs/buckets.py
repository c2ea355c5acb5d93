"""Batch buckets: the few batch sizes for which a graph is captured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Small sizes are dense because padding hurts most there; above 256 every step is 64 rows.
_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_LARGE_STEP = 64


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the ascending buckets for batches of up to `max_num_seqs` rows.

    The last bucket is `max_num_seqs` itself, so that a full batch carries no padding.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    sizes = _SMALL + tuple(range(_SMALL[-1] + _LARGE_STEP, max_num_seqs, _LARGE_STEP))
    return tuple(size for size in sizes if size < max_num_seqs) + (max_num_seqs,)


def check_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """Return `buckets` as an ascending tuple without duplicates.

    Raises:
        ValueError: the list is empty or holds a size below 1.
    """
    sizes = tuple(sorted(set(buckets)))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"buckets must be a non-empty list of sizes >= 1, got {list(buckets)}")
    return sizes


def pick_bucket(n: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `buckets` that holds `n` rows, None if none does."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    index = bisect_left(buckets, n)
    return buckets[index] if index < len(buckets) else None


def split_batch(n: int, buckets: Sequence[int]) -> list[int]:
    """Split `n` rows into chunks, in order, none larger than the largest bucket.

    Every chunk but the last is a full largest bucket; ``sum`` of the result is `n`.
    """
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    if not buckets:
        raise ValueError("buckets must not be empty")
    full, rest = divmod(n, buckets[-1])
    return [buckets[-1]] * full + ([rest] if rest else [])


__all__ = ["check_buckets", "default_buckets", "pick_bucket", "split_batch"]
