"""Argument checks shared by the ops over logits and the state of slots."""

from __future__ import annotations

import torch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_logits(logits: torch.Tensor) -> None:
    """Raise unless logits are floating [num_rows, vocab_size > 0] with contiguous rows."""
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(
            f"logits must be [num_rows, vocab_size] with vocab_size > 0, got {list(logits.shape)}"
        )
    if logits.dtype not in _DTYPES:
        raise TypeError(
            f"logits must be float32, bfloat16 or float16, got {logits.dtype}; call .float()"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(
            f"logits must be contiguous in the last dimension, got strides {logits.stride()}; "
            "call .contiguous()"
        )


def check_slots(slots: torch.Tensor, num_rows: int) -> None:
    """Raise unless slots are int32 [num_rows]."""
    if slots.dtype != torch.int32 or slots.shape != (num_rows,):
        raise TypeError(f"slots must be int32 [{num_rows}], got {slots.dtype} {list(slots.shape)}")


def check_state(name: str, state: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise unless a state is contiguous [num_slots] of one of `dtypes`: kernels index it so."""
    if state.dtype not in dtypes or state.dim() != 1 or not state.is_contiguous():
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(
            f"{name} must be {wanted} [num_slots], contiguous, got {state.dtype} "
            f"{list(state.shape)} with strides {state.stride()}; call .contiguous()"
        )


__all__ = ["check_logits", "check_slots", "check_state"]
