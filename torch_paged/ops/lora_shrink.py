"""The first half of low-rank updates: few outputs, shared by the linears of one input.

    h   = norm(x)                       RMS norm, optional
    z_i = h @ d_i.T                     i = 1..3, d_i [rank_i, in_features]
    out = [z_1, z_2, z_3]               float32

The second half is in the epilogue of `fused_linear`. The d_i may be float32 beside 16-bit x, as
PEFT keeps adapters that are trained. The kernel is the GEMV of `fused_linear`, with a program for
each output of a few rows of x: latency is all that it costs. While it runs, the programs of the
linear behind it move in and load their first weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.fused_linear.configs import (
    MAX_KERNEL_ROWS,
    GemvConfig,
    device_key,
)
from torch_paged.ops.fused_linear.launch import kernel_arguments, start_gemv
from torch_paged.ops.registration import register_op
from torch_paged.ops.rms_norm import rms_norm_reference

__all__ = ["lora_shrink", "lora_shrink_reference"]

# Rows of x that a program takes.
_TOKENS = 4
_REGISTERS = {1: 80, 2: 128, 4: 168}


def lora_shrink_reference(
    x: Tensor,
    downs: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    """Compute the module's equation with torch, rounding where PEFT's modules round."""
    if norm:
        x = rms_norm_reference(x, norm_weight, eps, norm_offset, cast_before_gain).to(x.dtype)
    return torch.cat([F.linear(x.to(down.dtype), down).float() for down in downs], dim=-1)


def _lora_shrink_fake(
    x: Tensor,
    downs: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    return x.new_empty((x.shape[0], sum(d.shape[0] for d in downs)), dtype=torch.float32)


def choose_config(num_processors: int, num_tokens: int, num_rows: int, steps: int) -> GemvConfig:
    """Return the launch of `num_rows` outputs whose sums take `steps` loads of a warp."""
    tokens = 1 if num_tokens == 1 else 2 if num_tokens == 2 else _TOKENS
    warps = 4 if steps <= 4 else 8
    chunks = {1: 4, 2: 2, 4: 1}[tokens]
    while chunks > 1 and warps * (chunks // 2) >= steps:
        chunks //= 2
    programs = num_rows * -(-num_tokens // tokens)
    # Two outputs share what is read of x, where there are programs enough.
    rows = 2 if programs > 4 * num_processors else 1
    return GemvConfig(rows, chunks, warps, warps, _REGISTERS[tokens])


def _launch_lora_shrink(
    x: Tensor,
    downs: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    *,
    config: GemvConfig | None = None,
) -> Tensor:
    num_tokens, in_features = x.shape
    sizes = [down.shape[0] for down in downs]
    if config is None and num_tokens > MAX_KERNEL_ROWS:
        return lora_shrink_reference(
            x, downs, norm_weight, norm, eps, norm_offset, cast_before_gain
        )
    out = torch.empty((num_tokens, sum(sizes)), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    arguments = kernel_arguments(
        x, downs, [], norm_weight, norm, eps, norm_offset, None, "", False, out
    )
    if config is None:
        steps = -(-in_features // (32 * arguments.constants["VEC"]))
        config = choose_config(device_key(x.device)[1], num_tokens, sum(sizes), steps)
    start_gemv(config, num_tokens, sizes, arguments, _TOKENS)
    return out


_lora_shrink = register_op(
    "lora_shrink(Tensor x, Tensor[] downs, Tensor? norm_weight=None, bool norm=False, "
    "float eps=0.0, float norm_offset=0.0, bool cast_before_gain=True) -> Tensor",
    cpu=lora_shrink_reference,
    cuda=_launch_lora_shrink,
    fake=_lora_shrink_fake,
)


def lora_shrink(
    x: Tensor,
    downs: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    *,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    """Multiply the same rows by up to three narrow matrices.

    Args:
        x: [num_tokens, in_features], last dim contiguous, row stride free.
        downs: 1 to 3 of [rank_i, in_features], last dim contiguous, row stride free; all of the
            dtype of `x` or all float32.
        norm_weight: [in_features], any floating dtype; None with `norm`: no gain.
        norm: normalise the rows of `x` by their root mean square first.
        norm_offset: added to the gain (1.0 for Gemma).
        cast_before_gain: whether the module rounds the normalised row before the gain. The
            kernel keeps float32 throughout; it matters to the reference.

    Returns:
        float32 [num_tokens, sum of rank_i], contiguous.

    Raises:
        ValueError: shapes, strides or options do not fit together.
        TypeError: a matrix is neither of the dtype of `x` nor float32, or they differ.
    """
    if not torch.compiler.is_compiling():
        _validate(x, downs, norm_weight, norm)
    return _lora_shrink(x, downs, norm_weight, norm, eps, norm_offset, cast_before_gain)


def _validate(x: Tensor, downs: Sequence[Tensor], norm_weight: Tensor | None, norm: bool) -> None:
    if x.dim() != 2 or (x.numel() and x.stride(1) != 1):
        raise ValueError(
            f"x must be [num_tokens, in_features] and contiguous in its last dim, got "
            f"{list(x.shape)} with strides {x.stride()}"
        )
    if not 1 <= len(downs) <= 3:
        raise ValueError(f"downs must be 1 to 3, got {len(downs)}")
    for i, down in enumerate(downs):
        if down.dim() != 2 or down.shape[1] != x.shape[1] or down.stride(1) != 1:
            raise ValueError(
                f"downs[{i}] must be [rank, {x.shape[1]}] and contiguous in its last dim, got "
                f"{list(down.shape)} with strides {down.stride()}"
            )
        if down.dtype != downs[0].dtype or down.dtype not in (x.dtype, torch.float32):
            raise TypeError(
                f"downs must all be {x.dtype} as x or all float32, got "
                f"{[d.dtype for d in downs]}; cast x first"
            )
    if norm_weight is None:
        return
    if not norm:
        raise ValueError("norm_weight was given without norm=True")
    if norm_weight.shape != x.shape[1:] or not norm_weight.is_contiguous():
        raise ValueError(
            f"norm_weight must be contiguous [{x.shape[1]}], got {list(norm_weight.shape)}"
        )
