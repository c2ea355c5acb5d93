"""Triton when it is installed, inert stand-ins when it is not.

Op files define their kernels at module level; on platforms without Triton (macOS, Windows) the
decorator below makes each kernel raise when launched, and the CPU references keep working.

Kernels follow each other by programmatic dependent launch where the device has it, under two
rules. Each waits (`gdc_wait`) before it reads what a kernel of the same step wrote: its end is
then the end of all before it. And it lets its successors start at once (`gdc_launch_dependents`),
unless it writes what they read before they wait: decode attention reads slots, lengths, block
tables and the blocks of earlier tokens, so `advance` and `copy_blocks` let nobody start before
they end. The first half of a low-rank update lets the linear behind it start when its own wait is
over: what it reads is then complete, and the linear waits for nothing but its result.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
else:
    try:
        import triton
        import triton.language as tl
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
        from triton.tools.tensor_descriptor import TensorDescriptor

        HAS_TRITON = True
    except ImportError:
        HAS_TRITON = False

        class _Missing:
            """Stands for any attribute of triton; launching or calling it raises."""

            constexpr = object

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return self

            def __getitem__(self, grid: Any) -> Any:
                return self

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                raise NotImplementedError(
                    "this op needs Triton on a CUDA device, and triton is not installed; "
                    "install triton>=3.6 or move the tensors to the CPU"
                )

        class _MissingTriton(_Missing):
            def jit(self, fn: Any = None, **kwargs: Any) -> Any:
                return _Missing() if callable(fn) else lambda f: _Missing()

            @staticmethod
            def cdiv(a: int, b: int) -> int:
                return -(-a // b)

            @staticmethod
            def next_power_of_2(n: int) -> int:
                return 1 << max(n - 1, 0).bit_length()

        triton = _MissingTriton()
        tl = _Missing()
        gdc_wait = gdc_launch_dependents = TensorDescriptor = _Missing()

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def device_capability(device_index: int) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, e.g. ``(9, 0)``."""
    return torch.cuda.get_device_capability(device_index)


def use_pdl(tensor: torch.Tensor) -> bool:
    """Say whether kernels over `tensor` may use programmatic dependent launch (from Hopper on)."""
    if INTERPRETED or not tensor.is_cuda:
        return False
    return device_capability(tensor.device.index or 0)[0] >= 9


__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "TensorDescriptor",
    "device_capability",
    "gdc_launch_dependents",
    "gdc_wait",
    "tl",
    "triton",
    "use_pdl",
]
