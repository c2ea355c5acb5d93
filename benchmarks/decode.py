"""Milliseconds per token of whole `generate()` calls: `python -m benchmarks.decode --help`.

Differenced time is (time of N + 1 tokens - time of 1 token) / N: a decode step without prefill
and set-up. End-to-end time is the whole call over N + 1 tokens. Fresh ids each repetition.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

import torch

import torch_paged
from benchmarks import shapes
from benchmarks.ceiling import read_tbps

_PROMPT = 128


def timed(model: Any, batch: int, new: int, **kwargs: Any) -> float:
    """Return seconds of one call on fresh ids."""
    ids = torch.randint(100, 100000, (batch, _PROMPT), device=model.device)
    mask = torch.ones_like(ids)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **kwargs)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert out.shape == (batch, _PROMPT + new), out.shape
    return seconds


def measure(model: Any, batch: int, new: int, repeats: int, **kwargs: Any) -> dict[str, float]:
    """Return differenced and end-to-end ms per token, and the spread of the former."""
    timed(model, batch, new + 1, **kwargs)
    short = statistics.median(timed(model, batch, 1, **kwargs) for _ in range(repeats))
    longs = sorted(timed(model, batch, new + 1, **kwargs) for _ in range(repeats))
    steps = [1e3 * (s - short) / new for s in longs]
    return {
        "ms": statistics.median(steps),
        "spread_ms": steps[-1] - steps[0],
        "end_to_end_ms": 1e3 * statistics.median(longs) / (new + 1),
        "first_token_ms": 1e3 * short,
    }


def main() -> None:
    """Measure the shapes and batches asked for and print a table; JSON to --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(shapes.NAMES), choices=shapes.NAMES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hf", action="store_true", help="measure Hugging Face eager as well")
    parser.add_argument("--sample", action="store_true", help="also sample (0.8, 0.9, 50)")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    ceiling = read_tbps()
    rows: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {ceiling:.2f} TB/s")
    for name in args.models:
        model = shapes.build(name)
        greedy: dict[str, Any] = {"do_sample": False}
        for batch in args.batches if args.hf else []:
            rows.append({"model": name, "batch": batch, "what": "hf eager"})
            rows[-1] |= measure(model, batch, 16, 1, **greedy)
            print(rows[-1], flush=True)
        start = time.perf_counter()
        torch_paged.accelerate(model, on_unsupported="raise")
        timed(model, 1, 1, **greedy)
        print(f"{name}: accelerate to first token {time.perf_counter() - start:.2f} s", flush=True)
        modes: dict[str, dict[str, Any]] = {"greedy": greedy}
        if args.sample:
            modes["sample"] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50}
        for batch in args.batches:
            for what, kwargs in modes.items():
                row = {"model": name, "batch": batch, "what": what}
                row |= measure(model, batch, args.new, args.repeats, **kwargs)
                moved = shapes.weight_bytes(model) + shapes.kv_bytes(model, batch, 200)
                row["floor_ms"] = moved / ceiling / 1e9
                row["of_floor"] = row["floor_ms"] / row["ms"]
                rows.append(row)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        print(torch_paged.stats(model), flush=True)
        torch_paged.restore(model)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    if args.json:
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        record |= {"read_tbps": ceiling, "rows": rows, "command": "python -m benchmarks.decode"}
        os.makedirs(os.path.dirname(args.json) or ".", exist_ok=True)
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
