"""Decode and prefill attention against the read ceiling and torch's SDPA.

    python -m benchmarks.ops_attention [--sweep]

Times are medians under CUDA graph replay. A graph runs one launch per layer, each on blocks of its
own, so that every layer's cache comes from memory and not from L2. `--sweep` times other
configurations than the checked-in ones.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.ceiling import read_tbps
from benchmarks.timing import default_device, graph_ms
from torch_paged.ops.paged_attention.config import DecodeConfig, PrefillConfig
from torch_paged.ops.paged_attention.decode_launch import _launch_fused_decode_attention
from torch_paged.ops.paged_attention.prefill import _launch_paged_prefill_attention

BF16 = torch.bfloat16
BLOCK_SIZE = 16
# Block tables as wide as a server's: short contexts run with the split count of long ones.
MAX_TOKENS = 40960
COLD_BYTES = 200 << 20
SHAPES = [(16, 8, 128), (32, 8, 64), (32, 8, 128)]
DECODE_CASES = (
    [(1, 15)] + [(b, 200) for b in (1, 8, 32, 128)] + [(b, 2048) for b in (1, 8, 32, 128)]
)
DECODE_CASES.append((1, 32768))
PREFILL_TOKENS = [512, 2048, 8192]


def graph_us(
    launches: Sequence[Callable[[], Any]], device: torch.device, repeats: int = 15
) -> tuple[float, float]:
    """Return median and spread of microseconds a launch, all launches in one graph."""
    timing = graph_ms(lambda: [launch() for launch in launches], repeats, device)
    timing = timing.scaled(1e3 / len(launches))
    return timing.median, timing.spread


class DecodeCase:
    """Inputs of one decode step over several layers, in shuffled blocks of one pool."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        batch: int,
        context: int,
        cold_bytes: int = COLD_BYTES,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        device = self.device = default_device()
        self.heads, self.batch, self.context = heads, batch, context
        num_heads, num_kv_heads, dim = heads
        self.bytes = 2 * 2 * batch * (context + 1) * num_kv_heads * dim
        self.num_layers = min(max(2, math.ceil(cold_bytes / self.bytes)), 128)
        used = context // BLOCK_SIZE + 1
        num_blocks = self.num_layers * batch * used
        shape = (num_blocks, num_kv_heads, BLOCK_SIZE, dim)
        self.k_cache = torch.randn(shape, device=device, dtype=BF16)
        self.v_cache = torch.randn(shape, device=device, dtype=BF16)
        order = torch.randperm(num_blocks, device=device).int().view(self.num_layers, batch, used)
        self.tables = torch.zeros(
            self.num_layers, batch, max_tokens // BLOCK_SIZE, dtype=torch.int32, device=device
        )
        self.tables[:, :, :used] = order
        self.slots = torch.randperm(batch, device=device).int()
        self.context_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.counters = torch.zeros(batch * num_kv_heads, dtype=torch.int32, device=device)
        projection = torch.randn(
            batch, (num_heads + 2 * num_kv_heads) * dim, device=device, dtype=BF16
        )
        self.projection = projection
        self.query, self.key, self.value = self._split(projection)
        angle = torch.rand(batch, dim // 2, device=device) * 6
        self.cos, self.sin = angle.cos(), angle.sin()
        # Qwen3 has q/k norms, the Llamas have not.
        self.norm: dict[str, Any] = {}
        if heads == (16, 8, 128):
            gains = torch.rand(2, dim, device=device, dtype=BF16) + 0.5
            self.norm = {"q_norm": gains[0], "k_norm": gains[1], "eps": 1e-6}

    def _split(self, projection: Tensor) -> tuple[Tensor, ...]:
        num_heads, num_kv_heads, dim = self.heads
        parts = (num_heads, num_kv_heads, num_kv_heads)
        return projection.view(self.batch, -1, dim).split(parts, dim=1)

    def run(
        self,
        layer: int,
        config: DecodeConfig | None = None,
        projection: Tensor | tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Launch one layer, by the op itself unless a configuration is given.

        `projection` [batch, (heads + 2 kv_heads) * head_dim], or its three parts, takes the place
        of the case's own.
        """
        if isinstance(projection, tuple):
            parts = (part.view(self.batch, -1, self.heads[2]) for part in projection)
            query, key, value = parts
        else:
            query, key, value = self._split(self.projection if projection is None else projection)
        launch: Callable[..., Tensor] = torch.ops.torch_paged.fused_decode_attention.default
        if config is not None:
            launch = partial(_launch_fused_decode_attention, config=config)
        return launch(
            query,
            key,
            value,
            self.cos,
            self.sin,
            self.k_cache,
            self.v_cache,
            self.tables[layer],
            self.slots,
            self.context_lens,
            self.counters,
            self.heads[2] ** -0.5,
            **self.norm,
        )

    def check(self, config: DecodeConfig | None = None) -> float:
        """Return the relative error against float32 attention over what the cache holds."""
        output = self.run(1, config)
        num_heads, num_kv_heads, dim = self.heads
        query = self._prepared(self.query, "q_norm")
        worst = 0.0
        for row in {0, self.batch - 1}:
            blocks = self.tables[1, self.slots[row], : self.context // BLOCK_SIZE + 1].long()
            # The kernel has written the new token by now.
            keys, values = (
                cache[blocks].transpose(1, 2).flatten(0, 1)[: self.context + 1].float()
                for cache in (self.k_cache, self.v_cache)
            )
            q = query[row].view(num_kv_heads, -1, dim).float()
            weights = torch.softmax(torch.einsum("hgd,lhd->hgl", q, keys) * dim**-0.5, dim=-1)
            exact = torch.einsum("hgl,lhd->hgd", weights, values).view(num_heads, dim)
            worst = max(worst, float((output[row] - exact).norm() / exact.norm()))
        return worst

    def _prepared(self, x: Tensor, norm: str) -> Tensor:
        if norm in self.norm:
            x = F.rms_norm(x, x.shape[-1:], None, self.norm["eps"]) * self.norm[norm]
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def time(self, config: DecodeConfig | None = None) -> tuple[float, float]:
        """Return median and spread of microseconds a layer."""
        layers = range(self.num_layers)
        launches = [partial(self.run, layer, config) for layer in layers]
        return graph_us(launches, self.device)


class PrefillCase:
    """One prompt without prefix, over two layers."""

    def __init__(self, heads: tuple[int, int, int], num_tokens: int) -> None:
        device = self.device = default_device()
        self.heads, self.num_tokens = heads, num_tokens
        num_heads, num_kv_heads, dim = heads
        num_blocks = num_tokens // BLOCK_SIZE
        shape = (2 * num_blocks, num_kv_heads, BLOCK_SIZE, dim)
        self.k_cache = torch.randn(shape, device=device, dtype=BF16)
        self.v_cache = torch.randn(shape, device=device, dtype=BF16)
        self.tables = torch.randperm(2 * num_blocks, device=device).int().view(2, 1, -1)
        self.query = torch.randn(num_tokens, num_heads, dim, device=device, dtype=BF16)
        self.slots, self.context_lens = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.bounds = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        self.flops = 2 * num_heads * dim * num_tokens**2
        caches = (self.k_cache, self.v_cache)
        self.dense = [
            cache[self.tables[0, 0].long()].transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]
            for cache in caches
        ]

    def run(self, layer: int, config: PrefillConfig | None = None) -> Tensor:
        """Launch one layer, by the op itself unless a configuration is given."""
        launch: Callable[..., Tensor] = torch.ops.torch_paged.paged_prefill_attention.default
        if config is not None:
            launch = partial(_launch_paged_prefill_attention, config=config)
        return launch(
            self.query,
            self.k_cache,
            self.v_cache,
            self.tables[layer],
            self.slots,
            self.bounds,
            self.context_lens,
            self.num_tokens,
            self.heads[2] ** -0.5,
        )

    def check(self, config: PrefillConfig | None = None) -> float:
        """Return the relative error of the last 64 queries against float32 attention."""
        output = self.run(0, config)[-64:]
        dim, n = self.heads[2], self.num_tokens
        keys, values = (x[0].float() for x in self.dense)
        query = self.query[-64:].view(64, keys.shape[0], -1, dim).float()
        scores = torch.einsum("nhgd,hld->hgnl", query, keys) * dim**-0.5
        at = torch.arange(n, device=self.device)
        later = at > at[-64:, None]
        weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
        exact = torch.einsum("hgnl,hld->nhgd", weights, values).flatten(1, 2)
        return float((output - exact).norm() / exact.norm())

    def time(self, config: PrefillConfig | None = None) -> tuple[float, float]:
        """Return median and spread of microseconds a layer."""
        return graph_us([partial(self.run, i % 2, config) for i in range(4)], self.device)

    def time_sdpa(self) -> dict[str, float]:
        """Return microseconds of torch's backends on the same sizes, contiguous."""
        query = self.query.transpose(0, 1)[None].contiguous()
        keys, values = (x.contiguous() for x in self.dense)
        times = {}
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            with sdpa_kernel(getattr(SDPBackend, name)):
                times[name.split("_")[0].lower()] = graph_us(
                    [
                        lambda: F.scaled_dot_product_attention(
                            query, keys, values, is_causal=True, enable_gqa=True
                        )
                    ]
                    * 4,
                    self.device,
                )[0]
        return times


def _decode_variants() -> list[DecodeConfig]:
    """Configurations that differ in what is compiled."""
    tiles = [(16384, 4, 2, 0), (16384, 4, 3, 0), (16384, 4, 4, 0), (16384, 8, 3, 0)]
    tiles += [(8192, 4, 4, 0), (32768, 4, 2, 0), (32768, 8, 2, 0), (32768, 8, 3, 0)]
    tiles += [(65536, 8, 2, 0), (16384, 4, 3, 256), (32768, 8, 2, 256), (32768, 8, 3, 256)]
    tiles += [(65536, 8, 2, 256)]
    found = [
        DecodeConfig(tile_bytes=t, num_warps=w, num_stages=s, prefetch_tokens=p)
        for t, w, s, p in tiles
    ]
    # Those of many programs, and of a few for each multiprocessor.
    for tile, warps, stages in ((8192, 4, 2), (8192, 4, 3), (16384, 4, 2), (32768, 8, 2)):
        base = DecodeConfig(tile_bytes=tile, num_warps=warps, num_stages=stages)
        found.append(dataclasses.replace(base, early_tile=True))
        found.append(dataclasses.replace(base, heads_first=True))
    return found


def _split_variants(config: DecodeConfig, tokens: int) -> list[DecodeConfig]:
    """Configurations that differ in how the context is split, which is a run-time matter."""
    if tokens == 200:
        return [
            dataclasses.replace(config, single_tokens=n, min_split_tokens=64) for n in (64, 128)
        ]
    return [
        dataclasses.replace(config, min_split_tokens=split, programs_per_sm=programs)
        for split in (64, 128, 256)
        for programs in (1, 2, 4)
    ]


def _prefill_variants() -> list[PrefillConfig]:
    tiles = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2)]
    return [PrefillConfig(*tile) for tile in tiles]


