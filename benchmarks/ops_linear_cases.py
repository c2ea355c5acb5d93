"""The layers that ops_linear.py times, and the configurations that its sweep tries for them."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import default_device
from torch_paged.ops.fused_linear import NUM_COUNTERS
from torch_paged.ops.fused_linear.configs import (
    ALWAYS_KERNEL_ROWS,
    KINDS,
    Composed,
    Config,
    GemvConfig,
    PlainTileGemmConfig,
    Problem,
    SmallGemmConfig,
    TileGemmConfig,
    choose_config,
    device_key,
    token_bucket,
)
from torch_paged.ops.fused_linear.wide_config import (
    SHARED_BYTES,
    AheadGemmConfig,
    ranked_configs,
    stage_bytes,
)

BF16 = torch.bfloat16
NUM_PROCESSORS = 132  # of the devices that the sweep's candidates are made for


class Layer(NamedTuple):
    """A fused_linear call of a model."""

    name: str
    sizes: tuple[str | int, ...]
    in_features: int
    norm: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return 2 * self.num_rows * self.in_features

    def options(self, num_tokens: int) -> dict[str, Any]:
        """Return the call's other arguments, made anew."""
        device = default_device()
        width = self.num_rows // 2 if self.gated else self.num_rows
        counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
        options: dict[str, Any] = {"counters": counters}
        if self.norm:
            gain = 1 + 0.1 * torch.randn(self.in_features, dtype=BF16, device=device)
            options |= {"norm_weight": gain, "norm": True, "eps": 1e-5}
        if self.gated:
            options |= {"activation": "silu", "gated": True}
        if self.residual:
            options["residual"] = torch.randn(num_tokens, width, dtype=BF16, device=device)
        return options

    def weights(self, empty: bool = False) -> list[Tensor]:
        device = default_device()
        make = [torch.empty(n, self.in_features, dtype=BF16, device=device) for n in self.sizes]
        return make if empty else [w.normal_(std=self.in_features**-0.5) for w in make]


class Model(NamedTuple):
    num_layers: int
    layers: tuple[Layer, ...]
    head: Layer


def _model(
    num_layers: int, hidden: int, heads: tuple[int, int, int], inner: int, vocab: int
) -> Model:
    num_heads, num_kv_heads, dim = heads
    q, kv = num_heads * dim, num_kv_heads * dim
    layers = (
        Layer("qkv", (q, kv, kv), hidden, norm=True),
        Layer("o", (hidden,), q, residual=True),
        Layer("gate_up", (inner, inner), hidden, norm=True, gated=True),
        Layer("down", (hidden,), inner, residual=True),
    )
    return Model(num_layers, layers, Layer("head", (vocab,), hidden, norm=True))


# Query heads, key and value heads, head_dim.
HEADS = {
    "0.6b": (16, 8, 128),
    "1b": (32, 8, 64),
    "8b": (32, 8, 128),
    "gemma-3-4b": (8, 4, 256),
    "phi-4-mini": (24, 8, 128),
    "tiny": (4, 2, 16),
}

MODELS = {
    "0.6b": _model(28, 1024, (16, 8, 128), 3072, 151936),
    "1b": _model(16, 2048, (32, 8, 64), 8192, 128256),
    "8b": _model(32, 4096, (32, 8, 128), 14336, 128256),
    "gemma-3-4b": _model(34, 2560, (8, 4, 256), 10240, 262208),
    "phi-4-mini": _model(32, 3072, (24, 8, 128), 8192, 200064),
    "tiny": _model(2, 64, (4, 2, 16), 96, 512),
}


def chosen(layer: Layer, num_tokens: int) -> Config:
    problem = Problem(num_tokens, layer.num_rows, layer.in_features, layer.gated)
    return choose_config(device_key(torch.device("cuda", 0)), problem, BF16, True)


