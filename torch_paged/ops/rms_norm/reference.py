"""RMS normalisation with torch: what the ops are on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


__all__ = ["add_rms_norm_reference", "rms_norm_add_reference", "rms_norm_reference"]
