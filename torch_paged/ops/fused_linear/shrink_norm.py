"""The first half of low-rank updates and the norm of the same rows, in one kernel.

Where the linear leaves its norm outside, both are ready before it starts: no kernel stands
between them, and neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged.ops.fused_linear.arguments import kernel_arguments
from torch_paged.ops.fused_linear.gemv import _gemv_kernel
from torch_paged.ops.fused_linear.shrink import SHRINK_TOKENS, shrink_config
from torch_paged.ops.l1_cache import prefer_l1
from torch_paged.ops.rms_norm.kernel import normalised
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton

# A program of the shrink has the warps, and the registers, for rows of so many elements.
MAX_NORM_WIDTH = 8192


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _shrink_norm_kernel(
    x_ptr,
    d0_ptr,
    d1_ptr,
    d2_ptr,
    norm_ptr,
    out_ptr,
    normed_ptr,
    num_tokens,
    n0,
    n1,
    n2,
    stride_x,  # strides of x and of the weights: in units of VEC
    stride_d0,
    stride_d1,
    stride_d2,
    eps,
    norm_offset,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    CAST_BEFORE_GAIN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    K_WARPS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """normed = norm(x) by the last TOKENS programs of a row of the grid; out = normed @ d.T."""
    place = tl.program_id(0) + TOKENS - tl.num_programs(0)
    if place >= 0:
        cols = tl.arange(0, BLOCK)
        mask = cols < K
        if PDL:
            gdc_launch_dependents()
        gain = 0.0
        if HAS_GAIN:
            gain = tl.load(norm_ptr + cols, mask=mask, other=0.0).to(tl.float32) + norm_offset
        if PDL:
            gdc_wait()
        row = (tl.program_id(1) * TOKENS + place).to(tl.int64)
        mask = cols < tl.where(row < num_tokens, K, 0)
        x = tl.load(x_ptr + row * stride_x * VEC + cols, mask=mask, other=0.0)
        value = normalised(x, gain, K, eps, HAS_GAIN, CAST_BEFORE_GAIN)
        tl.store(normed_ptr + row * K + cols, value.to(normed_ptr.dtype.element_ty), mask=mask)
    else:
        _gemv_kernel(
            x_ptr,
            d0_ptr,
            d1_ptr,
            d2_ptr,
            d0_ptr,
            d0_ptr,
            d0_ptr,
            norm_ptr,
            x_ptr,
            x_ptr,
            x_ptr,
            x_ptr,
            x_ptr,
            out_ptr,
            num_tokens,
            n0,
            n1,
            n2,
            stride_x,
            stride_d0,
            stride_d1,
            stride_d2,
            0,
            eps,
            norm_offset,
            0.0,
            0.0,
            0.0,
            K=K,
            NUM_WEIGHTS=NUM_WEIGHTS,
            HAS_BIAS0=False,
            HAS_BIAS1=False,
            HAS_BIAS2=False,
            NORM=True,
            HAS_GAIN=HAS_GAIN,
            HAS_RESIDUAL=False,
            RANK0=0,
            RANK1=0,
            RANK2=0,
            MAX_RANK=0,
            ACTIVATION="",
            GATED=False,
            TOKENS=TOKENS,
            ROWS=ROWS,
            CHUNKS=CHUNKS,
            WARPS=WARPS,
            K_WARPS=K_WARPS,
            VEC=VEC,
            EVEN_K=EVEN_K,
            EVEN_N=EVEN_N,
            EVEN_T=EVEN_T,
            AFTER_SHRINK=False,
            RELEASE_LATE=False,
            PDL=PDL,
        )


def launch_shrink_norm(
    x: Tensor,
    downs: Sequence[Tensor],
    norm_weight: Tensor | None,
    eps: float,
    norm_offset: float,
    cast_before_gain: bool,
) -> tuple[Tensor, Tensor]:
    """Return what `launch_shrink` and the norm make of `x`, at most `MAX_NORM_WIDTH` wide."""
    num_tokens, in_features = x.shape
    downs = [down for down in downs if down.shape[0]]
    sizes = [down.shape[0] for down in downs]
    out = torch.empty((num_tokens, sum(sizes)), dtype=torch.float32, device=x.device)
    normed = torch.empty((num_tokens, in_features), dtype=x.dtype, device=x.device)
    pointers, numbers, constants = kernel_arguments(
        x, downs, [], norm_weight, True, eps, norm_offset, None, "", False, out
    )
    vec = constants["VEC"]
    config = shrink_config(x, sizes, vec)
    tokens = min(triton.next_power_of_2(num_tokens), SHRINK_TOKENS)
    block = config.rows * config.warps // config.k_warps
    step = config.k_warps * config.chunks * 32 * vec
    programs = sum(triton.cdiv(n, block) for n in sizes) + tokens
    launched = _shrink_norm_kernel[(programs, triton.cdiv(num_tokens, tokens))](
        *pointers[:4],
        pointers[7],
        out,
        normed,
        *numbers[:8],
        *numbers[9:11],
        K=in_features,
        BLOCK=triton.next_power_of_2(in_features),
        NUM_WEIGHTS=len(downs),
        HAS_GAIN=constants["HAS_GAIN"],
        CAST_BEFORE_GAIN=cast_before_gain and norm_offset == 0.0,
        TOKENS=tokens,
        ROWS=config.rows,
        CHUNKS=config.chunks,
        WARPS=config.warps,
        K_WARPS=config.k_warps,
        VEC=vec,
        EVEN_K=in_features % step == 0,
        EVEN_N=all(n % block == 0 for n in sizes),
        EVEN_T=num_tokens % tokens == 0,
        PDL=constants["PDL"],
        num_warps=config.warps,
        num_stages=1,
        maxnreg=config.registers,
        **({"launch_pdl": True} if constants["PDL"] else {}),
    )
    prefer_l1(launched, x.device)
    return out, normed


__all__ = ["MAX_NORM_WIDTH", "launch_shrink_norm"]
