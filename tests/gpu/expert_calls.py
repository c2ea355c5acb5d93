"""Calls of experts and their routers for kernel_calls.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ops.paged_attention_case import DEVICE
from torch_paged.ops.experts import CLAMPED_SWIGLU
from torch_paged.ops.experts.configs import ExpertsConfig, GemvConfig, TileConfig
from torch_paged.ops.experts.launch import _launch_experts
from torch_paged.ops.route_experts import SCORINGS, route_experts

EXPERT_CALLS: dict[str, Callable[[], None]] = {}

# The interpreter has no bf16 products.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
_GENERATOR = torch.Generator().manual_seed(0)


def _add(name: str, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    assert name not in EXPERT_CALLS, name
    EXPERT_CALLS[name] = partial(function, *args, **kwargs)


def _randn(*shape: int, dtype: torch.dtype = HALF, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=_GENERATOR)).to(dtype).to(DEVICE)


def _rows(num_rows: int, width: int, *, dtype: torch.dtype = HALF) -> Tensor:
    """Return [num_rows, width] inside wider rows; the last row ends the allocation."""
    flat = _randn(num_rows * (width + 3) - 3, dtype=dtype)
    return flat.as_strided((num_rows, width), (width + 3, 1))


def _experts(
    config: ExpertsConfig | None,
    num_tokens: int,
    *,
    num_experts: int = 5,
    top_k: int = 2,
    hidden: int = 88,
    inner: int = 40,
    gpt_oss: bool = False,
    dtype: torch.dtype = HALF,
) -> None:
    """The last expert is taken, and ends the allocations."""
    scores = _randn(num_tokens, num_experts, dtype=torch.float32)
    scores[:, -1] += 3.0
    scoring = "topk_softmax" if gpt_oss else "softmax"
    weights, ids = route_experts(scores, top_k=top_k, scoring=scoring, normalise=not gpt_oss)
    shapes = ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
    matrices = [
        _randn(n, k, features, dtype=dtype, scale=0.1).transpose(1, 2)
        if gpt_oss
        else _randn(n, features, k, dtype=dtype, scale=0.1)
        for n, features, k in shapes
    ]
    biases = [_randn(*shape[:2], dtype=dtype) if gpt_oss else None for shape in shapes]
    out = _launch_experts(
        _rows(num_tokens, hidden, dtype=dtype),
        ids,
        weights,
        *matrices,
        *biases,
        activation=CLAMPED_SWIGLU if gpt_oss else "silu",
        interleaved=gpt_oss,
        alpha=1.702,
        limit=7.0,
        residual=_rows(num_tokens, hidden, dtype=dtype),
        config=config,
    )
    assert out.cpu().isfinite().all()


_EXPERT_GEMV = GemvConfig(4, 64, 4)
_EXPERT_GEMV_SPLIT = GemvConfig(16, 16, 4, splits=2)
_EXPERT_TILE = TileConfig(32, 32, 4, stages=3)
_EXPERT_TILE_SPLIT = TileConfig(64, 16, 4, splits=2, stages=2)
_EXPERTS_ONE = ExpertsConfig(0, _EXPERT_GEMV, _EXPERT_GEMV_SPLIT)
_EXPERTS_FEW = ExpertsConfig(16, _EXPERT_TILE, _EXPERT_TILE_SPLIT)
for _form in (False, True):
    _label = "gpt-oss" if _form else "mixtral"
    _add(f"experts-gemv-{_label}", _experts, _EXPERTS_ONE, 3, gpt_oss=_form)
    _add(f"experts-tile-{_label}", _experts, _EXPERTS_FEW, 37, gpt_oss=_form)
    for _tokens in (1, 7, 40, 300):  # as chosen for the device
        _add(f"experts-{_label}-{_tokens}", _experts, None, _tokens, gpt_oss=_form)
_add("experts-odd", _experts, _EXPERTS_FEW, 3, hidden=75, inner=33)
_add("experts-gemv-odd", _experts, _EXPERTS_ONE, 2, hidden=75, inner=33)
_add("experts-many", _experts, None, 33, num_experts=128, top_k=8, hidden=64, inner=32)
for _tokens in (1, 9):
    _add(f"experts-fp32-{_tokens}", _experts, None, _tokens, dtype=torch.float32)


def _routers() -> None:
    for scoring in SCORINGS:
        for num_experts, top_k in ((1, 1), (33, 5), (257, 8)):
            correction = None if scoring == "topk_softmax" else _randn(num_experts)
            route_experts(
                _rows(3, num_experts), top_k=top_k, scoring=scoring, correction=correction
            )
    for num_experts, num_groups, best in ((33, 11, 2), (160, 8, 1)):
        groups = {"num_groups": num_groups, "top_groups": 3, "group_best": best}
        route_experts(_rows(3, num_experts), top_k=5, scoring="sigmoid", **groups)


_add("route_experts", _routers)
