"""End of a decode step: record each row's token and move its slot's state one token on.

For row b with slot s = slots[b] >= 0, all right-hand sides read before anything is written::

    t               = pad_token[s] if finished[s] and pad_token[s] >= 0 else tokens[b]
    output[num_generated[s] % ring, s] = t
    last_token[s]   = t
    positions[s]    = positions[s] + 1
    context_lens[s] = context_lens[s] + 1
    num_generated[s] = num_generated[s] + 1
    finished[s]     = finished[s] or t in eos_ids[s] or num_generated[s] >= max_new_tokens[s]

and ``num_unfinished[0]`` becomes the number of such rows that are not finished now.
"""

from __future__ import annotations

import torch

from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_wait,
    tl,
    triton,
    use_pdl,
)


def advance_reference(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    positions: torch.Tensor,
    context_lens: torch.Tensor,
    num_generated: torch.Tensor,
    max_new_tokens: torch.Tensor,
    finished: torch.Tensor,
    eos_ids: torch.Tensor,
    pad_token: torch.Tensor,
    output: torch.Tensor,
    num_unfinished: torch.Tensor,
) -> None:
    """Advance every row with a slot, as the module docstring says."""
    live = slots >= 0
    slot = slots[live].long()
    was_finished = finished[slot]
    pad = pad_token[slot]
    token = torch.where(was_finished & (pad >= 0), pad, tokens[live])
    generated = num_generated[slot]
    output[generated.long() % output.shape[0], slot] = token
    last_token[slot] = token
    positions[slot] += 1
    context_lens[slot] += 1
    num_generated[slot] = generated + 1
    # The unused entries of eos_ids are -1, which is no token.
    is_end = ((token[:, None] == eos_ids[slot]) & (token >= 0)[:, None]).any(dim=1)
    now_finished = was_finished | is_end | (generated + 1 >= max_new_tokens[slot])
    finished[slot] = now_finished
    num_unfinished.fill_((~now_finished).sum())


# Rows times end ids compared at a time: a request may name thousands of end ids.
_EOS_TILE = 2048


