"""fused_linear at the layers of three models, against the read ceiling and cuBLAS.

    python -m benchmarks.ops_linear [--models 0.6b,1b,8b] [--tokens 1,2,4,...,128,256]
        [--sweep [--kinds wide_gemm,...]]

Every time is the median of CUDA graph replays. A graph runs one launch per weight over enough
distinct weights that each comes from memory. `chain` runs a model's layers as they follow each
other (qkv, attention over 200 tokens, o, gate and up, down, then the head), each reading what the
one before wrote; its bytes count keys and values too. Where a layer's kernel leaves the norm to a
kernel of its own, both are one time.
`--sweep` also times the candidate configurations and writes table.py with the best ones, to $OUT
when that is set and over the checked-in one otherwise. `--kinds` leaves only the candidates of
these kinds and the one that the table names.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention_cases import DecodeCase
from benchmarks.ceiling import read_tbps
from benchmarks.ops_linear_cases import BF16, HEADS, MODELS, Layer, Model, candidates, chosen
from benchmarks.parity import WrongResult
from benchmarks.timing import default_device, graph_ms
from torch_paged.ops.fused_linear import fused_linear_reference, table
from torch_paged.ops.fused_linear.configs import (
    KINDS,
    Composed,
    Config,
    GemvConfig,
    device_key,
    leaves_norm_outside,
    token_bucket,
)
from torch_paged.ops.fused_linear.launch import _launch_fused_linear
from torch_paged.ops.fused_linear.wide_config import WideGemmConfig
from torch_paged.ops.paged_attention.config import SHORT_TOKENS
from torch_paged.ops.unchecked import add_rms_norm, glu, rms_norm

COLD_BYTES = 400 << 20
CONTEXT = 200  # tokens that attention reads between the layers of a chain
DEVICE = default_device()
KIND_NAMES = {kind: name for name, kind in KINDS.items()}
TABLE_FILE = Path(table.__file__)


def call(
    layer: Layer,
    x: Tensor,
    weights: list[Tensor],
    options: dict[str, Any],
    config: Config | None = None,
) -> Tensor:
    """Launch a layer, by the op itself unless a configuration is given."""
    named = dict(options)
    if isinstance(config, Composed):
        return compose(x, weights, named)
    gain = named.pop("norm_weight", None)
    if config is None:
        return torch.ops.torch_paged.fused_linear.default(x, weights, [], gain, **named)
    return _launch_fused_linear(x, weights, [], gain, **named, config=config)


def compose(x: Tensor, weights: list[Tensor], options: dict[str, Any]) -> Tensor:
    """Run a layer as a plan does that leaves its linears to torch."""
    if options.get("norm"):
        x = rms_norm(x, options["norm_weight"], eps=options["eps"])
    parts = [F.linear(x, weight) for weight in weights]
    if options.get("gated"):
        return glu(*parts, activation=options["activation"])
    y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return y if options.get("residual") is None else y + options["residual"]


def check(layer: Layer, num_tokens: int, config: Config | None = None) -> None:
    """Hold a configuration to twice the error of the rounding reference, against float64."""
    x = torch.randn(num_tokens, layer.in_features, dtype=BF16, device=DEVICE)
    weights = [w[:4096] for w in layer.weights()]
    options = layer.options(num_tokens)
    if layer.residual:
        options["residual"] = options["residual"][:, : weights[0].shape[0]]
    out = call(layer, x, weights, options, config)
    assert not options.pop("counters").any()
    low = fused_linear_reference(x, weights, [], **options)
    options = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    if layer.norm:
        h = x.double()
        h = h / (h.square().mean(-1, keepdim=True) + options.pop("eps")).sqrt()
        x = h * options.pop("norm_weight")
        options.pop("norm")
    want = fused_linear_reference(x.double(), [w.double() for w in weights], [], **options)
    budget = 2 * ((low - want).abs().max() + 2**-9 * want.abs().max())
    error = (out - want).abs().max()
    if not error <= budget:
        raise WrongResult(
            f"{layer.name} {config}: error {error:.3e}, at most {budget:.3e} is right"
        )


def time_layer(
    layer: Layer, num_tokens: int, sets: list[list[Tensor]], configs: Iterable[Config]
) -> list[tuple[float, Config]]:
    """Return TB/s of each configuration that fits the device, the best first."""
    x = torch.randn(num_tokens, layer.in_features, dtype=BF16, device=DEVICE)
    options = layer.options(num_tokens)
    results = []
    for config in configs:

        def run(config: Config = config) -> None:
            for weights in sets:
                call(layer, x, weights, options, config)

        try:
            ms = graph_ms(run, 12, DEVICE).median
            results.append((layer.nbytes * len(sets) / ms / 1e9, config))
        except Exception as error:  # e.g. out of registers or shared memory
            print(f"{layer.name} {config}: {str(error)[:100]}", flush=True)
    return sorted(results, reverse=True)


def time_cublas(layer: Layer, num_tokens: int, sets: list[list[Tensor]]) -> float:
    """Return TB/s of F.linear alone, over all weights of a layer as if they were one."""
    x = torch.randn(num_tokens, layer.in_features, dtype=BF16, device=DEVICE)
    joined = [torch.cat(weights) if len(weights) > 1 else weights[0] for weights in sets]
    ms = graph_ms(lambda: [F.linear(x, w) for w in joined], 12, DEVICE).median
    return layer.nbytes * len(sets) / ms / 1e9


def time_chain(
    model: Model,
    num_tokens: int,
    sets: dict[str, list[list[Tensor]]],
    configs: dict[str, Config],
    replays: int = 20,
    attention: Callable[[int, Any], Tensor] | None = None,
) -> float:
    """Return milliseconds of one pass over all layers of a model.

    `attention` makes the heads of a layer from what its projections give; without it attention is
    left out.
    """
    qkv, o, gate_up, down = model.layers
    options = {layer.name: layer.options(num_tokens) for layer in (*model.layers, model.head)}
    hidden = torch.randn(num_tokens, qkv.in_features, dtype=BF16, device=DEVICE)

    composed = {name: isinstance(config, Composed) for name, config in configs.items()}

    def step(
        layer: Layer, index: int, x: Tensor, residual: Tensor | None = None, norm: bool = True
    ) -> Any:
        weights = sets[layer.name][index % len(sets[layer.name])]
        named = options[layer.name] | ({"residual": residual} if layer.residual else {})
        if layer.norm and not norm:
            named = named | {"norm": False, "norm_weight": None}
            if layer is qkv and composed["qkv"]:  # attention takes the three apart
                return tuple(F.linear(x, weight) for weight in weights)
        return call(layer, x, weights, named, configs[layer.name])

    def normed(
        first: Layer, second: Layer, index: int, x: Tensor, residual: Tensor
    ) -> tuple[Any, Tensor]:
        """Run `first` on x and `second`, which has a norm, on the sum; return output and sum."""
        chosen = configs[second.name]
        if not (isinstance(chosen, Composed) or leaves_norm_outside(chosen, x.shape[0])):
            total = step(first, index, x, residual)
            return step(second, index, total), total
        gain, eps = (options[second.name][name] for name in ("norm_weight", "eps"))
        if composed[first.name]:
            y = compose(x, sets[first.name][index % len(sets[first.name])], {})
            h, total = add_rms_norm(y, residual, gain, eps=eps)
        else:
            total = step(first, index, x, residual)
            h = rms_norm(total, gain, eps=eps)
        return step(second, index, h, norm=False), total

    def run() -> None:
        projected, x = step(qkv, 0, hidden), hidden
        if composed["qkv"]:
            projected = projected.split(qkv.sizes, -1)
        for index in range(model.num_layers):
            if attention is None:
                heads = projected[0] if composed["qkv"] else projected[:, : o.in_features]
            else:
                heads = attention(index, projected).flatten(1)
            inner, x = normed(o, gate_up, index, heads, x)
            last = index == model.num_layers - 1
            projected, x = normed(down, model.head if last else qkv, index, inner, x)

    return graph_ms(run, replays, DEVICE).median


def tune_chain(
    model: Model,
    num_tokens: int,
    sets: dict[str, list[list[Tensor]]],
    ranked: dict[str, list[Config]],
    attention: Callable[[int, Any], Tensor],
) -> dict[str, Config]:
    """Choose among each layer's best configurations by what they make of the whole chain.

    How well a kernel overlaps the one before it depends on both, so the best alone need not be
    the best together.
    """
    configs = {name: tried[0] for name, tried in ranked.items()}
    best = time_chain(model, num_tokens, sets, configs, attention=attention)
    for name in (layer.name for layer in model.layers):
        wide = [c for c in ranked[name] if isinstance(c, WideGemmConfig)]
        tried = [*ranked[name][:5], *wide[:3]]
        tried += [c for c in ranked[name][5:] if isinstance(c, Composed)]
        for config in dict.fromkeys(tried):
            if config == configs[name]:
                continue
            changed = configs | {name: config}
            ms = time_chain(model, num_tokens, sets, changed, 12, attention)
            if ms < 0.995 * best:
                best, configs[name] = ms, config
    return configs


def chain_bytes(model: Model) -> int:
    return model.num_layers * sum(layer.nbytes for layer in model.layers) + model.head.nbytes


def _compile(jobs: Sequence[tuple[Layer, int, Config]]) -> None:
    """Compile in a process of its own; the kernels reach the others through Triton's cache."""
    for layer, num_tokens, config in jobs:
        x = torch.zeros(num_tokens, layer.in_features, dtype=BF16, device=DEVICE)
        try:
            call(layer, x, layer.weights(empty=True), layer.options(num_tokens), config)
            torch.cuda.synchronize()
        except Exception:
            pass  # reported when timed


