"""Device and host time of a prefill: `python -m benchmarks.prefill --models 0.6b 8b`."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import torch_paged
from benchmarks import shapes
from torch_paged.engine.batch import BatchLimits, BatchRun, PackedPrompts
from torch_paged.generate.registry import find_session


def prefill_once(model: Any, rows: int, length: int) -> tuple[float, float, float]:
    """Return host, device and wall milliseconds of one prefill of fresh ids."""
    session = find_session(model)
    assert session is not None and session.core is not None
    positions = torch.arange(length, dtype=torch.int32, device="cuda")
    prompts = PackedPrompts(
        (length,) * rows,
        torch.randint(100, 100000, (rows * length,), device="cuda"),
        None,
        positions.repeat(rows),
        positions[-1:].expand(rows),
    )
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter()
    with BatchRun(session.core, prompts, BatchLimits(2), lag=0) as run:
        begin.record()
        logits = run.prefill()
        end.record()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
        assert torch.isfinite(logits).all()
    return 1e3 * host, begin.elapsed_time(end), 1e3 * wall


@torch.no_grad()
def main() -> None:
    """Time prefills after warm-up; with --profile print the kernels of the last one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6b", "8b"], choices=shapes.NAMES)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for name in args.models:
        model = torch_paged.accelerate(shapes.build(name), on_unsupported="raise")
        torch_paged.explain(model)
        for rows, length in ((1, 512), (1, 2048), (1, 8192), (128, 128)):
            for _ in range(3):
                prefill_once(model, rows, length)
            times = [prefill_once(model, rows, length) for _ in range(5)]
            host, device, wall = (statistics.median(t[i] for t in times) for i in range(3))
            print(
                f"{name} {rows} x {length}: host {host:.2f} ms, device {device:.2f} ms, "
                f"wall {wall:.2f} ms",
                flush=True,
            )
            if args.profile:
                with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
                    prefill_once(model, rows, length)
                print(
                    prof.key_averages().table(
                        sort_by="self_cuda_time_total", row_limit=8, max_name_column_width=50
                    )
                )
        torch_paged.restore(model)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
