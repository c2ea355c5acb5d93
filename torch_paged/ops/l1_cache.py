"""Leaves an SM's memory to L1 for kernels whose loads in flight live there.

L1 and shared memory are one memory. A load on its way to registers holds a line of L1, so that a
kernel which streams weights into registers is as fast as L1 is large; yet without a word from
it, it runs with whatever split the kernel before it left behind. After attention, which takes
nearly all as shared memory, a GEMV of Llama-3.1-8B read 3.5 instead of 4.5 TB/s (H200).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_paged.driver import prefer_shared_memory

# Handles of the kernels that were asked for; a handle is never reused while its module is loaded.
_ASKED: set[int] = set()

_REGISTERS = 65536
_MAX_WARPS = 64
# Shared memory that the hardware takes for each block of threads.
_RESERVED_BYTES = 1024


def prefer_l1(kernel: Any, device: torch.device) -> None:
    """Give a launched Triton kernel the shared memory that its blocks fill, and L1 the rest.

    Takes effect from the next launch on. `kernel` is what a launch returns: None when interpreted.
    """
    if kernel is None or kernel.function in _ASKED:
        return
    _ASKED.add(kernel.function)
    total = _shared_memory_bytes(device.index or 0)
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    prefer_shared_memory(kernel.function, carveout_percent(shared, kernel.n_regs, warps, total))


def carveout_percent(shared: int, registers: int, warps: int, total: int) -> int:
    """Return what share of `total` bytes all blocks use that fit an SM's registers and warps.

    Args:
        shared: bytes of shared memory of a block.
        registers: registers of a thread.
        warps: warps of a block.
        total: bytes of shared memory that an SM can have at most.
    """
    by_registers = _REGISTERS // (max(-(-registers // 8) * 8, 8) * 32)
    blocks = max(min(by_registers, _MAX_WARPS) // warps, 1)
    return min(-(-100 * blocks * (shared + _RESERVED_BYTES) // total), 100)


@functools.cache
def _shared_memory_bytes(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).shared_memory_per_multiprocessor)
