"""Launch configurations of `fused_linear`: their kinds, the measured table, the rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from torch_paged.ops.fused_linear.table import TABLE
from torch_paged.ops.fused_linear.wide_config import (
    SHARED_BYTES,
    AheadGemmConfig,
    WideGemmConfig,
    ranked_configs,
    stage_bytes,
)
from torch_paged.ops.triton_compat import INTERPRETED, device_capability

# Past this many rows the op composes torch ops: cuBLAS is at least as quick there.
MAX_KERNEL_ROWS = 256

# Up to this many every shape has a kernel, and a step is one plan whose linears take in all of
# their neighbours; where the kernel leaves the norm outside, the op launches that before it. Past
# them torch ops may be quicker.
ALWAYS_KERNEL_ROWS = 64

# Up to so many rows a shape that was not measured takes the wide kernel, where it runs.
MAX_WIDE_UNMEASURED = 128

# A row or two are worth making anew in every program, but not in the thousands of a vocabulary.
MAX_JOINED_TOKENS = 2
MAX_JOINED_FEATURES = 65536

# Length of the caller's `counters`: one for each block of output features whose sum is split.
NUM_COUNTERS = 4096

# Largest rank of a low-rank update; its columns are summed 16 or 64 at a time.
MAX_RANK = 256

# The kernel keeps the order of a sum for a configuration, so few buckets make few orders.
TOKEN_BUCKETS = (1, 2, 8, 16, 32, 64, 128, 256)


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


class TileGemmConfig(NamedTuple):
    """Tensor cores: tiles of `rows` output features x `block_k`, `stages` of them in flight.

    Where `block_k` x `splits` covers in_features there is one tile, and all of a program's weights
    are in shared memory before the kernel waits for its predecessor.
    """

    rows: int
    block_k: int
    warps: int
    splits: int
    stages: int


class PlainTileGemmConfig(NamedTuple):
    """`TileGemmConfig` with the norm in a kernel of its own before it."""

    rows: int
    block_k: int
    warps: int
    splits: int
    stages: int


class Composed(NamedTuple):
    """No kernel: torch ops, which were quicker when measured."""


Config = (
    GemvConfig
    | SmallGemmConfig
    | TileGemmConfig
    | PlainTileGemmConfig
    | AheadGemmConfig
    | WideGemmConfig
    | Composed
)

# Kernels that take only what `tma_serves`.
CopyConfig = AheadGemmConfig | WideGemmConfig

KINDS: dict[str, type[Config]] = {
    "gemv": GemvConfig,
    "small_gemm": SmallGemmConfig,
    "tile_gemm": TileGemmConfig,
    "plain_tile_gemm": PlainTileGemmConfig,
    "ahead_gemm": AheadGemmConfig,
    "wide_gemm": WideGemmConfig,
    "torch": Composed,
}


# What a kernel takes in: the norm before a layer and what follows, only the latter, or nothing,
# as torch ops are quicker.
Folds = Literal["all", "epilogue", "none"]


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
) -> Config:
    """Return the configuration for a problem; `Composed`: torch ops.

    Whether the tile copies serve its tensors is left open: `without_copies` is for where they do
    not.
    """
    if problem.num_tokens > MAX_KERNEL_ROWS:
        return Composed()
    always = problem.num_tokens <= ALWAYS_KERNEL_ROWS
    if dtype == torch.float32:
        return _gemv_rule(key, problem, 4) if always else Composed()
    # Triton has no batched tensor-core product before Ampere.
    if 0 < key[0] < 80:
        return _gemv_rule(key, problem, 8) if problem.num_tokens <= 8 else Composed()
    config = _measured(key, problem)
    if config is None:
        if always:
            config = _rule(key, problem)
        else:
            config = _many_rows_rule(key, problem)
    if can_split or isinstance(config, (GemvConfig, Composed)):
        return config
    config = config._replace(splits=1)
    if not _reaches(config, problem):
        config = _tile_gemm_rule(key, problem)._replace(splits=1)
    return config


def joined_config(key: tuple[int, int], config: Config, problem: Problem) -> GemvConfig | None:
    """Return the launch of `joined_linear` where that of the linear alone is `config`.

    None: two kernels. A program makes whole rows of x, so it has eight output features for them
    where the table may have four, and one group of warps along in_features, whose tiles of x need
    the fewest barriers. With these registers Triton 3.6 spills none on Hopper at the sizes of
    Gemma 3, and four programs share a multiprocessor, or five. Elsewhere it would spill.
    """
    if key[0] not in (0, 90):
        return None
    few = problem.num_tokens <= MAX_JOINED_TOKENS and problem.num_rows <= MAX_JOINED_FEATURES
    if not isinstance(config, GemvConfig) or not few:
        return None
    if problem.num_tokens == 1:
        return GemvConfig(2, 2, 4, 1, 96 if problem.gated else 128)
    return GemvConfig(2, 2, 4, 1, 128 if problem.gated else 104)


def without_copies(key: tuple[int, int], problem: Problem, can_split: bool) -> Config:
    """Return the configuration where a `CopyConfig` was chosen and `tma_serves` refuses."""
    if problem.num_tokens > ALWAYS_KERNEL_ROWS:
        return Composed()
    config = _rule(key, problem)
    if can_split or isinstance(config, GemvConfig):
        return config
    return config._replace(splits=1)


def folds(
    device: torch.device, dtype: torch.dtype, num_tokens: int, shape: tuple[int, int], gated: bool
) -> Folds:
    """Say what one kernel over `num_tokens` rows of a layer takes in.

    Args:
        shape: output features over all weights, input features.
    """
    problem = Problem(num_tokens, *shape, gated)
    config = choose_config(device_key(device), problem, dtype, True)
    if isinstance(config, Composed):
        return "none"
    return "epilogue" if leaves_norm_outside(config, num_tokens) else "all"


def leaves_norm_outside(config: Config, num_tokens: int) -> bool:
    """Say whether the norm before a linear is a kernel of its own where it has this launch."""
    if isinstance(config, AheadGemmConfig):
        # A norm inside needs all rows of its tile of x in registers.
        return num_tokens > ALWAYS_KERNEL_ROWS
    return isinstance(config, (PlainTileGemmConfig, WideGemmConfig))


def tma_serves(tensors: Iterable[torch.Tensor]) -> bool:
    """Say whether the hardware's tile copies can read these matrices, rows contiguous."""
    for tensor in tensors:
        num_rows, width = tensor.shape
        size = tensor.element_size()
        if tensor.data_ptr() % 16 or not num_rows or not width:
            return False
        if num_rows > 1 and (tensor.stride(0) * size % 16 or tensor.stride(0) < width):
            return False
    return True


