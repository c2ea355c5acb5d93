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
from benchmarks.runs import fresh_ids, open_run
from benchmarks.timing import span_ms, synchronize


def prefill_once(model: Any, rows: int, length: int) -> tuple[float, float, float]:
    """Return host, device and wall milliseconds of one prefill of fresh ids."""
    ids = fresh_ids(model, rows, length)
    synchronize(model.device)
    start = time.perf_counter()
    host = 0.0
    out: list[torch.Tensor] = []

    with torch.no_grad(), open_run(model, ids, 2) as run:

        def prefill() -> None:
            nonlocal host
            out.append(run.prefill())
            host = time.perf_counter() - start

        device = span_ms(prefill, model.device)
        wall = time.perf_counter() - start
        assert torch.isfinite(out[0]).all()
    return 1e3 * host, device, 1e3 * wall


def hf_prefill_once(model: Any, rows: int, length: int) -> float:
    """Return device milliseconds of Hugging Face's own prefill of fresh ids, cache included."""
    ids = fresh_ids(model, rows, length)
    synchronize(model.device)
    with torch.inference_mode():
        return span_ms(lambda: model(ids, use_cache=True, logits_to_keep=1), model.device)


def prefill_flops(model: Any, rows: int, length: int) -> float:
    """Return the operations of a prefill: causal attention, and the head for last tokens only."""
    c = model.config
    head = c.vocab_size * c.hidden_size
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * head_dim * length**2
    return float(rows * (2 * layers * length + attention + 2 * head))


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