def compile_all(jobs: list[tuple[Layer, int, Config]]) -> None:
    """Compile the kernels of all jobs on all cores."""
    kinds = {}
    for layer, num_tokens, config in jobs:
        # Between 2 and 8 rows, say, only the values of arguments differ.
        tokens = num_tokens if isinstance(config, GemvConfig) else max(token_bucket(num_tokens), 8)
        kinds[layer, tokens, num_tokens == 1, config] = (layer, num_tokens, config)
    unique = sorted(kinds.values(), key=lambda job: -job[1])
    workers = min(os.cpu_count() or 1, 16, len(unique))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_compile, [unique[i::workers] for i in range(workers)]))


def write_table(entries: dict[table.Shape, table.Entry]) -> Path:
    """Write table.py with these entries over the checked-in ones of this device."""
    tables = dict(table.TABLE)
    key = device_key(DEVICE)
    tables[key] = tables.get(key, {}) | entries
    head, _, _ = TABLE_FILE.read_text().partition("TABLE:")
    lines = ["TABLE: dict[tuple[int, int], dict[Shape, Entry]] = {"]
    for device, rows in sorted(tables.items()):
        lines.append(f"    {device}: {{")
        lines += [f"        {problem}: {config}," for problem, config in sorted(rows.items())]
        lines.append("    },")
    path = Path(os.environ["OUT"]) / "table.py" if "OUT" in os.environ else TABLE_FILE
    path.write_text(head + "\n".join([*lines, "}", ""]).replace("'", '"'))
    table.TABLE.update(tables)
    return path


