"""The experts of a layer, as GB/s of the weights that their tokens touch, against Hugging Face's.

    python -m benchmarks.ops_experts [--models 8x1b,gpt-oss-20b] [--tokens 1,2,8,32,64] [--sweep]

Experts are drawn uniformly for each token, anew in each layer; what counts is the bytes of those
drawn, each once. Every time is the median of CUDA graph replays over layers of their own, so that
weights come from memory. Hugging Face's side is what its `generate` runs on a GPU: batched
products for one token, grouped ones for more. `--sweep` also times candidate configurations and
writes table.py with the best ones, to $OUT when that is set and over the checked-in one otherwise.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from benchmarks.ceiling import read_tbps
from benchmarks.ops_experts_cases import BF16, MIXTURES, Mixture, candidates, chosen
from benchmarks.parity import WrongResult
from benchmarks.timing import default_device, graph_ms
from torch_paged.ops.experts import CLAMPED_SWIGLU, experts_reference, table
from torch_paged.ops.experts.configs import MAX_DECODE_TOKENS, ExpertsConfig, table_shape
from torch_paged.ops.experts.launch import _launch_experts
from torch_paged.ops.experts.reference import gate_reference
from torch_paged.ops.fused_linear.configs import device_key

DEVICE = default_device()
TABLE_FILE = Path(table.__file__)
LAYERS = 3


class Case:
    """A few layers of a mixture, and as many tokens for each."""

    def __init__(self, mixture: Mixture, num_tokens: int, layers: Sequence[list[Tensor]]) -> None:
        self.mixture = mixture
        self.layers = layers
        self.x = torch.randn(num_tokens, mixture.hidden, dtype=BF16, device=DEVICE)
        self.routing = [mixture.routing(num_tokens) for _ in layers]
        self.touched = sum(ids.unique().numel() for ids, _ in self.routing)

    @property
    def nbytes(self) -> int:
        """Bytes of the experts that the tokens of all layers touch."""
        return self.touched * self.mixture.expert_bytes

    def run(self, config: ExpertsConfig | None = None) -> Tensor:
        """Send the tokens through all layers, each on top of the one before."""
        x = self.x
        op = torch.ops.torch_paged.experts.default
        for layer, (ids, weights) in zip(self.layers, self.routing, strict=True):
            options = self.mixture.options() | {"residual": x}
            if config is None:
                x = op(x, ids, weights, *layer, **options)
            else:
                x = _launch_experts(x, ids, weights, *layer, **options, config=config)
        return x

    def ms(self, config: ExpertsConfig | None = None, replays: int = 20) -> float:
        """Return milliseconds of all layers."""
        return graph_ms(lambda: self.run(config), replays, DEVICE).median

    def check(self, config: ExpertsConfig | None = None) -> None:
        """Hold some tokens of a layer to twice the error of the rounding reference."""
        layer, (ids, weights) = self.layers[0], self.routing[0]
        options = self.mixture.options()
        if config is None:
            out = torch.ops.torch_paged.experts.default(self.x, ids, weights, *layer, **options)
        else:
            out = _launch_experts(self.x, ids, weights, *layer, **options, config=config)
        rows = sorted({0, ids.shape[0] // 2, ids.shape[0] - 1})
        chosen_ids = ids[rows].unique()
        places = torch.searchsorted(chosen_ids, ids[rows]).int()
        few = [tensor[chosen_ids] for tensor in layer]
        low = experts_reference(self.x[rows], places, weights[rows], *few, **options)
        want = experts_reference(
            self.x[rows].double(),
            places,
            weights[rows].double(),
            *(t.double() for t in few),
            **options,
        )
        scale = float(want.abs().max())
        budget = 2 * (float((low - want).abs().max()) + scale * torch.finfo(BF16).eps / 2)
        error = float((out[rows] - want).abs().max())
        if not error <= budget:
            raise WrongResult(f"experts: error {error:.3e} exceeds {budget:.3e} ({config})")


class HuggingFaceExperts:
    """What transformers' own functions read of an experts module."""

    has_gate, has_post_expert_norm, _is_expert_parallel = True, False, False

    def __init__(self, mixture: Mixture, layer: list[Tensor]) -> None:
        self._mixture = mixture
        self.num_experts = mixture.num_experts
        self.is_transposed = self.has_bias = mixture.gpt_oss
        self.is_concatenated = not mixture.gpt_oss
        matrices = [t.transpose(1, 2) if mixture.gpt_oss else t for t in layer[:2]]
        self.gate_up_proj, self.down_proj = matrices
        self.gate_up_proj_bias, self.down_proj_bias = (*layer[2:], None, None)[:2]

    def _apply_gate(self, y: Tensor) -> Tensor:
        clamped = self._mixture.gpt_oss
        name = CLAMPED_SWIGLU if clamped else "silu"
        return gate_reference(y, name, clamped, 1.702, 7.0)


def time_hugging_face(case: Case) -> float:
    """Return milliseconds of all layers by transformers' functions."""
    modules = [HuggingFaceExperts(case.mixture, layer) for layer in case.layers]
    one = case.x.shape[0] == 1
    forward = batched_mm_experts_forward if one else grouped_mm_experts_forward

    def run() -> Tensor:
        x = case.x
        for module, (ids, weights) in zip(modules, case.routing, strict=True):
            x = x + forward(module, x, ids.long(), weights)
        return x

    return graph_ms(run, 10, DEVICE).median


