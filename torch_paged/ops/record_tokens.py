"""What the host is told of each row's choice besides the token: its log-probability, and failure.

For row b with slot s = slots[b] >= 0::

    failed[s]         = logits[b, tokens[b]] is NaN
    token_logprobs[s] = logprobs[b]              where logprobs are given

A NaN anywhere in a row is its maximum (see `argmax` and `sample`), so the chosen logit is NaN
exactly where the row has one.
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


def record_tokens_reference(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    logprobs: torch.Tensor | None,
    failed: torch.Tensor,
    token_logprobs: torch.Tensor,
) -> None:
    """Record every row with a slot, as the module docstring says."""
    live = slots >= 0
    slot = slots[live].long()
    chosen = logits[live].gather(1, tokens[live][:, None])[:, 0]
    failed[slot] = torch.isnan(chosen)
    if logprobs is not None:
        token_logprobs[slot] = logprobs[live]


@triton.jit
def _record_tokens_kernel(
    logits_ptr,
    tokens_ptr,
    slots_ptr,
    logprobs_ptr,
    failed_ptr,
    token_logprobs_ptr,
    num_rows,
    stride_b,
    HAS_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """failed[slots[b]] = isnan(logits[b, tokens[b]]) for BLOCK rows a program."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    live = slot >= 0
    token = tl.load(tokens_ptr + row, mask=live, other=0)
    chosen = tl.load(logits_ptr + row * stride_b + token, mask=live, other=0.0).to(tl.float32)
    tl.store(failed_ptr + slot, chosen != chosen, mask=live)
    if HAS_LOGPROBS:
        logprob = tl.load(logprobs_ptr + row, mask=live, other=0.0)
        tl.store(token_logprobs_ptr + slot, logprob, mask=live)


def _launch_record_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    logprobs: torch.Tensor | None,
    failed: torch.Tensor,
    token_logprobs: torch.Tensor,
) -> None:
    num_rows = logits.shape[0]
    if num_rows == 0:
        return
    pdl = use_pdl(logits)
    launch = {"launch_pdl": True} if pdl else {}
    block = 64
    _record_tokens_kernel[(triton.cdiv(num_rows, block),)](
        logits,
        tokens,
        slots,
        token_logprobs if logprobs is None else logprobs,
        failed,
        token_logprobs,
        num_rows,
        logits.stride(0),
        HAS_LOGPROBS=logprobs is not None,
        BLOCK=block,
        PDL=pdl,
        num_warps=2,
        **launch,
    )


def _record_tokens_fake(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    logprobs: torch.Tensor | None,
    failed: torch.Tensor,
    token_logprobs: torch.Tensor,
) -> None:
    return None


_record_tokens_op = register_op(
    "record_tokens(Tensor logits, Tensor tokens, Tensor slots, Tensor? logprobs, "
    "Tensor(a!) failed, Tensor(b!) token_logprobs) -> ()",
    cpu=record_tokens_reference,
    cuda=_launch_record_tokens,
    fake=_record_tokens_fake,
)


def record_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    logprobs: torch.Tensor | None,
    failed: torch.Tensor,
    token_logprobs: torch.Tensor,
) -> None:
    """Record by slot whether each row failed and, where given, its log-probability, in place.

    `tokens`, `slots` and `logprobs` are copied if they are not contiguous.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; rows contiguous.
        tokens: [num_rows] int64, each within the vocabulary.
        slots: [num_rows] int32, -1 for a padding row, which records nothing.
        logprobs: [num_rows] float32, or None.
        failed: [num_slots] bool, contiguous.
        token_logprobs: [num_slots] float32, contiguous.
    """
    if not torch.compiler.is_compiling():
        check_logits(logits)
        check_slots(slots, logits.shape[0])
        if tokens.dtype != torch.int64 or tokens.shape != logits.shape[:1]:
            raise TypeError(
                f"tokens must be int64 [{logits.shape[0]}], "
                f"got {tokens.dtype} {list(tokens.shape)}"
            )
        check_state("failed", failed, torch.bool)
        check_state("token_logprobs", token_logprobs, torch.float32)
    if logprobs is not None:
        logprobs = logprobs.contiguous()
    tokens, slots = tokens.contiguous(), slots.contiguous()
    _record_tokens_op(logits, tokens, slots, logprobs, failed, token_logprobs)


__all__ = ["record_tokens", "record_tokens_reference"]
