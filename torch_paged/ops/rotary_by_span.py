"""Rotary tables whose frequencies depend on the length of the sequence.

    span[t]    = max(positions[t] + 1 + leads[t], floors[t])
    freq[t]    = inv_freq                                      span[t] <= limit
               | long_inv_freq                                 else, where it is given
               | 1 / base[t] ** (2 r / rotary_dim)             else: dynamic NTK
    base[t]    = base * (factor * span[t] / limit - (factor - 1)) ** (dim / (dim - 2))
    cos, sin   = cos(positions[t] * freq[t]) * scaling, sin(...) * scaling

The span is the length that Hugging Face takes from the positions of a whole batch, on the host;
here each row knows how far it is behind the longest one, so that nothing has to be looked up.
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

__all__ = ["dynamic_frequencies", "rotary_by_span", "rotary_by_span_reference"]


def rotary_by_span_reference(
    positions: Tensor,
    slots: Tensor | None,
    leads: Tensor | None,
    floors: Tensor,
    inv_freq: Tensor,
    long_inv_freq: Tensor | None,
    limit: int,
    base: float,
    factor: float,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Compute the module's equation with torch, in the order of Hugging Face's own."""
    if slots is not None:
        rows = slots.clamp(min=0)
        positions, floors = positions.index_select(0, rows), floors.index_select(0, rows)
        leads = None if leads is None else leads.index_select(0, rows)
    spans = positions.long() + 1
    spans = torch.maximum(spans if leads is None else spans + leads, floors)
    if long_inv_freq is None:
        long_inv_freq = dynamic_frequencies(spans, inv_freq, limit, base, factor)
    freq = torch.where((spans > limit)[:, None], long_inv_freq, inv_freq)
    angle = positions.float()[:, None] * freq
    cos, sin = angle.cos() * scaling, angle.sin() * scaling
    if slots is not None:
        padding = (slots < 0).unsqueeze(1)
        cos.masked_fill_(padding, 0.0)
        sin.masked_fill_(padding, 0.0)
    return cos, sin


def dynamic_frequencies(
    spans: Tensor, inv_freq: Tensor, limit: int, base: float, factor: float
) -> Tensor:
    """Return the frequencies [num_spans, num_freqs] of dynamic NTK; as of `limit` below it."""
    spans = spans.clamp(min=limit)
    dim = 2 * inv_freq.shape[0]
    bases = base * ((factor * spans / limit) - (factor - 1)) ** (dim / (dim - 2))
    powers = torch.arange(0, dim, 2, device=spans.device).float() / dim
    return 1.0 / bases[:, None] ** powers