# How many half octaves, over both dimensions, a measured shape may be away. A configuration whose
# steps cut the sum worse than the one it was measured with is further away: one more step in four
# counts as an octave.
_NEAR = 4.0
_STEP_WEIGHT = 8.0

# Elements of 16 bits that the lanes of a warp load at once.
_WARP_ELEMENTS = 256

# Tiles this deep are for programs that have just one: several in flight would not fit.
ONE_TILE_BLOCK_K = 256


@functools.cache
def _measured(key: tuple[int, int], problem: Problem) -> Config | None:
    """Return the configuration measured on this kind of device for the nearest shape."""
    bucket, nearest, best = token_bucket(problem.num_tokens), _NEAR, None
    for shape, entry in TABLE.get(key, {}).items():
        config = _config(entry)
        if (shape[0], shape[3]) != (bucket, problem.gated) or not _reaches(config, problem):
            continue
        distance = _octaves(problem.num_rows, shape[1]) + _octaves(problem.in_features, shape[2])
        waste = _waste(config, problem.in_features) - _waste(config, shape[2])
        distance = 2 * distance + _STEP_WEIGHT * max(waste, 0.0)
        if distance < nearest or (distance == nearest and best is None):
            nearest, best = distance, config
    return best


def _octaves(size: int, measured: int) -> float:
    return abs(math.log2(max(size, 1) / measured))


