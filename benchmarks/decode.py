"""Milliseconds per token of whole `generate()` calls: `python -m benchmarks.decode --help`.

Differenced time is (time of N + 1 tokens - time of 1 token) / N: a decode step without prefill
and set-up. End-to-end time is the whole call over N + 1 tokens. Fresh ids each repetition.
`python -m benchmarks.report` checks the tokens first and measures everything else as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from typing import Any

import torch
from torch import Tensor

import torch_paged
from benchmarks import shapes
from benchmarks.ceiling import read_tbps
from benchmarks.runs import fresh_ids
from benchmarks.timing import differenced, synchronize

PROMPT = 128
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50}
GREEDY: dict[str, Any] = {"do_sample": False}


def generate(model: Any, ids: Tensor, new: int, **kwargs: Any) -> Tensor:
    """Return prompts [B, P] with `new` tokens each."""
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **kwargs
        )
    if out.shape != (ids.shape[0], ids.shape[1] + new):
        raise RuntimeError(
            f"generate() must return [{ids.shape[0]}, {ids.shape[1] + new}] ids, got "
            f"{list(out.shape)}; leave end tokens off"
        )
    return out


def timed(model: Any, batch: int, new: int, prompt: int = PROMPT, **kwargs: Any) -> float:
    """Return seconds of one call on fresh ids."""
    ids = fresh_ids(model, batch, prompt)
    synchronize(model.device)
    start = time.perf_counter()
    generate(model, ids, new, **kwargs)
    synchronize(model.device)
    return time.perf_counter() - start


def measure(
    model: Any, batch: int, new: int, repeats: int, prompt: int = PROMPT, **kwargs: Any
) -> dict[str, float]:
    """Return differenced and end-to-end ms per token, and the spread of the former."""
    return differenced(lambda n: timed(model, batch, n, prompt, **kwargs), new, repeats)


def step_bytes(model: Any, batch: int, prompt: int, new: int) -> int:
    """Return the bytes that a decode step must read, at the mean context of a measurement."""
    return shapes.weight_bytes(model, batch) + shapes.kv_bytes(model, batch, prompt + new // 2)


def main() -> None:
    """Measure the shapes and batches asked for and print a table; JSON to --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(shapes.NAMES), choices=shapes.ALL)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hf", action="store_true", help="measure Hugging Face eager as well")
    parser.add_argument("--sample", action="store_true", help="also sample (0.8, 0.9, 50)")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    ceiling = read_tbps()
    rows: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {ceiling:.2f} TB/s")
    for name in args.models:
        model = shapes.build(name)
        for batch in args.batches if args.hf else []:
            rows.append({"model": name, "batch": batch, "what": "hf eager"})
            rows[-1] |= measure(model, batch, 16, 1, **GREEDY)
            print(rows[-1], flush=True)
        start = time.perf_counter()
        torch_paged.accelerate(model, on_unsupported="raise")
        timed(model, 1, 1, **GREEDY)
        print(f"{name}: accelerate to first token {time.perf_counter() - start:.2f} s", flush=True)
        modes = {"greedy": GREEDY} | ({"sample": SAMPLE} if args.sample else {})
        for batch in args.batches:
            for what, kwargs in modes.items():
                row = {"model": name, "batch": batch, "what": what}
                row |= measure(model, batch, args.new, args.repeats, **kwargs)
                row["floor_ms"] = step_bytes(model, batch, PROMPT, args.new) / ceiling / 1e9
                row["of_floor"] = row["floor_ms"] / row["ms"]
                rows.append(row)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        print(torch_paged.stats(model), flush=True)
        torch_paged.restore(model)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    if args.json:
        record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        record |= {"read_tbps": ceiling, "rows": rows, "command": "python -m benchmarks.decode"}
        os.makedirs(os.path.dirname(args.json) or ".", exist_ok=True)
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
