"""lora_shrink, and low-rank updates in fused_linear, against a float64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.fused_linear import (
    NUM_COUNTERS,
    arguments,
    fused_linear,
    fused_linear_reference,
    launch,
)
from torch_paged.ops.fused_linear.configs import (
    Config,
    GemvConfig,
    SmallGemmConfig,
    TileGemmConfig,
)
from torch_paged.ops.fused_linear.reference import shrink_reference
from torch_paged.ops.fused_linear.shrink import (
    MAX_SHRINK_ROWS,
    choose_shrink_config,
    launch_shrink,
)
from torch_paged.ops.fused_linear.shrink_norm import launch_shrink_norm
from torch_paged.ops.fused_linear.wide_config import AheadGemmConfig, WideGemmConfig
from torch_paged.ops.glu import activation_reference
from torch_paged.ops.lora_shrink import lora_shrink
from torch_paged.ops.rms_norm import kernel as rms_norm_kernel
from torch_paged.ops.rms_norm import rms_norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

GEMV = GemvConfig(rows=2, chunks=1, warps=4, k_warps=2)
SMALL_GEMM = SmallGemmConfig(rows=16, chunks=1, warps=2, splits=1)
SPLIT = SmallGemmConfig(rows=8, chunks=1, warps=2, splits=2)
TILE_GEMM = TileGemmConfig(rows=16, block_k=32, warps=4, splits=1, stages=2)
TILE_SPLIT = TileGemmConfig(rows=16, block_k=16, warps=4, splits=2, stages=2)
WIDE = WideGemmConfig(rows=64, tokens=16, block_k=64, warps=4, splits=1, stages=2)
AHEAD = AheadGemmConfig(rows=64, block_k=128, warps=4, splits=2)

TMA = DEVICE == "cpu" or torch.cuda.get_device_capability()[0] >= 9
needs_tma = pytest.mark.skipif(not TMA, reason="needs the tile copies of Hopper")

KERNELS = [
    pytest.param(torch.float32, GEMV, id="gemv-fp32"),
    pytest.param(torch.bfloat16, GEMV, id="gemv-bf16"),
    pytest.param(torch.float16, SMALL_GEMM, id="small_gemm-fp16"),
    pytest.param(torch.bfloat16, SPLIT, id="split-bf16"),
    pytest.param(torch.float16, TILE_GEMM, id="tile_gemm-fp16"),
    pytest.param(torch.bfloat16, TILE_SPLIT, id="tile_split-bf16"),
    pytest.param(torch.bfloat16, WIDE, id="wide-bf16", marks=needs_tma),
    pytest.param(torch.float16, WIDE._replace(splits=2), id="wide_split-fp16", marks=needs_tma),
    pytest.param(torch.bfloat16, AHEAD, id="ahead-bf16", marks=needs_tma),
]


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves unwritten reads as NaN."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


def normed(x: Tensor, gain: Tensor | None, norm: bool, eps: float, offset: float) -> Tensor:
    x = x.double()
    if norm:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if gain is None else x * (gain.double() + offset)


def within(got: Tensor, want: Tensor, low: Tensor, dtype: torch.dtype) -> None:
    """Hold an error to twice what the roundings of the modules would have cost."""
    scale = want.abs().max()
    budget = 2 * ((low.double() - want).abs().max() + torch.finfo(dtype).eps / 2 * scale)
    error = (got.double() - want).abs().max()
    assert error <= budget, f"error {error:.3e} exceeds {budget:.3e}"
    if dtype == torch.float32:
        assert error <= 1e-5 * scale


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize("ranks", [[4], [8, 1, 5]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "down_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_shrink_matches_the_oracle(
    dtype: torch.dtype, down_dtype: torch.dtype, ranks: list[int], num_tokens: int
) -> None:
    x = randn(num_tokens, 144, dtype=dtype)
    gain = randn(144, dtype=dtype)
    downs = [randn(r, 144, dtype=down_dtype, scale=0.1, seed=i) for i, r in enumerate(ranks)]
    options = {"norm": True, "eps": 1e-5, "norm_offset": 1.0}
    got = launch_shrink(x, downs, gain, **options)
    h = normed(x, gain, True, 1e-5, 1.0)
    want = torch.cat([h @ d.double().T for d in downs], dim=-1)
    assert got.dtype == torch.float32 and got.shape == want.shape
    within(got, want, shrink_reference(x, downs, gain, **options), dtype)


# Past 4,096 features programs have more warps.
@pytest.mark.parametrize("in_features", [1, 33, 575, 2049, 4360])
@pytest.mark.parametrize("num_tokens", [1, 5, 83])
def test_shrink_takes_any_size_and_stride(num_tokens: int, in_features: int) -> None:
    x = randn(num_tokens, in_features + 3, dtype=torch.bfloat16)[:, 1:-2]
    downs = [randn(5, in_features, dtype=torch.float32)]
    got = launch_shrink(x, downs)
    want = x.double() @ downs[0].double().T
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize("in_features", [64, 575, 1100])
@pytest.mark.parametrize("cast", [True, False])
def test_shrink_and_norm_share_a_kernel(cast: bool, in_features: int, num_tokens: int) -> None:
    x = randn(num_tokens, in_features + 3, dtype=torch.bfloat16)[:, 1:-2]
    gain = randn(in_features, dtype=torch.float32)
    downs = [randn(r, in_features, dtype=torch.float32, seed=r) for r in (4, 0, 3)]
    got, rows = launch_shrink_norm(x, downs, gain, 1e-5, 0.5, cast)
    want = normed(x, gain, True, 1e-5, 0.5)
    within(rows, want, rms_norm_reference(x, gain, 1e-5, 0.5, cast).to(x.dtype), x.dtype)
    assert rows.dtype == x.dtype and rows.is_contiguous()
    assert torch.equal(got, launch_shrink(x, downs, gain, True, 1e-5, 0.5, cast))
    sums = torch.cat([want @ down.double().T for down in downs], dim=-1)
    assert (got - sums).abs().max() <= 1e-5 * sums.abs().max()


def test_past_the_kernels_rows_the_shrink_is_the_reference() -> None:
    x = randn(MAX_SHRINK_ROWS + 1, 32, dtype=torch.bfloat16)
    downs = [randn(4, 32, dtype=torch.float32)]
    got = launch_shrink(x, downs)
    assert torch.equal(got, shrink_reference(x, downs))


def test_more_outputs_than_programs_share_their_rows() -> None:
    x = randn(6, 96, dtype=torch.bfloat16)
    downs = [randn(40, 96, dtype=torch.bfloat16), randn(33, 96, dtype=torch.bfloat16, seed=1)]
    config = choose_shrink_config(4, 6, 73, 3)
    assert config.rows == 2
    assert choose_shrink_config(4, 6, 2, 9).rows == 1
    assert choose_shrink_config(4, 6, 2, 9, overlaps=True).rows == 2
    got = launch_shrink(x, downs, config=config)
    want = torch.cat([x.double() @ d.double().T for d in downs], dim=-1)
    within(got, want, shrink_reference(x, downs), torch.bfloat16)


def updated(
    h: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    lora_x: Tensor,
    updates: list[Tensor],
    scales: list[float],
) -> list[Tensor]:
    """The layers of fused_linear with their updates, in float64."""
    parts, start = [], 0
    for weight, bias, update, scale in zip(weights, biases, updates, scales, strict=True):
        part = h @ weight.double().T + (0.0 if bias is None else bias.double())
        share = lora_x[:, start : start + update.shape[1]].double()
        parts.append(part + scale * (share @ update.double().T))
        start += update.shape[1]
    return parts


def check(
    config: Config,
    dtype: torch.dtype,
    ranks: list[int],
    *,
    num_tokens: int = 3,
    sizes: tuple[int, ...] = (24, 9, 17),
    update_dtype: torch.dtype | None = None,
    gated: bool = False,
    activation: str = "",
    has_residual: bool = False,
    in_features: int = 80,
) -> None:
    x = randn(num_tokens, in_features, dtype=dtype)
    gain = randn(in_features, dtype=dtype)
    weights = [
        randn(n, in_features, dtype=dtype, scale=in_features**-0.5, seed=i)
        for i, n in enumerate(sizes)
    ]
    biases: list[Tensor | None] = [None, *(randn(n, dtype=dtype) for n in sizes[1:])]
    updates = [
        randn(n, r, dtype=update_dtype or dtype, seed=i + 7)
        for i, (n, r) in enumerate(zip(sizes, ranks, strict=True))
    ]
    scales = [0.5, 1.25, 2.0][: len(sizes)]
    lora_x = randn(num_tokens, sum(ranks), dtype=torch.float32, scale=0.5)
    width = sizes[0] if gated else sum(sizes)
    options = {
        "norm": True,
        "eps": 1e-5,
        "residual": randn(num_tokens, width, dtype=dtype) if has_residual else None,
        "activation": activation,
        "gated": gated,
        "updates": updates,
        "update_scales": scales,
    }
    downs = [
        randn(r, in_features, dtype=update_dtype or dtype, scale=in_features**-0.5, seed=i + 3)
        for i, r in enumerate(ranks)
    ]
    h = normed(x, gain, True, 1e-5, 0.0)
    made = torch.cat([h @ down.double().T for down in downs], dim=-1)
    for halves, share in (({"lora_x": lora_x}, lora_x), ({"downs": downs}, made)):
        counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
        named = {**options, **halves}
        got = launch._launch_fused_linear(
            x, weights, biases, gain, **named, counters=counters, config=config
        )
        parts = updated(h, weights, biases, share, updates, scales)
        if gated:
            want = activation_reference(parts[0], activation) * parts[1]
        else:
            want = torch.cat(parts, dim=-1)
            want = activation_reference(want, activation) if activation else want
        if has_residual:
            want = want + options["residual"].double()
        assert got.dtype == dtype and not counters.any()
        within(got, want, fused_linear_reference(x, weights, biases, gain, **named), dtype)


# Each number of rows with some ranks: all of them take a minute.
@pytest.mark.parametrize(
    ("ranks", "num_tokens"),
    [([16, 16, 16], 1), ([0, 40, 3], 9), ([4, 0, 7], 20)],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "config"), KERNELS)
def test_each_weight_gets_its_own_update(
    dtype: torch.dtype, config: Config, ranks: list[int], num_tokens: int
) -> None:
    check(config, dtype, ranks, num_tokens=num_tokens)


@pytest.mark.parametrize("ranks", [[16, 16], [0, 5]], ids=str)
@pytest.mark.parametrize(("dtype", "config"), KERNELS)
def test_gate_and_up_are_updated_before_they_meet(
    dtype: torch.dtype, config: Config, ranks: list[int]
) -> None:
    check(config, dtype, ranks, sizes=(40, 40), gated=True, activation="silu", has_residual=True)


@pytest.mark.parametrize(("dtype", "config"), KERNELS)
def test_an_update_comes_before_activation_and_residual(
    dtype: torch.dtype, config: Config
) -> None:
    check(config, dtype, [8], sizes=(33,), activation="gelu", has_residual=True)


@pytest.mark.parametrize(
    ("rank", "update_dtype"),
    [(17, torch.bfloat16), (17, torch.float32), (70, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GEMV, id="gemv"),
        pytest.param(SPLIT, id="small"),
        pytest.param(TILE_GEMM, id="tile"),
        pytest.param(WIDE, id="wide", marks=needs_tma),
    ],
)
def test_any_rank_and_float32_updates(
    config: Config, rank: int, update_dtype: torch.dtype
) -> None:
    check(config, torch.bfloat16, [rank, 2], sizes=(18, 18), update_dtype=update_dtype)
    check(
        config,
        torch.bfloat16,
        [2, rank],
        sizes=(18, 18),
        update_dtype=update_dtype,
        gated=True,
        activation="silu",
    )


def test_the_cpu_kernel_computes_what_peft_computes() -> None:
    x, weight = torch.randn(3, 32), torch.randn(8, 32)
    down, up = torch.randn(4, 32), torch.randn(8, 4)
    want = F.linear(x, weight) + F.linear(F.linear(x, down), up) * 0.7
    for halves in ({"lora_x": lora_shrink(x, [down])}, {"downs": [down]}):
        got = fused_linear(x, [weight], **halves, updates=[up], update_scales=[0.7])
        assert torch.equal(got, want)


def test_opcheck() -> None:
    shrink = torch.ops.torch_paged.lora_shrink.default
    x, gain = torch.randn(3, 16), torch.randn(16)
    torch.library.opcheck(shrink, (x, [torch.randn(4, 16), torch.randn(2, 16)], gain, True, 1e-6))
    linear = torch.ops.torch_paged.fused_linear.default
    weights = [torch.randn(8, 16), torch.randn(8, 16)]
    options = {
        "lora_x": torch.randn(3, 5),
        "updates": [torch.randn(8, 5), torch.randn(8, 0)],
        "update_scales": [1.5, 0.0],
    }
    torch.library.opcheck(linear, (x, weights, []), options)
    options["downs"] = [torch.randn(5, 16), torch.randn(0, 16)]
    del options["lora_x"]
    torch.library.opcheck(linear, (x, weights, []), options)


def test_both_halves_compile_without_graph_breaks() -> None:
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    down, up = torch.randn(4, 16), torch.randn(8, 4)

    def step(x: Tensor) -> Tensor:
        lora_x = lora_shrink(x, [down], norm=True, eps=1e-6)
        options = {"lora_x": lora_x, "updates": [up], "update_scales": [2.0]}
        y = fused_linear(x, [weight], norm=True, eps=1e-6, **options)
        del options["lora_x"]
        return y + fused_linear(x, [weight], norm=True, eps=1e-6, downs=[down], **options)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"updates": None}, "got no updates"),
        ({"lora_x": None}, "got neither"),
        ({"downs": [torch.randn(4, 16)]}, "got both"),
        ({"lora_x": None, "downs": []}, "1 long"),
        ({"lora_x": None, "downs": [torch.randn(5, 16)]}, r"must be \[4, 16\]"),
        ({"update_scales": []}, "1 long"),
        ({"updates": [torch.randn(7, 4)]}, r"contiguous \[8"),
        ({"lora_x": torch.randn(3, 5)}, r"contiguous \[3, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    options = {"lora_x": torch.randn(3, 4), "updates": [torch.randn(8, 4)], "update_scales": [1.0]}
    with pytest.raises(ValueError, match=message):
        fused_linear(torch.randn(3, 16), [torch.randn(8, 16)], **{**options, **change})


def test_matrices_of_other_dtypes_are_refused() -> None:
    x = torch.randn(3, 16)
    with pytest.raises(TypeError, match="cast x first"):
        lora_shrink(x, [torch.randn(4, 16).bfloat16()])
    lora_x = torch.randn(3, 4).bfloat16()
    with pytest.raises(TypeError, match="float32"):
        fused_linear(
            x,
            [torch.randn(8, 16)],
            lora_x=lora_x,
            updates=[torch.randn(8, 4)],
            update_scales=[1.0],
        )
    with pytest.raises(TypeError, match="cast x first"):
        fused_linear(
            x,
            [torch.randn(8, 16)],
            downs=[torch.randn(4, 16).bfloat16()],
            updates=[torch.randn(8, 4)],
            update_scales=[1.0],
        )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("together", [False, True], ids=["two ops", "one op"])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("width", [1024, 2048])
@pytest.mark.parametrize("num_tokens", [1, 8, 32, 64, 100])
def test_a_captured_chain_keeps_its_order(
    num_tokens: int, width: int, norm: bool, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halves overlap with their neighbours; what they read must still be finished."""
    rank = 16
    weights = [randn(width, width, dtype=torch.bfloat16, scale=0.02, seed=i) for i in range(6)]
    downs = [randn(rank, width, dtype=torch.float32, scale=0.03, seed=i) for i in range(6)]
    ups = [randn(width, rank, dtype=torch.float32, scale=0.2, seed=i) for i in range(6)]
    start = randn(num_tokens, width, dtype=torch.bfloat16)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")

    def chain(synchronize: bool) -> Tensor:
        x = start
        for index in range(36):
            at = index % 6
            halves: dict[str, Any] = {"downs": [downs[at]]}
            if not together:
                halves = {"lora_x": lora_shrink(x, [downs[at]], norm=norm, eps=1e-6)}
            if synchronize:
                torch.cuda.synchronize()
            x = fused_linear(
                x,
                [weights[at]],
                norm=norm,
                eps=1e-6,
                residual=x if index % 2 else None,
                counters=counters,
                **halves,
                updates=[ups[at]],
                update_scales=[0.5],
            )
            if synchronize:
                torch.cuda.synchronize()
        return x

    with monkeypatch.context() as patch:
        # One kernel after the other, those of one op too.
        for module in (arguments, rms_norm_kernel):
            patch.setattr(module, "use_pdl", lambda tensor: False)
        want = chain(synchronize=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(synchronize=False)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
