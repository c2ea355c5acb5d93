"""Token embedding, scaled, with ids given directly or read through slots.

    out[t] = weight[ids[t]] * scale              slots is None
    out[b] = weight[ids[slots[b]]] * scale       slots[b] >= 0; zeros for padding rows (-1)

The product is fp32 and rounded once, as torch multiplies by a Python number. Models that hold the
scale as a tensor (Gemma) round it to the dtype first: pass the rounded value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

__all__ = ["embed", "embed_reference"]

_BLOCK = 1024


def embed_reference(
    ids: Tensor, slots: Tensor | None, weight: Tensor, scale: float = 1.0
) -> Tensor:
    """Look rows up with torch; an id outside the table raises IndexError."""
    if slots is None:
        out = F.embedding(ids, weight)
    else:
        padding = slots < 0
        tokens = ids.index_select(0, slots.clamp(min=0)).masked_fill_(padding, 0)
        out = F.embedding(tokens, weight).masked_fill_(padding.unsqueeze(1), 0.0)
    return out if scale == 1.0 else out.mul_(scale)


@triton.jit
def _embed_kernel(
    ids_ptr,
    slots_ptr,
    weight_ptr,
    out_ptr,
    stride_wv,
    vocab_size,
    width,
    scale,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row] = weight[ids[row]] * scale over BLOCK columns; NaN for an id outside the table."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        live = slot >= 0
        token = tl.load(ids_ptr + slot, mask=live, other=0).to(tl.int64)
    else:
        token = tl.load(ids_ptr + row).to(tl.int64)
    inside = (token >= 0) & (token < vocab_size)
    # An id outside the table must not read foreign memory, nor pass for a token.
    weight_row = weight_ptr + tl.where(inside, token, 0) * stride_wv
    value = tl.load(weight_row + cols, mask=mask, other=0.0).to(tl.float32) * scale
    value = tl.where(inside, value, float("nan"))
    if HAS_SLOTS:
        value = tl.where(live, value, 0.0)
    tl.store(out_ptr + row * width + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


def _launch_embed(ids: Tensor, slots: Tensor | None, weight: Tensor, scale: float = 1.0) -> Tensor:
    num_rows = ids.shape[0] if slots is None else slots.shape[0]
    vocab_size, width = weight.shape
    out = torch.empty((num_rows, width), dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    pdl = use_pdl(weight)
    extra = {"launch_pdl": True} if pdl else {}
    _embed_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        ids,
        ids if slots is None else slots,
        weight,
        out,
        weight.stride(0),
        vocab_size,
        width,
        scale,
        HAS_SLOTS=slots is not None,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        **extra,
    )
    return out


def _embed_fake(ids: Tensor, slots: Tensor | None, weight: Tensor, scale: float = 1.0) -> Tensor:
    num_rows = ids.shape[0] if slots is None else slots.shape[0]
    return torch.empty((num_rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)


_EMBED = register_op(
    "embed(Tensor ids, Tensor? slots, Tensor weight, float scale=1.0) -> Tensor",
    cpu=embed_reference,
    cuda=_launch_embed,
    fake=_embed_fake,
)


def embed(ids: Tensor, slots: Tensor | None, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """Look token embeddings up.

    Args:
        ids: int64 or int32, contiguous: [num_tokens], or the state [num_slots] read by `slots`.
        slots: int32 [num_rows], contiguous, the slot of each row and -1 for padding; or None.
        weight: [vocab_size, width], floating, rows contiguous.
        scale: factor in fp32.

    Returns:
        [num_tokens or num_rows, width] in the dtype of `weight`; zeros in padding rows. An id
        outside the table gives a row of NaN on CUDA, where raising would stall the stream, and
        IndexError on the CPU.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    if not torch.compiler.is_compiling():
        _check(ids, slots, weight)
    return _EMBED(ids, slots, weight, scale)


def _check(ids: Tensor, slots: Tensor | None, weight: Tensor) -> None:
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32) or not ids.is_contiguous():
        raise ValueError(
            f"ids must be contiguous int64 or int32 [num_tokens], got {ids.dtype} "
            f"{list(ids.shape)} with strides {ids.stride()}"
        )
    if slots is not None and (
        slots.dim() != 1 or slots.dtype != torch.int32 or not slots.is_contiguous()
    ):
        raise ValueError(
            f"slots must be contiguous int32 [num_rows], got {slots.dtype} {list(slots.shape)}; "
            "call .int()"
        )
    if weight.dim() != 2 or not weight.is_floating_point() or weight.stride(1) != 1:
        raise ValueError(
            f"weight must be floating [vocab_size, width] with contiguous rows, got "
            f"{weight.dtype} {list(weight.shape)} with strides {weight.stride()}"
        )
