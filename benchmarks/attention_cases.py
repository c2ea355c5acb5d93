"""Inputs of decode and prefill attention at true shapes, their checks and their times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def graph_us(
    launches: Sequence[Callable[[], Any]], device: torch.device, repeats: int = 15
) -> tuple[float, float]:
    """Return median and spread of microseconds a launch, all launches in one graph."""
    timing = graph_ms(lambda: [launch() for launch in launches], repeats, device)
    timing = timing.scaled(1e3 / len(launches))
    return timing.median, timing.spread


def ragged_contexts(rows: int) -> list[int]:
    """Return contexts as `benchmarks.ragged` has them midway, longest first, as an engine has."""
    draw = random.Random(rows)
    contexts = [
        draw.randint(32, 1024) + draw.randint(0, draw.randint(32, 512)) for _ in range(rows)
    ]
    return sorted(contexts, reverse=True)


class DecodeCase:
    """Inputs of one decode step over several layers, in shuffled blocks of one pool.

    `context` is what the cache holds of every row, or of each.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        batch: int,
        context: int | Sequence[int],
        cold_bytes: int = COLD_BYTES,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        device = self.device = default_device()
        self.heads, self.batch = heads, batch
        self.contexts = [context] * batch if isinstance(context, int) else list(context)
        num_heads, num_kv_heads, dim = heads
        self.bytes = 2 * 2 * sum(n + 1 for n in self.contexts) * num_kv_heads * dim
        self.num_layers = min(max(2, math.ceil(cold_bytes / self.bytes)), 128)
        used = max(self.contexts) // BLOCK_SIZE + 1
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
        self.context_lens = torch.empty(batch, dtype=torch.int32, device=device)
        self.context_lens[self.slots.long()] = torch.tensor(
            self.contexts, dtype=torch.int32, device=device
        )
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
        for row in {0, self.batch // 2, self.batch - 1}:
            context = self.contexts[row]
            blocks = self.tables[1, self.slots[row], : context // BLOCK_SIZE + 1].long()
            # The kernel has written the new token by now.
            keys, values = (
                cache[blocks].transpose(1, 2).flatten(0, 1)[: context + 1].float()
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
