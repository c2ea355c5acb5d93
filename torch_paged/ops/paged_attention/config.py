"""Tile sizes and grid shapes of the attention kernels, by device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from torch_paged.ops.triton_compat import device_capability


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the decode kernel cuts its work; token counts are multiples of the tile."""

    tile_bytes: int = 16384  # of keys in one iteration
    single_tokens: int = 256  # up to so many tokens are one range, without a merge
    min_split_tokens: int = 128
    programs_per_sm: int = 2
    max_splits: int = 64
    num_warps: int = 4
    num_stages: int = 3
    early_tile: bool = False  # load the first tile, to registers, while the predecessor runs
    prefetch_tokens: int = 0  # asked for in L2 by each program while its predecessor runs
    heads_first: bool = False  # load the new heads before the keys: for many waves of programs
    registers: int | None = None  # at most so many a thread, where that lets more programs fit


# With fewer programs than SMs, one program an SM hides latency by itself: deep loads, and the
# first tokens asked for while the predecessor runs. With a few for each SM all of them run at
# once. With more, programs hide each other's latency, so that many have to fit: small tiles.
# H200, 128 rows of 160 tokens, 8 KV heads of 128: tiles of 32768 bytes 40 us, of 8192 28.5 us
# (18.3 us at the read ceiling); of 1024 tokens 133 and 127.5 us (116.5).
_FEW_PROGRAMS = DecodeConfig(tile_bytes=32768, programs_per_sm=1, num_warps=8, prefetch_tokens=256)
_SEVERAL_PROGRAMS = DecodeConfig(tile_bytes=32768, num_warps=8, num_stages=2, early_tile=True)
_MANY_PROGRAMS = DecodeConfig(tile_bytes=8192, num_warps=4, num_stages=3, heads_first=True)
# All of a large batch at once, on two warps each, eight programs an SM. The time that a program
# takes to begin and to end is then spent once, where four an SM spend it twice. Rows of any length
# do better with the latter: of those that all began at once the long ones run on alone, and no
# program of two warps reads as fast. H200, 128 rows, 8 KV heads of 128 (of 64): 160 tokens each
# 28.0 to 24.7 us (18.2 to 13.4), 640 each 84 to 83 (46.4 to 43.8), of 32 to 1,536 tokens 85 to 97.
_ONE_WAVE_PROGRAMS = DecodeConfig(
    tile_bytes=4096, num_warps=2, num_stages=3, early_tile=True, registers=128
)
_ONE_WAVE_PER_SM = 8
# Up to so many query heads share a KV head of programs of two warps: more make larger tiles, which
# take more registers.
_ONE_WAVE_GROUP = 16
# Rows count as of like length up to so many tokens between the longest and the shortest.
ALIKE_TOKENS = 64
_alike: ContextVar[bool] = ContextVar("rows_alike", default=False)
_SEVERAL_WIDE_PROGRAMS = dataclasses.replace(_SEVERAL_PROGRAMS, early_tile=False)
# As many tokens a tile as of heads half as wide.
_MANY_WIDE_PROGRAMS = dataclasses.replace(_MANY_PROGRAMS, tile_bytes=16384)
_MANY_PER_SM = 3
# With three waves and more of four programs an SM, of which the short rows are the last, programs
# of two warps win: more of them fit. H200, 8 KV heads of 128 (of 64), 256 rows of 32 to 1,536
# tokens: 164.5 to 162.4 us (96.5 to 85.4), 206 rows of 169 to 1,151: 136.5 to 133.7; of 128 rows
# the long ones run on alone, 88.6 to 98.5 (48.3 to 50.4).
_MOST_PROGRAMS = dataclasses.replace(_MANY_PROGRAMS, num_warps=2)
_MOST_PER_SM = 12
# Where a program has a tile or two, it keeps them in registers: that leaves the SMs' memory to
# the L1 of the kernels around it, whose loads live there.
_FEW_SHORT_PROGRAMS = DecodeConfig(
    tile_bytes=65536, programs_per_sm=1, num_warps=8, num_stages=1, early_tile=True
)
SHORT_TOKENS = 4096
# Of heads of 256 a tile of that size would fill the registers. Short ranges with a merge take
# less: Gemma-3-4B, one row of 128 to 219 tokens, H200: 2.285 ms a step with _FEW_PROGRAMS, 2.173
# with these, 2.188 with tiles of 64 tokens. Past so many tokens a program the loop, of one stage,
# takes longer than it saves.
_FEW_SHORT_WIDE_PROGRAMS = DecodeConfig(
    tile_bytes=16384,
    single_tokens=64,
    min_split_tokens=32,
    programs_per_sm=1,
    num_warps=8,
    num_stages=1,
    early_tile=True,
)
_SHORT_WIDE_TOKENS = 128
_SMALL_SHARED_MEMORY = DecodeConfig(num_stages=2)
_NO_ASYNC_COPIES = DecodeConfig(tile_bytes=4096, num_stages=1)
# Small, so that small tests under the interpreter reach several splits.
_INTERPRETED = DecodeConfig(
    tile_bytes=2048, single_tokens=64, min_split_tokens=32, programs_per_sm=1, early_tile=True
)
_INTERPRETED_SMS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile of the prefill kernel: block_m (query, head) pairs by block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@functools.cache
def _cuda_sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors of `device`."""
    return _cuda_sm_count(device.index or 0) if device.type == "cuda" else _INTERPRETED_SMS


@contextlib.contextmanager
def rows_alike(alike: bool) -> Iterator[None]:
    """Launch decode attention meanwhile for rows of like length, or of all lengths.

    A matter of speed alone: the results are those of any lengths.
    """
    token = _alike.set(alike)
    try:
        yield
    finally:
        _alike.reset(token)


def cares_for_lengths(
    device: torch.device, dtype: torch.dtype, num_rows: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Say whether `rows_alike` may choose the decode configuration of so many rows."""
    if device.type != "cuda" or dtype.itemsize != 2 or head_dim > 128:
        return False
    if device_capability(device.index or 0)[0] not in (9, 10):
        return False
    two_waves = _MANY_PER_SM + 1
    programs, num_sms = num_rows * num_kv_heads, sm_count(device)
    return two_waves * num_sms < programs <= _ONE_WAVE_PER_SM * num_sms


