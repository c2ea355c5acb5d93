"""Stages of the latent attention kernels: tiles of the cache, and the online softmax over them."""

from __future__ import annotations

from torch_paged.ops.paged_attention.stages import LOG2E
from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def load_query(rows_ptr, in_rows, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows [M, BLOCK_D] at rows_ptr [M]; zeros past DIM and outside `in_rows`."""
    d = tl.arange(0, BLOCK_D)
    mask = in_rows[:, None]
    if DIM != BLOCK_D:
        mask = mask & (d < DIM)[None, :]
    return tl.load(rows_ptr[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_tokens(
    cache_ptr,
    block,
    inside,
    exists,
    stride_block: tl.constexpr,
    stride_token: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the rows [N, BLOCK_D] of tokens that exist; slots nobody wrote may hold NaN."""
    d = tl.arange(0, BLOCK_D)
    mask = exists[:, None]
    if DIM != BLOCK_D:
        mask = mask & (d < DIM)[None, :]
    rows = block.to(tl.int64) * stride_block + inside * stride_token
    return tl.load(cache_ptr + rows[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def attend_latents(q, r, c, k, seen, scale, peak, total, acc, PRECISION: tl.constexpr):
    """Take a tile of latents c and keys k into the online softmax of queries q and r.

    The latents are keys and values: s = q c^T + r k^T, acc = softmax(s) c.
    """
    s = tl.dot(q, tl.trans(c), input_precision=PRECISION)
    s = tl.dot(r, tl.trans(k), s, input_precision=PRECISION)
    s = tl.where(seen, s * (scale * LOG2E), float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, axis=1))
    p = tl.exp2(s - new_peak[:, None])
    alpha = tl.exp2(peak - new_peak)
    total = total * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(c.dtype), c, acc, input_precision=PRECISION)
    return new_peak, total, acc


__all__ = ["attend_latents", "load_query", "load_tokens"]
