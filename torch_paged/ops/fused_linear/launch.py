"""The CUDA implementation of `fused_linear`: chooses a kernel and launches it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged.ops.fused_linear.arguments import kernel_arguments, with_updates
from torch_paged.ops.fused_linear.configs import (
    Composed,
    Config,
    CopyConfig,
    GemvConfig,
    PlainTileGemmConfig,
    Problem,
    SmallGemmConfig,
    TileGemmConfig,
    choose_config,
    device_key,
    leaves_norm_outside,
    tma_serves,
    without_copies,
)
from torch_paged.ops.fused_linear.reference import fused_linear_reference
from torch_paged.ops.fused_linear.shrink import MAX_SHRINK_ROWS, launch_shrink
from torch_paged.ops.fused_linear.shrink_norm import MAX_NORM_WIDTH, launch_shrink_norm
from torch_paged.ops.fused_linear.start import (
    start_ahead_gemm,
    start_gemm,
    start_gemv,
    start_wide_gemm,
)
from torch_paged.ops.fused_linear.wide_config import MAX_FEATURES, AheadGemmConfig, WideGemmConfig
from torch_paged.ops.rms_norm.kernel import _launch_rms_norm

# Kernels that multiply while the first half of an update runs. The GEMV gains more by starting
# before that half, while its predecessor runs; what the tile copies read only a wait orders.
_OVERLAPPING = (SmallGemmConfig, TileGemmConfig, PlainTileGemmConfig)


def _launch_fused_linear(
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
    *,
    config: Config | None = None,
) -> Tensor:
    """Launch the kernel of `config`, or of the configuration chosen for the problem."""
    num_tokens, in_features = x.shape
    num_rows = sum(w.shape[0] for w in weights)
    problem = Problem(num_tokens, num_rows, in_features, gated)
    if not x.numel() or not num_rows:
        config = Composed()
    elif config is None:
        key, can_split = device_key(x.device), counters is not None
        config = choose_config(key, problem, x.dtype, can_split)
        if isinstance(config, CopyConfig):
            served = num_rows <= MAX_FEATURES and tma_serves((x, *weights))
            config = config if served else without_copies(key, problem, can_split)
    if isinstance(config, Composed):
        if downs is not None and x.numel():
            # The same first half, to the bit, as of callers that run it apart.
            lora_x = launch_shrink(x, downs, norm_weight, norm, eps, norm_offset, cast_before_gain)
            downs = None
        return fused_linear_reference(
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
            None,
            lora_x,
            updates,
            update_scales,
            downs,
        )
    after_shrink = False
    if downs is not None or (norm and leaves_norm_outside(config, num_tokens)):
        norms = (norm_weight, norm, eps, norm_offset, cast_before_gain)
        x, norm, made, after_shrink = _before_the_product(x, downs, norms, config)
        norm_weight = norm_weight if norm else None
        lora_x = lora_x if downs is None else made
    out = torch.empty(
        (num_tokens, num_rows // 2 if gated else num_rows), dtype=x.dtype, device=x.device
    )
    arguments = kernel_arguments(
        x, weights, biases, norm_weight, norm, eps, norm_offset, residual, activation, gated, out
    )
    if lora_x is not None and updates is not None:
        arguments = with_updates(arguments, lora_x, updates, update_scales, after_shrink)
    sizes = [w.shape[0] for w in (weights[:1] if gated else weights)]
    if isinstance(config, GemvConfig):
        start_gemv(config, num_tokens, sizes, arguments)
    elif isinstance(config, AheadGemmConfig):
        start_ahead_gemm(config, x, weights, sizes, arguments, counters)
    elif isinstance(config, WideGemmConfig):
        start_wide_gemm(config, x, weights, sizes, arguments, counters)
    else:
        start_gemm(config, num_tokens, sizes, arguments, counters)
    return out


def _before_the_product(
    x: Tensor,
    downs: Sequence[Tensor] | None,
    norms: tuple[Tensor | None, bool, float, float, bool],
    config: Config,
) -> tuple[Tensor, bool, Tensor | None, bool]:
    """Launch what has a kernel before that of `config`: first halves, and a norm left outside.

    Returns:
        What to multiply, whether that is still to be normalised, the first halves, and whether the
        product may begin beside them.
    """
    weight, norm, eps, offset, cast = norms
    outside = norm and leaves_norm_outside(config, x.shape[0])
    if downs is None:
        return _launch_rms_norm(x, weight, eps, offset, cast).to(x.dtype), False, None, False
    some = x.shape[0] <= MAX_SHRINK_ROWS and any(down.shape[0] for down in downs)
    if outside and some and x.shape[1] <= MAX_NORM_WIDTH:
        lora_x, x = launch_shrink_norm(x, downs, weight, eps, offset, cast)
        return x, False, lora_x, False
    beside = some and not outside and isinstance(config, _OVERLAPPING)
    lora_x = launch_shrink(x, downs, weight, norm, eps, offset, cast, release_late=beside)
    if outside:
        x = _launch_rms_norm(x, weight, eps, offset, cast).to(x.dtype)
    return x, norm and not outside, lora_x, beside
