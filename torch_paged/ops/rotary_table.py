"""Cosines and sines of rotary embeddings for a batch of positions.

    angle[t, r] = positions[t] * inv_freq[r]        in fp32
    cos = cos(angle) * scaling,  sin = sin(angle) * scaling

One table a step serves every layer. Unlike Hugging Face's it stays fp32 and holds each frequency
once: half-split and interleaved rotation read the same table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    HAS_TRITON,
    INTERPRETED,
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

if HAS_TRITON:
    from triton.language.extra import libdevice

__all__ = ["rotary_table", "rotary_table_reference"]


def rotary_table_reference(
    positions: Tensor, slots: Tensor | None, inv_freq: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Compute the module's equation with torch."""
    if slots is not None:
        positions = positions.index_select(0, slots.clamp(min=0))
    angle = positions.float().unsqueeze(1) * inv_freq
    cos, sin = angle.cos(), angle.sin_()
    if scaling != 1.0:
        cos.mul_(scaling)
        sin.mul_(scaling)
    if slots is not None:
        padding = (slots < 0).unsqueeze(1)
        cos.masked_fill_(padding, 0.0)
        sin.masked_fill_(padding, 0.0)
    return cos, sin


@triton.jit
def _rotary_table_kernel(
    positions_ptr,
    slots_ptr,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    num_freqs,
    scaling,
    HAS_SLOTS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """cos, sin of positions[row] * inv_freq, one row a program."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_freqs
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    inv_freq = tl.load(inv_freq_ptr + cols, mask=mask, other=0.0)
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        live = slot >= 0
        position = tl.load(positions_ptr + slot, mask=live, other=0)
    else:
        position = tl.load(positions_ptr + row)
    angle = position.to(tl.float32) * inv_freq
    # tl.cos is the hardware approximation, off by whole digits at positions in the thousands.
    if EXACT:
        cos = libdevice.cos(angle) * scaling
        sin = libdevice.sin(angle) * scaling
    else:
        cos = tl.cos(angle) * scaling
        sin = tl.sin(angle) * scaling
    if HAS_SLOTS:
        cos = tl.where(live, cos, 0.0)
        sin = tl.where(live, sin, 0.0)
    tl.store(cos_ptr + row * num_freqs + cols, cos, mask=mask)
    tl.store(sin_ptr + row * num_freqs + cols, sin, mask=mask)


def _launch_rotary_table(
    positions: Tensor, slots: Tensor | None, inv_freq: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    cos, sin = _rotary_table_fake(positions, slots, inv_freq, scaling)
    if cos.numel() == 0:
        return cos, sin
    num_rows, num_freqs = cos.shape
    pdl = use_pdl(inv_freq)
    extra = {"launch_pdl": True} if pdl else {}
    _rotary_table_kernel[(num_rows,)](
        positions,
        positions if slots is None else slots,
        inv_freq,
        cos,
        sin,
        num_freqs,
        scaling,
        HAS_SLOTS=slots is not None,
        EXACT=not INTERPRETED,
        BLOCK=triton.next_power_of_2(num_freqs),
        PDL=pdl,
        num_warps=1,
        **extra,
    )
    return cos, sin


def _rotary_table_fake(
    positions: Tensor, slots: Tensor | None, inv_freq: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    num_rows = positions.shape[0] if slots is None else slots.shape[0]
    shape = (num_rows, inv_freq.shape[0])
    cos = torch.empty(shape, dtype=torch.float32, device=inv_freq.device)
    return cos, torch.empty_like(cos)


_ROTARY_TABLE = register_op(
    "rotary_table(Tensor positions, Tensor? slots, Tensor inv_freq, float scaling) "
    "-> (Tensor, Tensor)",
    cpu=rotary_table_reference,
    cuda=_launch_rotary_table,
    fake=_rotary_table_fake,
)


def rotary_table(
    positions: Tensor, slots: Tensor | None, inv_freq: Tensor, *, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each row's rotary angles.

    Args:
        positions: int32 or int64, contiguous: [num_tokens], or the state [num_slots] read by
            `slots`.
        slots: int32 [num_rows], contiguous, the slot of each row and -1 for padding; or None.
        inv_freq: fp32 [num_freqs], contiguous; half as many as rotated dimensions.
        scaling: factor on both results (attention scaling of yarn and longrope).

    Returns:
        cos and sin, fp32 [num_tokens or num_rows, num_freqs]; zeros in padding rows.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    if not torch.compiler.is_compiling():
        _check(positions, slots, inv_freq)
    return _ROTARY_TABLE(positions, slots, inv_freq, scaling)


def _check(positions: Tensor, slots: Tensor | None, inv_freq: Tensor) -> None:
    if (
        positions.dim() != 1
        or positions.dtype not in (torch.int32, torch.int64)
        or not positions.is_contiguous()
    ):
        raise ValueError(
            f"positions must be contiguous int32 or int64 [num_tokens], got {positions.dtype} "
            f"{list(positions.shape)} with strides {positions.stride()}"
        )
    if slots is not None and (
        slots.dim() != 1 or slots.dtype != torch.int32 or not slots.is_contiguous()
    ):
        raise ValueError(
            f"slots must be contiguous int32 [num_rows], got {slots.dtype} {list(slots.shape)}; "
            "call .int()"
        )
    if inv_freq.dim() != 1 or inv_freq.dtype != torch.float32 or not inv_freq.is_contiguous():
        raise ValueError(
            f"inv_freq must be contiguous float32 [num_freqs], got {inv_freq.dtype} "
            f"{list(inv_freq.shape)}; call .float()"
        )
