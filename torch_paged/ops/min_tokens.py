"""Minimum length: no end token before a slot has generated enough, in place.

For row b with slot s >= 0::

    x[b, t] = -inf  for t in eos_ids[s], while num_generated[s] < min_new_tokens[s]
"""

from __future__ import annotations

import torch

from torch_paged.ops.logits import check_logits, check_slots, check_state
from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)


def apply_min_tokens_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_generated: torch.Tensor,
    min_new_tokens: torch.Tensor,
    eos_ids: torch.Tensor,
) -> None:
    """Set the end tokens of slots below their minimum length to -inf."""
    slot = slots.clamp(min=0).long()
    early = (slots >= 0) & (num_generated[slot] < min_new_tokens[slot])
    ids = eos_ids[slot]
    row, column = torch.nonzero(
        early[:, None] & (ids >= 0) & (ids < logits.shape[1]), as_tuple=True
    )
    logits[row, ids[row, column]] = float("-inf")


@triton.jit
def _min_tokens_kernel(
    logits_ptr,
    slots_ptr,
    num_generated_ptr,
    min_new_tokens_ptr,
    eos_ids_ptr,
    vocab_size,
    num_eos,
    stride_b,
    stride_eos,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """x[b, t] = -inf for t in eos_ids[s] while num_generated[s] < min_new_tokens[s]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        generated = tl.load(num_generated_ptr + slot)
        minimum = tl.load(min_new_tokens_ptr + slot)
        if generated < minimum:
            suppressed = tl.full([BLOCK], float("-inf"), logits_ptr.dtype.element_ty)
            for first in range(0, num_eos, BLOCK):
                i = first + tl.arange(0, BLOCK)
                eos = tl.load(eos_ids_ptr + slot * stride_eos + i, mask=i < num_eos, other=-1)
                in_row = (eos >= 0) & (eos < vocab_size)
                tl.store(logits_ptr + row * stride_b + eos, suppressed, mask=in_row)


def _launch_apply_min_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_generated: torch.Tensor,
    min_new_tokens: torch.Tensor,
    eos_ids: torch.Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    num_eos = eos_ids.shape[1]
    if num_rows == 0 or num_eos == 0:
        return
    pdl = use_pdl(logits)
    launch = {"launch_pdl": True} if pdl else {}
    _min_tokens_kernel[(num_rows,)](
        logits,
        slots,
        num_generated,
        min_new_tokens,
        eos_ids,
        vocab_size,
        num_eos,
        logits.stride(0),
        eos_ids.stride(0),
        BLOCK=min(triton.next_power_of_2(num_eos), 1024),
        PDL=pdl,
        num_warps=1,
        **launch,
    )


def _apply_min_tokens_fake(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_generated: torch.Tensor,
    min_new_tokens: torch.Tensor,
    eos_ids: torch.Tensor,
) -> None:
    return None


_apply_min_tokens_op = register_op(
    "apply_min_tokens(Tensor(a!) logits, Tensor slots, Tensor num_generated, "
    "Tensor min_new_tokens, Tensor eos_ids) -> ()",
    cpu=apply_min_tokens_reference,
    cuda=_launch_apply_min_tokens,
    fake=_apply_min_tokens_fake,
)


def apply_min_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    num_generated: torch.Tensor,
    min_new_tokens: torch.Tensor,
    eos_ids: torch.Tensor,
) -> None:
    """Set the end tokens of slots below their minimum length to -inf, in place.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; rows contiguous.
        slots: [num_rows] int32, -1 for a padding row; copied if it is not contiguous.
        num_generated: [num_slots] int32, contiguous, tokens generated before this one.
        min_new_tokens: [num_slots] int32, contiguous.
        eos_ids: [num_slots, num_eos] int64, rows contiguous; -1 is an unused entry.
    """
    if not torch.compiler.is_compiling():
        check_logits(logits)
        check_slots(slots, logits.shape[0])
        check_state("num_generated", num_generated, torch.int32)
        check_state("min_new_tokens", min_new_tokens, torch.int32)
        if eos_ids.dtype != torch.int64 or eos_ids.dim() != 2 or eos_ids.stride(1) != 1:
            raise TypeError(
                f"eos_ids must be int64 [num_slots, num_eos] with contiguous rows, got "
                f"{eos_ids.dtype} {list(eos_ids.shape)} with strides {eos_ids.stride()}"
            )
    _apply_min_tokens_op(logits, slots.contiguous(), num_generated, min_new_tokens, eos_ids)


__all__ = ["apply_min_tokens", "apply_min_tokens_reference"]
