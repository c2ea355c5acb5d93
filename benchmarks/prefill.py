"""Device and host time of a prefill: `python -m benchmarks.prefill --models 0.6b 8b`."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import torch_paged
from benchmarks import shapes
from benchmarks.runs import fresh_ids, open_run
from benchmarks.timing import span_ms, synchronize

# A large size is captured when it is met for the fourth time.
WARM_UPS = 4


class Prefill(NamedTuple):
    """Milliseconds of a prefill.

    Attributes:
        host: until everything is launched.
        span: of the device from the beginning of the call; with `queued`, device time alone.
        wall: until the logits are there.
    """

    host: float
    span: float
    wall: float


def prefill_once(model: Any, rows: int, length: int, *, queued: bool = False) -> Prefill:
    """Time one prefill of fresh ids."""
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

        span = span_ms(prefill, model.device, queued=queued)
        wall = time.perf_counter() - start
        assert torch.isfinite(out[0]).all()
    return Prefill(1e3 * host, span, 1e3 * wall)


def hf_prefill_once(model: Any, rows: int, length: int, *, queued: bool = False) -> float:
    """Return milliseconds of Hugging Face's own prefill of fresh ids, cache included."""
    ids = fresh_ids(model, rows, length)
    synchronize(model.device)
    with torch.inference_mode():
        return span_ms(
            lambda: model(ids, use_cache=True, logits_to_keep=1), model.device, queued=queued
        )


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
            for _ in range(WARM_UPS):
                prefill_once(model, rows, length)
            times = [prefill_once(model, rows, length) for _ in range(5)]
            host, span, wall = (statistics.median(t[i] for t in times) for i in range(3))
            device = statistics.median(
                prefill_once(model, rows, length, queued=True).span for _ in range(5)
            )
            print(
                f"{name} {rows} x {length}: device {device:.2f} ms, host {host:.2f} ms, "
                f"device from the call on {span:.2f} ms, wall {wall:.2f} ms",
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
