"""The ceilings of this device, measured in the run that reports against them."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.timing import graph_ms
from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        acc += tl.load(x_ptr + start + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out_ptr + pid, tl.sum(acc))


def read_tbps(device: torch.device | str = "cuda") -> float:
    """Return TB/s of the best of a few reading kernels over 4 GiB of random bf16.

    On a CPU: of torch's sum over 64 MiB of float32.
    """
    device = torch.device(device)
    if device.type != "cuda":
        x = torch.randn(16 << 20)
        return x.nbytes / graph_ms(x.sum, 5, device).low / 1e9
    best = _best_read(device)
    torch.cuda.empty_cache()
    return best


def _best_read(device: torch.device) -> float:
    count = 2 << 30
    x = torch.randn(count // 8, device=device, dtype=torch.bfloat16).repeat(8)
    out = torch.empty(132 * 32, device=device)
    best = 0.0
    for block in (4096, 8192):
        for grid in (132 * 8, 132 * 16):

            def launch(block: int = block, grid: int = grid) -> None:
                _read_kernel[(grid,)](x, out, count, block, num_warps=8)

            ms = triton.testing.do_bench(launch, rep=100, return_mode="median")
            best = max(best, count * 2 / ms / 1e9)
    return best


def matmul_tflops(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return TFLOP/s of the best square matrix product of this device."""
    device, best = torch.device(device), 0.0
    for size in (4096, 8192) if device.type == "cuda" else (256,):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        ms = graph_ms(partial(torch.mm, a, b), 10, device).median
        best = max(best, 2 * size**3 / ms / 1e9)
    return best


__all__ = ["matmul_tflops", "read_tbps"]