def decode_config(query: torch.Tensor, num_programs: int, max_tokens: int) -> DecodeConfig:
    """Return the decode configuration for a device and dtype and a grid of rows times KV heads.

    `max_tokens` is what the longest row may ever have: the width of the block table, or less.
    """
    device = query.device
    if device.type != "cuda":
        return _INTERPRETED
    major, _ = device_capability(device.index or 0)
    if major in (9, 10):
        if _alike.get() and (config := _alike_config(query, num_programs)) is not None:
            return config
        if num_programs > _MANY_PER_SM * sm_count(device):
            return _many_config(query, num_programs)
        # Exact float32 products, and wide heads, leave no registers for a tile.
        narrow = query.element_size() == 2 and query.shape[-1] <= 192
        if num_programs > sm_count(device):
            return _SEVERAL_PROGRAMS if narrow else _SEVERAL_WIDE_PROGRAMS
        if narrow and max_tokens <= SHORT_TOKENS:
            return _FEW_SHORT_PROGRAMS
        wide = query.element_size() == 2 and 192 < query.shape[-1] <= 256
        if wide and num_programs * max_tokens <= _SHORT_WIDE_TOKENS * sm_count(device):
            return _FEW_SHORT_WIDE_PROGRAMS
        return _FEW_PROGRAMS
    return _NO_ASYNC_COPIES if major < 8 else _SMALL_SHARED_MEMORY


def _many_config(query: torch.Tensor, num_programs: int) -> DecodeConfig:
    num_rows, num_heads, head_dim = query.shape
    if head_dim > 128:
        return _MANY_WIDE_PROGRAMS
    small = query.element_size() == 2 and num_rows * num_heads <= _ONE_WAVE_GROUP * num_programs
    if small and num_programs > _MOST_PER_SM * sm_count(query.device):
        return _MOST_PROGRAMS
    return _MANY_PROGRAMS


def _alike_config(query: torch.Tensor, num_programs: int) -> DecodeConfig | None:
    """Return what rows of like length are quicker with, if there is such."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = num_programs // num_rows
    cares = cares_for_lengths(query.device, query.dtype, num_rows, num_kv_heads, head_dim)
    if not cares or num_heads > _ONE_WAVE_GROUP * num_kv_heads:
        return None
    return _ONE_WAVE_PROGRAMS


def num_splits(num_programs: int, max_tokens: int, num_sms: int, config: DecodeConfig) -> int:
    """Return how many programs share one row and KV head; a function of shapes alone."""
    if max_tokens <= config.single_tokens:
        return 1
    wanted = config.programs_per_sm * num_sms // max(num_programs, 1)
    return max(1, min(wanted, config.max_splits, -(-max_tokens // config.min_split_tokens)))


def prefill_config(
    query: torch.Tensor, block_d: int, num_pairs: int, num_rows: int
) -> PrefillConfig:
    """Return the prefill tile for heads padded to `block_d`.

    Args:
        num_pairs: tokens times heads.
        num_rows: prompts that the tokens are of, at most.
    """
    if query.device.type != "cuda":
        return PrefillConfig(16, 16, 4, 1)
    major, minor = device_capability(query.device.index or 0)
    wide = block_d > 128
    if query.element_size() == 4:
        return PrefillConfig(32, 16 if wide else 32, 8, 1)
    if major < 8:
        return PrefillConfig(16 if wide else 32, 16, 4, 1)
    if (major, minor) in ((8, 6), (8, 9)) or major > 10:
        # 100 KiB of shared memory.
        return PrefillConfig(64, 32, 4, 1) if wide else PrefillConfig(64, 64, 4, 2)
    if wide:
        many = num_pairs >= 256 * sm_count(query.device)
        return PrefillConfig(128, 64, 8, 2) if many else PrefillConfig(64, 64, 8, 2)
    # H200, torch 2.11, 16 heads of 128: 128 x 128 gains 1 to 4% at 8192 tokens of one prompt and
    # loses as much at 2048. Of four prompts that share 8192 tokens it takes 210 for 190 us, of 64
    # 69 for 54: more of a large tile lies beyond what its queries see.
    if block_d == 128 and num_rows == 1 and num_pairs >= 1 << 17:
        return PrefillConfig(128, 128, 8, 2)
    return PrefillConfig(64, 64, 4, 3)


def row_block(num_rows: int) -> int:
    """Return the lanes that find the row of a prefill tile: a power of two above `num_rows`.

    One number up to 255 rows, or each number of prompts that is met would compile the kernel anew.
    """
    return max(256, 1 << num_rows.bit_length())


def dot_precision() -> str:
    """Return Triton's input_precision: TF32 only where torch allows it."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
