"""Ops alone at the shapes of a model: what to launch, what it moves, whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import ops_linear, shapes
from benchmarks.attention_cases import SHAPES, DecodeCase, PrefillCase
from benchmarks.ops_linear_cases import BF16, MODELS, Layer
from benchmarks.parity import WrongResult
from benchmarks.timing import default_device
from torch_paged.ops.argmax import argmax
from torch_paged.ops.rms_norm import rms_norm
from torch_paged.ops.sample import sample

HEADS = dict(zip(shapes.NAMES, SHAPES, strict=True)) | {shapes.TINY: (4, 2, 16)}
# Relative error of attention in bfloat16 against float32 over the same cache.
_ATTENTION_ERROR = 1e-2
_MAX_COPIES = 64


@dataclass(frozen=True, slots=True)
class OpCase:
    """One op at one shape.

    Attributes:
        launches: calls on data of their own, so that each reads from memory and not from a cache.
        nbytes: what one launch must read; 0 where arithmetic counts.
        flops: operations of one launch; 0 where bytes count.
        check: raises `WrongResult`.
    """

    name: str
    launches: Sequence[Callable[[], Any]]
    check: Callable[[], None]
    nbytes: float = 0.0
    flops: float = 0.0

    def run(self) -> None:
        """Launch all."""
        for launch in self.launches:
            launch()


def op_names(batch: int, context: int, prefill: int) -> list[str]:
    """Return the names of the cases that `op_case` makes."""
    names = [f"linear {layer}, {batch} rows" for layer in ("qkv", "o", "gate_up", "down", "head")]
    names += [f"decode attention, {batch} x {context} tokens"]
    names += [f"prefill attention, {prefill} tokens"] if batch == 1 else []
    return names + [f"{op}, {batch} rows" for op in ("rms_norm", "argmax", "sample")]


def op_case(model: str, name: str, cold_bytes: int) -> OpCase:
    """Make the inputs of a case.

    Args:
        cold_bytes: the launches of a case together touch that much at least; 0 on a CPU.
    """
    kind, _, size = name.partition(", ")
    count = int(size.split()[0])
    if kind.startswith("linear "):
        found = MODELS[model]
        layers = {layer.name: layer for layer in (*found.layers, found.head)}
        return _linear(name, layers[kind.removeprefix("linear ")], count, cold_bytes)
    if kind == "decode attention":
        return _decode_attention(name, HEADS[model], count, int(size.split()[2]), cold_bytes)
    if kind == "prefill attention":
        return _prefill_attention(name, HEADS[model], count)
    width = MODELS[model].head.in_features
    if kind == "rms_norm":
        return _rms_norm(name, count, width, cold_bytes)
    return _choice(name, kind, count, MODELS[model].head.num_rows, cold_bytes)


def _copies(nbytes: float, cold_bytes: int) -> int:
    return max(1, min(_MAX_COPIES, int(-(-cold_bytes // nbytes))))


def _linear(name: str, layer: Layer, rows: int, cold_bytes: int) -> OpCase:
    x = torch.randn(rows, layer.in_features, dtype=BF16, device=default_device())
    options = layer.options(rows)
    sets = [layer.weights() for _ in range(_copies(layer.nbytes, cold_bytes))]
    launches = [partial(ops_linear.call, layer, x, weights, options) for weights in sets]
    return OpCase(name, launches, partial(ops_linear.check, layer, rows), nbytes=layer.nbytes)


def _decode_attention(
    name: str, heads: tuple[int, int, int], batch: int, context: int, cold_bytes: int
) -> OpCase:
    case = DecodeCase(heads, batch, context, cold_bytes)
    launches = [partial(case.run, layer) for layer in range(case.num_layers)]
    return OpCase(name, launches, partial(_check_attention, name, case), nbytes=case.bytes)


def _prefill_attention(name: str, heads: tuple[int, int, int], num_tokens: int) -> OpCase:
    case = PrefillCase(heads, num_tokens)
    launches = [partial(case.run, layer) for layer in range(2)]
    return OpCase(name, launches, partial(_check_attention, name, case), flops=case.flops)


def _check_attention(name: str, case: DecodeCase | PrefillCase) -> None:
    error = case.check()
    if not error <= _ATTENTION_ERROR:
        raise WrongResult(
            f"{name}: relative error {error:.1e}, at most {_ATTENTION_ERROR} is right"
        )


def _rms_norm(name: str, rows: int, width: int, cold_bytes: int) -> OpCase:
    nbytes = 2 * rows * width * 2
    device = default_device()
    xs = [
        torch.randn(rows, width, dtype=BF16, device=device)
        for _ in range(_copies(nbytes, cold_bytes))
    ]
    gain = torch.rand(width, dtype=BF16, device=device) + 0.5

    def check() -> None:
        x = xs[0].double()
        want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        error = (rms_norm(xs[0], gain, eps=1e-5) - want).abs().max() / want.abs().max()
        # Two roundings to bfloat16, each by 2**-8 at most.
        if not error <= 2**-7:
            raise WrongResult(f"{name}: relative error {float(error):.1e}, at most 2**-7 is right")

    launches = [partial(rms_norm, x, gain, eps=1e-5) for x in xs]
    return OpCase(name, launches, check, nbytes=nbytes)


def _choice(name: str, kind: str, rows: int, vocab_size: int, cold_bytes: int) -> OpCase:
    device = default_device()
    nbytes = 2 * rows * vocab_size
    logits = [
        torch.randn(rows, vocab_size, dtype=BF16, device=device)
        for _ in range(_copies(nbytes, cold_bytes))
    ]
    slots = torch.arange(rows, dtype=torch.int32, device=device)

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    warps = (full(0.8, torch.float64), full(50, torch.int32), full(0.9, torch.float64))
    rest = (full(0.0, torch.float64), slots.long(), full(0, torch.int32))

    def choose(x: torch.Tensor) -> torch.Tensor:
        return argmax(x) if kind == "argmax" else sample(x, slots, *warps, *rest)

    def check() -> None:
        tokens = choose(logits[0])[:, None]
        least = logits[0].topk(1 if kind == "argmax" else 50).values[:, -1:]
        wrong = int((logits[0].gather(1, tokens) < least).sum())
        if wrong:
            raise WrongResult(f"{name}: {wrong} of {rows} tokens are outside of what is allowed")

    return OpCase(name, [partial(choose, x) for x in logits], check, nbytes=nbytes)


__all__ = ["HEADS", "OpCase", "op_case", "op_names"]
