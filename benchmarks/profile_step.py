"""Kernel times of one captured decode step: `python -m benchmarks.profile_step 0.6b 1`."""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

import torch_paged
from benchmarks import shapes
from benchmarks.runs import fresh_ids, open_run, step_ms
from torch_paged.engine.sampler import GreedySampler

_PROMPT = 128
_STEPS = 16


@torch.no_grad()
def main() -> None:
    """Profile replays and print kernels by total time, with the gaps between them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=shapes.ALL)
    parser.add_argument("batch", type=int, nargs="?", default=1)
    parser.add_argument("--timeline", type=int, default=0, help="kernels to list in order")
    args = parser.parse_args()
    model = torch_paged.accelerate(shapes.build(args.model), on_unsupported="raise", verify=False)
    torch_paged.explain(model)
    sampler = GreedySampler()
    with open_run(model, fresh_ids(model, args.batch, _PROMPT), 1000) as run:
        run.first_tokens(run.prefill(), sampler)
        step_ms(run, sampler, 4, model.device)
        bare = step_ms(run, sampler, _STEPS, model.device)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
            for _ in range(_STEPS):
                run.launch(sampler)
            torch.cuda.synchronize()
    on_device = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    totals: dict[str, list[float]] = defaultdict(list)
    for event in on_device:
        totals[event.name].append(event.device_time_total)
    print(f"{args.model} batch {args.batch}: {bare * 1e3:.1f} us a step without the profiler")
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1])):
        per_step = sum(times) / _STEPS
        count = len(times) / _STEPS
        print(f"{per_step:9.2f} us/step {count:6.1f} x {per_step / count:7.2f} us  {name[:70]}")
    in_order = sorted(on_device, key=lambda e: e.time_range.start)
    middle = in_order[len(in_order) // 2 :][: args.timeline]
    for event in middle:
        begins, ends = (
            t - middle[0].time_range.start for t in (event.time_range.start, event.time_range.end)
        )
        print(f"{begins:9.2f} to {ends:9.2f} us  {event.name[:70]}")


if __name__ == "__main__":
    main()
