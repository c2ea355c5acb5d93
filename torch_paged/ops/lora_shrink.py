"""The first half of low-rank updates: few outputs, shared by the linears of one input.

    h   = norm(x)                       RMS norm, optional
    z_i = h @ d_i.T                     i = 1..3, d_i [rank_i, in_features]
    out = [z_1, z_2, z_3]               float32

The second half is in the epilogue of `fused_linear`, which can do the first as well. The d_i may
be float32 beside 16-bit x, as PEFT keeps adapters that are trained. The kernel is the GEMV of
`fused_linear`, with a program for each output of a few rows of x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged.ops.fused_linear.reference import shrink_reference
from torch_paged.ops.fused_linear.shrink import launch_shrink
from torch_paged.ops.registration import register_op

__all__ = ["lora_shrink"]


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


def _launch_lora_shrink(
    x: Tensor,
    downs: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    return launch_shrink(x, downs, norm_weight, norm, eps, norm_offset, cast_before_gain)


_lora_shrink = register_op(
    "lora_shrink(Tensor x, Tensor[] downs, Tensor? norm_weight=None, bool norm=False, "
    "float eps=0.0, float norm_offset=0.0, bool cast_before_gain=True) -> Tensor",
    cpu=shrink_reference,
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
