"""For which sizes past the small buckets the device would wait for the host to launch a prefill.

The host takes 0.6 ms a layer to launch 8,192 prompt tokens op by op, and more for rows beside them
and for packing. On an H200 steps of so many tokens in `benchmarks.ragged` left the device idle for
490 of 2,774 ms at 0.6B, and for 50 of 7,245 ms at 8B; `generate()` with one prompt of 8,192 tokens
took 31 ms at 0.6B, as long as its launches.
"""

from __future__ import annotations

LARGE_TOKEN_BUCKETS = tuple(range(2560, 8193, 512))
# So many operations in a layer are 2.5 ms of an H200. Past that the launches are behind the
# device's back, and activations should not stay in the graphs' pool either.
LARGE_FLOPS = 1.5e12
# The padding of a graph takes device time: so many operations of it in a layer, 0.15 ms of an
# H200, are worth a graph where the device would wait for launches.
_LARGE_PADDING_FLOPS = 1e11


def large_token_buckets(layer_flops: float) -> tuple[int, ...]:
    """Return the ascending large buckets for a model.

    Args:
        layer_flops: operations of one token in a layer; 0 where that is not known: none.
    """
    if not layer_flops:
        return ()
    return tuple(n for n in LARGE_TOKEN_BUCKETS if n * layer_flops <= LARGE_FLOPS)


def most_large_padding(layer_flops: float) -> float:
    """Return the padding tokens of a large bucket that are worth a graph."""
    return _LARGE_PADDING_FLOPS / max(layer_flops, 1.0)


__all__ = ["LARGE_FLOPS", "LARGE_TOKEN_BUCKETS", "large_token_buckets", "most_large_padding"]