@triton.jit
def _rotary_by_span_kernel(
    positions_ptr,
    slots_ptr,
    leads_ptr,
    floors_ptr,
    inv_freq_ptr,
    long_ptr,
    cos_ptr,
    sin_ptr,
    num_freqs,
    limit,
    base,
    factor,
    exponent,
    scaling,
    HAS_SLOTS: tl.constexpr,
    HAS_LEADS: tl.constexpr,
    HAS_LONG: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """cos, sin of positions[row] * freq(span[row]), one row a program."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_freqs
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    freq = tl.load(inv_freq_ptr + cols, mask=mask, other=0.0)
    at = row
    live = True
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        live = slot >= 0
        at = tl.where(live, slot, 0)
    position = tl.load(positions_ptr + at).to(tl.int32)
    span = position + 1
    if HAS_LEADS:
        span += tl.load(leads_ptr + at)
    span = tl.maximum(span, tl.load(floors_ptr + at))
    if HAS_LONG:
        long_freq = tl.load(long_ptr + cols, mask=mask, other=0.0)
    else:
        ratio = factor * tl.maximum(span, limit).to(tl.float32) / limit - (factor - 1.0)
        power = 2.0 * cols.to(tl.float32) / (2.0 * num_freqs)
        # Exponents of two lose digits that positions in the thousands need.
        if EXACT:
            grown = base * libdevice.pow(ratio, exponent)
            long_freq = 1.0 / libdevice.pow(grown + cols * 0.0, power)
        else:
            grown = tl.log2(ratio.to(tl.float64)) * exponent + tl.log2(base + ratio * 0.0)
            long_freq = tl.exp2(-grown * power).to(tl.float32)
    freq = tl.where(span > limit, long_freq, freq)
    angle = position.to(tl.float32) * freq
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


def _launch_rotary_by_span(
    positions: Tensor,
    slots: Tensor | None,
    leads: Tensor | None,
    floors: Tensor,
    inv_freq: Tensor,
    long_inv_freq: Tensor | None,
    limit: int,
    base: float,
    factor: float,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    cos, sin = _rotary_by_span_fake(
        positions,
        slots,
        leads,
        floors,
        inv_freq,
        long_inv_freq,
        limit,
        base,
        factor,
        scaling,
    )
    if cos.numel() == 0:
        return cos, sin
    num_rows, num_freqs = cos.shape
    dim = 2 * num_freqs
    pdl = use_pdl(inv_freq)
    extra = {"launch_pdl": True} if pdl else {}
    _rotary_by_span_kernel[(num_rows,)](
        positions,
        positions if slots is None else slots,
        floors if leads is None else leads,
        floors,
        inv_freq,
        inv_freq if long_inv_freq is None else long_inv_freq,
        cos,
        sin,
        num_freqs,
        limit,
        float(base),
        float(factor),
        # With a long table there is no formula, and dim may be 2.
        dim / (dim - 2) if long_inv_freq is None else 0.0,
        float(scaling),
        HAS_SLOTS=slots is not None,
        HAS_LEADS=leads is not None,
        HAS_LONG=long_inv_freq is not None,
        EXACT=not INTERPRETED,
        BLOCK=triton.next_power_of_2(num_freqs),
        PDL=pdl,
        num_warps=1,
        **extra,
    )
    return cos, sin


def _rotary_by_span_fake(
    positions: Tensor,
    slots: Tensor | None,
    leads: Tensor | None,
    floors: Tensor,
    inv_freq: Tensor,
    long_inv_freq: Tensor | None,
    limit: int,
    base: float,
    factor: float,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    num_rows = positions.shape[0] if slots is None else slots.shape[0]
    shape = (num_rows, inv_freq.shape[0])
    cos = torch.empty(shape, dtype=torch.float32, device=inv_freq.device)
    return cos, torch.empty_like(cos)


_rotary_by_span = register_op(
    "rotary_by_span(Tensor positions, Tensor? slots, Tensor? leads, Tensor floors, "
    "Tensor inv_freq, Tensor? long_inv_freq, int limit, float base, float factor, float scaling) "
    "-> (Tensor, Tensor)",
    cpu=rotary_by_span_reference,
    cuda=_launch_rotary_by_span,
    fake=_rotary_by_span_fake,
)


def rotary_by_span(
    positions: Tensor,
    slots: Tensor | None,
    leads: Tensor | None,
    floors: Tensor,
    inv_freq: Tensor,
    long_inv_freq: Tensor | None = None,
    *,
    limit: int,
    base: float = 1.0,
    factor: float = 1.0,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each row's rotary angles.

    Args:
        positions: int32 or int64, contiguous: [num_tokens], or the state [num_slots] read by
            `slots`.
        slots: int32 [num_rows], contiguous, the slot of each row and -1 for padding; or None.
        leads: int32 like `positions`: how far the longest row of the batch is ahead; None: 0.
        floors: int32 like `positions`: the least span of the token.
        inv_freq: fp32 [num_freqs], contiguous: the frequencies up to `limit`.
        long_inv_freq: fp32 [num_freqs], contiguous: those past it; None: dynamic NTK.
        limit: longest span of the plain frequencies.
        base, factor: of dynamic NTK.
        scaling: factor on both results.

    Returns:
        cos and sin, fp32 [num_tokens or num_rows, num_freqs]; zeros in padding rows.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    if not torch.compiler.is_compiling():
        _check(positions, slots, leads, floors, inv_freq, long_inv_freq, limit)
    return _rotary_by_span(
        positions, slots, leads, floors, inv_freq, long_inv_freq, limit, base, factor, scaling
    )


def _check(
    positions: Tensor,
    slots: Tensor | None,
    leads: Tensor | None,
    floors: Tensor,
    inv_freq: Tensor,
    long_inv_freq: Tensor | None,
    limit: int,
) -> None:
    if (
        positions.dim() != 1
        or positions.dtype not in (torch.int32, torch.int64)
        or not positions.is_contiguous()
    ):
        raise ValueError(
            f"positions must be contiguous int32 or int64 [num_tokens], got {positions.dtype} "
            f"{list(positions.shape)} with strides {positions.stride()}"
        )
    for name, tensor in (("leads", leads), ("floors", floors)):
        if tensor is None:
            continue
        fits = tensor.shape == positions.shape and tensor.is_contiguous()
        if not fits or tensor.dtype != torch.int32:
            raise ValueError(
                f"{name} must be contiguous int32 {list(positions.shape)} as positions, got "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
    if slots is not None and (
        slots.dim() != 1 or slots.dtype != torch.int32 or not slots.is_contiguous()
    ):
        raise ValueError(
            f"slots must be contiguous int32 [num_rows], got {slots.dtype} {list(slots.shape)}; "
            "call .int()"
        )
    for name, tensor in (("inv_freq", inv_freq), ("long_inv_freq", long_inv_freq)):
        if tensor is None:
            continue
        fits = tensor.shape == inv_freq.shape and tensor.dim() == 1 and tensor.is_contiguous()
        if not fits or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} must be contiguous float32 [num_freqs], got {tensor.dtype} "
                f"{list(tensor.shape)}; call .float()"
            )
    if limit < 1 or (long_inv_freq is None and inv_freq.shape[0] < 2):
        raise ValueError(
            f"limit must be at least 1 and dynamic frequencies at least 2, got {limit} and "
            f"{inv_freq.shape[0]}"
        )
