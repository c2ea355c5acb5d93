"""Launch configurations of `experts`: their kinds, the measured table, the rules."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from torch_paged.ops.experts.table import TABLE, Shape
from torch_paged.ops.triton_compat import triton

# Up to this many tokens a step is bound by reading weights, past it by arithmetic.
MAX_DECODE_TOKENS = 128

# What is measured at a number of tokens serves down to the bucket before it.
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class GemvConfig(NamedTuple):
    """FP32 units: a program's output features, k of a tile, shares of the sum (down only)."""

    rows: int
    block_k: int
    warps: int
    splits: int = 1
    registers: int = 128


class TileConfig(NamedTuple):
    """Tensor cores: a program's output features, k of a tile, tiles in flight, shares of sums."""

    rows: int
    block_k: int
    warps: int
    splits: int = 1
    stages: int = 4


class ExpertsConfig(NamedTuple):
    """Both projections, by the same kind of kernel.

    Attributes:
        tokens: of an expert, that a program of the tile kernel takes; 0 for the gemv kernel.
    """

    tokens: int
    gate_up: GemvConfig | TileConfig
    down: GemvConfig | TileConfig


class Problem(NamedTuple):
    """What the choice depends on.

    Attributes:
        gate_up_k, down_k: whether k is contiguous in the matrices, rather than the features.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    inner: int
    gate_up_k: bool
    down_k: bool

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.top_k


def choose_config(key: tuple[int, int], problem: Problem, dtype: torch.dtype) -> ExpertsConfig:
    """Return the configuration for a problem.

    Args:
        key: capability (major * 10 + minor) and multiprocessors of the device.
    """
    # Triton multiplies 16-bit tiles without tensor cores before Ampere.
    wide = dtype == torch.float32 or 0 < key[0] < 80
    measured = None if wide else _measured(key, problem)
    return measured or _choose(key[1], problem, wide)


def table_shape(problem: Problem) -> Shape | None:
    """Return the table's key for a problem, or None for one that it does not hold."""
    if problem.num_tokens > TOKEN_BUCKETS[-1] or problem.gate_up_k != problem.down_k:
        return None
    bucket = next(bucket for bucket in TOKEN_BUCKETS if problem.num_tokens <= bucket)
    _, top_k, num_experts, hidden, inner, k_first, _ = problem
    return bucket, top_k, num_experts, hidden, inner, k_first


@functools.cache
def _measured(key: tuple[int, int], problem: Problem) -> ExpertsConfig | None:
    shape = table_shape(problem)
    entry = None if shape is None else TABLE.get(key, {}).get(shape)
    if entry is None:
        return None
    kind = TileConfig if entry[0] else GemvConfig
    return ExpertsConfig(entry[0], kind(*entry[1]), kind(*entry[2]))


@functools.cache
def _choose(processors: int, problem: Problem, wide: bool) -> ExpertsConfig:
    hidden, inner = problem.hidden, problem.inner
    if problem.num_tokens == 1:
        pairs = problem.num_pairs
        return ExpertsConfig(
            0,
            _gemv(processors, pairs, inner, hidden, problem.gate_up_k, gated=True, wide=wide),
            _gemv(processors, pairs, hidden, inner, problem.down_k, gated=False, wide=wide),
        )
    if problem.num_tokens > MAX_DECODE_TOKENS:
        return _many_tokens(problem, wide)
    tokens = 2 * problem.num_pairs // problem.num_experts
    tokens = min(tokens, problem.num_tokens)
    tokens = min(max(triton.next_power_of_2(tokens), 16), 32 if wide else 64)
    busy = min(problem.num_experts, problem.num_pairs)
    return ExpertsConfig(
        tokens,
        _tile(processors, busy, inner, hidden, problem.gate_up_k, gated=True, wide=wide),
        _tile(processors, busy, hidden, inner, problem.down_k, gated=False, wide=wide),
    )


def _power_of_two_up_to(limit: int, cap: int) -> int:
    """Return the largest power of two that neither `limit` nor `cap` is below, at least 1."""
    return 1 << (max(min(limit, cap), 1).bit_length() - 1)


def _gemv(
    processors: int, pairs: int, features: int, k: int, k_first: bool, *, gated: bool, wide: bool
) -> GemvConfig:
    """Tiles of four loads of 16 bytes a thread.

    Where k is contiguous, a tile is as long as the threads load at a time: x then reaches each of
    them from memory in the layout of the weights.
    """
    streams, vec = 2 if gated else 1, 4 if wide else 8
    if k_first:
        warps = 4 if k >= 1024 else 2 if k >= 512 else 1
        rows, block_k = 4 // streams, warps * 32 * vec
    else:
        warps, rows, block_k = 4, 64 // streams, 8 * vec
    programs = -(-features // rows) * pairs
    splits = 1 if gated else _splits(4 * processors, programs, k, block_k)
    return GemvConfig(rows, block_k, warps, splits)


def _tile(
    processors: int, busy: int, features: int, k: int, k_first: bool, *, gated: bool, wide: bool
) -> TileConfig:
    if wide:
        return TileConfig(16 if gated else 32, 32, 4, 1, 2)
    streams = 2 if gated else 1
    rows, block_k, stages = (64, 128, 3) if k_first else (128, 64, 4)
    rows //= streams
    programs = -(-features // rows) * busy
    splits = 1 if gated else _splits(2 * processors, programs, k, block_k)
    return TileConfig(rows, block_k, 4, splits, stages)


def _splits(wanted: int, programs: int, k: int, block_k: int) -> int:
    """Return into how many shares of four tiles or more to divide a sum over k."""
    return _power_of_two_up_to(min(wanted // max(programs, 1), k // (4 * block_k)), 4)


def _many_tokens(problem: Problem, wide: bool) -> ExpertsConfig:
    if wide:
        return ExpertsConfig(32, TileConfig(16, 32, 4, 1, 2), TileConfig(32, 32, 4, 1, 2))
    mean = problem.num_pairs // problem.num_experts
    tokens = 128 if mean > 64 else 64 if mean > 24 else 32
    warps = 8 if tokens == 128 else 4
    return ExpertsConfig(tokens, TileConfig(64, 64, warps, 1, 3), TileConfig(128, 64, warps, 1, 3))
