"""Configurations of the wide kernel, ranked by the time they should take, without measuring."""

from __future__ import annotations

import itertools
from typing import NamedTuple

# Shared memory that the tiles in flight of a multiprocessor's programs may take.
SHARED_BYTES = 200 << 10

# Up to so many rows tiles of 16 and 32 are tried, and programs of one warpgroup.
FEW_ROWS = 64

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

    `stages` tiles of `block_k` elements of both are in flight. Before it waits for its predecessor
    the kernel asks for the first `prefetch` bytes of each row of weights in L2.
    """

    rows: int
    tokens: int
    block_k: int
    warps: int
    splits: int
    stages: int
    prefetch: int = 512


class AheadGemmConfig(NamedTuple):
    """Hopper's tensor cores: one tile of `rows` output features x `block_k` elements a program.

    `block_k` x `splits` covers in_features: all weights are in shared memory before the kernel
    waits for its predecessor.
    """

    rows: int
    block_k: int
    warps: int
    splits: int


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
    few = num_tokens <= FEW_ROWS
    token_tiles = (16, 32, 64) if few else (64, 128, 256)
    for rows, tokens, splits in itertools.product((64, 128, 256), token_tiles, range(1, 9)):
        rows_read = rows * streams
        if rows_read > 256 or rows_read * tokens > 256 * 128:
            continue
        if tokens >= 2 * max(num_tokens, token_tiles[0]) or (few and num_tokens > 2 * tokens):
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
        # Of a small tile two warpgroups would have little each.
        for warps in (4, 8) if few and rows == 64 else (8,):
            ranked.append((time, WideGemmConfig(rows, tokens, 64, warps, splits, stages)))
    return [config for _, config in sorted(ranked)]
