"""One to three linear layers over the same rows in one kernel, with their neighbours folded in.

    h   = norm(x)                       RMS norm, optional
    y_i = h @ w_i.T + b_i               i = 1..3, each w_i where the model keeps it
    y_i = y_i + c_i * (z_i @ u_i.T)     low-rank update, optional; z_i = h @ d_i.T, given or made
    out = [y_1, y_2, y_3]               concatenated,
        | act(y_1) * y_2                gated,
        | act(y_1)                      plain activation
    out = out + residual                optional

At few rows this is bound by the reading of the weights, and the kernels are built around that:
`gemv.py` for a row or two and for float32, `small_gemm.py` for up to 16 rows or so, `tile_gemm.py`
for more, on Hopper `ahead_gemm.py` or `wide_gemm.py` too where they were measured to be quicker;
`configs.py` chooses. Past `ALWAYS_KERNEL_ROWS` rows it is `wide_gemm.py` on Hopper, with
the norm in a kernel of its own, and elsewhere a kernel only for shapes that were measured to win;
past `MAX_KERNEL_ROWS` none: there the reference runs (cuBLAS on a GPU). The z_i are a kernel of
their own before it, `shrink.py`, beside which it already multiplies by the weights, or one with a
norm that it leaves outside, `shrink_norm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_paged.ops.fused_linear.configs import (
    ALWAYS_KERNEL_ROWS,
    MAX_KERNEL_ROWS,
    MAX_RANK,
    NUM_COUNTERS,
    Folds,
    folds,
    tma_serves,
    token_bucket,
)
from torch_paged.ops.fused_linear.launch import _launch_fused_linear
from torch_paged.ops.fused_linear.reference import fused_linear_reference
from torch_paged.ops.glu import ACTIVATIONS
from torch_paged.ops.registration import register_op


def _fused_linear_fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm_weight: torch.Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    residual: torch.Tensor | None = None,
    activation: str = "",
    gated: bool = False,
    counters: torch.Tensor | None = None,
    lora_x: torch.Tensor | None = None,
    updates: Sequence[torch.Tensor] | None = None,
    update_scales: Sequence[float] = (),
    downs: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    width = weights[0].shape[0] if gated else sum(w.shape[0] for w in weights)
    return x.new_empty((x.shape[0], width))


_fused_linear = register_op(
    "fused_linear(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? norm_weight=None, "
    "bool norm=False, float eps=0.0, float norm_offset=0.0, bool cast_before_gain=True, "
    'Tensor? residual=None, str activation="", bool gated=False, '
    "Tensor(a!)? counters=None, Tensor? lora_x=None, Tensor[]? updates=None, "
    "float[] update_scales=[], Tensor[]? downs=None) -> Tensor",
    cpu=fused_linear_reference,
    cuda=_launch_fused_linear,
    fake=_fused_linear_fake,
)


def fused_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    norm_weight: torch.Tensor | None = None,
    *,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    residual: torch.Tensor | None = None,
    activation: str = "",
    gated: bool = False,
    counters: torch.Tensor | None = None,
    lora_x: torch.Tensor | None = None,
    updates: Sequence[torch.Tensor] | None = None,
    update_scales: Sequence[float] = (),
    downs: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Apply up to three linear layers to the same rows, with norm, activation and residual.

    Args:
        x: [num_tokens, in_features], last dim contiguous, row stride free.
        weights: 1 to 3 of [out_features_i, in_features], dtype of `x`, last dim contiguous, row
            stride free. Read in place. `gated` takes exactly [gate, up].
        biases: empty, or one of [out_features_i] | None for each weight.
        norm_weight: [in_features], any floating dtype; None with `norm`: no gain.
        norm: normalise the rows of `x` by their root mean square first.
        norm_offset: added to the gain (1.0 for Gemma).
        cast_before_gain: whether the module rounds the normalised row before the gain. The
            kernels keep float32 throughout; it matters to the reference.
        residual: [num_tokens, sum of out_features] (gated: [num_tokens, out_features]), added
            last.
        activation: one of `torch_paged.ops.glu.ACTIVATIONS` or "".
        gated: return `activation(y_gate) * y_up`.
        counters: int32, contiguous, at least `NUM_COUNTERS`, zero on entry and left zero; mutated
            meanwhile, so not shared between streams. Lets many rows split the sum over
            `in_features` among programs; without it they do not.
        lora_x: float32 [num_tokens, sum of the ranks], contiguous: what `lora_shrink` returns.
        updates: with `lora_x` or `downs`, one of [out_features_i, rank_i] for each weight,
            contiguous, all of one floating dtype; rank 0 where a weight has none.
        update_scales: the factor on each update.
        downs: instead of `lora_x`, the first halves: one of [rank_i, in_features] for each weight,
            last dim contiguous, all of the dtype of `x` or all float32.

    Returns:
        [num_tokens, sum of out_features], contiguous, dtype of `x`.

    Raises:
        ValueError: shapes, strides or options do not fit together.
        TypeError: a weight, bias or residual is not of the dtype of `x`, `lora_x` not float32.
    """
    if not torch.compiler.is_compiling():
        _validate(x, weights, biases, norm_weight, norm, residual, activation, gated, counters)
        _validate_updates(x, weights, lora_x, updates, update_scales, downs)
    return _fused_linear(
        x,
        weights,
        biases,
        norm_weight,
        norm,
        eps,
        norm_offset,
        cast_before_gain,
        residual,
        activation,
        gated,
        counters,
        lora_x,
        updates,
        update_scales,
        downs,
    )


