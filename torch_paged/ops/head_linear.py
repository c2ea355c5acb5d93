"""A product of each head with a matrix of its own.

    out[t, h] = x[t, h] @ weight[h]

The matrices are views of a model's parameter, read in place whichever of their dims is contiguous.
For few tokens each program takes some columns of one matrix, which it may load while its
predecessor runs; for more, torch's batched product serves.
"""

from __future__ import annotations

import torch
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

__all__ = ["head_linear", "head_linear_reference"]

# Up to so many tokens are one tile beside a matrix read once.
_MAX_KERNEL_TOKENS = 32
# Elements of a matrix in one program, and the widest sums that they hold whole.
_TILE = 8192
_MAX_IN_DIM = 512


def head_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the equation with torch."""
    out = x.new_empty((x.shape[0], x.shape[1], weight.shape[2]))
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _head_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    stride_xt,
    stride_xh,
    stride_wh,
    stride_wk: tl.constexpr,
    stride_wn: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    IN_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t, h, n] = sum_k x[t, h, k] weight[h, k, n]: one head and BLOCK_N columns a program."""
    head = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    if PDL:
        gdc_launch_dependents()
    w_ptrs = weight_ptr + head * stride_wh + (k * stride_wk)[:, None] + (n * stride_wn)[None, :]
    w = tl.load(w_ptrs, mask=(k < IN_DIM)[:, None] & (n < OUT_DIM)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    x_ptrs = x_ptr + (t.to(tl.int64) * stride_xt)[:, None] + head * stride_xh + k[None, :]
    x = tl.load(x_ptrs, mask=(t < num_tokens)[:, None] & (k < IN_DIM)[None, :], other=0.0)
    out = tl.dot(x, w, input_precision=PRECISION)
    out_ptrs = out_ptr + ((t * NUM_HEADS + head) * OUT_DIM)[:, None] + n[None, :]
    stored = (t < num_tokens)[:, None] & (n < OUT_DIM)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=stored)


def _kernel_serves(x: Tensor) -> bool:
    """Say whether the kernel is to serve x; exact float32 products take too much shared memory."""
    if x.shape[0] > _MAX_KERNEL_TOKENS or x.shape[2] > _MAX_IN_DIM:
        return False
    if INTERPRETED:
        return True
    return x.element_size() == 2 and device_capability(x.device.index or 0)[0] >= 8


def _launch_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    num_tokens, num_heads, in_dim = x.shape
    if num_tokens == 0 or not _kernel_serves(x):
        return head_linear_reference(x, weight)
    out_dim = weight.shape[2]
    out = torch.empty((num_tokens, num_heads, out_dim), dtype=x.dtype, device=x.device)
    block_k = max(16, triton.next_power_of_2(in_dim))
    block_n = max(16, min(_TILE // block_k, triton.next_power_of_2(out_dim)))
    pdl = use_pdl(x)
    _head_linear_kernel[(num_heads, triton.cdiv(out_dim, block_n))](
        x,
        weight,
        out,
        num_tokens,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        stride_wk=weight.stride(1),
        stride_wn=weight.stride(2),
        NUM_HEADS=num_heads,
        IN_DIM=in_dim,
        OUT_DIM=out_dim,
        BLOCK_T=max(16, triton.next_power_of_2(num_tokens)),
        BLOCK_K=block_k,
        BLOCK_N=block_n,
        PRECISION="ieee",
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _head_linear_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], weight.shape[2]))


_head_linear = register_op(
    "head_linear(Tensor x, Tensor weight) -> Tensor",
    cpu=head_linear_reference,
    cuda=_launch_head_linear,
    fake=_head_linear_fake,
)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head of `x` with its matrix.

    Args:
        x: [num_tokens, num_heads, in_dim], floating; last dim contiguous, other strides free.
        weight: [num_heads, in_dim, out_dim], dtype of `x`, of which in_dim or out_dim is
            contiguous and the other strides are free. Read in place.

    Returns:
        [num_tokens, num_heads, out_dim], contiguous, dtype of `x`.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    if not torch.compiler.is_compiling():
        _check(x, weight)
    return _head_linear(x, weight)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 3 or not x.is_floating_point() or x.stride(2) != 1:
        raise ValueError(
            "x must be floating [num_tokens, num_heads, in_dim] with a contiguous last dim, got "
            f"{x.dtype} {list(x.shape)} with strides {x.stride()}"
        )
    if weight.dim() != 3 or weight.shape[:2] != x.shape[1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight must be {x.dtype} [{x.shape[1]}, {x.shape[2]}, out_dim], got {weight.dtype} "
            f"{list(weight.shape)}"
        )
    if 1 not in weight.stride()[1:]:
        raise ValueError(
            f"in_dim or out_dim of weight must be contiguous, got strides {weight.stride()}"
        )
