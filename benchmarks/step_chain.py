"""The layers of a decode step as they follow each other, with attention in between.

    python -m benchmarks.step_chain [--models 0.6b 1b 8b] [--rows 1 8 32] [--context 200] [--sweep]

A kernel is not as fast in a step as alone: it starts while its predecessor runs, and finds the
split of L1 and shared memory that its predecessor wanted. So configurations of attention are
chosen here. `none` leaves attention out; `--sweep` tries other configurations than the chosen one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_cases import DecodeCase
from benchmarks.ceiling import read_tbps
from benchmarks.ops_linear import chain_bytes, time_chain
from benchmarks.ops_linear_cases import HEADS, MODELS, Model, chosen
from torch_paged.ops.paged_attention.config import DecodeConfig, decode_config


def variants(config: DecodeConfig) -> dict[str, DecodeConfig]:
    """Return the configuration and its neighbours, by what differs."""
    found = {"chosen": config}
    for early in (False, True):
        for stages in (1, 2, 3):
            for tile_bytes in (32768, 65536):
                name = f"{'early' if early else 'late'}, {stages} stages, {tile_bytes} bytes"
                other = {"early_tile": early, "num_stages": stages, "tile_bytes": tile_bytes}
                found[name] = dataclasses.replace(config, **other)
    return found


def run_model(
    name: str, rows: list[int], context: int, sweep: bool, ceiling: float
) -> list[dict[str, Any]]:
    """Time the chain of a model without attention, with the chosen one and with others."""
    model: Model = MODELS[name]
    layers = (*model.layers, model.head)
    sets = {
        layer.name: [
            layer.weights() for _ in range(1 if layer is model.head else model.num_layers)
        ]
        for layer in layers
    }
    found = []
    for num_rows in rows:
        reach = max(4096, 2 * context)
        case = DecodeCase(HEADS[name], num_rows, context, max_tokens=reach)
        configs = {layer.name: chosen(layer, num_rows) for layer in layers}
        base = decode_config(case.query, num_rows * HEADS[name][1], reach)
        tried: dict[str, DecodeConfig | None] = {"none": None, **variants(base)}
        for what, config in tried.items() if sweep else list(tried.items())[:2]:

            def attention(
                layer: int,
                projected: Any,
                case: DecodeCase = case,
                config: DecodeConfig | None = config,
            ) -> Tensor:
                return case.run(layer % case.num_layers, config, projected)

            row: dict[str, Any] = {"model": name, "rows": num_rows, "context": context}
            row["attention"] = what
            try:
                row["ms"] = time_chain(
                    model, num_rows, sets, configs, attention=attention if config else None
                )
            except Exception as error:  # out of shared memory, say
                print(f"{name} {what}: {str(error)[:100]}", flush=True)
                continue
            nbytes = chain_bytes(model) + (model.num_layers * case.bytes if config else 0)
            row["of_ceiling"] = nbytes / row["ms"] / 1e9 / ceiling
            found.append(row)
            print(
                f"{name:5} {num_rows:3} rows, context {context}, attention {what:30}: "
                f"{row['ms']:.4f} ms, {100 * row['of_ceiling']:.0f}% of the ceiling",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["0.6b", "1b", "8b"], choices=HEADS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ceiling = read_tbps()
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        rows += run_model(name, arguments.rows, arguments.context, arguments.sweep, ceiling)
    if arguments.json:
        os.makedirs(arguments.json.parent, exist_ok=True)
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        record |= {"read_tbps": ceiling, "context": arguments.context, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
