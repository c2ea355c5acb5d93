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
from torch_paged.ops.experts.group import Groups, group_pairs
from torch_paged.ops.experts.tile import _expert_tile_kernel
from torch_paged.ops.fused_linear.configs import device_key
from torch_paged.ops.l1_cache import prefer_l1
from torch_paged.ops.triton_compat import INTERPRETED, triton, use_pdl

_COMBINE_BLOCK = 512


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
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    if config is None:
        k_first = (gate_up.stride(2) == 1, down.stride(2) == 1)
        problem = Problem(num_tokens, top_k, num_experts, hidden, inner, *k_first)
        config = choose_config(device_key(x.device), problem, x.dtype)
    groups = None if config.tokens == 0 else group_pairs(ids, num_experts, config.tokens)
    gated = {
        "GATED": True,
        "INTERLEAVED": interleaved,
        "ACTIVATION": activation,
        "alpha": alpha,
        "limit": limit,
        "HAS_BIAS": gate_up_bias is not None,
        "TOP_K": top_k,
    }
    num_pairs = num_tokens * top_k
    h = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    _project(x, gate_up, gate_up_bias, ids, groups, h, config.tokens, config.gate_up, gated)
    splits = config.down.splits
    # Many tokens: no wider than Hugging Face's own.
    wide = splits > 1 or num_tokens <= MAX_DECODE_TOKENS
    partials = torch.empty(
        (splits, num_pairs, hidden), dtype=torch.float32 if wide else x.dtype, device=x.device
    )
    plain = {
        "GATED": False,
        "INTERLEAVED": False,
        "ACTIVATION": "",
        "alpha": 1.0,
        "limit": 0.0,
        "HAS_BIAS": False,
        "TOP_K": 1,
    }
    _project(h, down, None, ids, groups, partials, config.tokens, config.down, plain)
    _combine(partials, ids, weights, down_bias, residual, out)
    return out


def _project(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    groups: Groups | None,
    out: Tensor,
    tokens: int,
    config: GemvConfig | TileConfig,
    options: dict[str, Any],
) -> None:
    """Multiply each pair's row by its expert's matrix, [num_pairs or splits of them, features]."""
    num_pairs, features, in_features = ids.numel(), out.shape[-1], w.shape[2]
    rows, block_k, splits = config.rows, config.block_k, config.splits
    blocks = triton.cdiv(features, rows)
    pdl = use_pdl(x)
    options = options | {
        "K": in_features,
        "ROWS": rows,
        "BLOCK_K": block_k,
        "SPLITS": splits,
        "EVEN_K": in_features % (block_k * splits) == 0,
        "EVEN_N": features % rows == 0,
        "PDL": pdl,
        "num_warps": config.warps,
    }
    if pdl:
        options["launch_pdl"] = True
    strides = (
        x.stride(0),
        w.stride(0),
        w.stride(1),
        w.stride(2),
        0 if bias is None else bias.stride(0),
    )
    bias = x if bias is None else bias
    if isinstance(config, GemvConfig):
        launched = _expert_gemv_kernel[(blocks, num_pairs, splits)](
            x,
            w,
            bias,
            ids,
            out,
            num_pairs,
            features,
            *strides,
            **options,
            num_stages=1,
            maxnreg=config.registers,
        )
        prefer_l1(launched, x.device)
        return
    assert groups is not None
    max_tiles = groups.tiles.shape[1]
    _expert_tile_kernel[(blocks, max_tiles, splits)](
        x,
        w,
        bias,
        groups.tiles,
        groups.order,
        out,
        num_pairs,
        max_tiles,
        features,
        *strides,
        **options,
        TOKENS=tokens,
        STAGES=config.stages,
        STREAMED=num_pairs <= w.shape[0] * tokens,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        # The interpreter cannot multiply bfloat16.
        UPCAST=INTERPRETED,
        num_stages=1,
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
