"""The layers of experts that ops_experts.py times, and the configurations that its sweep tries."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import default_device
from torch_paged.ops.experts import CLAMPED_SWIGLU
from torch_paged.ops.experts.configs import (
    MAX_DECODE_TOKENS,
    ExpertsConfig,
    GemvConfig,
    Problem,
    TileConfig,
    choose_config,
)
from torch_paged.ops.fused_linear.configs import device_key

BF16 = torch.bfloat16


class Mixture(NamedTuple):
    """The experts of a layer; `gpt_oss`: transposed, interleaved, with biases and clamps."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    gpt_oss: bool = False

    @property
    def expert_bytes(self) -> int:
        return 2 * 3 * self.hidden * self.inner

    def problem(self, num_tokens: int) -> Problem:
        k_first = not self.gpt_oss
        sizes = (self.top_k, self.num_experts, self.hidden, self.inner)
        return Problem(num_tokens, *sizes, k_first, k_first)

    def options(self) -> dict[str, Any]:
        if not self.gpt_oss:
            return {}
        clamps = {"alpha": 1.702, "limit": 7.0}
        return {"activation": CLAMPED_SWIGLU, "interleaved": True, **clamps}

    def layer(self, *, alike: bool = False) -> list[Tensor]:
        """Return gate_up and down, and their biases where there are any, made anew.

        `alike`: all experts share the memory of one, to compile for.
        """
        device, count = default_device(), 1 if alike else self.num_experts
        shapes = ((count, 2 * self.inner, self.hidden), (count, self.hidden, self.inner))
        made = []
        for shape in shapes:
            held = (shape[0], shape[2], shape[1]) if self.gpt_oss else shape
            weight = torch.empty(held, dtype=BF16, device=device).normal_(std=shape[2] ** -0.5)
            made.append(weight.transpose(1, 2) if self.gpt_oss else weight)
        if self.gpt_oss:
            made += [torch.randn(s[:2], dtype=BF16, device=device) for s in shapes]
        return [tensor.expand(self.num_experts, *tensor.shape[1:]) for tensor in made]

    def routing(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return ids, uniformly random and none twice for a token, and equal weights."""
        noise = torch.rand(num_tokens, self.num_experts, device=default_device())
        ids = noise.argsort(-1)[:, : self.top_k].int().contiguous()
        return ids, torch.full(ids.shape, 1 / self.top_k, dtype=BF16, device=ids.device)


MIXTURES = {
    "8x1b": Mixture(8, 2, 2048, 8192),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, gpt_oss=True),
    "qwen3-30b": Mixture(128, 8, 2048, 768),
    "tiny": Mixture(4, 2, 64, 48),
}


def chosen(mixture: Mixture, num_tokens: int) -> ExpertsConfig:
    """Return the configuration that the op takes by itself."""
    return choose_config(device_key(default_device()), mixture.problem(num_tokens), BF16)


def candidates(mixture: Mixture, num_tokens: int, part: str) -> list[ExpertsConfig]:
    """Return the chosen configuration with other ones of one projection, itself first."""
    base = chosen(mixture, num_tokens)
    if num_tokens > MAX_DECODE_TOKENS:
        return [base]
    kinds = [base.tokens] if num_tokens > 2 else [0, 16]
    found = [base]
    for tokens in kinds:
        other = base if (base.tokens == 0) == (tokens == 0) else _other_kind(mixture, tokens)
        find = _gemvs if tokens == 0 else _tiles
        found += [other._replace(**{part: config}) for config in find(mixture, num_tokens, part)]
    return list(dict.fromkeys(found))


def _other_kind(mixture: Mixture, tokens: int) -> ExpertsConfig:
    """Return what the rules say of the other kernel."""
    return chosen(mixture, 1 if tokens == 0 else 4)._replace(tokens=tokens)


def _gemvs(mixture: Mixture, num_tokens: int, part: str) -> list[GemvConfig]:
    streams, k = (2, mixture.hidden) if part == "gate_up" else (1, mixture.inner)
    found = []
    for warps, (load, registers) in itertools.product((2, 4, 8), ((2, 128), (4, 128), (4, 168))):
        if mixture.gpt_oss:
            shapes = [(f // streams, warps * 32 * 8 * load // f) for f in (32, 64, 128)]
        else:
            shapes = [(load // streams, warps * 256)]
        for rows, block_k in shapes:
            if rows < 1 or not 8 <= block_k <= 2 * k:
                continue
            for splits in (1,) if part == "gate_up" else (1, 2, 4):
                if splits == 1 or k // (splits * block_k) >= 2:
                    found.append(GemvConfig(rows, block_k, warps, splits, registers))
    return found


def _tiles(mixture: Mixture, num_tokens: int, part: str) -> list[TileConfig]:
    streams, k = (2, mixture.hidden) if part == "gate_up" else (1, mixture.inner)
    tokens = max(chosen(mixture, max(num_tokens, 4)).tokens, 16)
    found = []
    for features, block_k, stages in itertools.product((64, 128), (64, 128), (3, 4, 5)):
        if stages * 2 * block_k * (features + tokens) > 110_000:
            continue
        for splits in (1,) if part == "gate_up" else (1, 2, 4):
            if splits == 1 or k // (splits * block_k) >= stages:
                found.append(TileConfig(features // streams, block_k, 4, splits, stages))
    return found
