"""Milliseconds per token of the patched tier: `python -m benchmarks.patched --help`.

The models of `benchmarks.decode`, as one without a row in the table of families runs: their own
forward with attention switched to the paged cache, captured. Measured in the same way.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from typing import Any
from unittest import mock

import torch

import torch_paged
from benchmarks import shapes
from benchmarks.ceiling import read_tbps
from benchmarks.decode import measure, timed
from torch_paged.patches.refusal import SpecRefusal

_GREEDY: dict[str, Any] = {"do_sample": False}


def only_patched() -> Any:
    """Refuse every model the fused tier while the context is entered."""
    refusal = SpecRefusal("the fused tier is switched off")
    return mock.patch("torch_paged.generate.session.read_spec", side_effect=refusal)


def measure_model(name: str, batches: list[int], new: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each batch."""
    model = shapes.build(name)
    torch_paged.accelerate(model, on_unsupported="raise")
    rows = []
    for batch in batches:
        timed(model, batch, 2, **_GREEDY)
        call = torch_paged.explain(model).last_call
        if call is None or call.path != "patched":
            raise RuntimeError(f"{name} must run in the patched tier, but its last call: {call}")
        row = {"model": name, "batch": batch, "what": "patched greedy"}
        row |= measure(model, batch, new, repeats, **_GREEDY)
        rows.append(row)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    print(torch_paged.stats(model), flush=True)
    torch_paged.restore(model)
    return rows


def main() -> None:
    """Measure the shapes and batches asked for; JSON to --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["8b", "0.6b"], choices=shapes.NAMES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    ceiling = read_tbps()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {ceiling:.2f} TB/s")
    rows = []
    with only_patched():
        for name in args.models:
            rows += measure_model(name, args.batches, args.new, args.repeats)
            gc.collect()
            torch.cuda.empty_cache()
    if args.json:
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        record |= {"read_tbps": ceiling, "rows": rows, "command": "python -m benchmarks.patched"}
        os.makedirs(os.path.dirname(args.json) or ".", exist_ok=True)
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
