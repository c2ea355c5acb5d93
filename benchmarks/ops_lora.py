"""The ops of LoRA alone: `python -m benchmarks.ops_lora [--models 0.6b 8b] [--rows 1 32]`.

For each linear of a layer the time of `fused_linear`, of `lora_shrink` with a `fused_linear` that
adds its update, and what of the read ceiling that is; under graph replay, from memory, checked
against float64 first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import ops_linear, shapes
from benchmarks.ceiling import read_tbps
from benchmarks.ops_linear_cases import BF16, MODELS, Layer
from benchmarks.parity import WrongResult
from benchmarks.timing import default_device, graph_ms
from torch_paged.ops.fused_linear import fused_linear, fused_linear_reference

COLD_BYTES = 400 << 20
_SCALE = 0.5


class Adapter(NamedTuple):
    """Both halves of the updates of a layer's linears."""

    downs: list[Tensor]
    ups: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.downs, *self.ups))


def adapter(layer: Layer, rank: int, dtype: torch.dtype) -> Adapter:
    """Draw updates that change about as much as the linears give."""
    device, width = default_device(), layer.in_features
    downs = [torch.randn(rank, width, device=device).mul_(width**-0.5) for _ in layer.sizes]
    ups = [torch.randn(size, rank, device=device).mul_(rank**-0.5) for size in layer.sizes]
    return Adapter([d.to(dtype) for d in downs], [u.to(dtype) for u in ups])


def updated(layer: Layer, x: Tensor, weights: list[Tensor], a: Adapter, options: Any) -> Tensor:
    """Launch both halves of a layer."""
    named = dict(options, downs=a.downs, updates=a.ups, update_scales=[_SCALE] * len(a.ups))
    return fused_linear(x, weights, **named)


def check(layer: Layer, x: Tensor, weights: list[Tensor], a: Adapter, options: Any) -> None:
    """Hold the ops to twice the error of the rounding references, against float64."""
    got = updated(layer, x, weights, a, options)
    options = {key: value for key, value in options.items() if key != "counters"}
    more = {"updates": a.ups, "update_scales": [_SCALE] * len(a.ups), "downs": a.downs}
    low = fused_linear_reference(x, weights, [], **options, **more)
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    h = x.double()
    if layer.norm:
        h = h / (h.square().mean(-1, keepdim=True) + wide.pop("eps")).sqrt()
        h = h * wide.pop("norm_weight")
        wide.pop("norm")
    merged = [
        w.double() + _SCALE * up.double() @ down.double()
        for w, up, down in zip(weights, a.ups, a.downs, strict=True)
    ]
    want = fused_linear_reference(h, merged, [], **wide)
    error, limit = (got - want).abs().max(), 2 * (low - want).abs().max()
    if not error <= limit:
        raise WrongResult(f"{layer.name}: error {error:.2e}, at most {limit:.2e} is right")


def time_layer(layer: Layer, rows: int, rank: int, dtype: torch.dtype) -> dict[str, float]:
    """Return microseconds of the plain and of the updated layer, and the bytes of the latter."""
    device = default_device()
    x = torch.randn(rows, layer.in_features, dtype=BF16, device=device)
    options = layer.options(rows)
    copies = max(1, COLD_BYTES // layer.nbytes) if device.type == "cuda" else 1
    sets = [(layer.weights(), adapter(layer, rank, dtype)) for _ in range(min(copies, 64))]
    check(layer, x, *sets[0], options)

    def each(run: Callable[..., Any]) -> float:
        timing = graph_ms(lambda: [run(*s) for s in sets], 20, device)
        return 1e3 * timing.median / len(sets)

    return {
        "plain": each(lambda weights, _: ops_linear.call(layer, x, weights, options)),
        "updated": each(lambda weights, a: updated(layer, x, weights, a, options)),
        "nbytes": layer.nbytes + sets[0][1].nbytes,
    }


def main() -> None:
    """Time the layers of the shapes asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = (*shapes.NAMES, shapes.TINY)
    parser.add_argument("--models", nargs="+", default=["0.6b", "8b"], choices=names)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    ceiling = read_tbps(default_device())
    for name in args.models:
        for rows in args.rows:
            for dtype in (BF16, torch.float32):
                for layer in MODELS[name].layers:
                    us = time_layer(layer, rows, args.rank, dtype)
                    rate = us["nbytes"] / us["updated"] / 1e3
                    print(
                        f"{name:5} {layer.name:8} {rows:3} rows, rank {args.rank} in "
                        f"{str(dtype).removeprefix('torch.'):8}: {us['plain']:7.2f} us plain, "
                        f"{us['updated']:7.2f} updated, {rate:6.0f} GB/s, "
                        f"{rate / ceiling / 10:.0f}% of the ceiling",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
