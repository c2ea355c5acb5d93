"""Launches the sampling kernels."""

from __future__ import annotations

import torch

from torch_paged.ops.sample.kernels import _sample_rows_kernel, _sample_tiles_kernel
from torch_paged.ops.sample.scores import _scores_kernel
from torch_paged.ops.triton_compat import triton, use_pdl

# Fixed for every batch, so that a row's result is too.
_GROUP = 64
_GROUPS = 32  # a tile: 2048 tokens
_LISTED = 64  # groups read at once when searching and drawing
_SMALL_K = 128
_SCORES_BLOCK = 2048
# Low bits that are 0 in every fp32 value of the dtype.
_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def _launch_sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    support: torch.Tensor | None = None,
) -> torch.Tensor:
    if logits.shape[1] == 1:
        # Triton makes 1 a constant, and 3.6 fails to compile that. A second token of no weight.
        logits = torch.nn.functional.pad(logits, (0, 1), value=float("-inf"))
    num_rows, vocab_size = logits.shape
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    num_tiles = triton.cdiv(vocab_size, _GROUP * _GROUPS)
    num_groups = num_tiles * _GROUPS
    words = torch.empty(2, num_rows, num_tiles, dtype=torch.int64, device=device)
    tile_max = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    groups = torch.empty(2, num_rows, num_groups, dtype=torch.float32, device=device)
    flags = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    listed = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
    pdl = use_pdl(logits)
    # No fused multiply-add: a score is one rounded product, the same wherever it is computed.
    launch = {"enable_fp_fusion": False}
    if pdl:
        launch["launch_pdl"] = True
    _sample_tiles_kernel[(num_rows, num_tiles)](
        logits,
        slots,
        temperature,
        top_k,
        seeds,
        counters,
        words[0],
        words[1],
        tile_max,
        groups[0],
        groups[1],
        vocab_size,
        num_tiles,
        num_groups,
        logits.stride(0),
        GROUPS=_GROUPS,
        GROUP=_GROUP,
        SMALL_K=_SMALL_K,
        PDL=pdl,
        num_warps=4,
        **launch,
    )
    _sample_rows_kernel[(num_rows,)](
        logits,
        slots,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        counters,
        words[0],
        words[1],
        tile_max,
        groups[0],
        groups[1],
        flags,
        listed,
        tokens,
        words if support is None else support,
        vocab_size,
        num_tiles,
        num_groups,
        logits.stride(0),
        TILES_BLOCK=triton.next_power_of_2(num_tiles),
        GROUPS_BLOCK=triton.next_power_of_2(num_groups),
        LIST_BLOCK=min(1024, triton.next_power_of_2(num_groups)),
        GROUPS=_GROUPS,
        GROUP=_GROUP,
        LISTED=_LISTED,
        SMALL_K=_SMALL_K,
        SHIFT=_SHIFTS[logits.dtype],
        HAS_SUPPORT=support is not None,
        PDL=pdl,
        num_warps=16,
        **launch,
    )
    return tokens


def _launch_sample_with_scores(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    scores = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    support = torch.empty(num_rows, 3, dtype=torch.int64, device=logits.device)
    tokens = _launch_sample(
        logits, slots, temperature, top_k, top_p, min_p, seeds, counters, support
    )
    if num_rows == 0:
        return tokens, scores
    pdl = use_pdl(logits)
    _scores_kernel[(num_rows, triton.cdiv(vocab_size, _SCORES_BLOCK))](
        logits,
        slots,
        temperature,
        min_p,
        support,
        scores,
        vocab_size,
        logits.stride(0),
        BLOCK=_SCORES_BLOCK,
        SHIFT=_SHIFTS[logits.dtype],
        PDL=pdl,
        num_warps=4,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl else {}),
    )
    return tokens, scores
