"""Edits of the logits that depend on a slot's history, in place.

Sets of tokens are bitmaps ``mask [num_slots, ceil(vocab_size / 32)] int32``: token t of slot s is
in the set iff bit ``t % 32`` of ``mask[s, t // 32]`` is 1. For row b with slot s >= 0::

    mark_seen                 seen_mask[s] |= {tokens[b]}
    apply_repetition_penalty  x[b, t] = x[b, t] * p  if x[b, t] < 0  else  x[b, t] / p
                                        for t in seen_mask[s], with p = penalty[s]
    apply_suppress_mask       x[b, t] = -inf  for t in suppress_mask[s]

Hugging Face edits float32 logits; bfloat16 and float16 are edited in fp32 and rounded.
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

_TILE_WORDS = 128  # 4096 tokens
_TILE_MARKS = 256


def _members(mask: torch.Tensor, slots: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Expand the bitmaps of `slots` to bool [num_rows, vocab_size]; padding rows are empty."""
    words = mask[slots.clamp(min=0).long()]
    bits = (words[:, :, None] >> torch.arange(32, device=mask.device)) & 1
    members = bits.flatten(1)[:, :vocab_size].bool()
    return members & (slots >= 0)[:, None]


def mark_seen_reference(
    seen_mask: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Set the bit of each token in its slot's bitmap."""
    valid = (slots >= 0) & (tokens >= 0) & (tokens < seen_mask.shape[1] * 32)
    # Distinct bits that are still 0 may be added, which is all that torch scatters in place of or.
    pairs = torch.stack([slots[valid].long(), tokens[valid].long()], dim=1).unique(dim=0)
    slot, word, bit = pairs[:, 0], pairs[:, 1] // 32, pairs[:, 1] % 32
    new = (seen_mask[slot, word] >> bit) & 1 == 0
    ones = torch.ones_like(bit, dtype=torch.int32) << bit.to(torch.int32)
    seen_mask.index_put_((slot[new], word[new]), ones[new], accumulate=True)


def apply_repetition_penalty_reference(
    logits: torch.Tensor, seen_mask: torch.Tensor, slots: torch.Tensor, penalty: torch.Tensor
) -> None:
    """Penalise each seen token once."""
    p = penalty[slots.clamp(min=0).long()].float()[:, None]
    x = logits.float()
    penalised = torch.where(x < 0, x * p, x / p).to(logits.dtype)
    logits.copy_(torch.where(_members(seen_mask, slots, logits.shape[1]), penalised, logits))


def apply_suppress_mask_reference(
    logits: torch.Tensor, suppress_mask: torch.Tensor, slots: torch.Tensor
) -> None:
    """Set the tokens of each slot's bitmap to -inf."""
    logits.masked_fill_(_members(suppress_mask, slots, logits.shape[1]), float("-inf"))


@triton.jit
def _mark_seen_kernel(
    seen_mask_ptr,
    slots_ptr,
    tokens_ptr,
    num_tokens,
    num_words,
    stride_ms,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """seen_mask[slots[i], tokens[i] // 32] |= 1 << (tokens[i] % 32)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + i, mask=i < num_tokens, other=-1).to(tl.int64)
    token = tl.load(tokens_ptr + i, mask=i < num_tokens, other=-1)
    valid = (slot >= 0) & (token >= 0) & (token < num_words * 32)
    bit = tl.full([BLOCK], 1, tl.int32) << (token & 31).to(tl.int32)
    tl.atomic_or(seen_mask_ptr + slot * stride_ms + (token >> 5), bit, mask=valid, sem="relaxed")


@triton.jit
def _edit_members_kernel(
    logits_ptr,
    mask_ptr,
    slots_ptr,
    penalty_ptr,
    vocab_size,
    num_words,
    stride_b,
    stride_ms,
    SUPPRESS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x[b, t] = -inf (SUPPRESS) or penalised, for t in mask[slots[b]] within one tile."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        word_index = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        words = tl.load(
            mask_ptr + slot * stride_ms + word_index, mask=word_index < num_words, other=0
        )
        # Few tokens are members: most tiles touch no logit.
        if tl.max((words != 0).to(tl.int32), axis=0) != 0:
            bit = tl.arange(0, 32)
            member = ((words[:, None] >> bit[None, :]) & 1) != 0
            token = word_index[:, None] * 32 + bit[None, :]
            member = member & (token < vocab_size)
            pointers = logits_ptr + row * stride_b + token
            if SUPPRESS:
                new = tl.full([WORDS, 32], float("-inf"), tl.float32)
            else:
                p = tl.load(penalty_ptr + slot).to(tl.float32)
                # torch divides a CUDA tensor by a number this way too.
                reciprocal = tl.div_rn(1.0, p)
                x = tl.load(pointers, mask=member, other=0.0).to(tl.float32)
                new = tl.where(x < 0.0, x * p, x * reciprocal)
            tl.store(pointers, new.to(logits_ptr.dtype.element_ty), mask=member)


def _launch_mark_seen(seen_mask: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    num_tokens = tokens.shape[0]
    if num_tokens == 0:
        return
    pdl = use_pdl(seen_mask)
    launch = {"launch_pdl": True} if pdl else {}
    _mark_seen_kernel[(triton.cdiv(num_tokens, _TILE_MARKS),)](
        seen_mask,
        slots,
        tokens,
        num_tokens,
        seen_mask.shape[1],
        seen_mask.stride(0),
        BLOCK=_TILE_MARKS,
        PDL=pdl,
        num_warps=4,
        **launch,
    )


def _edit_members(
    logits: torch.Tensor, mask: torch.Tensor, slots: torch.Tensor, penalty: torch.Tensor | None
) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    pdl = use_pdl(logits)
    launch = {"launch_pdl": True} if pdl else {}
    _edit_members_kernel[(num_rows, triton.cdiv(mask.shape[1], _TILE_WORDS))](
        logits,
        mask,
        slots,
        mask if penalty is None else penalty,
        vocab_size,
        mask.shape[1],
        logits.stride(0),
        mask.stride(0),
        SUPPRESS=penalty is None,
        WORDS=_TILE_WORDS,
        PDL=pdl,
        num_warps=4,
        **launch,
    )


def _launch_apply_repetition_penalty(
    logits: torch.Tensor, seen_mask: torch.Tensor, slots: torch.Tensor, penalty: torch.Tensor
) -> None:
    _edit_members(logits, seen_mask, slots, penalty)


def _launch_apply_suppress_mask(
    logits: torch.Tensor, suppress_mask: torch.Tensor, slots: torch.Tensor
) -> None:
    _edit_members(logits, suppress_mask, slots, None)


def _in_place_fake(*tensors: torch.Tensor) -> None:
    return None


_mark_seen_op = register_op(
    "mark_seen(Tensor(a!) seen_mask, Tensor slots, Tensor tokens) -> ()",
    cpu=mark_seen_reference,
    cuda=_launch_mark_seen,
    fake=_in_place_fake,
)
_apply_repetition_penalty_op = register_op(
    "apply_repetition_penalty(Tensor(a!) logits, Tensor seen_mask, Tensor slots, "
    "Tensor penalty) -> ()",
    cpu=apply_repetition_penalty_reference,
    cuda=_launch_apply_repetition_penalty,
    fake=_in_place_fake,
)
_apply_suppress_mask_op = register_op(
    "apply_suppress_mask(Tensor(a!) logits, Tensor suppress_mask, Tensor slots) -> ()",
    cpu=apply_suppress_mask_reference,
    cuda=_launch_apply_suppress_mask,
    fake=_in_place_fake,
)


def mark_seen(seen_mask: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Add each token to its slot's bitmap, in place.

    Args:
        seen_mask: [num_slots, num_words] int32, rows contiguous.
        slots: [num_tokens] int32; a slot may occur often (a prompt); -1 is skipped. Copied if it
            is not contiguous, as `tokens` is.
        tokens: [num_tokens] int64; a token past the bitmap's end is skipped.
    """
    if not torch.compiler.is_compiling():
        _check_mask(seen_mask, "seen_mask", None)
        check_slots(slots, tokens.shape[0])
        if tokens.dtype != torch.int64 or tokens.dim() != 1:
            raise TypeError(
                f"tokens must be int64 [num_tokens], got {tokens.dtype} {list(tokens.shape)}"
            )
    _mark_seen_op(seen_mask, slots.contiguous(), tokens.contiguous())


def apply_repetition_penalty(
    logits: torch.Tensor, seen_mask: torch.Tensor, slots: torch.Tensor, penalty: torch.Tensor
) -> None:
    """Multiply negative and divide other logits of seen tokens by the slot's penalty, in place.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; rows contiguous.
        seen_mask: [num_slots, ceil(vocab_size / 32)] int32, see `mark_seen`.
        slots: [num_rows] int32, -1 for a padding row; copied if it is not contiguous.
        penalty: [num_slots] float32 or float64, contiguous; 1 changes nothing.
    """
    if not torch.compiler.is_compiling():
        check_logits(logits)
        _check_mask(seen_mask, "seen_mask", logits.shape[1])
        check_slots(slots, logits.shape[0])
        check_state("penalty", penalty, torch.float32, torch.float64)
    _apply_repetition_penalty_op(logits, seen_mask, slots.contiguous(), penalty)


def apply_suppress_mask(
    logits: torch.Tensor, suppress_mask: torch.Tensor, slots: torch.Tensor
) -> None:
    """Set the logits of the slot's suppressed tokens to -inf, in place.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; rows contiguous.
        suppress_mask: [num_slots, ceil(vocab_size / 32)] int32; `mark_seen` fills it.
        slots: [num_rows] int32, -1 for a padding row; copied if it is not contiguous.
    """
    if not torch.compiler.is_compiling():
        check_logits(logits)
        _check_mask(suppress_mask, "suppress_mask", logits.shape[1])
        check_slots(slots, logits.shape[0])
    _apply_suppress_mask_op(logits, suppress_mask, slots.contiguous())


def _check_mask(mask: torch.Tensor, name: str, vocab_size: int | None) -> None:
    num_words = -(-vocab_size // 32) if vocab_size is not None else mask.shape[-1]
    if mask.dim() != 2 or mask.dtype != torch.int32 or mask.shape[1] != num_words:
        raise TypeError(
            f"{name} must be int32 [num_slots, {num_words}], got {mask.dtype} {list(mask.shape)}"
        )
    if mask.stride(1) != 1 and num_words > 1:
        raise ValueError(f"{name} must be contiguous in the last dimension, got {mask.stride()}")


__all__ = [
    "apply_repetition_penalty",
    "apply_repetition_penalty_reference",
    "apply_suppress_mask",
    "apply_suppress_mask_reference",
    "mark_seen",
    "mark_seen_reference",
]
