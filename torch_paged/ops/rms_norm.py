"""RMS normalisation of rows, alone, after a residual add or before one.

    x_hat = x / sqrt(mean(x^2) + eps)                  in fp32
    out   = weight * x_hat.to(x.dtype)                 cast_before_gain (Llama)
    out   = (weight * x_hat).to(x.dtype)               not cast_before_gain (gpt-oss, OLMo 2)
    out   = ((offset + weight) * x_hat).to(x.dtype)    offset != 0, gain in fp32 (Gemma)

Under ``cast_before_gain`` the product follows torch's type promotion, as in Hugging Face: an fp32
weight with a bf16 input gives an fp32 output. Otherwise the output has the dtype of the input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

__all__ = [
    "add_rms_norm",
    "add_rms_norm_reference",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_reference",
    "rms_norm_reference",
]

# One program of 16 warps holds a whole row in registers: here 64 fp32 values a thread.
_MAX_WIDTH = 32768


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    """Compute the module's equation with torch; exact to the bit against Hugging Face on CPU."""
    width = x.shape[-1:]
    if weight is None:
        return F.rms_norm(x, width, None, eps)
    if offset != 0.0:
        gain = weight.float() + offset
        return F.rms_norm(x.float(), width, gain, eps).to(x.dtype)
    if cast_before_gain and not x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, width, None, eps) * weight
    if x.dtype == weight.dtype:
        return F.rms_norm(x, width, weight, eps)
    return F.rms_norm(x.float(), width, weight.float(), eps).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> tuple[Tensor, Tensor]:
    """Add, round to the dtype that Hugging Face would hold, and normalise the rounded sum."""
    total = residual + x
    return rms_norm_reference(total, weight, eps, offset, cast_before_gain), total


def rms_norm_add_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    """Normalise, round to the dtype that Hugging Face would hold, and add."""
    return residual + rms_norm_reference(x, weight, eps, offset, cast_before_gain)


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
    value = x.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    if CAST_BEFORE_GAIN:
        value = value.to(x.dtype).to(tl.float32)
    if HAS_WEIGHT:
        value = value * gain
    if ADD_AFTER:
        if not WIDE_NORM:
            value = value.to(x.dtype).to(tl.float32)
        value += residual.to(tl.float32)
    tl.store(out_ptr + row * width + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


def _out_dtype(x_dtype: torch.dtype, weight: Tensor | None, promote: bool) -> torch.dtype:
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
    dtype = normed = _out_dtype(dtype, weight, cast_before_gain)
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


def _rms_norm_fake(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    dtype = _out_dtype(x.dtype, weight, cast_before_gain and offset == 0.0)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _add_rms_norm_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    total = torch.empty(x.shape, dtype=dtype, device=x.device)
    return _rms_norm_fake(total, weight, eps, offset, cast_before_gain), total


def _rms_norm_add_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    normed = _rms_norm_fake(x, weight, eps, offset, cast_before_gain)
    dtype = torch.promote_types(normed.dtype, residual.dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


_RMS_NORM = register_op(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset=0.0, "
    "bool cast_before_gain=True) -> Tensor",
    cpu=rms_norm_reference,
    cuda=_launch_rms_norm,
    fake=_rms_norm_fake,
)

_ADD_RMS_NORM = register_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset=0.0, "
    "bool cast_before_gain=True) -> (Tensor, Tensor)",
    cpu=add_rms_norm_reference,
    cuda=_launch_add_rms_norm,
    fake=_add_rms_norm_fake,
)

_RMS_NORM_ADD = register_op(
    "rms_norm_add(Tensor x, Tensor residual, Tensor? weight, float eps, float offset=0.0, "
    "bool cast_before_gain=True) -> Tensor",
    cpu=rms_norm_add_reference,
    cuda=_launch_rms_norm_add,
    fake=_rms_norm_add_fake,
)


def _check(x: Tensor, weight: Tensor | None) -> None:
    if x.dim() not in (2, 3) or not x.is_floating_point():
        raise ValueError(
            "x must be floating [num_tokens, width] or [num_tokens, num_heads, width], got "
            f"{x.dtype} {list(x.shape)}"
        )
    width = x.shape[-1]
    if width > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"x must be contiguous in its last dimension, got strides {x.stride()}; "
            "call .contiguous()"
        )
    if width > _MAX_WIDTH:
        raise NotImplementedError(f"rows wider than {_MAX_WIDTH} are unsupported, got {width}")
    if weight is not None and (weight.shape != x.shape[-1:] or not weight.is_contiguous()):
        raise ValueError(
            f"weight must be contiguous [{width}], the width of x, got {list(weight.shape)} "
            f"with strides {weight.stride()}"
        )


def _check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape or (x.shape[-1] > 1 and residual.stride(-1) != 1):
        raise ValueError(
            f"residual must be {list(x.shape)} like x, contiguous in its last dimension, "
            f"got {list(residual.shape)} with strides {residual.stride()}"
        )


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    """Normalise the rows of `x` by their root mean square.

    Args:
        x: [num_tokens, width] or [num_tokens, num_heads, width], floating, last dimension
            contiguous; the other strides are free.
        weight: [width] or None for no gain.
        eps: added to the mean square.
        offset: added to the weight in fp32 (Gemma: 1.0); the product is then fp32 too, whatever
            `cast_before_gain` says.
        cast_before_gain: round to the dtype of `x` before the gain instead of after it.

    Returns:
        A contiguous tensor in the shape of `x`; see the module for its dtype.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
        NotImplementedError: the rows are wider than 32768.
    """
    if not torch.compiler.is_compiling():
        _check(x, weight)
    return _RMS_NORM(x, weight, eps, offset, cast_before_gain)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> tuple[Tensor, Tensor]:
    """Add `residual` to `x` and normalise the rows of the sum.

    The arguments are those of :func:`rms_norm`; `residual` has the shape of `x`.

    Returns:
        The normalised sum, and the sum rounded as torch rounds ``residual + x``.

    Raises:
        ValueError: a shape, dtype or stride is not as in :func:`rms_norm`.
        NotImplementedError: the rows are wider than 32768.
    """
    if not torch.compiler.is_compiling():
        _check(x, weight)
        _check_residual(x, residual)
    return _ADD_RMS_NORM(x, residual, weight, eps, offset, cast_before_gain)


def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    """Normalise the rows of `x` and add `residual` to the result.

    The arguments are those of :func:`rms_norm`; `residual` has the shape of `x`.

    Returns:
        What torch returns for ``residual + rms_norm(x, ...)``, contiguous.

    Raises:
        ValueError: a shape, dtype or stride is not as in :func:`rms_norm`.
        NotImplementedError: the rows are wider than 32768.
    """
    if not torch.compiler.is_compiling():
        _check(x, weight)
        _check_residual(x, residual)
    return _RMS_NORM_ADD(x, residual, weight, eps, offset, cast_before_gain)
