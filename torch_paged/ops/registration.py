"""Registration of ops through torch.library, cheaper per call than ``custom_op``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# One fragment for the process; dropping it would unregister every op.
LIBRARY = torch.library.Library("torch_paged", "FRAGMENT")

_CALLS: dict[str, Callable[..., Any]] = {}


def register_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Define ``torch_paged::<schema>`` and return a function that calls it.

    The function calls the cached ``.default`` overload; for plain CPU tensors it calls `cpu`
    straight away, because the dispatcher alone costs 30 us there when caches are cold, which
    they are after a step has read the weights.

    Args:
        schema: e.g. ``"rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor"``; arguments that
            the op writes are marked ``Tensor(a!)``.
        cpu: the plain-torch reference, which is also the CPU kernel.
        cuda: the launcher of the Triton kernel.
        fake: returns empty outputs of the right shape, dtype and device, without reading data.
    """
    name = schema.split("(", 1)[0].strip()
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"torch_paged::{name}", fake, lib=LIBRARY)
    overload = getattr(torch.ops.torch_paged, name).default

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = type(first) is torch.Tensor and first.device.type == "cpu"
        if plain and not torch.compiler.is_compiling():
            return cpu(first, *args, **kwargs)
        return overload(first, *args, **kwargs)

    _CALLS[name] = call
    return call


def registered(name: str) -> Callable[..., Any]:
    """Return the function that `register_op` returned for an op."""
    return _CALLS[name]
