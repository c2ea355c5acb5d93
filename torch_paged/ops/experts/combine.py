"""Adds up what the experts of a token made of it, each times its weight, in the order of slots."""

from __future__ import annotations

from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _combine_experts_kernel(
    partials_ptr,
    ids_ptr,
    weights_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_pairs,
    width,
    stride_be,
    stride_residual,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = residual[t] + sum_j weights[t, j] * (sum_s partials[s, t, j] + bias[ids[t, j]])."""
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    if PDL:
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        y = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            row = (split * num_pairs + pair) * width
            y += tl.load(partials_ptr + row + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(ids_ptr + pair).to(tl.int64)
            bias = tl.load(bias_ptr + expert * stride_be + column, mask=mask, other=0.0)
            y += bias.to(tl.float32)
        total += weight * y
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + token * stride_residual + column
        total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * width + column, out, mask=mask)