def run_model(
    name: str, token_counts: list[int], sweep: bool, kinds: Sequence[str], ceiling: float
) -> tuple[list[dict[str, Any]], dict[table.Shape, table.Entry]]:
    """Time the layers and the chain of a model; return rows and, from a sweep, table entries."""
    model = MODELS[name]
    rows: list[dict[str, Any]] = []
    entries: dict[table.Shape, table.Entry] = {}
    sets = {}
    ranked: dict[int, dict[str, list[Config]]] = {n: {} for n in token_counts}
    for layer in (*model.layers, model.head):
        count = max(-(-COLD_BYTES // layer.nbytes), model.num_layers)
        sets[layer.name] = [layer.weights() for _ in range(1 if layer is model.head else count)]
        for num_tokens in token_counts:
            tried = [chosen(layer, num_tokens)]
            if sweep:
                tried = candidates(layer, num_tokens, kinds)
            timed = time_layer(layer, num_tokens, sets[layer.name], tried)
            ranked[num_tokens][layer.name] = [config for _, config in timed]
            cublas = time_cublas(layer, num_tokens, sets[layer.name])
            row = {"model": name, "layer": layer.name, "tokens": num_tokens}
            row |= {"tbps": timed[0][0], "of_ceiling": timed[0][0] / ceiling}
            row |= {"cublas_tbps": cublas, "config": str(timed[0][1])}
            rows.append(row | {"tried": [(round(t, 3), str(c)) for t, c in timed]})
    for num_tokens in token_counts:
        configs = {layer: tried[0] for layer, tried in ranked[num_tokens].items()}
        case = DecodeCase(HEADS[name], num_tokens, CONTEXT, max_tokens=SHORT_TOKENS)

        def attention(layer: int, projected: Any, case: DecodeCase = case) -> Tensor:
            return case.run(layer % case.num_layers, None, projected)

        if sweep:
            configs = tune_chain(model, num_tokens, sets, ranked[num_tokens], attention)
        for layer in (*model.layers, model.head):
            config = configs[layer.name]
            check(layer, num_tokens, config)
            bucket = token_bucket(num_tokens)
            shape = (bucket, layer.num_rows, layer.in_features, layer.gated)
            entries[shape] = (KIND_NAMES[type(config)], *config)
        ms = time_chain(model, num_tokens, sets, configs, attention=attention)
        tbps = (chain_bytes(model) + model.num_layers * case.bytes) / ms / 1e9
        row = {"model": name, "layer": "chain", "tokens": num_tokens, "tbps": tbps, "ms": ms}
        row |= {"of_ceiling": tbps / ceiling, "configs": {k: str(c) for k, c in configs.items()}}
        rows.append(row)
    return rows, entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="0.6b,1b,8b")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--kinds", default="", help="with --sweep: try these kinds only")
    arguments = parser.parse_args()
    kinds = [kind for kind in arguments.kinds.split(",") if kind]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds must be of {', '.join(KINDS)}, got {', '.join(sorted(unknown))}")
    names = arguments.models.split(",")
    token_counts = [int(n) for n in arguments.tokens.split(",")]
    begin = time.time()
    jobs = [
        (layer, n, config)
        for name in names
        for layer in (*MODELS[name].layers, MODELS[name].head)
        for n in token_counts
        for config in (candidates(layer, n, kinds) if arguments.sweep else [chosen(layer, n)])
    ]
    compile_all(jobs)
    print(f"{len(jobs)} configurations compiled in {time.time() - begin:.0f} s", flush=True)
    ceiling = read_tbps()
    rows: list[dict[str, Any]] = []
    entries: dict[table.Shape, table.Entry] = {}
    for name in names:
        more, found = run_model(name, token_counts, arguments.sweep, kinds, ceiling)
        rows += more
        entries |= found
        torch.cuda.empty_cache()
        print(f"{name} done at {time.time() - begin:.0f} s", flush=True)
        print("\n".join(map(describe, more)), flush=True)
        if arguments.sweep:
            write_table(entries)
        if "OUT" in os.environ:
            result = {"device": torch.cuda.get_device_name(), "ceiling_tbps": ceiling}
            result |= {"torch": torch.__version__, "rows": rows}
            (Path(os.environ["OUT"]) / "ops_linear.json").write_text(json.dumps(result, indent=1))
    print(f"read ceiling {ceiling:.2f} TB/s; TB/s (cuBLAS), % of ceiling")
    print("\n".join(map(describe, rows)))


def describe(row: dict[str, Any]) -> str:
    cublas = f"({row['cublas_tbps']:.2f})" if "cublas_tbps" in row else f"{row['ms']:.4f} ms"
    percent = f"{100 * row['of_ceiling']:.0f}%"
    head = f"{row['model']:5}{row['layer']:8}T={row['tokens']:<3}"
    return f"{head}{row['tbps']:5.2f} {cublas:10} {percent:5}{row.get('config', '')}"


if __name__ == "__main__":
    main()
