"""The kernel of RMS normalisation, a program for each row, and its launches."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

# One program of 16 warps holds a whole row in registers: here 64 fp32 values a thread.
MAX_WIDTH = 32768


@triton.jit
def normalised(x, gain, width, eps, HAS_WEIGHT: tl.constexpr, CAST_BEFORE_GAIN: tl.constexpr):
    """Return gain * x * rsqrt(mean(x^2) + eps) of a row x, zeros past `width`, in float32."""
    value = x.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    if CAST_BEFORE_GAIN:
        value = value.to(x.dtype).to(tl.float32)
    if HAS_WEIGHT:
        value = value * gain
    return value


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    stride_xt,
    stride_xh,
    stride_rt,
    stride_rh,
    num_heads,
    width,
    eps,
    offset,
    ADD_BEFORE: tl.constexpr,
    ADD_AFTER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CAST_BEFORE_GAIN: tl.constexpr,
    WIDE_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program: total = x + residual; out = gain * total * rsqrt(mean(total^2) + eps).

    ADD_AFTER: total = x, and the residual is added to out, which is first rounded to the dtype of
    x unless WIDE_NORM.
    """
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    if PDL:
        gdc_launch_dependents()
    gain = 0.0
    if HAS_WEIGHT:
        gain = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + token * stride_xt + head * stride_xh + cols, mask=mask, other=0.0)
    if ADD_BEFORE or ADD_AFTER:
        residual_row = residual_ptr + token * stride_rt + head * stride_rh
        residual = tl.load(residual_row + cols, mask=mask, other=0.0)
    if ADD_BEFORE:
        total = x.to(tl.float32) + residual.to(tl.float32)
        x = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + cols, x, mask=mask)
    value = normalised(x, gain, width, eps, HAS_WEIGHT, CAST_BEFORE_GAIN)
    if ADD_AFTER:
        if not WIDE_NORM:
            value = value.to(x.dtype).to(tl.float32)
        value += residual.to(tl.float32)
    tl.store(out_ptr + row * width + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


def out_dtype(x_dtype: torch.dtype, weight: Tensor | None, promote: bool) -> torch.dtype:
    """Return the dtype of the normalised rows; `promote`: as torch promotes x and weight."""
    if weight is None or not promote:
        return x_dtype
    return torch.promote_types(x_dtype, weight.dtype)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    cast_before_gain: bool,
    add_after: bool = False,
) -> tuple[Tensor, Tensor | None]:
    width = x.shape[-1]
    cast_before_gain = cast_before_gain and offset == 0.0
    add_before = residual is not None and not add_after
    dtype = x.dtype
    if residual is not None and add_before:
        dtype = torch.promote_types(dtype, residual.dtype)
    total = torch.empty(x.shape, dtype=dtype, device=x.device) if add_before else None
    dtype = normed = out_dtype(dtype, weight, cast_before_gain)
    if residual is not None and add_after:
        dtype = torch.promote_types(dtype, residual.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    if num_rows == 0 or width == 0:
        return out, total
    block = triton.next_power_of_2(width)
    pdl = use_pdl(x)
    extra = {"launch_pdl": True} if pdl else {}
    other = x if residual is None else residual
    _rms_norm_kernel[(num_rows,)](
        x,
        other,
        x if weight is None else weight,
        out,
        out if total is None else total,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        other.stride(0),
        other.stride(1) if x.dim() == 3 else 0,
        num_heads,
        width,
        eps,
        offset,
        ADD_BEFORE=add_before,
        ADD_AFTER=add_after,
        HAS_WEIGHT=weight is not None,
        CAST_BEFORE_GAIN=cast_before_gain,
        WIDE_NORM=normed != x.dtype,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // 512, 1), 16),
        **extra,
    )
    return out, total


def _launch_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    return _launch(x, None, weight, eps, offset, cast_before_gain)[0]


def _launch_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> tuple[Tensor, Tensor]:
    out, total = _launch(x, residual, weight, eps, offset, cast_before_gain)
    assert total is not None
    return out, total


def _launch_rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    return _launch(x, residual, weight, eps, offset, cast_before_gain, add_after=True)[0]


__all__ = [
    "MAX_WIDTH",
    "normalised",
    "out_dtype",
]
