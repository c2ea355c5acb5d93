"""Starting the kernels of `fused_linear`: grids, scratch memory, compile-time sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged.ops.fused_linear.ahead_gemm import _ahead_gemm_kernel
from torch_paged.ops.fused_linear.arguments import Arguments
from torch_paged.ops.fused_linear.configs import (
    MAX_JOINED_TOKENS,
    NUM_COUNTERS,
    GemvConfig,
    PlainTileGemmConfig,
    SmallGemmConfig,
    TileGemmConfig,
    num_processors,
)
from torch_paged.ops.fused_linear.gemv import _gemv_kernel
from torch_paged.ops.fused_linear.joined_gemv import _joined_gemv_kernel
from torch_paged.ops.fused_linear.small_gemm import _small_gemm_kernel
from torch_paged.ops.fused_linear.tile_gemm import _tile_gemm_kernel
from torch_paged.ops.fused_linear.wide_config import AheadGemmConfig, WideGemmConfig
from torch_paged.ops.fused_linear.wide_gemm import _wide_gemm_kernel
from torch_paged.ops.l1_cache import prefer_l1
from torch_paged.ops.triton_compat import INTERPRETED, TensorDescriptor, triton

# What the joined GEMV does not do.
_NOT_JOINED = {"HAS_RESIDUAL", "RANK0", "RANK1", "RANK2", "MAX_RANK", "AFTER_SHRINK"}


def start_gemv(
    config: GemvConfig,
    num_tokens: int,
    sizes: Sequence[int],
    arguments: Arguments,
    max_tokens: int = 8,
    release_late: bool = False,
) -> None:
    """Launch the GEMV kernel; a program takes up to `max_tokens` rows of x.

    `release_late`: the next kernel may start when x is complete, not before.
    """
    pointers, numbers, constants = arguments
    tokens = min(triton.next_power_of_2(num_tokens), max_tokens)
    block = config.rows * config.warps // config.k_warps
    step = config.k_warps * config.chunks * 32 * constants["VEC"]
    grid = (sum(triton.cdiv(n, block) for n in sizes), triton.cdiv(num_tokens, tokens))
    kernel = _gemv_kernel[grid](
        *pointers,
        *numbers,
        **constants,
        TOKENS=tokens,
        ROWS=config.rows,
        CHUNKS=config.chunks,
        WARPS=config.warps,
        K_WARPS=config.k_warps,
        EVEN_K=constants["K"] % step == 0,
        EVEN_N=all(n % block == 0 for n in sizes),
        EVEN_T=num_tokens % tokens == 0,
        RELEASE_LATE=release_late,
        num_warps=config.warps,
        num_stages=1,
        maxnreg=config.registers,
    )
    prefer_l1(kernel, pointers[0].device)


def start_joined_gemv(
    config: GemvConfig,
    branch: Tensor,
    join_weight: Tensor | None,
    join_eps: float,
    join_offset: float,
    join_cast_before_gain: bool,
    total: Tensor,
    sizes: Sequence[int],
    arguments: Arguments,
) -> None:
    """Launch the kernel; `arguments` are of a linear whose x is the stream."""
    pointers, numbers, constants = arguments
    num_tokens = branch.shape[0]
    tokens = min(triton.next_power_of_2(num_tokens), MAX_JOINED_TOKENS)
    block = config.rows * config.warps // config.k_warps
    step = config.k_warps * config.chunks * 32 * constants["VEC"]
    # One more stores the total.
    num_programs = sum(triton.cdiv(n, block) for n in sizes) + 1
    kernel = _joined_gemv_kernel[(num_programs, triton.cdiv(num_tokens, tokens))](
        branch,
        branch if join_weight is None else join_weight,
        total,
        *pointers[:8],
        pointers[-1],
        branch.stride(0) // constants["VEC"],
        join_eps,
        join_offset,
        *numbers[:8],
        *numbers[9:11],
        **{name: constants[name] for name in constants if name not in _NOT_JOINED},
        JOIN_GAIN=join_weight is not None,
        JOIN_CAST=join_cast_before_gain,
        TOKENS=tokens,
        ROWS=config.rows,
        CHUNKS=config.chunks,
        WARPS=config.warps,
        K_WARPS=config.k_warps,
        EVEN_K=constants["K"] % step == 0,
        EVEN_N=all(n % block == 0 for n in sizes),
        EVEN_T=num_tokens % tokens == 0,
        num_warps=config.warps,
        num_stages=1,
        maxnreg=config.registers,
    )
    prefer_l1(kernel, branch.device)


def start_gemm(
    config: SmallGemmConfig | TileGemmConfig | PlainTileGemmConfig,
    num_tokens: int,
    sizes: Sequence[int],
    arguments: Arguments,
    counters: Tensor | None,
) -> None:
    pointers, numbers, constants = arguments
    rows = config.rows
    options: dict[str, Any] = {}
    if isinstance(config, SmallGemmConfig):
        kernel, tokens = _small_gemm_kernel, max(triton.next_power_of_2(num_tokens), 8)
        step = config.chunks * 32 * config.warps
        options = {"CHUNKS": config.chunks, "WARPS": config.warps, "maxnreg": config.registers}
    else:
        kernel, tokens = _tile_gemm_kernel, max(triton.next_power_of_2(num_tokens), 16)
        step = config.block_k
        options = {"BLOCK_K": step, "STAGES": config.stages}
    num_blocks = sum(triton.cdiv(n, rows) for n in sizes)
    # Every share of in_features must have something to sum.
    splits = min(config.splits, triton.cdiv(constants["K"], step))
    slot = rows * tokens * (2 if constants["GATED"] else 1) + tokens
    splits, *scratch = _split_scratch(splits, num_blocks, slot, counters, pointers[-1])
    launched = kernel[(num_blocks, splits)](
        *pointers,
        *scratch,
        *numbers,
        **constants,
        **options,
        TOKENS=tokens,
        ROWS=rows,
        SPLITS=splits,
        EVEN_K=constants["K"] % (step * splits) == 0,
        EVEN_N=all(n % rows == 0 for n in sizes),
        # The interpreter cannot multiply bfloat16.
        UPCAST=INTERPRETED,
        num_warps=config.warps,
        num_stages=1,
    )
    if isinstance(config, SmallGemmConfig):
        prefer_l1(launched, pointers[0].device)


def _split_scratch(
    splits: int, num_sums: int, slot: int, counters: Tensor | None, unused: Tensor
) -> tuple[int, Tensor, Tensor]:
    """Return into how many splits each sum goes, the memory of their parts, the counters."""
    if splits == 1 or counters is None or num_sums > NUM_COUNTERS:
        return 1, unused, unused
    partials = torch.empty(num_sums * splits * slot, dtype=torch.float32, device=counters.device)
    return splits, partials, counters


def start_wide_gemm(
    config: WideGemmConfig,
    x: Tensor,
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    arguments: Arguments,
    counters: Tensor | None,
) -> None:
    pointers, numbers, constants = arguments
    rows, tokens, block_k = config.rows, config.tokens, config.block_k
    in_features, size = constants["K"], x.element_size()
    num_blocks = sum(triton.cdiv(n, rows) for n in sizes)
    num_tiles = triton.cdiv(x.shape[0], tokens)
    splits = min(config.splits, triton.cdiv(in_features, block_k))
    slot = rows * tokens * (2 if constants["GATED"] else 1)
    splits, *scratch = _split_scratch(splits, num_blocks * num_tiles, slot, counters, pointers[-1])
    share = block_k * triton.cdiv(in_features, block_k * splits)
    _wide_gemm_kernel[(splits, num_tiles, num_blocks)](
        _descriptor(x, tokens, block_k),
        *(_descriptor(weight, rows, block_k) for weight in weights),
        *(None for _ in range(3 - len(weights))),
        *pointers,
        *scratch,
        *numbers,
        **constants,
        TOKENS=tokens,
        ROWS=rows,
        BLOCK_K=block_k,
        SPLITS=splits,
        # Of a share of fewer rows the update's product would not run on tensor cores.
        SHARE=max(rows // triton.next_power_of_2(splits), 16),
        STAGES=config.stages,
        PREFETCH=min(config.prefetch, min(share, in_features) * size // 16 * 16),
        UPCAST=INTERPRETED,
        TOGETHER=_run_together(splits * num_tiles * num_blocks, x.device),
        num_warps=config.warps,
        num_stages=1,
    )


def start_ahead_gemm(
    config: AheadGemmConfig,
    x: Tensor,
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    arguments: Arguments,
    counters: Tensor | None,
) -> None:
    pointers, numbers, constants = arguments
    rows, block_k = config.rows, config.block_k
    in_features, size = constants["K"], x.element_size()
    tokens = max(triton.next_power_of_2(x.shape[0]), 16)
    num_blocks = sum(triton.cdiv(n, rows) for n in sizes)
    wanted = triton.cdiv(in_features, block_k)
    slot = rows * tokens * (2 if constants["GATED"] else 1) + tokens
    splits, *scratch = _split_scratch(wanted, num_blocks, slot, counters, pointers[-1])
    assert splits == wanted, f"{config} splits {in_features} elements: it needs counters"
    _ahead_gemm_kernel[(splits, num_blocks)](
        _descriptor(x, tokens, block_k),
        *(_descriptor(weight, rows, block_k) for weight in weights),
        *(None for _ in range(3 - len(weights))),
        *pointers,
        *scratch,
        *numbers,
        **constants,
        TOKENS=tokens,
        ROWS=rows,
        BLOCK_K=block_k,
        SPLITS=splits,
        # Of a share of fewer rows the update's product would not run on tensor cores.
        SHARE=max(rows // triton.next_power_of_2(splits), 16),
        PREFETCH=min(block_k, in_features) * size // 16 * 16,
        UPCAST=INTERPRETED,
        TOGETHER=_run_together(splits * num_blocks, x.device),
        num_warps=config.warps,
        num_stages=1,
    )


def _run_together(num_programs: int, device: torch.device) -> bool:
    """Say whether programs may wait for each other: each has a multiprocessor of its own.

    No program then waits for one that cannot start before it has ended. The interpreter runs one
    program after the other.
    """
    return not INTERPRETED and num_programs <= num_processors(device.index or 0)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix to the copies of tiles [rows, columns]; `tma_serves` it."""
    num_rows, width = matrix.shape
    # A single row may have any stride, which the descriptor would refuse.
    stride = matrix.stride(0) if num_rows > 1 else triton.cdiv(width, 8) * 8
    return TensorDescriptor(matrix, [num_rows, width], [stride, 1], [rows, columns])


__all__ = ["start_ahead_gemm", "start_gemm", "start_gemv", "start_joined_gemv", "start_wide_gemm"]
