"""The experts of a mixture: each token goes through its own few, weighted.

    g, u   = gate_up[e] @ x + gate_up_bias[e]             for each chosen expert e of a token
    y_e    = down[e] @ (act(g) * u) + down_bias[e]
    out    = residual + sum_e weight_e * y_e

Only the chosen experts' weights are read, where the model keeps them, and each of them once for
all tokens of a decode step: `gemv.py` for one token, `tile.py` for more, whose pairs of token and
expert `group.py` has brought together. `configs.py` chooses. Sums are float32, in an order that
nothing but shapes decides; nothing is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.experts.launch import _launch_experts
from torch_paged.ops.experts.reference import CLAMPED_SWIGLU, experts_reference
from torch_paged.ops.glu import ACTIVATIONS
from torch_paged.ops.registration import register_op

__all__ = ["CLAMPED_SWIGLU", "experts", "experts_reference"]


def _experts_fake(
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
    return x.new_empty(x.shape)


_experts = register_op(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, "
    'Tensor? gate_up_bias=None, Tensor? down_bias=None, str activation="silu", '
    "bool interleaved=False, float alpha=1.0, float limit=0.0, Tensor? residual=None) -> Tensor",
    cpu=experts_reference,
    cuda=_launch_experts,
    fake=_experts_fake,
)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Send each token through its experts.

    Args:
        x: [num_tokens, hidden], last dim contiguous, row stride free.
        ids: [num_tokens, top_k] int32, contiguous, each of them an expert, none twice in a row;
            as `route_experts` returns them.
        weights: [num_tokens, top_k], contiguous, floating.
        gate_up: [num_experts, 2 * inner, hidden], dtype of `x`. Strides are free, so a module's
            transposed parameter is passed as a view; one of the last two should be 1.
        down: [num_experts, hidden, inner], likewise.
        gate_up_bias: [num_experts, 2 * inner], dtype of `x`, rows contiguous.
        down_bias: [num_experts, hidden], likewise.
        activation: one of `torch_paged.ops.glu.ACTIVATIONS`, or `CLAMPED_SWIGLU`.
        interleaved: gate and up alternate along 2 * inner; otherwise all of the gate is first.
        alpha, limit: of `CLAMPED_SWIGLU`.
        residual: [num_tokens, hidden], dtype of `x`, rows contiguous; added last.

    Returns:
        [num_tokens, hidden], contiguous, dtype of `x`.

    Raises:
        ValueError: shapes, strides or options do not fit together.
        TypeError: a dtype is not as above.
    """
    if not torch.compiler.is_compiling():
        _check_routing(x, ids, weights)
        _check_matrices(x, gate_up, down)
        num_experts, hidden, inner = down.shape
        _check_rows("gate_up_bias", gate_up_bias, (num_experts, 2 * inner), x.dtype)
        _check_rows("down_bias", down_bias, (num_experts, hidden), x.dtype)
        _check_rows("residual", residual, tuple(x.shape), x.dtype)
        if activation not in ACTIVATIONS and activation != CLAMPED_SWIGLU:
            names = ", ".join(sorted((*ACTIVATIONS, CLAMPED_SWIGLU)))
            raise ValueError(f"activation must be one of {names}, got {activation!r}")
    return _experts(
        x,
        ids,
        weights,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        activation,
        interleaved,
        alpha,
        limit,
        residual,
    )


def _check_routing(x: Tensor, ids: Tensor, weights: Tensor) -> None:
    if x.dim() != 2 or not x.is_floating_point() or (x.numel() and x.stride(1) != 1):
        raise ValueError(
            f"x must be floating [num_tokens, hidden] with contiguous rows, got {x.dtype} "
            f"{list(x.shape)} with strides {x.stride()}"
        )
    if ids.dtype != torch.int32 or not weights.is_floating_point():
        raise TypeError(
            f"ids must be int32 and weights floating, got {ids.dtype} and {weights.dtype}; "
            "pass what route_experts returns"
        )
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"ids and weights must be [{x.shape[0]}, top_k], got {list(ids.shape)} and "
            f"{list(weights.shape)}"
        )
    if not (ids.is_contiguous() and weights.is_contiguous()):
        raise ValueError("ids and weights must be contiguous; call .contiguous()")


def _check_matrices(x: Tensor, gate_up: Tensor, down: Tensor) -> None:
    if gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            "gate_up must be [num_experts, 2 * inner, hidden] and down [num_experts, hidden, "
            f"inner], got {list(gate_up.shape)} and {list(down.shape)}"
        )
    num_experts, hidden, inner = down.shape
    if hidden != x.shape[1] or gate_up.shape != (num_experts, 2 * inner, hidden):
        raise ValueError(
            f"gate_up must be [{num_experts}, {2 * inner}, {x.shape[1]}] for down "
            f"{list(down.shape)} and x {list(x.shape)}, got {list(gate_up.shape)}"
        )
    if gate_up.dtype != x.dtype or down.dtype != x.dtype:
        raise TypeError(
            f"gate_up and down must be {x.dtype} like x, got {gate_up.dtype} and {down.dtype}"
        )


def _check_rows(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype} like x, got {tensor.dtype}")
    if tuple(tensor.shape) != shape or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {list(shape)} with contiguous rows, got {list(tensor.shape)} with "
            f"strides {tensor.stride()}"
        )