def _validate(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm_weight: torch.Tensor | None,
    norm: bool,
    residual: torch.Tensor | None,
    activation: str,
    gated: bool,
    counters: torch.Tensor | None,
) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must be [num_tokens, in_features], got {list(x.shape)}")
    if not 1 <= len(weights) <= 3 or (gated and len(weights) != 2):
        wanted = "exactly 2 (gate, up) when gated" if gated else "1 to 3"
        raise ValueError(f"weights must be {wanted}, got {len(weights)}")
    if len(biases) not in (0, len(weights)):
        raise ValueError(f"biases must be empty or {len(weights)} long, got {len(biases)}")
    for i, weight in enumerate(weights):
        bias = biases[i] if biases else None
        _validate_layer(x, weight, bias, i)
    if gated and weights[0].shape != weights[1].shape:
        raise ValueError(
            f"gate and up must have one shape, got {list(weights[0].shape)} and "
            f"{list(weights[1].shape)}"
        )
    if activation not in ACTIVATIONS and (activation or gated):
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
    if norm_weight is not None:
        if not norm:
            raise ValueError("norm_weight was given without norm=True")
        if norm_weight.shape != x.shape[1:] or not norm_weight.is_contiguous():
            raise ValueError(
                f"norm_weight must be contiguous [{x.shape[1]}], got {list(norm_weight.shape)}"
            )
    if x.numel() and x.stride(1) != 1:
        raise ValueError(f"x must be contiguous in its last dim, got strides {x.stride()}")
    if residual is not None:
        _validate_residual(x, residual, weights[0].shape[0] if gated else _total_rows(weights))
    if counters is not None:
        _validate_counters(counters)


def _validate_counters(counters: torch.Tensor) -> None:
    enough = counters.numel() >= NUM_COUNTERS
    if counters.dtype != torch.int32 or not enough or not counters.is_contiguous():
        raise ValueError(
            f"counters must be contiguous int32 [>= {NUM_COUNTERS}], got {counters.dtype} "
            f"{list(counters.shape)} with strides {counters.stride()}"
        )


def _total_rows(weights: Sequence[torch.Tensor]) -> int:
    return sum(w.shape[0] for w in weights)