def sweep(case: Case, num_tokens: int) -> ExpertsConfig:
    """Return the best configuration: of the gate and up projection first, then of down."""
    best, least = chosen(case.mixture, num_tokens), case.ms()
    for part in ("gate_up", "down"):
        for config in candidates(case.mixture, num_tokens, part):
            if part == "down" and (config.tokens == 0) == (best.tokens == 0):
                config = config._replace(gate_up=best.gate_up)
            try:
                ms = case.ms(config, 8)
            except Exception as error:  # out of shared memory, say
                print(f"  {config}: {str(error)[:100]}", flush=True)
                continue
            if ms < 0.995 * least:
                best, least = config, ms
    case.check(best)
    return best


def _compile(jobs: Sequence[tuple[Mixture, int, ExpertsConfig]]) -> None:
    """Compile in a process of its own; the kernels reach the others through Triton's cache."""
    for mixture, num_tokens, config in jobs:
        x = torch.zeros(num_tokens, mixture.hidden, dtype=BF16, device=DEVICE)
        try:
            routing, layer = mixture.routing(num_tokens), mixture.layer(alike=True)
            options = mixture.options() | {"residual": x}
            _launch_experts(x, *routing, *layer, **options, config=config)
            torch.cuda.synchronize()
        except Exception:
            pass  # reported when timed


def compile_all(names: Sequence[str], token_counts: Sequence[int]) -> int:
    """Compile the kernels of all candidates on all cores."""
    kinds = {}
    for name, num_tokens in itertools.product(names, token_counts):
        mixture = MIXTURES[name]
        # Between numbers of tokens little else than the values of arguments differs.
        streamed = num_tokens * mixture.top_k <= mixture.num_experts * 16
        for part in ("gate_up", "down"):
            for config in candidates(mixture, num_tokens, part):
                kinds[name, config, streamed] = (mixture, num_tokens, config)
    jobs = list(kinds.values())
    workers = min(os.cpu_count() or 1, 16, len(jobs))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_compile, [jobs[i::workers] for i in range(workers)]))
    return len(jobs)


def write_table(entries: dict[table.Shape, table.Entry]) -> None:
    """Write table.py with these entries over the checked-in ones of this device."""
    tables = dict(table.TABLE)
    key = device_key(DEVICE)
    tables[key] = tables.get(key, {}) | entries
    head, _, _ = TABLE_FILE.read_text().partition("TABLE:")
    lines = ["TABLE: dict[tuple[int, int], dict[Shape, Entry]] = {"]
    for device, rows in sorted(tables.items()):
        lines.append(f"    {device}: {{")
        lines += [f"        {shape}: {entry}," for shape, entry in sorted(rows.items())]
        lines.append("    },")
    path = Path(os.environ["OUT"]) / "experts_table.py" if "OUT" in os.environ else TABLE_FILE
    path.write_text(head + "\n".join([*lines, "}", ""]))


def run_model(
    name: str, token_counts: Sequence[int], sweeps: bool, ceiling: float
) -> tuple[list[dict[str, Any]], dict[table.Shape, table.Entry]]:
    """Check and time a mixture; return rows and, from a sweep, table entries."""
    mixture = MIXTURES[name]
    layers = [mixture.layer() for _ in range(LAYERS)]
    rows: list[dict[str, Any]] = []
    entries: dict[table.Shape, table.Entry] = {}
    for num_tokens in token_counts:
        case = Case(mixture, num_tokens, layers)
        case.check()
        config = chosen(mixture, num_tokens)
        if sweeps and num_tokens <= MAX_DECODE_TOKENS:
            config = sweep(case, num_tokens)
            shape = table_shape(mixture.problem(num_tokens))
            assert shape is not None
            entries[shape] = (config.tokens, tuple(config.gate_up), tuple(config.down))
        ms = case.ms(config)
        tbps = case.nbytes / ms / 1e9
        row = {"model": name, "tokens": num_tokens, "us_a_layer": 1e3 * ms / LAYERS}
        row |= {"touched": case.touched / LAYERS, "tbps": tbps, "of_ceiling": tbps / ceiling}
        row |= {"hugging_face_us": 1e3 * time_hugging_face(case) / LAYERS, "config": str(config)}
        rows.append(row)
        print(describe(row), flush=True)
    return rows, entries


def describe(row: dict[str, Any]) -> str:
    head = f"{row['model']:12}T={row['tokens']:<5}{row['touched']:6.1f} experts "
    times = f"{row['us_a_layer']:8.1f} us ({row['hugging_face_us']:8.1f}) "
    rate = f"{row['tbps']:5.2f} TB/s {100 * row['of_ceiling']:3.0f}% "
    return head + times + rate + row["config"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="8x1b,gpt-oss-20b,qwen3-30b")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    token_counts = [int(n) for n in arguments.tokens.split(",")]
    begin = time.time()
    if arguments.sweep:
        count = compile_all(names, [n for n in token_counts if n <= MAX_DECODE_TOKENS])
        print(f"{count} configurations compiled in {time.time() - begin:.0f} s", flush=True)
    ceiling = read_tbps(DEVICE)
    print(f"read ceiling {ceiling:.2f} TB/s; us a layer (Hugging Face's)", flush=True)
    rows: list[dict[str, Any]] = []
    entries: dict[table.Shape, table.Entry] = {}
    for name in names:
        more, found = run_model(name, token_counts, arguments.sweep, ceiling)
        rows += more
        entries |= found
        torch.cuda.empty_cache()
        if arguments.sweep:
            write_table(entries)
        if "OUT" in os.environ:
            record = {"device": torch.cuda.get_device_name(), "ceiling_tbps": ceiling}
            record |= {"torch": torch.__version__, "rows": rows}
            (Path(os.environ["OUT"]) / "ops_experts.json").write_text(json.dumps(record, indent=1))
    print(f"done at {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
