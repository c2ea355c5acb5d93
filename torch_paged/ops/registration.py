"""Registration of ops through torch.library, cheaper per call than ``custom_op``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# One fragment for the process; dropping it would unregister every op.
LIBRARY = torch.library.Library("torch_paged", "FRAGMENT")


def register_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Define ``torch_paged::<schema>`` and return its cached ``.default`` overload.

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
    return getattr(torch.ops.torch_paged, name).default
