"""The read ceiling of this GPU, measured in the run that reports against it."""

from __future__ import annotations

import torch

from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        acc += tl.load(x_ptr + start + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out_ptr + pid, tl.sum(acc))


def read_tbps() -> float:
    """Return TB/s of the best of a few reading kernels over 4 GiB of random bf16."""
    count = 2 << 30
    x = torch.randn(count // 8, device="cuda", dtype=torch.bfloat16).repeat(8)
    out = torch.empty(132 * 32, device="cuda")
    best = 0.0
    for block in (4096, 8192):
        for grid in (132 * 8, 132 * 16):

            def launch(block: int = block, grid: int = grid) -> None:
                _read_kernel[(grid,)](x, out, count, block, num_warps=8)

            ms = triton.testing.do_bench(launch, rep=100, return_mode="median")
            best = max(best, count * 2 / ms / 1e9)
    return best
