"""The second half of a low-rank update, onto the output of a linear that is there already.

    out = out + scale * lora_x @ update.T           in place, rounded once

For many rows, whose linears cuBLAS computes; few rows have it in the epilogue of `fused_linear`.
On tensor cores in three TF32 products, which leave less of an error than the rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    INTERPRETED,
    device_capability,
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

__all__ = ["lora_expand_", "lora_expand_reference"]

_TOKENS = 64
_ROWS = 64


def lora_expand_reference(out: Tensor, lora_x: Tensor, update: Tensor, scale: float) -> None:
    """Compute the module's equation with torch, rounding where PEFT's modules round."""
    change = F.linear(lora_x.to(update.dtype), update) * scale
    out.copy_((out + change).to(out.dtype))


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _lora_expand_kernel(
    out_ptr,
    lora_x_ptr,
    update_ptr,
    num_tokens,
    n,
    rank,
    stride_out,
    lora_stride,
    scale,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, row] += scale * sum_r lora_x[t, r] * update[row, r]."""
    if PDL:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    r = tl.arange(0, 16)
    u_ptrs = update_ptr + rows[:, None].to(tl.int64) * rank + r[None, :]
    u_mask = rows[:, None] < n
    u = tl.load(u_ptrs, mask=u_mask & (r[None, :] < rank), other=0.0)
    if PDL:
        gdc_wait()
    mask = (tokens[:, None] < num_tokens) & (rows[None, :] < n)
    out_ptrs = out_ptr + tokens[:, None].to(tl.int64) * stride_out + rows[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0)
    x_ptrs = lora_x_ptr + tokens[:, None].to(tl.int64) * lora_stride + r[None, :]
    x_mask = tokens[:, None] < num_tokens
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, RANK, 16):
        x = tl.load(x_ptrs + start, mask=x_mask & (start + r[None, :] < rank), other=0.0)
        this = u
        more = u_mask & (start + 16 + r[None, :] < rank)
        u = tl.load(u_ptrs + start + 16, mask=more, other=0.0)
        acc = tl.dot(x, tl.trans(this.to(tl.float32)), acc, input_precision=PRECISION)
    out = out.to(tl.float32) + acc * scale
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def _launch_lora_expand(out: Tensor, lora_x: Tensor, update: Tensor, scale: float) -> None:
    num_tokens, n = out.shape
    rank = update.shape[1]
    if out.numel() == 0 or rank == 0:
        return
    exact = out.dtype == torch.float32
    if not (exact or INTERPRETED):
        exact = device_capability(out.device.index or 0)[0] < 8
    pdl = use_pdl(out)
    extra = {"launch_pdl": True} if pdl else {}
    _lora_expand_kernel[(triton.cdiv(n, _ROWS), triton.cdiv(num_tokens, _TOKENS))](
        out,
        lora_x,
        update,
        num_tokens,
        n,
        rank,
        out.stride(0),
        lora_x.stride(0),
        float(scale),
        RANK=triton.cdiv(rank, 16) * 16,
        TOKENS=_TOKENS,
        ROWS=_ROWS,
        PRECISION="ieee" if exact else "tf32x3",
        PDL=pdl,
        num_warps=4,
        num_stages=1,
        **extra,
    )


def _lora_expand_fake(out: Tensor, lora_x: Tensor, update: Tensor, scale: float) -> None:
    return None


_lora_expand = register_op(
    "lora_expand_(Tensor(a!) out, Tensor lora_x, Tensor update, float scale) -> ()",
    cpu=lora_expand_reference,
    cuda=_launch_lora_expand,
    fake=_lora_expand_fake,
)


def lora_expand_(out: Tensor, lora_x: Tensor, update: Tensor, *, scale: float) -> None:
    """Add a low-rank update to the output of its linear, in place.

    Args:
        out: [num_tokens, out_features], last dim contiguous, row stride free.
        lora_x: float32 [num_tokens, rank], last dim contiguous: a share of what `lora_shrink`
            returns.
        update: [out_features, rank], any floating dtype, contiguous.
        scale: factor on the update.

    Raises:
        ValueError: shapes or strides do not fit together.
        TypeError: `lora_x` is not float32.
    """
    if not torch.compiler.is_compiling():
        _validate(out, lora_x, update)
    _lora_expand(out, lora_x, update, scale)


def _validate(out: Tensor, lora_x: Tensor, update: Tensor) -> None:
    if out.dim() != 2 or (out.numel() and out.stride(1) != 1):
        raise ValueError(
            f"out must be [num_tokens, out_features] and contiguous in its last dim, got "
            f"{list(out.shape)} with strides {out.stride()}"
        )
    if update.dim() != 2 or update.shape[0] != out.shape[1] or not update.is_contiguous():
        raise ValueError(
            f"update must be contiguous [{out.shape[1]}, rank], got {list(update.shape)} with "
            f"strides {update.stride()}"
        )
    shape = (out.shape[0], update.shape[1])
    if lora_x.shape != shape or (lora_x.numel() and lora_x.stride(1) != 1):
        raise ValueError(
            f"lora_x must be {list(shape)} and contiguous in its last dim, got "
            f"{list(lora_x.shape)} with strides {lora_x.stride()}"
        )
    if lora_x.dtype != torch.float32:
        raise TypeError(f"lora_x must be float32, got {lora_x.dtype}; take it from lora_shrink")