def _validate_layer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, index: int
) -> None:
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"weights[{index}] must be [out_features, {x.shape[1]}], got {list(weight.shape)}"
        )
    if weight.dtype != x.dtype:
        raise TypeError(
            f"weights[{index}] must have the dtype of x, {x.dtype}, got {weight.dtype}; "
            "cast x first"
        )
    if weight.numel() and weight.stride(1) != 1:
        raise ValueError(
            f"weights[{index}] must be contiguous in its last dim, got strides {weight.stride()}"
        )
    if bias is None:
        return
    if bias.dtype != x.dtype:
        raise TypeError(f"biases[{index}] must have the dtype of x, {x.dtype}, got {bias.dtype}")
    if bias.shape != weight.shape[:1] or not bias.is_contiguous():
        raise ValueError(
            f"biases[{index}] must be contiguous [{weight.shape[0]}], got {list(bias.shape)}"
        )


def _validate_updates(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    lora_x: torch.Tensor | None,
    updates: Sequence[torch.Tensor] | None,
    scales: Sequence[float],
    downs: Sequence[torch.Tensor] | None,
) -> None:
    if lora_x is not None and downs is not None:
        raise ValueError("lora_x is what downs make of x: got both, give one of them")
    if updates is None:
        if lora_x is not None or downs is not None:
            raise ValueError("lora_x or downs come with updates, got no updates")
        return
    if lora_x is None and downs is None:
        raise ValueError("updates come with lora_x or downs, got neither")
    if not len(updates) == len(scales) == len(weights):
        raise ValueError(
            f"updates and update_scales must be {len(weights)} long as the weights are, got "
            f"{len(updates)} and {len(scales)}"
        )
    for i, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        fits = update.dim() == 2 and update.shape[0] == weight.shape[0]
        if not fits or not update.is_contiguous() or update.shape[1] > MAX_RANK:
            raise ValueError(
                f"updates[{i}] must be contiguous [{weight.shape[0]}, rank <= {MAX_RANK}], got "
                f"{list(update.shape)} with strides {update.stride()}"
            )
    if len({update.dtype for update in updates}) != 1:
        raise TypeError(f"updates must be of one dtype, got {[u.dtype for u in updates]}")
    if downs is not None:
        _validate_downs(x, downs, updates)
    if lora_x is None:
        return
    shape = (x.shape[0], sum(update.shape[1] for update in updates))
    if lora_x.dtype != torch.float32:
        raise TypeError(f"lora_x must be float32, got {lora_x.dtype}; take it from lora_shrink")
    if lora_x.shape != shape or not lora_x.is_contiguous():
        raise ValueError(
            f"lora_x must be contiguous {list(shape)}, got {list(lora_x.shape)} with strides "
            f"{lora_x.stride()}"
        )


def _validate_downs(
    x: torch.Tensor, downs: Sequence[torch.Tensor], updates: Sequence[torch.Tensor]
) -> None:
    if len(downs) != len(updates):
        raise ValueError(f"downs must be {len(updates)} long as updates are, got {len(downs)}")
    for i, (down, update) in enumerate(zip(downs, updates, strict=True)):
        shape = (update.shape[1], x.shape[1])
        if down.shape != shape or (down.numel() and down.stride(1) != 1):
            raise ValueError(
                f"downs[{i}] must be {list(shape)} and contiguous in its last dim, got "
                f"{list(down.shape)} with strides {down.stride()}"
            )
        if down.dtype != downs[0].dtype or down.dtype not in (x.dtype, torch.float32):
            raise TypeError(
                f"downs must all be {x.dtype} as x or all float32, got "
                f"{[d.dtype for d in downs]}; cast x first"
            )


def _validate_residual(x: torch.Tensor, residual: torch.Tensor, width: int) -> None:
    if residual.dtype != x.dtype:
        raise TypeError(f"residual must have the dtype of x, {x.dtype}, got {residual.dtype}")
    if residual.shape != (x.shape[0], width) or (residual.numel() and residual.stride(1) != 1):
        raise ValueError(
            f"residual must be [{x.shape[0]}, {width}] and contiguous in its last dim, got "
            f"{list(residual.shape)} with strides {residual.stride()}"
        )


__all__ = [
    "ALWAYS_KERNEL_ROWS",
    "Folds",
    "MAX_KERNEL_ROWS",
    "MAX_RANK",
    "NUM_COUNTERS",
    "folds",
    "fused_linear",
    "fused_linear_reference",
    "tma_serves",
    "token_bucket",
]