def _compile(job: tuple[str, tuple[int, int, int], Any]) -> None:
    """Fill Triton's disk cache with one variant, in a process of its own."""
    kind, heads, config = job
    if kind == "prefill":
        for num_tokens in PREFILL_TOKENS:
            PrefillCase(heads, num_tokens).run(0, config)
    else:
        for batch in (1, 64):  # with and without splits
            DecodeCase(heads, batch, 20, cold_bytes=0).run(0, config)
    torch.cuda.synchronize()


def _compile_all(with_variants: bool) -> None:
    jobs: list[tuple[str, tuple[int, int, int], Any]] = []
    for heads in SHAPES:
        jobs += [("decode", heads, None), ("prefill", heads, None)]
        if with_variants:
            jobs += [("decode", heads, config) for config in _decode_variants()]
            jobs += [("prefill", heads, config) for config in _prefill_variants()]
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(14, (os.cpu_count() or 2) - 2, len(jobs)))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for job, future in [(job, pool.submit(_compile, job)) for job in jobs]:
            if future.exception() is not None:
                print(f"{job} does not run: {future.exception()}")


def _try(case: DecodeCase | PrefillCase, config: Any) -> float:
    """Return microseconds, infinite where the configuration does not run or is wrong."""
    try:
        error = case.check(config)
        return case.time(config)[0] if error < 1e-2 else math.inf
    except Exception as exception:
        print(f"{config}: {exception!r:.200}")
        return math.inf


