"""joined_linear at the layers of a model with norms behind its blocks, as one kernel and as two.

    python -m benchmarks.ops_joined [--models gemma-3-4b] [--tokens 1,2] [--sweep]

Every time is the median of CUDA graph replays over enough distinct weights that each comes from
memory. `chain` runs a model's layers as they follow each other, without attention, each reading
what the one before wrote. `--sweep` also times the candidate launches of each layer, in the order
of their speed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.ceiling import read_tbps
from benchmarks.ops_linear_cases import BF16, MODELS, Layer, Model, chosen
from benchmarks.parity import WrongResult
from benchmarks.timing import default_device, graph_ms
from torch_paged.ops.fused_linear import fused_linear_reference
from torch_paged.ops.fused_linear.configs import (
    GemvConfig,
    Problem,
    device_key,
    joined_config,
)
from torch_paged.ops.fused_linear.joined import _launch_joined_linear, joined_linear_reference
from torch_paged.ops.fused_linear.launch import _launch_fused_linear
from torch_paged.ops.rms_norm.kernel import _launch_rms_norm_add

COLD_BYTES = 400 << 20
DEVICE = default_device()
EPS = 1e-6


def joined(
    layer: Layer,
    branch: Tensor,
    stream: Tensor,
    gains: Sequence[Tensor],
    weights: list[Tensor],
    config: GemvConfig | None,
) -> tuple[Tensor, Tensor]:
    """Run a layer over stream + norm(branch); without a configuration in two kernels."""
    options = {"norm": True, "eps": EPS, "norm_offset": 1.0, "gated": layer.gated}
    options["activation"] = "gelu_tanh" if layer.gated else ""
    if config is None:
        total = _launch_rms_norm_add(branch, stream, gains[0], EPS, 1.0)
        return _launch_fused_linear(total, weights, [], gains[1], **options), total
    join = (gains[0], EPS, 1.0, True)
    rest = (weights, [], gains[1])
    return _launch_joined_linear(branch, stream, *join, *rest, **options, config=config)


def _rows(num_tokens: int, width: int, count: int = 1) -> list[Tensor]:
    return [torch.randn(num_tokens, width, dtype=BF16, device=DEVICE) for _ in range(count)]


def _gains(width: int) -> list[Tensor]:
    return [0.1 * torch.randn(width, dtype=BF16, device=DEVICE) for _ in range(2)]


def launch_of(layer: Layer, num_tokens: int) -> GemvConfig | None:
    problem = Problem(num_tokens, layer.num_rows, layer.in_features, layer.gated)
    return joined_config(device_key(DEVICE), chosen(layer, num_tokens), problem)


def check(layer: Layer, num_tokens: int, config: GemvConfig | None) -> None:
    """Hold a launch to twice the error of the rounding reference, against float64."""
    branch, stream = _rows(num_tokens, layer.in_features, 2)
    gains, weights = _gains(layer.in_features), [w[:4096] for w in layer.weights()]
    out, total = joined(layer, branch, stream, gains, weights, config)
    act = "gelu_tanh" if layer.gated else ""
    options = {"activation": act, "gated": layer.gated}
    prologue = {"norm": True, "eps": EPS, "norm_offset": 1.0}
    join = (gains[0], EPS, 1.0, True)
    lows = joined_linear_reference(
        branch, stream, *join, weights, [], gains[1], **prologue, **options
    )

    def normed(x: Tensor, gain: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1.0 + gain.double())

    exact = stream.double() + normed(branch.double(), gains[0])
    wide = [w.double() for w in weights]
    want = fused_linear_reference(normed(exact, gains[1]), wide, [], **options)
    for got, low, right in ((out, lows[0], want), (total, lows[1], exact)):
        budget = 2 * ((low - right).abs().max() + 2**-9 * right.abs().max())
        error = (got - right).abs().max()
        if not error <= budget:
            raise WrongResult(
                f"{layer.name} {config}: error {error:.3e}, at most {budget:.3e} is right"
            )


def time_layer(
    layer: Layer, num_tokens: int, sets: list[list[Tensor]], config: GemvConfig | None
) -> float:
    """Return microseconds of one launch, or of two."""
    branch, stream = _rows(num_tokens, layer.in_features, 2)
    gains = _gains(layer.in_features)

    def run() -> None:
        for weights in sets:
            joined(layer, branch, stream, gains, weights, config)

    return 1e3 * graph_ms(run, 12, DEVICE).median / len(sets)


def time_chain(
    model: Model,
    num_tokens: int,
    sets: dict[str, list[list[Tensor]]],
    launches: dict[str, GemvConfig | None],
) -> float:
    """Return milliseconds of one pass over all layers of a model, and its head."""
    qkv, o, gate_up, down = model.layers
    gains = _gains(qkv.in_features)
    hidden, first = (
        torch.randn(num_tokens, width, dtype=BF16, device=DEVICE)
        for width in (qkv.in_features, o.in_features)
    )

    def step(layer: Layer, index: int, branch: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        weights = sets[layer.name][index % len(sets[layer.name])]
        return joined(layer, branch, stream, gains, weights, launches[layer.name])

    def run() -> None:
        heads, stream = first, hidden
        for index in range(model.num_layers):
            branch = _launch_fused_linear(heads, sets["o"][index], [])
            inner, stream = step(gate_up, index, branch, stream)
            branch = _launch_fused_linear(inner, sets["down"][index], [])
            last = index == model.num_layers - 1
            projected, stream = step(model.head if last else qkv, index, branch, stream)
            heads = projected[:, : o.in_features]

    return graph_ms(run, 20, DEVICE).median


def candidates(layer: Layer, num_tokens: int) -> list[GemvConfig]:
    """Return the launches worth timing, the chosen one first.

    The others have up to 8 loads of 16 bytes of the weights in flight.
    """
    grid = itertools.product((1, 2, 4), (1, 2, 4), (4, 8), (1, 2), (80, 96, 128))
    streams = 2 if layer.gated else 1
    launch = launch_of(layer, num_tokens)
    found = [] if launch is None else [launch]
    for rows, chunks, warps, k_warps, registers in grid:
        loads = rows * chunks * streams
        if 4 <= loads <= 8 and registers >= (64 + 4 * loads if num_tokens == 1 else 96):
            found.append(GemvConfig(rows, chunks, warps, k_warps, registers))
    return list(dict.fromkeys(found))


def _compile(jobs: Sequence[tuple[Layer, int, GemvConfig]]) -> None:
    for layer, num_tokens, config in jobs:
        branch, stream = _rows(num_tokens, layer.in_features, 2)
        weights = layer.weights(empty=True)
        joined(layer, branch, stream, _gains(layer.in_features), weights, config)


def compile_all(jobs: list[tuple[Layer, int, GemvConfig]]) -> None:
    """Compile in processes of their own; the kernels reach this one through Triton's cache."""
    workers = min(os.cpu_count() or 1, 16, len(jobs))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_compile, [jobs[i::workers] for i in range(workers)]))


