"""The first half of low-rank updates: the GEMV kernel, with a program for each few outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged.ops.fused_linear.arguments import kernel_arguments
from torch_paged.ops.fused_linear.configs import GemvConfig, device_key
from torch_paged.ops.fused_linear.reference import shrink_reference
from torch_paged.ops.fused_linear.start import start_gemv

# Past so many rows torch ops are at least as quick.
MAX_SHRINK_ROWS = 128

# Rows of x that a program takes.
SHRINK_TOKENS = 4
_REGISTERS = {1: 80, 2: 128, 4: 168}
# Of 14,336 features 16 warps take 4 loads where 8 take 7.
_LONG_STEPS, _LONG_WARPS, _LONG_REGISTERS = 16, 16, 80


def choose_shrink_config(
    num_processors: int, num_tokens: int, num_rows: int, steps: int, *, overlaps: bool = False
) -> GemvConfig:
    """Return the launch of `num_rows` outputs whose sums take `steps` loads of a warp.

    Args:
        overlaps: the product with the weights runs beside it, on SMs that it leaves. Two outputs
            then share what is read of x where that leaves a program for half of the SMs: 8B, 32
            rows, H200, with the warps for long sums 5.185 to 5.058 ms. Where the product waits
            instead, that costs: 0.6B, 32 rows, 1.444 to 1.469 ms.
    """
    tokens = 1 if num_tokens == 1 else 2 if num_tokens == 2 else SHRINK_TOKENS
    if tokens == SHRINK_TOKENS and steps > _LONG_STEPS:
        return GemvConfig(1, 1, _LONG_WARPS, _LONG_WARPS, _LONG_REGISTERS)
    warps = 4 if steps <= 4 else 8
    chunks = {1: 4, 2: 2, 4: 1}[tokens]
    while chunks > 1 and warps * (chunks // 2) >= steps:
        chunks //= 2
    programs = num_rows * -(-num_tokens // tokens)
    enough = 3 * num_processors // 4 if overlaps and warps == 8 else 4 * num_processors
    rows = 2 if programs > enough else 1
    return GemvConfig(rows, chunks, warps, warps, _REGISTERS[tokens])


def launch_shrink(
    x: Tensor,
    downs: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    *,
    config: GemvConfig | None = None,
    release_late: bool = False,
) -> Tensor:
    """Launch the kernel; `release_late`: let the next start when `x` is complete, not before."""
    num_tokens, in_features = x.shape
    downs = [down for down in downs if down.shape[0]] or list(downs[:1])
    sizes = [down.shape[0] for down in downs]
    if config is None and num_tokens > MAX_SHRINK_ROWS:
        return shrink_reference(x, downs, norm_weight, norm, eps, norm_offset, cast_before_gain)
    out = torch.empty((num_tokens, sum(sizes)), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    arguments = kernel_arguments(
        x, downs, [], norm_weight, norm, eps, norm_offset, None, "", False, out
    )
    if config is None:
        config = shrink_config(x, sizes, arguments.constants["VEC"], overlaps=release_late)
    start_gemv(config, num_tokens, sizes, arguments, SHRINK_TOKENS, release_late)
    return out


def shrink_config(
    x: Tensor, sizes: Sequence[int], vec: int, *, overlaps: bool = False
) -> GemvConfig:
    """Return the launch for the rows of `x` and outputs `sizes`, loads being `vec` elements."""
    steps = -(-x.shape[1] // (32 * vec))
    num_processors = device_key(x.device)[1]
    return choose_shrink_config(num_processors, x.shape[0], sum(sizes), steps, overlaps=overlaps)


__all__ = [
    "MAX_SHRINK_ROWS",
    "SHRINK_TOKENS",
    "choose_shrink_config",
    "launch_shrink",
    "shrink_config",
]
