"""Launches the sampling kernels."""

from __future__ import annotations

import torch

from torch_paged.ops.sample.kernels import _sample_rows_kernel, _sample_tiles_kernel
from torch_paged.ops.triton_compat import triton, use_pdl

# Fixed for every batch, so that a row's result is too.
_GROUP = 64
_GROUPS = 32  # a tile: 2048 tokens
_LISTED = 64  # groups read at once when searching and drawing
_SMALL_K = 128
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
) -> torch.Tensor:
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
        PDL=pdl,
        num_warps=16,
        **launch,
    )
    return tokens
