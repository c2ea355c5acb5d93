"""The CUDA implementation of `experts`: groups the pairs, then both projections, then the sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_paged.ops.experts.combine import _combine_experts_kernel
from torch_paged.ops.experts.configs import (
    MAX_DECODE_TOKENS,
    ExpertsConfig,
    GemvConfig,
    Problem,
    TileConfig,
    choose_config,
)
from torch_paged.ops.experts.gemv import _expert_gemv_kernel
from torch_paged.ops.experts.group import group_pairs
from torch_paged.ops.experts.tile import _expert_tile_kernel
from torch_paged.ops.fused_linear.configs import device_key
from torch_paged.ops.l1_cache import prefer_l1
from torch_paged.ops.triton_compat import INTERPRETED, triton, use_pdl

_COMBINE_BLOCK = 512


# Options of the down projection where those of a gated one differ.
_PLAIN: dict[str, Any] = {
    "GATED": False,
    "INTERLEAVED": False,
    "ACTIVATION": "",
    "alpha": 1.0,
    "limit": 0.0,
    "TOP_K": 1,
}


def _launch_experts(
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
    *,
    config: ExpertsConfig | None = None,
) -> Tensor:
    """Launch the kernels of `config`, or of the configuration chosen for the problem."""
    num_tokens, top_k = ids.shape
    num_experts, hidden, inner = down.shape
    num_pairs = num_tokens * top_k
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    if config is None:
        k_first = (gate_up.stride(2) == 1, down.stride(2) == 1)
        problem = Problem(num_tokens, top_k, num_experts, hidden, inner, *k_first)
        config = choose_config(device_key(x.device), problem, x.dtype)
    pairs = _Pairs(ids, num_experts, config.tokens)
    gated = {
        "GATED": True,
        "INTERLEAVED": interleaved,
        "ACTIVATION": activation,
        "alpha": alpha,
        "limit": limit,
        "TOP_K": top_k,
    }
    h = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    _project(x, gate_up, gate_up_bias, pairs, h, config.gate_up, gated)
    splits = config.down.splits
    # Many tokens: no wider than Hugging Face's own.
    wide = splits > 1 or num_tokens <= MAX_DECODE_TOKENS
    partials = torch.empty(
        (splits, num_pairs, hidden), dtype=torch.float32 if wide else x.dtype, device=x.device
    )
    _project(h, down, None, pairs, partials, config.down, _PLAIN)
    _combine(partials, ids, weights, down_bias, residual, out)
    return out


class _Pairs:
    """The (token, expert) pairs of a step, grouped for the tile kernel.

    Args:
        tokens: of an expert, that a program takes; 0 for the gemv kernel, which needs no groups.
    """

    def __init__(self, ids: Tensor, num_experts: int, tokens: int) -> None:
        self.ids = ids
        self.count = ids.numel()
        self.tokens = tokens
        self.groups = group_pairs(ids, num_experts, tokens) if tokens else None


def _project(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    pairs: _Pairs,
    out: Tensor,
    config: GemvConfig | TileConfig,
    options: dict[str, Any],
) -> None:
    """Multiply each pair's row by its expert's matrix, [num_pairs or splits of them, features]."""
    features, in_features = out.shape[-1], w.shape[2]
    pdl = use_pdl(x)
    options = options | {
        "HAS_BIAS": bias is not None,
        "K": in_features,
        "ROWS": config.rows,
        "BLOCK_K": config.block_k,
        "SPLITS": config.splits,
        "EVEN_K": in_features % (config.block_k * config.splits) == 0,
        "EVEN_N": features % config.rows == 0,
        "PDL": pdl,
        "num_warps": config.warps,
        "num_stages": 1,
    }
    if pdl:
        options["launch_pdl"] = True
    strides = (x.stride(0), *w.stride(), 0 if bias is None else bias.stride(0))
    tensors = (x, w, x if bias is None else bias)
    if isinstance(config, GemvConfig):
        _start_gemv(tensors, strides, pairs, out, config, options)
    else:
        _start_tiles(tensors, strides, pairs, out, config, options)


def _start_gemv(
    tensors: tuple[Tensor, ...],
    strides: tuple[int, ...],
    pairs: _Pairs,
    out: Tensor,
    config: GemvConfig,
    options: dict[str, Any],
) -> None:
    features = out.shape[-1]
    grid = (triton.cdiv(features, config.rows), pairs.count, config.splits)
    launched = _expert_gemv_kernel[grid](
        *tensors,
        pairs.ids,
        out,
        pairs.count,
        features,
        *strides,
        **options,
        maxnreg=config.registers,
    )
    prefer_l1(launched, out.device)


def _start_tiles(
    tensors: tuple[Tensor, ...],
    strides: tuple[int, ...],
    pairs: _Pairs,
    out: Tensor,
    config: TileConfig,
    options: dict[str, Any],
) -> None:
    assert pairs.groups is not None
    features, max_tiles = out.shape[-1], pairs.groups.tiles.shape[1]
    _expert_tile_kernel[(triton.cdiv(features, config.rows), max_tiles, config.splits)](
        *tensors,
        pairs.groups.tiles,
        pairs.groups.order,
        out,
        pairs.count,
        max_tiles,
        features,
        *strides,
        **options,
        TOKENS=pairs.tokens,
        STAGES=config.stages,
        # Most experts have one tile then.
        STREAMED=pairs.count <= tensors[1].shape[0] * pairs.tokens,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        # The interpreter cannot multiply bfloat16.
        UPCAST=INTERPRETED,
    )


def _combine(
    partials: Tensor,
    ids: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    num_tokens, width = out.shape
    pdl = use_pdl(out)
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(width))
    _combine_experts_kernel[(num_tokens, triton.cdiv(width, block))](
        partials,
        ids,
        weights,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        ids.numel(),
        width,
        0 if bias is None else bias.stride(0),
        0 if residual is None else residual.stride(0),
        TOP_K=ids.shape[1],
        SPLITS=partials.shape[0],
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
