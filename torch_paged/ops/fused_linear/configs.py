"""Launch configurations of `fused_linear`: their two kinds, the measured table, the rules."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from torch_paged.ops.fused_linear.table import TABLE
from torch_paged.ops.triton_compat import INTERPRETED, device_capability

# Past this many rows the op composes torch ops: cuBLAS is at least as quick there.
MAX_KERNEL_ROWS = 64

# Length of the caller's `counters`: one for each block of output features whose sum is split.
NUM_COUNTERS = 1024

# The kernel keeps the order of a sum for a configuration, so few buckets make few orders.
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class GemvConfig(NamedTuple):
    """FP32 units: `rows` x `warps` / `k_warps` output features a program.

    A step takes `chunks` x 32 x 16 bytes of each for each of `k_warps`. `registers` bounds those
    of a thread. Without any bound the assembler aims for 48 or so and, to get there, issues the
    loads of x one after the other.
    """

    rows: int
    chunks: int
    warps: int
    k_warps: int
    registers: int = 128


class SmallGemmConfig(NamedTuple):
    """Tensor cores: `rows` output features a program, `warps` x `chunks` x 32 elements a step."""

    rows: int
    chunks: int
    warps: int
    splits: int
    registers: int = 128


_KINDS = {"gemv": GemvConfig, "small_gemm": SmallGemmConfig}


class Problem(NamedTuple):
    """What the choice depends on; `num_rows` counts output features over all weights."""

    num_tokens: int
    num_rows: int
    in_features: int
    gated: bool


def token_bucket(num_tokens: int) -> int:
    return next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket)


@functools.cache
def num_processors(device_index: int) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def device_key(device: torch.device) -> tuple[int, int]:
    """Return the table's key for a device: capability (major * 10 + minor), multiprocessors."""
    if INTERPRETED or device.type != "cuda":
        return (0, 4)
    index = device.index or 0
    major, minor = device_capability(index)
    return (major * 10 + minor, num_processors(index))


def choose_config(
    key: tuple[int, int], problem: Problem, dtype: torch.dtype, can_split: bool
) -> GemvConfig | SmallGemmConfig | None:
    """Return the configuration for a problem; None: compose torch ops."""
    if problem.num_tokens > MAX_KERNEL_ROWS:
        return None
    if dtype == torch.float32:
        return _gemv_rule(key, problem, 4)
    # Triton has no batched tensor-core product before Ampere.
    if 0 < key[0] < 80:
        return _gemv_rule(key, problem, 8) if problem.num_tokens <= 8 else None
    config = _measured(key, problem)
    if config is None:
        config = _small_gemm_rule(key, problem)
    if isinstance(config, SmallGemmConfig) and config.splits > 1 and not can_split:
        config = config._replace(splits=1)
    return config


def _measured(key: tuple[int, int], problem: Problem) -> GemvConfig | SmallGemmConfig | None:
    entry = TABLE.get(key, {}).get(
        (
            token_bucket(problem.num_tokens),
            size_class(problem.num_rows),
            size_class(problem.in_features),
            problem.gated,
        )
    )
    if entry is None:
        return None
    return _KINDS[entry[0]](*entry[1:])


def size_class(size: int) -> int:
    """Return the class of a dimension: two to an octave."""
    octave = max(size, 1).bit_length() - 1
    return 2 * octave + (2 * size >= 3 << octave)


def _power_of_two_up_to(limit: int, cap: int) -> int:
    """Return the largest power of two that neither `limit` nor `cap` is below, at least 1."""
    return 1 << max(min(limit, cap).bit_length() - 1, 0) if min(limit, cap) > 0 else 1


def _gemv_rule(key: tuple[int, int], problem: Problem, vec: int) -> GemvConfig:
    streams = 2 if problem.gated else 1
    steps = -(-problem.in_features // (32 * vec))
    warps = 4 if steps <= 16 else 8
    rows = _power_of_two_up_to(problem.num_rows // (streams * key[1] * 4), 2 // streams)
    most = 8 // (rows * streams) if problem.num_tokens < 4 else 2
    chunks = _power_of_two_up_to(-(-steps // warps), most)
    return GemvConfig(rows, chunks, warps, warps, 128 if problem.num_tokens <= 2 else 255)


def _small_gemm_rule(key: tuple[int, int], problem: Problem) -> SmallGemmConfig:
    tokens = token_bucket(problem.num_tokens)
    streams = 2 if problem.gated else 1
    rows = 8 if problem.num_rows < 16 * 2 * key[1] * streams else 16
    if tokens >= 32 and not problem.gated:
        rows = max(rows, 16)
    warps = 4 if problem.in_features <= 1024 else 8
    # Loads in flight: 16 bytes a lane for each 8 rows and chunk.
    budget = max(8 // (rows // 8 * streams), 1) if tokens <= 16 else 2
    chunks = _power_of_two_up_to(-(-problem.in_features // (32 * warps)), budget)
    return SmallGemmConfig(rows, chunks, warps, 1, 128 if tokens <= 16 else 255)
