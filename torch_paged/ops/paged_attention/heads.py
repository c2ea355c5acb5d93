"""A row's new heads in the attention kernels: loads, norm and rotation.

All is loaded as tiles [M, BLOCK_D], what is one for all rows too: vectors would be loaded in
layouts of their own and change to the tile's by way of shared memory, one after the other. On an
H200 those changes took a fifth of the time of a program with 160 tokens.
"""

from __future__ import annotations

from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def _apply_gain(x, rstd, gain, offset, CAST_BEFORE_GAIN: tl.constexpr):
    normed = x.to(tl.float32) * rstd
    if CAST_BEFORE_GAIN:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * (gain.to(tl.float32) + offset)).to(x.dtype)


@triton.jit
def _partner(d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the dimension that `d` < 2 * HALF is rotated with."""
    if INTERLEAVED:
        return d ^ 1
    # Contiguous in runs of HALF, which lets the loads be wide.
    return (d + HALF) % (2 * HALF)


@triton.jit
def load_head(
    row_ptrs,
    row_mask,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load heads at row_ptrs [M, 1] twice: in order, and as each dimension's partner sees them.

    Reading the partners again is cheaper than an exchange between lanes.
    """
    d = tl.arange(0, BLOCK_D)
    mask = row_mask
    if D != BLOCK_D:
        mask = row_mask & (d[None, :] < D)
    x = tl.load(row_ptrs + d[None, :], mask=mask, other=0.0)
    y = x
    if HALF > 0:
        mask = row_mask
        if 2 * HALF != BLOCK_D:
            mask = row_mask & (d[None, :] < 2 * HALF)
        y = tl.load(row_ptrs + _partner(d, HALF, INTERLEAVED)[None, :], mask=mask, other=0.0)
    return x, y


@triton.jit
def norm_and_rotate(
    x,
    y,
    cos,
    sin,
    gain,
    partner_gain,
    offset,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CAST_BEFORE_GAIN: tl.constexpr,
):
    """RMS-normalise heads x [M, BLOCK_D] over D, then rotate them with their partners y.

    The other tiles are [M, BLOCK_D] too; `offset` is added to the gain.
    """
    if HAS_NORM:
        wide = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)[:, None]
        x = _apply_gain(x, rstd, gain, offset, CAST_BEFORE_GAIN)
        if HALF > 0:
            y = _apply_gain(y, rstd, partner_gain, offset, CAST_BEFORE_GAIN)
    if HALF > 0:
        x = (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)
    return x


@triton.jit
def load_gain(
    norm_ptr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load a norm's gain for ROWS heads twice, as `load_head` loads the heads."""
    r = tl.arange(0, ROWS)[:, None]
    return load_head(norm_ptr + tl.zeros_like(r), r >= 0, D, BLOCK_D, HALF, INTERLEAVED)


@triton.jit
def load_new_heads(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    row,
    head,
    stride_qt,
    stride_kt,
    stride_vt,
    stride_cos,
    stride_qh: tl.constexpr,
    stride_kh: tl.constexpr,
    stride_vh: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    FUSED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load what the kernel before wrote for one row and KV head, and the row's rotation.

    Returns the queries with their partners, the new key with its partner and the new value, as
    zeros unless FUSED, and cosines and signed sines.
    """
    dv = tl.arange(0, BLOCK_DV)
    r = tl.arange(0, ROWS)
    q_rows = q_ptr + row * stride_qt + ((head * GROUP + r) * stride_qh)[:, None]
    q, q_partner = load_head(q_rows, (r < GROUP)[:, None], D, BLOCK_D, HALF, INTERLEAVED)
    k, k_partner = q, q_partner
    v = tl.zeros([BLOCK_DV], q.dtype)
    if FUSED:
        # The one new key in every row of a tile: no change of layout for its product with q.
        k_rows = k_ptr + row * stride_kt + head * stride_kh + tl.zeros_like(r)[:, None]
        k, k_partner = load_head(k_rows, (r >= 0)[:, None], D, BLOCK_D, HALF, INTERLEAVED)
        v_ptrs = v_ptr + row * stride_vt + head * stride_vh + dv
        v = tl.load(v_ptrs, mask=dv < DV, other=0.0)
    cos, sin = 0.0, 0.0
    if HALF > 0:
        d = tl.arange(0, BLOCK_D)[None, :]
        if INTERLEAVED:
            angle = d // 2
            minus = d % 2 == 0
        else:
            angle = d % HALF
            minus = d < HALF
        angle += tl.zeros_like(r)[:, None]
        cos_ptrs = cos_ptr + row * stride_cos + angle
        sin_ptrs = sin_ptr + row * stride_cos + angle
        if 2 * HALF == BLOCK_D:
            cos = tl.load(cos_ptrs)
            sin = tl.load(sin_ptrs)
        else:
            cos = tl.load(cos_ptrs, mask=d < 2 * HALF, other=1.0)
            sin = tl.load(sin_ptrs, mask=d < 2 * HALF, other=0.0)
        sin = tl.where(minus, -sin, sin)
    return q, q_partner, k, k_partner, v, cos, sin


__all__ = ["load_gain", "load_head", "load_new_heads", "norm_and_rotate"]
