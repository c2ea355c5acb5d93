"""fused_linear on a GPU: true shapes, graphs, and the order that dependent launch must keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_paged.ops.fused_linear import (
    ALWAYS_KERNEL_ROWS,
    NUM_COUNTERS,
    fused_linear,
    fused_linear_reference,
)
from torch_paged.ops.fused_linear.configs import TileGemmConfig
from torch_paged.ops.fused_linear.launch import _launch_fused_linear
from torch_paged.ops.fused_linear.wide_config import AheadGemmConfig, WideGemmConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# (output features of each weight, in_features, gated) of a 0.6B and an 8B layer and of odd ones.
SHAPES = [
    pytest.param((2048, 1024, 1024), 1024, False, id="qkv-0.6b"),
    pytest.param((1024,), 2048, False, id="o-0.6b"),
    pytest.param((3072, 3072), 1024, True, id="gate_up-0.6b"),
    pytest.param((1024,), 3072, False, id="down-0.6b"),
    pytest.param((4096,), 14336, False, id="down-8b"),
    pytest.param((192, 192), 576, True, id="576"),
    pytest.param((321, 7, 100), 449, False, id="odd"),
]


def make_call(
    sizes: tuple[int, ...], in_features: int, gated: bool, num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], dict[str, object]]:
    device = torch.device("cuda")
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    scale = in_features**-0.5
    weights = [(scale * torch.randn(n, in_features, device=device)).to(dtype) for n in sizes]
    width = sizes[0] if gated else sum(sizes)
    options: dict[str, object] = {
        "norm_weight": torch.randn(in_features, device=device).to(dtype),
        "norm": True,
        "eps": 1e-6,
        "residual": torch.randn(num_tokens, width, device=device).to(dtype),
        "activation": "silu" if gated else "",
        "gated": gated,
    }
    return x, weights, options


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 32, 64, 65, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sizes", "in_features", "gated"), SHAPES)
def test_true_shapes_match_float64(
    sizes: tuple[int, ...], in_features: int, gated: bool, dtype: torch.dtype, num_tokens: int
) -> None:
    x, weights, options = make_call(sizes, in_features, gated, num_tokens, dtype)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")
    out = fused_linear(x, weights, **options, counters=counters)
    assert not counters.any()
    low = fused_linear_reference(x, weights, [], **options)
    h = x.double()
    h = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * options["norm_weight"].double()
    want = fused_linear_reference(
        h,
        [w.double() for w in weights],
        [],
        residual=options["residual"].double(),
        activation=options["activation"],
        gated=gated,
    )
    scale = want.abs().max()
    error = (out - want).abs().max()
    assert error <= 2 * ((low - want).abs().max() + torch.finfo(dtype).eps / 2 * scale)
    if dtype == torch.float32 and num_tokens <= ALWAYS_KERNEL_ROWS:
        assert error <= 1e-5 * scale


@pytest.mark.parametrize("num_tokens", [24, 64, 100, 128])
@pytest.mark.parametrize(
    "config",
    [(64, 64, 8, 2, 4), (32, 64, 4, 1, 4), (128, 64, 8, 1, 3), (16, 1024, 8, 0, 1)],
    ids=["64x64", "32x64", "128x64", "one tile"],
)
@pytest.mark.parametrize(("sizes", "in_features", "gated"), SHAPES[:4] + SHAPES[6:])
def test_configurations_for_many_rows_match_float64(
    sizes: tuple[int, ...],
    in_features: int,
    gated: bool,
    config: tuple[int, int, int, int, int],
    num_tokens: int,
) -> None:
    rows, block_k, warps, splits, stages = config
    if block_k == 1024 and num_tokens > 64:
        block_k, splits = 256, 0
    chosen = TileGemmConfig(rows, block_k, warps, splits or -(-in_features // block_k), stages)
    x, weights, options = make_call(sizes, in_features, gated, num_tokens, torch.bfloat16)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")
    gain = options.pop("norm_weight")
    outs = [
        _launch_fused_linear(x, weights, [], gain, **options, counters=counters, config=chosen)
        for _ in range(2)
    ]
    assert torch.equal(*outs) and not counters.any()
    low = fused_linear_reference(x, weights, [], gain, **options)
    h = x.double()
    h = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    residual = options.pop("residual").double()
    options = {"activation": options["activation"], "gated": gated, "residual": residual}
    want = fused_linear_reference(h, [w.double() for w in weights], [], **options)
    rounding = torch.finfo(torch.bfloat16).eps / 2 * want.abs().max()
    assert (outs[0] - want).abs().max() <= 2 * ((low - want).abs().max() + rounding)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs Hopper",
)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(WideGemmConfig(64, 16, 64, 4, 3, 6), id="wide-64x16"),
        pytest.param(WideGemmConfig(64, 32, 128, 8, 2, 4, 1024), id="wide-64x32"),
        pytest.param(WideGemmConfig(128, 32, 64, 8, 1, 5), id="wide-128x32"),
        pytest.param(WideGemmConfig(64, 64, 64, 4, 4, 6, 2048), id="wide-64x64"),
        # As many splits as in_features take.
        pytest.param(AheadGemmConfig(64, 256, 4, 16), id="ahead-64x256"),
        pytest.param(AheadGemmConfig(64, 512, 8, 8), id="ahead-64x512"),
        pytest.param(AheadGemmConfig(128, 256, 8, 16), id="ahead-128x256"),
    ],
)
@pytest.mark.parametrize(("sizes", "in_features", "gated"), [*SHAPES[:4], SHAPES[5]])
def test_tile_copies_of_few_rows_match_float64_and_repeat_to_the_bit(
    sizes: tuple[int, ...],
    in_features: int,
    gated: bool,
    config: WideGemmConfig | AheadGemmConfig,
    dtype: torch.dtype,
    num_tokens: int,
) -> None:
    """With the norm, in the kernel or before it."""
    check_against_float64(sizes, in_features, gated, config, dtype, num_tokens)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [65, 100, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("sizes", "in_features", "gated"), SHAPES[:4])
def test_weights_ahead_of_many_rows_match_float64_and_repeat_to_the_bit(
    sizes: tuple[int, ...], in_features: int, gated: bool, dtype: torch.dtype, num_tokens: int
) -> None:
    """Their norm is a kernel before it."""
    config = AheadGemmConfig(64, 256, 8, 16) if gated else AheadGemmConfig(64, 512, 8, 8)
    check_against_float64(sizes, in_features, gated, config, dtype, num_tokens)


def check_against_float64(
    sizes: tuple[int, ...],
    in_features: int,
    gated: bool,
    config: WideGemmConfig | AheadGemmConfig,
    dtype: torch.dtype,
    num_tokens: int,
) -> None:
    x, weights, options = make_call(sizes, in_features, gated, num_tokens, dtype)
    gain = options.pop("norm_weight")
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")
    outs = [
        _launch_fused_linear(x, weights, [], gain, **options, counters=counters, config=config)
        for _ in range(3)
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert not counters.any()
    low = fused_linear_reference(x, weights, [], gain, **options)
    h = x.double()
    h = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    residual = options.pop("residual").double()
    options = {"activation": options["activation"], "gated": gated, "residual": residual}
    want = fused_linear_reference(h, [w.double() for w in weights], [], **options)
    rounding = torch.finfo(dtype).eps / 2 * want.abs().max()
    assert (outs[0] - want).abs().max() <= 2 * ((low - want).abs().max() + rounding)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [17, 32, 64])
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["ahead"], id="ahead"),
        pytest.param(["wide"], id="wide"),
        pytest.param(["ahead", "wide", "tile"], id="mixed"),
    ],
)
def test_a_captured_chain_of_tile_copies_keeps_its_order(
    kinds: list[str], num_tokens: int
) -> None:
    """Weights are read ahead of predecessors, x and the residual are not."""
    width = 1024
    configs = {
        "ahead": [AheadGemmConfig(64, 512, 8, 2), AheadGemmConfig(64, 256, 4, 4)],
        "wide": [WideGemmConfig(64, 32, 64, 4, 4, 6, 512), WideGemmConfig(64, 64, 64, 4, 1, 6)],
        "tile": [TileGemmConfig(64, 64, 4, 4, 4)],
    }
    chosen = [config for kind in kinds for config in configs[kind]]
    scale = width**-0.5
    weights = [(scale * torch.randn(width, width, device="cuda")).bfloat16() for _ in range(8)]
    start = torch.randn(num_tokens, width, device="cuda").bfloat16()
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")

    def chain(synchronize: bool) -> Tensor:
        x = start
        for index in range(48):
            x = _launch_fused_linear(
                x,
                [weights[index % 8]],
                [],
                norm=index % 3 > 0,
                eps=1e-6,
                residual=x if index % 2 else None,
                counters=counters,
                config=chosen[index % len(chosen)],
            )
            if synchronize:
                torch.cuda.synchronize()
        return x

    want = chain(synchronize=True)
    assert want.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(synchronize=False)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


@needs_hopper
@pytest.mark.parametrize("num_tokens", [65, 100, 128, 129, 256])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param((64, 128, 64, 8, 2, 6), id="64x128"),
        pytest.param((128, 128, 64, 8, 1, 4), id="128x128"),
        pytest.param((128, 128, 128, 8, 2, 2), id="128x128x128"),
        pytest.param((256, 128, 64, 8, 3, 4), id="256x128"),
        pytest.param((64, 256, 64, 8, 4, 3), id="64x256"),
        pytest.param((128, 256, 64, 8, 1, 3), id="128x256"),
        pytest.param((64, 64, 64, 4, 3, 3), id="64x64"),
    ],
)
@pytest.mark.parametrize(("sizes", "in_features", "gated"), SHAPES[:6])
def test_wide_tiles_match_float64_and_repeat_to_the_bit(
    sizes: tuple[int, ...],
    in_features: int,
    gated: bool,
    config: tuple[int, int, int, int, int, int],
    num_tokens: int,
) -> None:
    chosen = WideGemmConfig(*config)
    if gated and chosen.rows * chosen.tokens > 128 * 128:
        chosen = chosen._replace(rows=64, tokens=128)
    x, weights, options = make_call(sizes, in_features, gated, num_tokens, torch.bfloat16)
    options |= {"norm_weight": None, "norm": False}
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")
    outs = [
        _launch_fused_linear(x, weights, [], **options, counters=counters, config=chosen)
        for _ in range(3)
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert not counters.any()
    low = fused_linear_reference(x, weights, [], **options)
    options["residual"] = options["residual"].double()
    want = fused_linear_reference(x.double(), [w.double() for w in weights], [], **options)
    rounding = torch.finfo(torch.bfloat16).eps / 2 * want.abs().max()
    assert (outs[0] - want).abs().max() <= 2 * ((low - want).abs().max() + rounding)


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64, 128, 256])
@pytest.mark.parametrize(("sizes", "in_features", "gated"), SHAPES)
def test_replay_equals_eager_to_the_bit(
    sizes: tuple[int, ...], in_features: int, gated: bool, num_tokens: int
) -> None:
    x, weights, options = make_call(sizes, in_features, gated, num_tokens, torch.bfloat16)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")
    fused_linear(x, weights, **options, counters=counters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_linear(x, weights, **options, counters=counters)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, fused_linear(x, weights, **options, counters=counters))


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 64, 100, 256])
@pytest.mark.parametrize("width", [256, 1024, 4096])
def test_a_captured_chain_keeps_its_order(width: int, num_tokens: int) -> None:
    """Launches overlap their predecessors; what they read must still be finished."""
    weights = [
        (width**-0.5 * torch.randn(width, width, device="cuda")).bfloat16() for _ in range(8)
    ]
    start = torch.randn(num_tokens, width, device="cuda").bfloat16()
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")

    def chain(synchronize: bool) -> Tensor:
        x = start
        for index in range(48):
            residual = x if index % 2 else None
            weight = weights[index % 8 : index % 8 + 1]
            x = fused_linear(x, weight, norm=True, eps=1e-6, residual=residual, counters=counters)
            if synchronize:
                torch.cuda.synchronize()
        return x

    want = chain(synchronize=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(synchronize=False)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