def candidates(layer: Layer, num_tokens: int, kinds: Collection[str] = ()) -> list[Config]:
    """Return the configurations worth timing for a layer, the chosen one first.

    `kinds`: of these kinds only, besides the chosen one.
    """
    streams = 2 if layer.gated else 1
    found = [chosen(layer, num_tokens)]
    if num_tokens <= 2:
        found += _gemv_candidates(layer, num_tokens, streams)
    if 1 < num_tokens <= 16:
        found += _small_gemm_candidates(layer, num_tokens, streams)
    if num_tokens > ALWAYS_KERNEL_ROWS:
        found += [Composed(), *_wide_candidates(layer, num_tokens, streams)]
        found += _plain_tile_candidates(layer, streams)
    elif num_tokens > 2:
        found += _tile_gemm_candidates(layer, num_tokens, streams)
        found += _one_tile_candidates(layer, num_tokens, streams)
    if 8 < num_tokens <= ALWAYS_KERNEL_ROWS:
        found += _few_rows_wide_candidates(layer, num_tokens, streams)
    if 8 < num_tokens <= 128:
        found += _ahead_candidates(layer, num_tokens, streams)
    return [c for c in dict.fromkeys(found) if not kinds or c == found[0] or is_one_of(c, kinds)]


def is_one_of(config: Config, kinds: Collection[str]) -> bool:
    return isinstance(config, tuple(KINDS[kind] for kind in kinds))


