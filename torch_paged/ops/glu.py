"""Activations of MLPs, alone or gating a second projection.

    activation(x)   = act(x)
    glu(gate, up)   = act(gate).to(dtype) * up

Both compute in fp32; the activation is rounded to the dtype before the product, as Hugging Face's
modules do. Names follow torch, not Hugging Face: ``silu``, ``gelu`` (erf), ``gelu_tanh``
(Hugging Face's gelu_new, gelu_fast and gelu_pytorch_tanh), ``quick_gelu``, ``relu``, ``relu2``
(relu squared) and ``sigmoid``.
"""

from __future__ import annotations

from collections.abc import Callable

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

__all__ = [
    "ACTIVATIONS",
    "activate",
    "activation",
    "activation_reference",
    "glu",
    "glu_reference",
]

_BLOCK = 1024


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


_REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "sigmoid": torch.sigmoid,
}

#: The names that `activation` arguments take.
ACTIVATIONS = frozenset(_REFERENCES)


def activation_reference(x: Tensor, activation: str) -> Tensor:
    """Apply the named activation with torch."""
    return _REFERENCES[activation](x)


def glu_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Multiply the activated gate by `up` with torch."""
    return _REFERENCES[activation](gate).mul_(up)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """act(x) of an fp32 block, in fp32; NaN stays NaN."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) = sigmoid(2u), with 2u = sqrt(8 / pi) * (x + 0.044715 x^3).
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-inner))
    elif ACTIVATION == "quick_gelu":
        y = x / (1.0 + tl.exp(-1.702 * x))
    elif ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0.0, 0.0, x * x)
    else:
        tl.static_assert(ACTIVATION == "sigmoid", "unknown activation")
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def _glu_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    stride_gt,
    stride_ut,
    width,
    ACTIVATION: tl.constexpr,
    HAS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = act(gate).to(dtype) * up over BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_ptr + row * stride_gt + cols, mask=mask, other=0.0)
    value = activate(gate.to(tl.float32), ACTIVATION)
    if HAS_UP:
        up = tl.load(up_ptr + row * stride_ut + cols, mask=mask, other=0.0)
        value = value.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * width + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    num_rows, width = gate.shape
    out = torch.empty((num_rows, width), dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    pdl = use_pdl(gate)
    extra = {"launch_pdl": True} if pdl else {}
    other = gate if up is None else up
    _glu_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        gate,
        other,
        out,
        gate.stride(0),
        other.stride(0),
        width,
        ACTIVATION=activation,
        HAS_UP=up is not None,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        **extra,
    )
    return out


def _launch_glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return _launch(gate, up, activation)


def _launch_activation(x: Tensor, activation: str) -> Tensor:
    return _launch(x, None, activation)


def _glu_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _activation_fake(x: Tensor, activation: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_GLU = register_op(
    "glu(Tensor gate, Tensor up, str activation) -> Tensor",
    cpu=glu_reference,
    cuda=_launch_glu,
    fake=_glu_fake,
)

_ACTIVATION = register_op(
    "activation(Tensor x, str activation) -> Tensor",
    cpu=activation_reference,
    cuda=_launch_activation,
    fake=_activation_fake,
)


def _check(name: str, x: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {activation!r}"
        )
    if x.dim() != 2 or not x.is_floating_point() or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"{name} must be floating [num_tokens, width] with contiguous rows, got {x.dtype} "
            f"{list(x.shape)} with strides {x.stride()}"
        )


def glu(gate: Tensor, up: Tensor, *, activation: str) -> Tensor:
    """Return ``act(gate) * up``.

    Args:
        gate: [num_tokens, width], floating, rows contiguous; the row stride is free, so both may
            be views into one projection.
        up: like `gate`, of the same dtype.
        activation: one of `ACTIVATIONS`.

    Raises:
        ValueError: a shape, dtype, stride or name is not as above.
    """
    if not torch.compiler.is_compiling():
        _check("gate", gate, activation)
        _check("up", up, activation)
        if up.shape != gate.shape or up.dtype != gate.dtype:
            raise ValueError(
                f"up must be {gate.dtype} {list(gate.shape)} like gate, got {up.dtype} "
                f"{list(up.shape)}"
            )
    return _GLU(gate, up, activation)


def activation(x: Tensor, *, activation: str) -> Tensor:
    """Return ``act(x)`` of x [num_tokens, width], floating, rows contiguous.

    Raises:
        ValueError: a shape, dtype, stride or name is not as above.
    """
    if not torch.compiler.is_compiling():
        _check("x", x, activation)
    return _ACTIVATION(x, activation)