def sweep() -> list[dict[str, Any]]:
    """Time variants of both kernels and print the best of each case."""
    rows: list[dict[str, Any]] = []

    def report(case: str, timed: list[tuple[Any, float]]) -> None:
        timed.sort(key=lambda pair: pair[1])
        for config, us in timed:
            rows.append({"case": case, "us": us, "config": dataclasses.astuple(config)})
        shown = " | ".join(f"{us:.2f} {dataclasses.astuple(config)}" for config, us in timed[:7])
        print(f"{case}: {shown} ... {timed[-1][1]:.2f}", flush=True)

    for heads in SHAPES:
        for num_tokens in PREFILL_TOKENS:
            prompt = PrefillCase(heads, num_tokens)
            timed = [(config, _try(prompt, config)) for config in _prefill_variants()]
            report(f"prefill {heads} {num_tokens}", timed)
    cases = [(1, 200), (1, 2048), (1, 32768), (8, 2048), (32, 200), (32, 2048)]
    for batch, tokens in [*cases, (64, 200), (128, 160), (128, 1024)]:
        for heads in SHAPES:
            case = DecodeCase(heads, batch, tokens)
            configs = _decode_variants()
            if batch < 32:
                configs += _split_variants(DecodeConfig(), tokens)
                large = DecodeConfig(tile_bytes=32768, num_warps=8)
                configs += _split_variants(large, tokens)
            report(f"decode {heads} b{batch} ctx {tokens}", [(c, _try(case, c)) for c in configs])
            del case
    return rows