def run_model(name: str, token_counts: list[int], sweep: bool) -> None:
    """Check and time the layers and the chain of a model, and print a line for each."""
    model = MODELS[name]
    sets = {layer.name: _sets(layer, model.num_layers) for layer in model.layers}
    sets["head"] = [model.head.weights()]
    for num_tokens in token_counts:
        launches = {}
        for layer in (model.layers[0], model.layers[2], model.head):
            config = launches[layer.name] = launch_of(layer, num_tokens)
            check(layer, num_tokens, config)
            two = time_layer(layer, num_tokens, sets[layer.name], None)
            one = time_layer(layer, num_tokens, sets[layer.name], config)
            tbps = layer.nbytes / one / 1e6
            line = f"{name} {layer.name:8}T={num_tokens} {two:7.2f} us in two kernels, {one:7.2f} "
            print(line + f"in one ({tbps:.2f} TB/s)  {config}", flush=True)
            if sweep:
                _sweep(layer, num_tokens, sets[layer.name])
        two = time_chain(model, num_tokens, sets, dict.fromkeys(launches))
        one = time_chain(model, num_tokens, sets, launches)
        nbytes = model.num_layers * sum(layer.nbytes for layer in model.layers)
        tbps = (nbytes + model.head.nbytes) / one / 1e9
        line = f"{name} chain   T={num_tokens} {two:7.4f} ms in two kernels, {one:7.4f} in one"
        print(f"{line} ({tbps:.2f} TB/s)", flush=True)


def _sets(layer: Layer, num_layers: int) -> list[list[Tensor]]:
    cold = COLD_BYTES if DEVICE.type == "cuda" else 0
    return [layer.weights() for _ in range(max(-(-cold // layer.nbytes), num_layers))]


def _sweep(layer: Layer, num_tokens: int, sets: list[list[Tensor]]) -> None:
    tried = candidates(layer, num_tokens)
    compile_all([(layer, num_tokens, config) for config in tried])
    timed = sorted((time_layer(layer, num_tokens, sets, config), config) for config in tried)
    for microseconds, config in timed[:12]:
        print(f"    {microseconds:7.2f} us  {tuple(config)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gemma-3-4b")
    parser.add_argument("--tokens", default="1,2")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args(arguments)
    if DEVICE.type == "cuda":
        print(f"read ceiling {read_tbps():.2f} TB/s", flush=True)
    for name in args.models.split(","):
        run_model(name, [int(n) for n in args.tokens.split(",")], args.sweep)


if __name__ == "__main__":
    main()
