"""Configurations of the wide kernel, ranked by the time they should take, without measuring."""

from __future__ import annotations

import itertools
from typing import NamedTuple

# Shared memory that the tiles in flight of a multiprocessor's programs may take.
SHARED_BYTES = 200 << 10

# Offsets within a tile of the output are of 32 bits.
MAX_FEATURES = 1 << 22

# Bytes a nanosecond, from an H200: what one multiprocessor takes at best, and on average when all
# of them read L2.
_PROCESSOR_RATE = 60
_L2_RATE = 42

# Until programs that share a sum have seen each other's stores, in nanoseconds.
_MEETING = 1500


class WideGemmConfig(NamedTuple):
    """Hopper's tensor cores: tiles of `rows` output features x `tokens` rows of x, no norm inside.

    `stages` tiles of `block_k` elements of both are in flight.
    """

    rows: int
    tokens: int
    block_k: int
    warps: int
    splits: int
    stages: int


def stage_bytes(rows: int, tokens: int, block_k: int) -> int:
    """Return the shared memory of one stage; `rows` of weights, over gate and up if gated."""
    return 2 * block_k * (rows + tokens)


def ranked_configs(
    num_processors: int, num_tokens: int, num_rows: int, in_features: int, gated: bool
) -> list[WideGemmConfig]:
    """Return configurations of all tiles and splits, what should be the quickest first."""
    streams = 2 if gated else 1
    features = -(-num_rows // streams)
    steps = -(-in_features // 64)
    ranked: list[tuple[float, WideGemmConfig]] = []
    for rows, tokens, splits in itertools.product((64, 128, 256), (64, 128, 256), range(1, 9)):
        rows_read = rows * streams
        if rows_read > 256 or rows_read * tokens > 256 * 128 or tokens >= 2 * max(num_tokens, 64):
            continue
        if splits > 1 and steps < 4 * splits:
            continue
        programs = -(-features // rows) * -(-num_tokens // tokens) * splits
        nbytes = -(-steps // splits) * stage_bytes(rows_read, tokens, 64)
        time = max(
            -(-programs // num_processors) * nbytes / _PROCESSOR_RATE,
            programs * nbytes / (_L2_RATE * num_processors),
        )
        if splits > 1:
            # Sums are written and read once.
            time += _MEETING + 2 * 4 * rows_read * tokens / _PROCESSOR_RATE
        stages = min(SHARED_BYTES // stage_bytes(rows_read, tokens, 64), 6)
        ranked.append((time, WideGemmConfig(rows, tokens, 64, 8, splits, stages)))
    return [config for _, config in sorted(ranked)]
