"""What the kernels of `fused_linear` take: tensors, numbers, constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torch_paged.ops.triton_compat import triton, use_pdl


class Arguments(NamedTuple):
    """What the kernels take in this order: pointers, numbers; and constants by name."""

    pointers: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]


def _vector(x: Tensor, weights: Sequence[Tensor], in_features: int) -> int:
    """Return how many elements the kernels load at a time: what all alignments allow, <= 16 bytes.

    One number serves x and the weights, so their strides reach the kernel in its multiples.
    """
    size = x.element_size()
    common = in_features | 16 // size
    for tensor in (x, *weights):
        common |= tensor.data_ptr() // size
        if tensor.shape[0] > 1:
            common |= tensor.stride(0)
    return common & -common


def kernel_arguments(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weight: Tensor | None,
    norm: bool,
    eps: float,
    norm_offset: float,
    residual: Tensor | None,
    activation: str,
    gated: bool,
    out: Tensor,
    beside: Sequence[Tensor] = (),
) -> Arguments:
    """Return the arguments of any of the kernels, without low-rank updates.

    `beside`: further matrices that are loaded VEC elements at a time.
    """
    biases = [*biases, None, None, None]
    vec = _vector(x, (*weights, *beside), x.shape[1])
    streams = [weights[min(i, len(weights) - 1)] for i in range(3)]
    pointers = (
        x,
        *streams,
        *(streams[0] if b is None else b for b in biases[:3]),
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        *(x, x, x, x),
        out,
    )
    numbers = (
        x.shape[0],
        *(w.shape[0] for w in streams),
        x.stride(0) // vec,
        *(w.stride(0) // vec for w in streams),
        0 if residual is None else residual.stride(0),
        eps,
        0.0 if norm_weight is None else norm_offset,
        *(0.0, 0.0, 0.0),
    )
    pdl = use_pdl(x)
    constants = {
        "K": x.shape[1],
        "NUM_WEIGHTS": len(weights),
        "HAS_BIAS0": biases[0] is not None,
        "HAS_BIAS1": biases[1] is not None,
        "HAS_BIAS2": biases[2] is not None,
        "NORM": norm,
        "HAS_GAIN": norm_weight is not None,
        "HAS_RESIDUAL": residual is not None,
        "RANK0": 0,
        "RANK1": 0,
        "RANK2": 0,
        "MAX_RANK": 0,
        "AFTER_SHRINK": False,
        "ACTIVATION": activation,
        "GATED": gated,
        "VEC": vec,
        "PDL": pdl,
    }
    if pdl:
        constants["launch_pdl"] = True
    return Arguments(pointers, numbers, constants)


def with_updates(
    arguments: Arguments,
    lora_x: Tensor,
    updates: Sequence[Tensor],
    scales: Sequence[float],
    after_shrink: bool,
) -> Arguments:
    """Return the arguments with low-rank updates.

    `after_shrink`: the kernel launched just before makes `lora_x` and let this one start when x
    was complete, so that nothing but `lora_x` has to be waited for.
    """
    pointers, numbers, constants = arguments
    missing = 3 - len(updates)
    ranks = [*(update.shape[1] for update in updates), *(0,) * missing]
    # A rank of 0 has no memory; all three pointers have one type.
    present = next((t for t in updates if t.shape[1]), lora_x)
    tensors = [update if update.shape[1] else present for update in updates]
    tensors += [present] * missing
    return Arguments(
        (*pointers[:-5], *tensors, lora_x, pointers[-1]),
        (*numbers[:-3], *(float(scale) for scale in scales), *(0.0,) * missing),
        {
            **constants,
            **{f"RANK{i}": rank for i, rank in enumerate(ranks)},
            "MAX_RANK": max(triton.next_power_of_2(max(ranks)), 16) if any(ranks) else 0,
            "AFTER_SHRINK": after_shrink and any(ranks),
        },
    )


__all__ = ["Arguments", "kernel_arguments", "with_updates"]