def main() -> None:
    """Check, time and print; JSON under $OUT where that is set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    _compile_all(args.sweep)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    ceiling = read_tbps()
    record |= {"read_tbps": ceiling, "decode": [], "prefill": []}
    lines = [f"{record['gpu']}, torch {torch.__version__}, read ceiling {ceiling:.2f} TB/s"]
    for heads, (batch, tokens) in itertools.product(SHAPES, DECODE_CASES):
        case = DecodeCase(heads, batch, tokens)
        error = case.check()
        us, spread = case.time()
        row = {"heads": heads, "batch": batch, "context": tokens, "us": us, "spread_us": spread}
        row |= {"error": error, "gbps": case.bytes / us / 1e3}
        record["decode"].append(row)
        lines.append(
            f"decode {heads!s:13} b{batch:<3} ctx {tokens:<5} {us:7.2f} us (+-{spread:.2f}) "
            f"{row['gbps']:5.0f} GB/s {row['gbps'] / ceiling / 10:5.1f}%  error {error:.1e}"
        )
        assert error < 1e-2, lines[-1]
        del case
    for heads, num_tokens in itertools.product(SHAPES, PREFILL_TOKENS):
        prompt = PrefillCase(heads, num_tokens)
        error = prompt.check()
        us, spread = prompt.time()
        times = {"ours": us} | prompt.time_sdpa()
        tflops = {name: prompt.flops / us / 1e6 for name, us in times.items()}
        record["prefill"].append({"heads": heads, "tokens": num_tokens, "us": times})
        record["prefill"][-1] |= {"tflops": tflops, "spread_us": spread, "error": error}
        shown = ", ".join(f"{name} {value:.0f}" for name, value in tflops.items())
        lines.append(
            f"prefill {heads!s:13} {num_tokens:<5} {us:7.1f} us  TFLOP/s {shown} error {error:.1e}"
        )
        assert error < 1e-2, lines[-1]
    record["seconds"] = time.perf_counter() - began
    if args.sweep:
        print("\n".join(lines), flush=True)
        record["sweep"] = sweep()
    print("\n".join(lines), f"\n{time.perf_counter() - began:.0f} s", flush=True)
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "ops_attention.json"), "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
