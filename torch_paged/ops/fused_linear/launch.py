"""The CUDA implementation of `fused_linear`: chooses a kernel and launches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged.ops.fused_linear.configs import (
    NUM_COUNTERS,
    Composed,
    Config,
    GemvConfig,
    NormOutside,
    PlainTileGemmConfig,
    Problem,
    SmallGemmConfig,
    TileGemmConfig,
    WideGemmConfig,
    choose_config,
    device_key,
    tma_serves,
)
from torch_paged.ops.fused_linear.gemv import _gemv_kernel
from torch_paged.ops.fused_linear.reference import fused_linear_reference
from torch_paged.ops.fused_linear.small_gemm import _small_gemm_kernel
from torch_paged.ops.fused_linear.tile_gemm import _tile_gemm_kernel
from torch_paged.ops.fused_linear.wide_gemm import _wide_gemm_kernel
from torch_paged.ops.l1_cache import prefer_l1
from torch_paged.ops.rms_norm import _launch_rms_norm
from torch_paged.ops.triton_compat import INTERPRETED, TensorDescriptor, triton, use_pdl

# Bytes of a row of weights that a wide program asks for before it waits: 128 KiB of 256 rows.
_PREFETCH_BYTES = 512


class Arguments(NamedTuple):
    """What the kernels take in this order: pointers, numbers; and constants by name."""

    pointers: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]


def _vector(x: Tensor, weights: Sequence[Tensor], in_features: int) -> int:
    """Return how many elements the kernels load at a time: what all alignments allow, <= 16 bytes.

    One number serves x and the weights, so their strides reach the kernel in its multiples.
    """
    size = x.element_size()
    common = in_features | 16 // size
    for tensor in (x, *weights):
        common |= tensor.data_ptr() // size
        if tensor.shape[0] > 1:
            common |= tensor.stride(0)
    return common & -common


def _launch_fused_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    residual: Tensor | None = None,
    activation: str = "",
    gated: bool = False,
    counters: Tensor | None = None,
    lora_x: Tensor | None = None,
    updates: Sequence[Tensor] | None = None,
    update_scales: Sequence[float] = (),
    *,
    config: Config | None = None,
) -> Tensor:
    """Launch the kernel of `config`, or of the configuration chosen for the problem."""
    num_tokens, in_features = x.shape
    num_rows = sum(w.shape[0] for w in weights)
    problem = Problem(num_tokens, num_rows, in_features, gated)
    if not x.numel() or not num_rows:
        config = Composed()
    elif config is None:
        config = choose_config(device_key(x.device), problem, x.dtype, counters is not None)
        if isinstance(config, WideGemmConfig) and not tma_serves((x, *weights)):
            config = Composed()
    if isinstance(config, Composed):
        return fused_linear_reference(
            x,
            weights,
            biases,
            norm_weight,
            norm,
            eps,
            norm_offset,
            cast_before_gain,
            residual,
            activation,
            gated,
            None,
            lora_x,
            updates,
            update_scales,
        )
    if norm and isinstance(config, NormOutside):
        x = _launch_rms_norm(x, norm_weight, eps, norm_offset, cast_before_gain).to(x.dtype)
        norm_weight, norm = None, False
    out = torch.empty(
        (num_tokens, num_rows // 2 if gated else num_rows), dtype=x.dtype, device=x.device
    )
    arguments = kernel_arguments(
        x, weights, biases, norm_weight, norm, eps, norm_offset, residual, activation, gated, out
    )
    if lora_x is not None and updates is not None:
        arguments = _with_updates(arguments, lora_x, updates, update_scales)
    sizes = [w.shape[0] for w in (weights[:1] if gated else weights)]
    if isinstance(config, GemvConfig):
        start_gemv(config, num_tokens, sizes, arguments)
    elif isinstance(config, WideGemmConfig):
        _start_wide_gemm(config, x, weights, sizes, arguments, counters)
    else:
        _start_gemm(config, num_tokens, sizes, arguments, counters)
    return out


def kernel_arguments(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weight: Tensor | None,
    norm: bool,
    eps: float,
    norm_offset: float,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    out: Tensor,
) -> Arguments:
    """Return the arguments of any of the kernels, without low-rank updates."""
    biases = [*biases, None, None, None]
    vec = _vector(x, weights, x.shape[1])
    streams = [weights[min(i, len(weights) - 1)] for i in range(3)]
    pointers = (
        x,
        *streams,
        *(streams[0] if b is None else b for b in biases[:3]),
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        *(x, x, x, x),
        out,
    )
    numbers = (
        x.shape[0],
        *(w.shape[0] for w in streams),
        x.stride(0) // vec,
        *(w.stride(0) // vec for w in streams),
        0 if residual is None else residual.stride(0),
        eps,
        0.0 if norm_weight is None else norm_offset,
        *(0.0, 0.0, 0.0),
    )
    pdl = use_pdl(x)
    constants = {
        "K": x.shape[1],
        "NUM_WEIGHTS": len(weights),
        "HAS_BIAS0": biases[0] is not None,
        "HAS_BIAS1": biases[1] is not None,
        "HAS_BIAS2": biases[2] is not None,
        "NORM": norm,
        "HAS_GAIN": norm_weight is not None,
        "HAS_RESIDUAL": residual is not None,
        "RANK0": 0,
        "RANK1": 0,
        "RANK2": 0,
        "MAX_RANK": 0,
        "ACTIVATION": activation,
        "GATED": gated,
        "VEC": vec,
        "PDL": pdl,
    }
    if pdl:
        constants["launch_pdl"] = True
    return Arguments(pointers, numbers, constants)


def _with_updates(
    arguments: Arguments, lora_x: Tensor, updates: Sequence[Tensor], scales: Sequence[float]
) -> Arguments:
    pointers, numbers, constants = arguments
    missing = 3 - len(updates)
    ranks = [*(update.shape[1] for update in updates), *(0,) * missing]
    # A rank of 0 has no memory; all three pointers have one type.
    present = next((t for t in updates if t.shape[1]), lora_x)
    tensors = [update if update.shape[1] else present for update in updates]
    tensors += [present] * missing
    return Arguments(
        (*pointers[:-5], *tensors, lora_x, pointers[-1]),
        (*numbers[:-3], *(float(scale) for scale in scales), *(0.0,) * missing),
        {
            **constants,
            **{f"RANK{i}": rank for i, rank in enumerate(ranks)},
            "MAX_RANK": max(triton.next_power_of_2(max(ranks)), 16) if any(ranks) else 0,
        },
    )


def start_gemv(
    config: GemvConfig,
    num_tokens: int,
    sizes: Sequence[int],
    arguments: Arguments,
    max_tokens: int = 8,
) -> None:
    """Launch the GEMV kernel; a program takes up to `max_tokens` rows of x."""
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
        num_warps=config.warps,
        num_stages=1,
        maxnreg=config.registers,
    )
    prefer_l1(kernel, pointers[0].device)


def _start_gemm(
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


def _start_wide_gemm(
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
    slot = rows * tokens * (2 if constants["GATED"] else 1) + tokens
    splits, *scratch = _split_scratch(splits, num_blocks * num_tiles, slot, counters, pointers[-1])
    share = block_k * triton.cdiv(in_features, block_k * splits)
    _wide_gemm_kernel[(num_tiles, num_blocks, splits)](
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
        STAGES=config.stages,
        PREFETCH=min(_PREFETCH_BYTES, min(share, in_features) * size // 16 * 16),
        UPCAST=INTERPRETED,
        num_warps=config.warps,
        num_stages=1,
    )


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix to the copies of tiles [rows, columns]; `tma_serves` it."""
    num_rows, width = matrix.shape
    # A single row may have any stride, which the descriptor would refuse.
    stride = matrix.stride(0) if num_rows > 1 else triton.cdiv(width, 8) * 8
    return TensorDescriptor(matrix, [num_rows, width], [stride, 1], [rows, columns])
