"""Plain-torch `experts`: the CPU kernel, and a budget for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.glu import glu_reference

#: gate = min(g, limit), up = clamp(u, -limit, limit): gate * sigmoid(alpha * gate) * (up + 1).
CLAMPED_SWIGLU = "clamped_swiglu"


def gate_reference(
    gate_up: Tensor, activation: str, interleaved: bool, alpha: float, limit: float
) -> Tensor:
    """Gate [rows, 2 * inner] -> [rows, inner], rounding where Hugging Face rounds."""
    if interleaved:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    if activation != CLAMPED_SWIGLU:
        return glu_reference(gate, up, activation)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Run expert after expert over its tokens, as Hugging Face's eager experts do."""
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        h = F.linear(x[rows], gate_up[expert], bias)
        h = gate_reference(h, activation, interleaved, alpha, limit)
        y = F.linear(h, down[expert], None if down_bias is None else down_bias[expert])
        out.index_add_(0, rows, (y * weights[rows, slots, None]).to(out.dtype))
    return out if residual is None else residual + out
