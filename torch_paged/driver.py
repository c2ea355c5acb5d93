"""The few calls of the CUDA driver that torch and Triton do not offer.

Nothing here loads the driver before a CUDA device is in use.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

# CUfunction_attribute, CUstream_flags
_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
_NON_BLOCKING = 1


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of its own on `device` (with an index), which is never destroyed.

    The streams that torch hands out come from a pool of 32, made at once (70 MiB of device memory
    on an H200), and come round again.
    """
    library = _library()
    if library is not None:
        handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the context current
            if library.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING) == 0 and handle.value:
                return torch.cuda.ExternalStream(handle.value, device)
    # High priority: the others are more often used for matrix products, whose workspace is kept
    # by stream.
    return torch.cuda.Stream(device, priority=-1)


def prefer_shared_memory(function: int, percent: int) -> None:
    """Ask that a kernel runs with `percent` of an SM's memory as shared memory, the rest as L1.

    Args:
        function: the driver's handle of a loaded kernel (CUfunction).
        percent: 0 to 100; the driver rounds up to what the device offers. A hint: a driver that
            does not know it is not asked again.
    """
    library = _library()
    if library is not None:
        library.cuFuncSetAttribute(
            ctypes.c_void_p(function),
            ctypes.c_int(_PREFERRED_SHARED_MEMORY_CARVEOUT),
            ctypes.c_int(percent),
        )
