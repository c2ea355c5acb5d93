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
from torch import Tensor

from torch_paged.ops.registration import register_op
from torch_paged.ops.rms_norm.kernel import (
    MAX_WIDTH,
    _launch_add_rms_norm,
    _launch_rms_norm,
    _launch_rms_norm_add,
    out_dtype,
)
from torch_paged.ops.rms_norm.reference import (
    add_rms_norm_reference,
    rms_norm_add_reference,
    rms_norm_reference,
)

__all__ = [
    "add_rms_norm",
    "add_rms_norm_reference",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_reference",
    "rms_norm_reference",
]


def _rms_norm_fake(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    dtype = out_dtype(x.dtype, weight, cast_before_gain and offset == 0.0)
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
    if width > MAX_WIDTH:
        raise NotImplementedError(f"rows wider than {MAX_WIDTH} are unsupported, got {width}")
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
