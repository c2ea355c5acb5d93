"""joined_linear on a GPU: true shapes, and the order that dependent launch must keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_paged.ops.fused_linear import NUM_COUNTERS, fused_linear, fused_linear_reference
from torch_paged.ops.fused_linear.configs import GemvConfig
from torch_paged.ops.fused_linear.joined import (
    _launch_joined_linear,
    joined_linear,
    joined_linear_reference,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# (output features of each weight, in_features, gated) of Gemma 3 4B, and odd ones.
JOINED = [
    pytest.param((2048, 1024, 1024), 2560, False, id="qkv-4b"),
    pytest.param((10240, 10240), 2560, True, id="gate_up-4b"),
    pytest.param((262208,), 2560, False, id="head-4b"),
    pytest.param((1024, 256, 256), 1152, False, id="qkv-1b"),
    pytest.param((6912, 6912), 1152, True, id="gate_up-1b"),
    pytest.param((321, 7, 100), 449, False, id="odd"),
]


def make_call(
    sizes: tuple[int, ...], in_features: int, gated: bool, num_tokens: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor, list[Tensor]], dict[str, object]]:
    """Return branch, stream, gain, weights; and the rest of `joined_linear`."""

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device="cuda")).to(dtype)

    branch, stream = randn(num_tokens, in_features, scale=3.0), randn(num_tokens, in_features)
    weights = [randn(n, in_features, scale=in_features**-0.5) for n in sizes]
    options: dict[str, object] = {
        "norm_weight": randn(in_features),
        "norm": True,
        "eps": 1e-6,
        "norm_offset": 1.0,
        "activation": "gelu_tanh" if gated else "",
        "gated": gated,
        "join_eps": 1e-6,
        "join_offset": 1.0,
    }
    return (branch, stream, randn(in_features), weights), options


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("sizes", "in_features", "gated"), JOINED)
def test_joined_shapes_match_float64_and_repeat_to_the_bit(
    sizes: tuple[int, ...], in_features: int, gated: bool, dtype: torch.dtype, num_tokens: int
) -> None:
    arguments, options = make_call(sizes, in_features, gated, num_tokens, dtype)
    outs = [joined_linear(*arguments, **options) for _ in range(3)]
    for repeated in outs[1:]:
        assert all(torch.equal(*pair) for pair in zip(outs[0], repeated, strict=True))
    branch, stream, gain, weights = arguments
    join = (1e-6, 1.0, True)
    gain_behind = options["norm_weight"]
    prologue = (True, 1e-6, 1.0, True, options["activation"], gated)
    lows = joined_linear_reference(
        branch, stream, gain, *join, weights, [], gain_behind, *prologue
    )
    rows = (branch.double(), stream.double())

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return x * (weight.double() + 1.0)

    total = rows[1] + normed(rows[0], gain)
    want = fused_linear_reference(
        normed(total, gain_behind),
        [w.double() for w in weights],
        [],
        activation=options["activation"],
        gated=gated,
    )
    for out, low, exact in zip(outs[0], lows, (want, total), strict=True):
        scale = exact.abs().max()
        error = (out - exact).abs().max()
        rounding = torch.finfo(dtype).eps / 2 * scale
        assert error <= 2 * ((low - exact).abs().max() + rounding)
        if dtype == torch.float32:
            assert error <= 1e-5 * scale


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("width", [256, 1152, 2560])
@pytest.mark.parametrize("given", [None, (2, 1, 4, 2, 128)], ids=["chosen", "two-groups"])
def test_a_captured_chain_of_joined_linears_keeps_its_order(
    given: tuple[int, int, int, int, int] | None, width: int, num_tokens: int
) -> None:
    """Both what is joined and where to were written one to three launches before."""
    config = None if given is None else GemvConfig(*given)
    scale = width**-0.5
    weights = [(scale * torch.randn(width, width, device="cuda")).bfloat16() for _ in range(8)]
    gain = torch.randn(width, device="cuda").bfloat16()
    start = torch.randn(num_tokens, width, device="cuda").bfloat16()
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")

    def chain(synchronize: bool) -> Tensor:
        branch, stream = start, start
        for index in range(40):
            weight = [weights[index % 8]]
            join = (gain, 1e-6, 1.0, True)
            x, stream = _launch_joined_linear(
                *(branch, stream, *join, weight, []),
                norm=index % 2 > 0,
                eps=1e-6,
                counters=counters,
                config=config,
            )
            if synchronize:
                torch.cuda.synchronize()
            weight = [weights[(index + 3) % 8]]
            branch = fused_linear(x, weight, norm=index % 3 > 0, eps=1e-6, counters=counters)
            if synchronize:
                torch.cuda.synchronize()
        return stream + branch

    want = chain(synchronize=True)
    assert want.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(synchronize=False)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