@triton.jit
def _advance_kernel(
    tokens_ptr,
    slots_ptr,
    last_token_ptr,
    positions_ptr,
    context_lens_ptr,
    num_generated_ptr,
    max_new_tokens_ptr,
    finished_ptr,
    eos_ids_ptr,
    pad_token_ptr,
    output_ptr,
    num_unfinished_ptr,
    num_rows,
    ring_size,
    num_eos,
    stride_eos,
    stride_output,
    EOS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for all rows: their count of unfinished rows needs no atomics then."""
    if PDL:
        # Successors start when this kernel is done: they read the state before they wait.
        gdc_wait()
    num_live = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        in_batch = row < num_rows
        slot = tl.load(slots_ptr + row, mask=in_batch, other=-1).to(tl.int64)
        live = slot >= 0
        token = tl.load(tokens_ptr + row, mask=live, other=-1)
        was_finished = tl.load(finished_ptr + slot, mask=live, other=1).to(tl.int32) != 0
        pad = tl.load(pad_token_ptr + slot, mask=live, other=-1)
        generated = tl.load(num_generated_ptr + slot, mask=live, other=0)
        limit = tl.load(max_new_tokens_ptr + slot, mask=live, other=0)
        position = tl.load(positions_ptr + slot, mask=live, other=0)
        context_len = tl.load(context_lens_ptr + slot, mask=live, other=0)

        token = tl.where(was_finished & (pad >= 0), pad, token)
        now_finished = was_finished | (generated + 1 >= limit)
        is_end = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, num_eos, EOS_BLOCK):
            i = first + tl.arange(0, EOS_BLOCK)[None, :]
            eos_ptrs = eos_ids_ptr + slot[:, None] * stride_eos + i
            eos = tl.load(eos_ptrs, mask=live[:, None] & (i < num_eos), other=-1)
            equal = (token[:, None] == eos) & (eos >= 0)
            is_end |= tl.max(equal.to(tl.int32), axis=1)
        now_finished = now_finished | (is_end != 0)

        ring_row = (generated % ring_size).to(tl.int64)
        tl.store(output_ptr + ring_row * stride_output + slot, token, mask=live)
        tl.store(last_token_ptr + slot, token, mask=live)
        tl.store(positions_ptr + slot, position + 1, mask=live)
        tl.store(context_lens_ptr + slot, context_len + 1, mask=live)
        tl.store(num_generated_ptr + slot, generated + 1, mask=live)
        tl.store(finished_ptr + slot, now_finished.to(tl.int8), mask=live)
        num_live += (live & (now_finished == 0)).to(tl.int32)
    tl.store(num_unfinished_ptr, tl.sum(num_live, axis=0))


def _launch_advance(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    positions: torch.Tensor,
    context_lens: torch.Tensor,
    num_generated: torch.Tensor,
    max_new_tokens: torch.Tensor,
    finished: torch.Tensor,
    eos_ids: torch.Tensor,
    pad_token: torch.Tensor,
    output: torch.Tensor,
    num_unfinished: torch.Tensor,
) -> None:
    num_rows = tokens.shape[0]
    num_eos = eos_ids.shape[1]
    block = min(1024, max(32, triton.next_power_of_2(num_rows)))
    eos_block = min(triton.next_power_of_2(max(num_eos, 1)), max(_EOS_TILE // block, 1))
    pdl = use_pdl(tokens)
    launch = {"launch_pdl": True} if pdl else {}
    _advance_kernel[(1,)](
        tokens,
        slots,
        last_token,
        positions,
        context_lens,
        num_generated,
        max_new_tokens,
        finished.view(torch.int8),
        eos_ids,
        pad_token,
        output,
        num_unfinished,
        num_rows,
        output.shape[0],
        num_eos,
        eos_ids.stride(0),
        output.stride(0),
        EOS_BLOCK=eos_block,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(1, block // 128, block * eos_block // 512),
        **launch,
    )


def _advance_fake(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    positions: torch.Tensor,
    context_lens: torch.Tensor,
    num_generated: torch.Tensor,
    max_new_tokens: torch.Tensor,
    finished: torch.Tensor,
    eos_ids: torch.Tensor,
    pad_token: torch.Tensor,
    output: torch.Tensor,
    num_unfinished: torch.Tensor,
) -> None:
    return None


_advance_op = register_op(
    "advance(Tensor tokens, Tensor slots, Tensor(a!) last_token, Tensor(b!) positions, "
    "Tensor(c!) context_lens, Tensor(d!) num_generated, Tensor max_new_tokens, "
    "Tensor(e!) finished, Tensor eos_ids, Tensor pad_token, Tensor(f!) output, "
    "Tensor(g!) num_unfinished) -> ()",
    cpu=advance_reference,
    cuda=_launch_advance,
    fake=_advance_fake,
)


def advance(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    positions: torch.Tensor,
    context_lens: torch.Tensor,
    num_generated: torch.Tensor,
    max_new_tokens: torch.Tensor,
    finished: torch.Tensor,
    eos_ids: torch.Tensor,
    pad_token: torch.Tensor,
    output: torch.Tensor,
    num_unfinished: torch.Tensor,
) -> None:
    """Record the tokens of a step and advance the slots' state in place.

    Rows whose slot is -1 change nothing and are not counted. The slots of a call are distinct.
    `tokens` and `slots` may be views, such as a column of ids, which are copied; the state is
    contiguous.

    Args:
        tokens: [num_rows] int64, the tokens chosen in this step.
        slots: [num_rows] int32, -1 for a padding row.
        last_token: [num_slots] int64, written.
        positions: [num_slots] int32, written: rotary position of `last_token`.
        context_lens: [num_slots] int32, written: tokens in the cache.
        num_generated: [num_slots] int32, written.
        max_new_tokens: [num_slots] int32, the limit of `num_generated`.
        finished: [num_slots] bool, written.
        eos_ids: [num_slots, num_eos] int64, rows contiguous; -1 is an unused entry.
        pad_token: [num_slots] int64, what a finished slot emits; -1: it keeps emitting `tokens`.
        output: [ring_size, num_slots] int64, written at ``num_generated % ring_size``.
        num_unfinished: [1] int32, written.
    """
    if not torch.compiler.is_compiling():
        _check(tokens, slots, last_token, eos_ids, output, num_unfinished)
        _check_state(positions, torch.int32, "positions", last_token)
        _check_state(context_lens, torch.int32, "context_lens", last_token)
        _check_state(num_generated, torch.int32, "num_generated", last_token)
        _check_state(max_new_tokens, torch.int32, "max_new_tokens", last_token)
        _check_state(finished, torch.bool, "finished", last_token)
        _check_state(pad_token, torch.int64, "pad_token", last_token)
    _advance_op(
        tokens.contiguous(),
        slots.contiguous(),
        last_token,
        positions,
        context_lens,
        num_generated,
        max_new_tokens,
        finished,
        eos_ids,
        pad_token,
        output,
        num_unfinished,
    )


def _check(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    eos_ids: torch.Tensor,
    output: torch.Tensor,
    num_unfinished: torch.Tensor,
) -> None:
    if tokens.dtype != torch.int64 or tokens.dim() != 1:
        raise TypeError(
            f"tokens must be int64 [num_rows], got {tokens.dtype} {list(tokens.shape)}"
        )
    if slots.dtype != torch.int32 or slots.shape != tokens.shape:
        raise TypeError(
            f"slots must be int32 {list(tokens.shape)}, got {slots.dtype} {list(slots.shape)}"
        )
    if last_token.dtype != torch.int64 or last_token.dim() != 1 or not last_token.is_contiguous():
        raise TypeError(
            f"last_token must be contiguous int64 [num_slots], got {last_token.dtype} "
            f"{list(last_token.shape)} with strides {last_token.stride()}"
        )
    num_slots = last_token.shape[0]
    for name, state, rows in (("eos_ids", eos_ids, True), ("output", output, False)):
        width = state.shape[0 if rows else 1] if state.dim() == 2 else -1
        if state.dtype != torch.int64 or width != num_slots or state.stride(1) != 1:
            want = "[num_slots, num_eos]" if rows else "[ring_size, num_slots]"
            raise TypeError(
                f"{name} must be int64 {want} with num_slots {num_slots} and contiguous rows, "
                f"got {state.dtype} {list(state.shape)} with strides {state.stride()}"
            )
    if num_unfinished.dtype != torch.int32 or num_unfinished.numel() != 1:
        raise TypeError(
            f"num_unfinished must be int32 [1], got {num_unfinished.dtype} "
            f"{list(num_unfinished.shape)}"
        )


def _check_state(
    state: torch.Tensor, dtype: torch.dtype, name: str, last_token: torch.Tensor
) -> None:
    if state.dtype != dtype or state.shape != last_token.shape or not state.is_contiguous():
        raise TypeError(
            f"{name} must be contiguous {dtype} {list(last_token.shape)}, "
            f"got {state.dtype} {list(state.shape)} with strides {state.stride()}"
        )


__all__ = ["advance", "advance_reference"]
