"""Latent attention against the read ceiling, with the products around it.

    python -m benchmarks.ops_latent [--sweep]

Times are medians under CUDA graph replay. A graph runs one launch per layer, each on blocks and
weights of its own, so that every layer's cache comes from memory and not from L2. Bytes are those
of the latents and rotary keys of the context, once, whatever the number of heads. `--sweep` times
other configurations than the checked-in ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_cases import BF16, BLOCK_SIZE, COLD_BYTES, MAX_TOKENS, graph_us
from benchmarks.ceiling import read_tbps
from benchmarks.timing import default_device
from torch_paged.ops.latent_attention.config import DecodeConfig, PrefillConfig
from torch_paged.ops.latent_attention.decode import _launch_latent_decode_attention
from torch_paged.ops.latent_attention.prefill import _launch_latent_prefill_attention

# (heads, rank, rope_dim, nope_dim, v_head_dim) of DeepSeek-V2-Lite, DeepSeek-V3 and MiniCPM3.
Shape = tuple[int, int, int, int, int]
SHAPES: dict[str, Shape] = {
    "v2-lite": (16, 512, 64, 128, 128),
    "v3": (128, 512, 64, 128, 128),
    "minicpm3": (40, 256, 32, 64, 64),
}
DECODE_CASES = [(b, 200) for b in (1, 8, 32, 128)] + [(b, 2048) for b in (1, 8, 32, 128)]
DECODE_CASES += [(1, 32768), (8, 32768)]
PREFILL_TOKENS = [512, 2048, 8192]
_ERROR = 1e-2


class LatentCase:
    """Inputs of one step over several layers, in shuffled blocks of one pool."""

    def __init__(
        self,
        shape: Shape,
        batch: int,
        context: int,
        *,
        cold_bytes: int = COLD_BYTES,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        device = self.device = default_device()
        self.shape, self.batch, self.context = shape, batch, context
        heads, rank, rope, nope, v_dim = shape
        self.bytes = 2 * batch * (context + 1) * (rank + rope)
        self.weight_bytes = 2 * heads * (nope + v_dim) * rank
        self.num_layers = min(max(2, math.ceil(cold_bytes / self.bytes)), 64)
        used = context // BLOCK_SIZE + 1
        num_blocks = self.num_layers * batch * used
        self.latents = torch.randn(num_blocks, 1, BLOCK_SIZE, rank, device=device, dtype=BF16)
        self.keys = torch.randn(num_blocks, 1, BLOCK_SIZE, rope, device=device, dtype=BF16)
        order = torch.randperm(num_blocks, device=device).int().view(self.num_layers, batch, used)
        self.tables = torch.zeros(
            self.num_layers, batch, max_tokens // BLOCK_SIZE, dtype=torch.int32, device=device
        )
        self.tables[:, :, :used] = order
        self.slots = torch.randperm(batch, device=device).int()
        self.context_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.query = torch.randn(batch, heads, nope + rope, device=device, dtype=BF16)
        self.latent_query = torch.randn(batch, heads, rank, device=device, dtype=BF16)
        self.compressed = torch.randn(batch, rank + rope, device=device, dtype=BF16)
        angle = torch.rand(batch, rope // 2, device=device) * 6
        self.tables_of_angles = (angle.cos(), angle.sin())
        self.gain = torch.rand(rank, device=device, dtype=BF16) + 0.5
        copies = min(max(1, math.ceil(cold_bytes / self.weight_bytes)), self.num_layers)
        weight = torch.randn(copies, heads, nope + v_dim, rank, device=device, dtype=BF16)
        self.weights = weight * rank**-0.5
        self.scale = (nope + rope) ** -0.5 / 8

    def attend(self, layer: int, config: DecodeConfig | None = None) -> Tensor:
        """Launch one layer's attention, by the op itself unless a configuration is given."""
        launch: Callable[..., Tensor] = torch.ops.torch_paged.latent_decode_attention.default
        if config is not None:
            launch = partial(_launch_latent_decode_attention, config=config)
        return launch(
            self.latent_query,
            self.query[..., self.shape[3] :],
            self.latents,
            self.keys,
            self.tables[layer],
            self.slots,
            self.context_lens,
            self.scale,
        )

    def write(self, layer: int) -> None:
        """Launch one layer's norm, rotation and cache write."""
        torch.ops.torch_paged.latent_cache_write.default(
            self.query,
            self.compressed,
            *self.tables_of_angles,
            self.latents,
            self.keys,
            self.gain,
            1e-6,
            "pairs",
            None,
            self.tables[layer],
            self.slots,
            self.context_lens,
        )

    def project(self, layer: int) -> Tensor:
        """Launch the products of one layer that lead into the space of latents and out of it."""
        nope = self.shape[3]
        weight = self.weights[layer % self.weights.shape[0]]
        product: Callable[..., Tensor] = torch.ops.torch_paged.head_linear.default
        latent = product(self.query[..., :nope], weight[:, :nope])
        return product(latent, weight[:, nope:].transpose(1, 2))

    def project_by_torch(self, layer: int) -> Tensor:
        """Launch the same products of torch."""
        nope = self.shape[3]
        weight = self.weights[layer % self.weights.shape[0]]
        latent = torch.bmm(self.query[..., :nope].transpose(0, 1), weight[:, :nope])
        return torch.bmm(latent, weight[:, nope:].transpose(1, 2))

    def check(self, config: DecodeConfig | None = None) -> float:
        """Return the relative error against float32 attention over what the cache holds."""
        output = self.attend(1, config)
        worst = 0.0
        for row in {0, self.batch - 1}:
            blocks = self.tables[1, self.slots[row], : self.context // BLOCK_SIZE + 1].long()
            latents, keys = (
                cache[blocks].flatten(0, 2)[: self.context + 1].float()
                for cache in (self.latents, self.keys)
            )
            scores = self.latent_query[row].float() @ latents.T
            scores += self.query[row, :, self.shape[3] :].float() @ keys.T
            exact = torch.softmax(scores * self.scale, dim=-1) @ latents
            worst = max(worst, float((output[row] - exact).norm() / exact.norm()))
        return worst

    def time(self, launch: Callable[[int], Any]) -> tuple[float, float]:
        """Return median and spread of microseconds a layer."""
        layers = range(self.num_layers)
        return graph_us([partial(launch, layer) for layer in layers], self.device)


class LatentPrefillCase:
    """One prompt without prefix, over two layers."""

    def __init__(self, shape: Shape, num_tokens: int) -> None:
        device = self.device = default_device()
        self.shape, self.num_tokens = shape, num_tokens
        heads, rank, rope, nope, _ = shape
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.latents = torch.randn(2 * num_blocks, 1, BLOCK_SIZE, rank, device=device, dtype=BF16)
        self.keys = torch.randn(2 * num_blocks, 1, BLOCK_SIZE, rope, device=device, dtype=BF16)
        self.tables = torch.randperm(2 * num_blocks, device=device).int().view(2, 1, -1)
        self.latent_query = torch.randn(num_tokens, heads, rank, device=device, dtype=BF16)
        self.rope_query = torch.randn(num_tokens, heads, rope, device=device, dtype=BF16)
        self.slots, self.context_lens = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        self.flops = heads * (2 * rank + rope) * num_tokens**2
        self.scale = (nope + rope) ** -0.5 / 8

    def run(self, layer: int, config: PrefillConfig | None = None) -> Tensor:
        """Launch one layer, by the op itself unless a configuration is given."""
        launch: Callable[..., Tensor] = torch.ops.torch_paged.latent_prefill_attention.default
        if config is not None:
            launch = partial(_launch_latent_prefill_attention, config=config)
        return launch(
            self.latent_query,
            self.rope_query,
            self.latents,
            self.keys,
            self.tables[layer],
            self.slots,
            self.bounds,
            self.context_lens,
            self.scale,
        )

    def check(self, config: PrefillConfig | None = None) -> float:
        """Return the relative error of the last 16 queries against float32 attention."""
        output = self.run(0, config)[-16:]
        blocks, n = self.tables[0, 0].long(), self.num_tokens
        latents = self.latents[blocks].flatten(0, 2)[:n].float()
        keys = self.keys[blocks].flatten(0, 2)[:n].float()
        scores = self.latent_query[-16:].float() @ latents.T
        scores += self.rope_query[-16:].float() @ keys.T
        at = torch.arange(n, device=self.device)
        later = (at > at[-16:, None])[:, None]
        weights = torch.softmax((scores * self.scale).masked_fill(later, -math.inf), dim=-1)
        exact = weights @ latents
        return float((output - exact).norm() / exact.norm())

    def time(self, config: PrefillConfig | None = None) -> tuple[float, float]:
        """Return median and spread of microseconds a layer."""
        return graph_us([partial(self.run, i % 2, config) for i in range(4)], self.device)


def _decode_variants() -> list[DecodeConfig]:
    tiles = [(16, 32, 4, 2), (16, 32, 4, 3), (16, 64, 4, 2), (16, 32, 8, 2), (16, 64, 8, 2)]
    tiles += [(16, 64, 8, 3), (32, 32, 8, 2), (32, 32, 8, 3), (32, 64, 8, 2), (64, 32, 8, 2)]
    tiles += [(64, 32, 8, 3), (64, 16, 8, 3)]
    bases = [DecodeConfig(*tile) for tile in tiles]
    return [
        dataclasses.replace(base, min_split_tokens=least, programs_per_sm=programs)
        for base in bases
        for least, programs in ((128, 1), (128, 2), (64, 2), (256, 1))
    ]


def _prefill_variants() -> list[PrefillConfig]:
    tiles = [(32, 32, 4, 2), (32, 32, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3)]
    tiles += [(64, 64, 8, 1), (64, 64, 8, 2), (64, 16, 8, 2)]
    return [PrefillConfig(*tile) for tile in tiles]


def _try(check: Callable[[], float], time: Callable[[], tuple[float, float]]) -> float:
    """Return microseconds, infinite where the configuration does not run or is wrong."""
    try:
        return time()[0] if check() < _ERROR else math.inf
    except Exception as exception:
        print(f"{exception!r:.200}")
        return math.inf


def sweep() -> list[dict[str, Any]]:
    """Time variants of both kernels and print the best of each case."""
    rows: list[dict[str, Any]] = []

    def report(case: str, timed: list[tuple[Any, float]]) -> None:
        timed.sort(key=lambda pair: pair[1])
        for config, us in timed:
            rows.append({"case": case, "us": us, "config": dataclasses.astuple(config)})
        shown = " | ".join(f"{us:.2f} {dataclasses.astuple(config)}" for config, us in timed[:5])
        print(f"{case}: {shown} ... {timed[-1][1]:.2f}", flush=True)

    for name, shape in SHAPES.items():
        for batch, tokens in ((1, 2048), (1, 32768), (8, 2048), (32, 2048), (128, 2048)):
            case = LatentCase(shape, batch, tokens)
            timed: list[tuple[Any, float]] = []
            for config in _decode_variants():
                attend = partial(case.attend, config=config)
                us = _try(partial(case.check, config), partial(case.time, attend))
                timed.append((config, us))
            report(f"decode {name} b{batch} ctx {tokens}", timed)
            del case
        for tokens in (512, 2048):
            prompt = LatentPrefillCase(shape, tokens)
            report(
                f"prefill {name} {tokens}",
                [
                    (c, _try(partial(prompt.check, c), partial(prompt.time, c)))
                    for c in _prefill_variants()
                ],
            )
    return rows


def _decode_row(name: str, batch: int, tokens: int, ceiling: float) -> tuple[dict[str, Any], str]:
    case = LatentCase(SHAPES[name], batch, tokens)
    error = case.check()
    us, spread = case.time(case.attend)
    write, project = case.time(case.write)[0], case.time(case.project)[0]
    by_torch = case.time(case.project_by_torch)[0]
    row = {"shape": name, "batch": batch, "context": tokens, "us": us, "spread_us": spread}
    row |= {"error": error, "gbps": case.bytes / us / 1e3, "write_us": write}
    row |= {"project_us": project, "project_gbps": case.weight_bytes / project / 1e3}
    row |= {"project_torch_us": by_torch}
    line = (
        f"decode {name:8} b{batch:<3} ctx {tokens:<5} {us:7.2f} us (+-{spread:.2f}) "
        f"{row['gbps']:5.0f} GB/s {row['gbps'] / ceiling / 10:5.1f}%  write {write:.2f} us, "
        f"both products {project:.2f} us ({row['project_gbps']:.0f} GB/s, "
        f"torch.bmm {by_torch:.2f} us)  error {error:.1e}"
    )
    assert error < _ERROR, line
    return row, line


def main() -> None:
    """Check, time and print; JSON under $OUT where that is set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    ceiling = read_tbps()
    record |= {"read_tbps": ceiling, "decode": [], "prefill": []}
    print(f"{record['gpu']}, torch {torch.__version__}, read ceiling {ceiling:.2f} TB/s")
    for name, (batch, tokens) in itertools.product(SHAPES, DECODE_CASES):
        row, line = _decode_row(name, batch, tokens, ceiling)
        record["decode"].append(row)
        print(line, flush=True)
    for name, tokens in itertools.product(SHAPES, PREFILL_TOKENS):
        prompt = LatentPrefillCase(SHAPES[name], tokens)
        error = prompt.check()
        us, spread = prompt.time()
        tflops = prompt.flops / us / 1e6
        record["prefill"].append({"shape": name, "tokens": tokens, "us": us, "tflops": tflops})
        record["prefill"][-1] |= {"spread_us": spread, "error": error}
        line = f"prefill {name:8} {tokens:<5} {us:8.1f} us {tflops:4.0f} TFLOP/s error {error:.1e}"
        print(line, flush=True)
        assert error < _ERROR, line
    if args.sweep:
        record["sweep"] = sweep()
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "ops_latent.json"), "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
