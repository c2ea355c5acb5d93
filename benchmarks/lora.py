"""What unmerged LoRA adapters cost: `python -m benchmarks.lora [--models 0.6b 8b] [--rank 16]`.

Whole `generate()` calls over adapters on all linears of the layers, merged into the weights and
beside them, in float32 as PEFT keeps what it trains and in the model's dtype. ms per token of a
decode step, prefill and set-up differenced out. Needs peft.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from typing import Any

import torch

import torch_paged
from benchmarks import shapes
from benchmarks.ceiling import read_tbps
from benchmarks.decode import GREEDY, measure
from benchmarks.timing import default_device

# How much slower than merged weights a step may be, by shape.
GOALS = {"0.6b": 1.40, "8b": 1.15}
FORMS = ("merged", "float32", "own dtype")


def with_adapters(model: Any, rank: int, *, wide: bool) -> Any:
    """Put adapters of random weights beside all linears but the head, in place."""
    import peft

    settings = peft.LoraConfig(
        r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=wide).eval()


def measure_form(
    model: Any, form: str, rank: int, batch: int, new: int, repeats: int, prompt: int
) -> dict[str, Any]:
    """Return the row of one form; the model is left without adapters."""
    wrapped = with_adapters(model, rank, wide=form == "float32")
    if form == "merged":
        wrapped.merge_adapter()
    torch_paged.accelerate(model, on_unsupported="raise")
    row: dict[str, Any] = {"batch": batch, "form": form}
    row |= measure(model, batch, new, repeats, prompt, **GREEDY)
    report = torch_paged.explain(model)
    if report.last_call is None or report.last_call.path != "fused":
        raise RuntimeError(f"the call must take the fused path, got {report.last_call}")
    opaque = [slot.module for slot in report.slots if slot.kind == "opaque"]
    if opaque:
        raise RuntimeError(f"all linears must be fused, got opaque {', '.join(opaque)}")
    torch_paged.restore(model)
    if form == "merged":
        wrapped.unmerge_adapter()
    wrapped.unload()
    return row


def compare(
    name: str, batches: list[int], rank: int, new: int, repeats: int, prompt: int
) -> list[dict[str, Any]]:
    """Measure all forms of a model and print how they compare."""
    device = default_device()
    model = shapes.build(name, device=device)
    rows = []
    for batch in batches:
        base = 0.0
        for form in FORMS:
            row = {"model": name, "rank": rank}
            row |= measure_form(model, form, rank, batch, new, repeats, prompt)
            base = row["ms"] if form == "merged" else base
            row["of_merged"] = row["ms"] / base
            rows.append(row)
            print(
                f"{name:5} batch {batch:3}, {form:9}: {row['ms']:.4f} ms "
                f"({row['low_ms']:.4f} to {row['high_ms']:.4f}), "
                f"{row['of_merged']:.3f} of merged (goal {GOALS.get(name, 1.4):.2f})",
                flush=True,
            )
            gc.collect()
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Measure the shapes and batches asked for; JSON to --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = (*shapes.NAMES, shapes.TINY)
    parser.add_argument("--models", nargs="+", default=["0.6b", "8b"], choices=names)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += compare(name, args.batches, args.rank, args.new, args.repeats, args.prompt)
    if args.json:
        record: dict[str, Any] = {"torch": torch.__version__, "rows": rows}
        if torch.cuda.is_available():
            record |= {"gpu": torch.cuda.get_device_name(), "read_tbps": read_tbps()}
        record["command"] = "python -m benchmarks.lora"
        os.makedirs(os.path.dirname(args.json) or ".", exist_ok=True)
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