def _waste(config: Config, in_features: int) -> float:
    """Return what share of in_features the steps of a program, or of all splits, reach beyond."""
    match config:
        case GemvConfig():
            step = config.k_warps * config.chunks * _WARP_ELEMENTS
        case SmallGemmConfig():
            step = config.warps * config.chunks * 32 * config.splits
        case Composed():
            return 0.0
        case _:
            step = config.block_k * config.splits
    return -(-in_features // step) * step / max(in_features, 1) - 1.0


def _config(entry: tuple[Any, ...]) -> Config:
    kind, *fields = entry
    return KINDS[kind](*fields)


def _reaches(config: Config, problem: Problem) -> bool:
    """Say whether a configuration found for one in_features works at that of `problem`."""
    if isinstance(config, AheadGemmConfig):
        # Where the sums of so many rows are split there are counters for them.
        counted = config.splits == 1 or 2 * problem.num_rows <= config.rows * NUM_COUNTERS
        tokens = max(1 << (problem.num_tokens - 1).bit_length(), 16)
        streams = 2 if problem.gated else 1
        tile = stage_bytes(config.rows * streams, tokens, config.block_k)
        if not counted or tile > SHARED_BYTES:
            return False
        return problem.in_features <= config.block_k * config.splits
    if not isinstance(config, TileGemmConfig) or config.block_k < ONE_TILE_BLOCK_K:
        return True
    return problem.in_features <= config.block_k * config.splits


def _power_of_two_up_to(limit: int, cap: int) -> int:
    """Return the largest power of two that neither `limit` nor `cap` is below, at least 1."""
    return 1 << max(min(limit, cap).bit_length() - 1, 0) if min(limit, cap) > 0 else 1


def _gemv_rule(key: tuple[int, int], problem: Problem, vec: int) -> GemvConfig:
    streams = 2 if problem.gated else 1
    steps = -(-problem.in_features // (32 * vec))
    most = 16 if problem.in_features > 4096 else 8
    k_warps = 1 if steps <= 4 else _power_of_two_up_to(-(-steps // 2), most // 2)
    rows = _power_of_two_up_to(problem.num_rows // (streams * key[1] * 2), 2)
    chunks = _power_of_two_up_to(-(-steps // k_warps), 2 if problem.num_tokens < 4 else 1)
    registers = 80 if problem.num_tokens == 1 else 128 if problem.num_tokens < 4 else 255
    return GemvConfig(rows, chunks, max(k_warps, 4), k_warps, registers)


def _rule(key: tuple[int, int], problem: Problem) -> GemvConfig | SmallGemmConfig | TileGemmConfig:
    if problem.num_tokens <= 2:
        return _gemv_rule(key, problem, 8)
    if problem.num_tokens <= 16:
        return _small_gemm_rule(key, problem)
    return _tile_gemm_rule(key, problem)


def _small_gemm_rule(key: tuple[int, int], problem: Problem) -> SmallGemmConfig:
    streams = 2 if problem.gated else 1
    rows = 16 if problem.num_rows >= 48 * key[1] * streams else 8
    warps = 4 if problem.in_features <= 1024 or rows == 16 else 8
    # 4 loads ahead, each of 16 bytes a lane, fit the registers next to those of x.
    chunks = 4 // (rows // 8 * streams)
    steps = -(-problem.in_features // (32 * warps))
    return SmallGemmConfig(rows, _power_of_two_up_to(steps, max(chunks, 1)), warps, 1)


def _tile_gemm_rule(key: tuple[int, int], problem: Problem) -> TileGemmConfig:
    num_blocks = -(-problem.num_rows // (128 if problem.gated else 64))
    splits = _power_of_two_up_to(2 * key[1] // num_blocks, problem.in_features // 256)
    return TileGemmConfig(64, 64, 4, min(splits, 8), 4)


@functools.cache
def _many_rows_rule(key: tuple[int, int], problem: Problem) -> Config:
    """Return the wide kernel where it runs: it needs Hopper's copies and tensor cores."""
    if key[0] != 90 or problem.num_tokens > MAX_WIDE_UNMEASURED:
        return Composed()
    return ranked_configs(key[1], *problem)[0]