def _gemv_candidates(layer: Layer, num_tokens: int, streams: int) -> list[Config]:
    found: list[Config] = []
    for warps, rows, chunks in itertools.product((4, 8), (1, 2, 4), (1, 2, 4)):
        loads = rows * chunks * streams
        for k_warps in (1, 2, 4, 8):
            tiles = -(-layer.in_features // (k_warps * chunks * 256))
            waste = tiles * k_warps * chunks * 256 / layer.in_features
            if not 4 <= loads <= 8 or k_warps > warps or waste > 1.4:
                continue
            if tiles > 6 or rows * warps // k_warps * streams > 16:
                continue
            registers = 96 if num_tokens == 2 else 64 if loads < 8 else 80
            found.append(GemvConfig(rows, chunks, warps, k_warps, registers))
            if k_warps <= 2 and layer.in_features == 1024:
                found.append(GemvConfig(rows, chunks, warps, k_warps, 128))
    return found


def _small_gemm_candidates(layer: Layer, num_tokens: int, streams: int) -> list[Config]:
    found: list[Config] = []
    tokens = max(token_bucket(num_tokens), 8)
    for warps, rows, chunks in itertools.product((4, 8), (8, 16, 32, 64), (1, 2, 4, 8)):
        loads = rows // 8 * chunks * streams
        if not 4 <= loads <= 8 or not tokens <= rows <= 512 // tokens or chunks * tokens > 64:
            continue
        for splits in (1, 2, 4):
            per_program = layer.in_features // splits
            nbytes = 2 * rows * streams * per_program
            if per_program < warps * chunks * 32 or not 16 << 10 <= nbytes <= 512 << 10:
                continue
            # More than 4 loads ahead, of weights and of x, spill out of 128 registers.
            registers = 128 if loads < 8 else 168 if warps == 4 else 255
            if splits == 1 or (layer.in_features >= 2048 and nbytes <= 128 << 10):
                found.append(SmallGemmConfig(rows, chunks, warps, splits, registers))
    return found


def _tile_gemm_candidates(layer: Layer, num_tokens: int, streams: int) -> list[Config]:
    found: list[Config] = []
    for rows, block_k, warps in itertools.product((32, 64, 128), (64, 128), (4, 8)):
        if rows * streams < num_tokens or rows * num_tokens * streams > 8192:
            continue
        if warps == 8 and rows * num_tokens * streams < 4096:
            continue
        blocks = layer.num_rows // streams // rows
        stages = 3 if block_k == 128 else 4
        for splits in (1, 2, 4, 8):
            tiles = layer.in_features // (block_k * splits)
            fits = stages * 2 * block_k * (rows * streams + num_tokens) <= 110_000
            fits &= num_tokens > 8 or rows * streams == 128
            if not fits or tiles < stages:
                continue
            if 48 <= blocks * splits and (splits == 1 or blocks * splits <= 800):
                found.append(TileGemmConfig(rows, block_k, warps, splits, stages))
    return found


def _one_tile_candidates(layer: Layer, num_tokens: int, streams: int) -> list[Config]:
    """Return those that hold all of a program's weights at once, in one wave of programs."""
    found: list[Config] = []
    tokens = max(token_bucket(num_tokens), 16)
    for splits, rows, warps in itertools.product((1, 2, 3, 4, 6, 8), (16, 32, 64), (4, 8)):
        block_k = 1 << (-(-layer.in_features // splits) - 1).bit_length()
        waste = block_k * splits / layer.in_features
        if not 256 <= block_k <= 1024 or waste > 1.15:
            continue
        if num_tokens > 2 * rows * streams:
            continue  # x would be read more than the weights
        programs = -(-layer.num_rows // (streams * rows)) * splits
        shared = 2 * block_k * (rows * streams + tokens)
        # Past 256 bytes a thread of either operand the tiles spill.
        thread = 2 * block_k * max(rows * streams, tokens) // (32 * warps)
        wave = -(-programs // 132)
        if 0.7 * 132 <= programs and wave * shared <= 220 << 10 and thread <= 256:
            found.append(TileGemmConfig(rows, block_k, warps, splits, 1))
    return found


def _wide_candidates(layer: Layer, num_tokens: int, streams: int) -> list[Config]:
    """Return the four tiles that should be the quickest, the two best in further forms."""
    ranked = ranked_configs(
        NUM_PROCESSORS, num_tokens, layer.num_rows, layer.in_features, layer.gated
    )
    best = list({(c.rows, c.tokens): c for c in reversed(ranked)}.values())
    best = sorted(best, key=ranked.index)[:4]
    found: list[Config] = list(best)
    if best[0].splits > 1:
        found += [c for c in ranked if c[:2] == best[0][:2]][1:2]
    for config in best[:2]:
        stage = stage_bytes(config.rows * streams, config.tokens, 64)
        # Two programs, or this one and the next kernel's, on a multiprocessor.
        if SHARED_BYTES // 2 >= 3 * stage:
            found.append(config._replace(stages=SHARED_BYTES // 2 // stage))
        if config.stages >= 6 and layer.in_features >= 512 * config.splits:
            found.append(config._replace(block_k=128, stages=config.stages // 2))
    return found


def _few_rows_wide_candidates(layer: Layer, num_tokens: int, streams: int) -> list[Config]:
    """Return the three tiles that should be the quickest, two of them in further forms."""
    ranked = ranked_configs(
        NUM_PROCESSORS, num_tokens, layer.num_rows, layer.in_features, layer.gated
    )
    best = list({(c.rows, c.tokens): c for c in reversed(ranked)}.values())
    best = sorted(best, key=ranked.index)[:3]
    found: list[Config] = list(best)
    found += [c for c in ranked if c[:4] == best[0][:4]][1:2]
    share = -(-layer.in_features // best[0].splits)
    # As much in L2 ahead as the 256 rows of other tiles ask for.
    found.append(best[0]._replace(prefetch=min(2 * share, (128 << 10) // best[0].rows)))
    for index, config in enumerate(best[:2]):
        stage = stage_bytes(config.rows * streams, config.tokens, 128)
        # Half a multiprocessor leaves the rest to the next kernel's programs.
        stages = max(SHARED_BYTES // 2 // stage, min(SHARED_BYTES // stage, 3))
        deep = config._replace(block_k=128, stages=min(stages, 6))
        if deep.stages >= 2 and layer.in_features >= 512 * config.splits:
            found.append(deep)
            if index == 0 and config.rows == 64:
                found.append(deep._replace(warps=8))
    return found


def _ahead_candidates(layer: Layer, num_tokens: int, streams: int) -> list[Config]:
    """Return those whose weights fit the multiprocessors, one or two programs to each."""
    found: list[Config] = []
    tokens = max(token_bucket(num_tokens), 16)
    for rows, block_k in itertools.product((64, 128), (256, 512, 1024)):
        splits = -(-layer.in_features // block_k)
        waste = splits * block_k / layer.in_features - 1
        programs = -(-layer.num_rows // (streams * rows)) * splits
        shared = stage_bytes(rows * streams, tokens, block_k)
        wave = -(-programs // NUM_PROCESSORS)
        if waste > 0.15 or splits > 16 or programs < 40 or wave * shared > SHARED_BYTES:
            continue
        # A norm holds the tile of x in registers.
        many = rows == 128 or (layer.norm and tokens * block_k > 128 * 64)
        found.append(AheadGemmConfig(rows, block_k, 8 if many else 4, splits))
    return found


def _plain_tile_candidates(layer: Layer, streams: int) -> list[Config]:
    blocks = -(-layer.num_rows // (streams * 64))
    splits = max(min(NUM_PROCESSORS // blocks, layer.in_features // 256, 8), 1)
    return [PlainTileGemmConfig(64, 64, 8, splits, 4)]
