"""Plain-torch `fused_linear`: the CPU kernel, a budget for tests, the path of many rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.glu import activation_reference, glu_reference
from torch_paged.ops.rms_norm.reference import rms_norm_reference


def fused_linear_reference(
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
    downs: Sequence[Tensor] | None = None,
) -> Tensor:
    """Compute the equation with torch, rounding wherever the modules of HF and PEFT round."""
    if norm:
        x = rms_norm_reference(x, norm_weight, eps, norm_offset, cast_before_gain).to(x.dtype)
    biases = biases or [None] * len(weights)
    parts = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    if downs is not None:
        lora_x = shrink_reference(x, downs)
    if lora_x is not None and updates is not None:
        parts = _updated(parts, lora_x, updates, update_scales)
    if gated:
        y = glu_reference(parts[0], parts[1], activation)
    else:
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if activation:
            y = activation_reference(y, activation)
    return y if residual is None else residual + y


def _updated(
    parts: list[Tensor], lora_x: Tensor, updates: Sequence[Tensor], scales: Sequence[float]
) -> list[Tensor]:
    shares = lora_x.split([update.shape[1] for update in updates], dim=-1)
    out = []
    for part, share, update, scale in zip(parts, shares, updates, scales, strict=True):
        if update.shape[1]:
            change = F.linear(share.to(update.dtype), update) * scale
            part = (part + change).to(part.dtype)
        out.append(part)
    return out


def shrink_reference(
    x: Tensor,
    downs: Sequence[Tensor],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
) -> Tensor:
    """Compute ``norm(x) @ down.T`` for each, float32, rounding where PEFT's modules round."""
    if norm:
        x = rms_norm_reference(x, norm_weight, eps, norm_offset, cast_before_gain).to(x.dtype)
    return torch.cat([F.linear(x.to(down.dtype), down).float() for down in downs], dim=-1)
