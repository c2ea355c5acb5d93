"""fused_linear: both kernels against a float64 oracle, and the contract around them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.fused_linear import (
    ALWAYS_KERNEL_ROWS,
    NUM_COUNTERS,
    configs,
    fused_linear,
    fused_linear_reference,
    launch,
    start,
)
from torch_paged.ops.fused_linear.configs import (
    Config,
    GemvConfig,
    PlainTileGemmConfig,
    SmallGemmConfig,
    TileGemmConfig,
)
from torch_paged.ops.fused_linear.wide_config import AheadGemmConfig, WideGemmConfig
from torch_paged.ops.glu import ACTIVATIONS, activation_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

GEMV = GemvConfig(rows=2, chunks=1, warps=4, k_warps=2)
SMALL_GEMM = SmallGemmConfig(rows=16, chunks=1, warps=2, splits=1)
SPLIT = SmallGemmConfig(rows=8, chunks=1, warps=2, splits=2)
TILE_GEMM = TileGemmConfig(rows=16, block_k=32, warps=4, splits=1, stages=2)
TILE_SPLIT = TileGemmConfig(rows=16, block_k=16, warps=4, splits=2, stages=2)
PLAIN_TILE = PlainTileGemmConfig(rows=16, block_k=32, warps=4, splits=2, stages=2)
# The tensor cores of Hopper take 64 output features at least.
WIDE = WideGemmConfig(rows=64, tokens=16, block_k=64, warps=4, splits=1, stages=2)
WIDE_SPLIT = WideGemmConfig(rows=64, tokens=32, block_k=64, warps=4, splits=2, stages=2)
# A program's weights are one tile, there before the wait.
AHEAD = AheadGemmConfig(rows=64, block_k=256, warps=4, splits=1)
AHEAD_SPLIT = AheadGemmConfig(rows=64, block_k=64, warps=4, splits=8)

TMA = DEVICE == "cpu" or torch.cuda.get_device_capability()[0] >= 9
needs_tma = pytest.mark.skipif(not TMA, reason="needs the tile copies of Hopper")

KERNELS = [
    pytest.param(torch.float32, GEMV, id="gemv-fp32"),
    pytest.param(torch.float16, GEMV, id="gemv-fp16"),
    pytest.param(torch.bfloat16, GEMV, id="gemv-bf16"),
    pytest.param(torch.float16, SMALL_GEMM, id="small_gemm-fp16"),
    pytest.param(torch.bfloat16, SMALL_GEMM, id="small_gemm-bf16"),
    pytest.param(torch.bfloat16, SPLIT, id="split-bf16"),
    pytest.param(torch.float16, TILE_GEMM, id="tile_gemm-fp16"),
    pytest.param(torch.bfloat16, TILE_SPLIT, id="tile_split-bf16"),
    pytest.param(torch.bfloat16, PLAIN_TILE, id="plain_tile-bf16"),
    pytest.param(torch.float16, WIDE, id="wide-fp16", marks=needs_tma),
    pytest.param(torch.bfloat16, WIDE_SPLIT, id="wide_split-bf16", marks=needs_tma),
    pytest.param(torch.float16, AHEAD, id="ahead-fp16", marks=needs_tma),
    pytest.param(torch.bfloat16, AHEAD_SPLIT, id="ahead_split-bf16", marks=needs_tma),
]
# The tile copies cannot read rows that start off 16 bytes.
ANY_ALIGNMENT = KERNELS[:-4]
SOME_KERNELS = [KERNELS[0], KERNELS[4], KERNELS[7], KERNELS[10]]
HALF_KERNELS = [
    pytest.param(GEMV, id="gemv"),
    pytest.param(SPLIT, id="split"),
    pytest.param(TILE_GEMM, id="tile_gemm"),
    pytest.param(WIDE_SPLIT, id="wide", marks=needs_tma),
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


def at_16_bytes(matrix: Tensor) -> Tensor:
    """Return a matrix of these values whose rows start at multiples of 16 bytes."""
    num_rows, width = matrix.shape
    wide = torch.empty(num_rows, -(-width // 8) * 8 + 8, dtype=matrix.dtype, device=DEVICE)
    return wide[:, :width].copy_(matrix)


def make_weights(sizes: list[int], in_features: int, dtype: torch.dtype) -> list[Tensor]:
    scale = in_features**-0.5
    return [
        randn(n, in_features, dtype=dtype, scale=scale, seed=i + 1) for i, n in enumerate(sizes)
    ]


def make_counters() -> Tensor:
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=DEVICE)


def oracle(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None] | None = None,
    norm_weight: Tensor | None = None,
    *,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    residual: Tensor | None = None,
    activation: str = "",
    gated: bool = False,
) -> Tensor:
    """The module's equation in float64, without any rounding."""
    x = x.double()
    if norm:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        if norm_weight is not None:
            x = x * (norm_weight.double() + norm_offset)
    parts = [x @ w.double().T for w in weights]
    for part, bias in zip(parts, biases or (), strict=False):
        if bias is not None:
            part += bias.double()
    if gated:
        y = activation_reference(parts[0], activation) * parts[1]
    else:
        y = torch.cat(parts, dim=-1)
        if activation:
            y = activation_reference(y, activation)
    return y if residual is None else y + residual.double()


def check(
    config: Config,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None] | None = None,
    norm_weight: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Run a kernel and hold it to twice what Hugging Face's roundings would have cost."""
    counters = make_counters()
    out = launch._launch_fused_linear(
        x, weights, biases or [], norm_weight, **options, counters=counters, config=config
    )
    want = oracle(x, weights, biases, norm_weight, **options)
    # Torch's own bfloat16 product on a CPU reads what lies between the rows.
    dense = [weight.contiguous() for weight in weights]
    low = fused_linear_reference(x.contiguous(), dense, biases or [], norm_weight, **options)
    assert out.shape == want.shape and out.dtype == x.dtype
    assert not counters.any()
    scale = want.abs().max()
    budget = 2 * ((low.double() - want).abs().max() + torch.finfo(x.dtype).eps / 2 * scale)
    error = (out.double() - want).abs().max()
    assert error <= budget, f"error {error:.3e} exceeds {budget:.3e}"
    if x.dtype == torch.float32:
        assert error <= 1e-5 * scale
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9, 17, 33, 64])
@pytest.mark.parametrize(("dtype", "config"), KERNELS)
def test_norm_and_three_weights_match_the_oracle(
    dtype: torch.dtype, config: Config, num_tokens: int
) -> None:
    in_features = 80
    x = randn(num_tokens, in_features, dtype=dtype)
    weights = make_weights([24, 9, 17], in_features, dtype)
    biases = [randn(24, dtype=dtype), None, randn(17, dtype=dtype)]
    gain = randn(in_features, dtype=dtype)
    check(config, x, weights, biases, gain, norm=True, eps=1e-5)


@pytest.mark.parametrize("cast_before_gain", [True, False])
@pytest.mark.parametrize(
    ("gain_dtype", "norm_offset"),
    [(None, 0.0), (torch.bfloat16, 0.0), (torch.bfloat16, 1.0), (torch.float32, 1.0)],
)
@pytest.mark.parametrize("config", HALF_KERNELS)
def test_every_norm_matches_the_oracle(
    config: Config,
    gain_dtype: torch.dtype | None,
    norm_offset: float,
    cast_before_gain: bool,
) -> None:
    x = randn(3, 72, dtype=torch.bfloat16, scale=3.0)
    gain = None if gain_dtype is None else randn(72, dtype=gain_dtype)
    options = {"norm_offset": norm_offset, "cast_before_gain": cast_before_gain}
    check(config, x, make_weights([12], 72, x.dtype), None, gain, norm=True, eps=1e-6, **options)


@pytest.mark.parametrize("sizes", [[5], [8, 16], [16, 1, 15]], ids=str)
@pytest.mark.parametrize("biased", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize(("dtype", "config"), SOME_KERNELS)
def test_biases_belong_to_their_weights(
    dtype: torch.dtype, config: Config, biased: int, sizes: list[int]
) -> None:
    biases = [
        randn(n, dtype=dtype, seed=i) if biased >> i & 1 else None for i, n in enumerate(sizes)
    ]
    check(config, randn(2, 64, dtype=dtype), make_weights(sizes, 64, dtype), biases)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("config", HALF_KERNELS)
def test_activations_match_the_oracle(config: Config, gated: bool, activation: str) -> None:
    dtype = torch.float16
    x = randn(2, 80, dtype=dtype)
    weights = make_weights([20, 20] if gated else [20], 80, dtype)
    biases = [None, randn(20, dtype=dtype)] if gated else [randn(20, dtype=dtype)]
    check(config, x, weights, biases, norm=True, eps=1e-5, activation=activation, gated=gated)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize(("dtype", "config"), KERNELS)
def test_residual_is_added_last_with_its_own_row_stride(
    dtype: torch.dtype, config: Config, gated: bool
) -> None:
    residual = randn(3, 50, dtype=dtype)[:, 5:45]
    x = randn(3, 64, dtype=dtype)
    weights = make_weights([40, 40] if gated else [40], 64, dtype)
    check(config, x, weights, residual=residual, activation="silu" * gated, gated=gated)


@pytest.mark.parametrize("in_features", [1, 31, 33, 63, 64, 65, 144, 224])
@pytest.mark.parametrize("out_features", [1, 7, 16, 17])
@pytest.mark.parametrize(("dtype", "config"), SOME_KERNELS)
def test_any_size_matches_the_oracle(
    dtype: torch.dtype,
    config: Config,
    out_features: int,
    in_features: int,
) -> None:
    x = randn(2, in_features, dtype=dtype)
    weights = make_weights([out_features], in_features, dtype)
    if isinstance(config, WideGemmConfig):
        x, weights = at_16_bytes(x), [at_16_bytes(w) for w in weights]
    norm = {} if isinstance(config, WideGemmConfig) else {"norm": True, "eps": 1e-5}
    check(config, x, weights, None, randn(in_features, dtype=dtype) if norm else None, **norm)


@pytest.mark.parametrize("first", [0, 1, 2, 8])
@pytest.mark.parametrize(("dtype", "config"), ANY_ALIGNMENT)
def test_row_strides_and_alignments_are_free(
    dtype: torch.dtype, config: Config, first: int
) -> None:
    columns = slice(first, first + 64)
    x = randn(3, 96, dtype=dtype)[:, columns]
    weights = [w[:, columns] for w in make_weights([9, 8], 96, dtype)]
    check(config, x, weights)


@pytest.mark.parametrize("config", HALF_KERNELS)
def test_a_large_float16_row_times_its_gain_does_not_overflow(config: Config) -> None:
    x = randn(2, 64, dtype=torch.float16, scale=15000.0)
    gain = randn(64, dtype=torch.float16, scale=40.0)
    out = check(config, x, make_weights([8], 64, x.dtype), None, gain, norm=True, eps=1e-6)
    assert out.isfinite().all()


@pytest.mark.parametrize(("dtype", "config"), KERNELS)
def test_nan_stays_in_its_row(dtype: torch.dtype, config: Config) -> None:
    x = randn(3, 64, dtype=dtype)
    x[1, 7] = float("nan")
    out = launch._launch_fused_linear(
        x,
        make_weights([8], 64, dtype),
        [],
        norm=True,
        eps=1e-6,
        counters=make_counters(),
        config=config,
    )
    assert out.isnan().all(dim=1).tolist() == [False, True, False]
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("dtype", "config"), KERNELS)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, config: Config) -> None:
    x = randn(20, 160, dtype=dtype)
    weights = make_weights([24], 160, dtype)
    gain = randn(160, dtype=dtype)
    rows = [
        launch._launch_fused_linear(
            x[:n], weights, [], gain, norm=True, eps=1e-6, counters=make_counters(), config=config
        )[0]
        for n in (1, 2, 3, 8, 20)
    ]
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(SMALL_GEMM, id="small_gemm"),
        pytest.param(TILE_GEMM, id="tile_gemm"),
        pytest.param(WIDE, id="wide", marks=needs_tma),
    ],
)
def test_split_sums_match_and_are_left_whole_without_counters(kind: Config, splits: int) -> None:
    config = kind._replace(splits=splits)
    x = randn(5, 160, dtype=torch.bfloat16)
    weights = make_weights([40], 160, x.dtype)
    check(config, x, weights, norm=True, eps=1e-6)
    without = launch._launch_fused_linear(x, weights, [], norm=True, eps=1e-6, config=config)
    whole = check(kind, x, weights, norm=True, eps=1e-6)
    assert torch.equal(without, whole)


@pytest.mark.parametrize("in_features", [64, 128, 200, 320])
def test_any_number_of_tiles_and_stages_matches(in_features: int) -> None:
    x = randn(3, in_features, dtype=torch.bfloat16)
    weights = make_weights([24], in_features, x.dtype)
    for kind in (SMALL_GEMM, TILE_GEMM._replace(stages=1), TILE_GEMM._replace(stages=3)):
        check(kind, x, weights, norm=True, eps=1e-6)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("block_k", "splits"), [(256, 1), (64, 3), (16, 2)])
def test_many_rows_match_with_one_tile_and_with_several(
    block_k: int, splits: int, gated: bool
) -> None:
    config = TileGemmConfig(rows=16, block_k=block_k, warps=4, splits=splits, stages=2)
    x = randn(70, 160, dtype=torch.bfloat16)
    weights = make_weights([24, 24], 160, x.dtype)
    options = {"activation": "silu", "gated": True} if gated else {}
    check(config, x, weights, norm=True, eps=1e-6, **options)


@needs_tma
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 33, 65])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(WIDE, id="16"),
        pytest.param(WIDE._replace(splits=3), id="16-split"),
        pytest.param(WIDE._replace(tokens=32, warps=8, splits=2), id="32-split"),
        pytest.param(WIDE._replace(tokens=64, block_k=128, splits=1), id="64"),
        pytest.param(AHEAD, id="ahead"),
        pytest.param(AHEAD._replace(block_k=128, splits=2), id="ahead-split"),
    ],
)
def test_wide_tiles_cover_any_number_of_rows_and_never_what_lies_between_them(
    config: Config, num_tokens: int, gated: bool
) -> None:
    """Around x and the weights everything is NaN, and no size is a multiple of the tile's."""
    dtype = torch.bfloat16
    x = at_16_bytes(randn(num_tokens, 201, dtype=dtype))
    sizes = [70, 70] if gated else [70, 3, 65]
    weights = [at_16_bytes(w) for w in make_weights(sizes, 201, dtype)]
    biases = [randn(n, dtype=dtype, seed=n) for n in sizes]
    width = 70 if gated else 138
    residual = at_16_bytes(randn(num_tokens, width, dtype=dtype))
    options = {"activation": "silu", "gated": True} if gated else {}
    check(config, x, weights, biases, residual=residual, **options)


def test_programs_wait_for_each_other_only_where_each_has_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "INTERPRETED", False)
    monkeypatch.setattr(start, "num_processors", lambda index: 132)
    device = torch.device("cuda", 0)
    assert start._run_together(132, device) and not start._run_together(133, device)
    monkeypatch.setattr(start, "INTERPRETED", True)
    assert not start._run_together(1, device)


@pytest.mark.parametrize(("first", "wide"), [(0, True), (4, False), (8, True)])
def test_many_rows_off_16_bytes_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, first: int, wide: bool
) -> None:
    launched = []
    monkeypatch.setattr(launch, "device_key", lambda device: (90, 132))
    monkeypatch.setattr(launch, "start_wide_gemm", lambda *args: launched.append(args))
    x = randn(70, 96, dtype=torch.bfloat16)
    (weight,) = make_weights([9], 96, x.dtype)
    columns = slice(first, first + 64)
    for one, other in ((x[:, columns], weight[:, :64]), (x[:, :64], weight[:, columns])):
        out = launch._launch_fused_linear(one, [other], [])
        if not wide:
            assert torch.equal(out, F.linear(one, other))
    assert len(launched) == (2 if wide else 0)


@pytest.mark.parametrize("with_counters", [False, True])
@pytest.mark.parametrize(
    ("entry", "num_tokens"),
    [
        *((("wide_gemm", 64, 32, 64, 4, 2, 3), num_tokens) for num_tokens in (9, 24, 64)),
        # With 64 rows of x the tiles of 1024 elements would not fit a multiprocessor.
        *((("ahead_gemm", 64, 1024, 8, 1), num_tokens) for num_tokens in (9, 24, 32)),
    ],
    ids=str,
)
def test_few_rows_off_16_bytes_take_a_kernel_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
    entry: tuple[str | int, ...],
    num_tokens: int,
    with_counters: bool,
) -> None:
    """Though the table names one of tile copies, before which the norm may be left outside."""
    bucket = configs.token_bucket(num_tokens)
    monkeypatch.setattr(configs, "TABLE", {(90, 132): {(bucket, 40, 576, False): entry}})
    monkeypatch.setattr(launch, "device_key", lambda device: (90, 132))
    configs._measured.cache_clear()
    copies = configs.KINDS[entry[0]]
    started: list[object] = []
    for name in ("start_wide_gemm", "start_ahead_gemm", "start_gemm"):
        start_kernel = getattr(launch, name)

        def recorded(config: Config, *args: object, start_kernel: object = start_kernel) -> None:
            started.append(config)
            start_kernel(config, *args)

        monkeypatch.setattr(launch, name, recorded)
    x = randn(num_tokens, 576, dtype=torch.bfloat16)
    (wide,) = make_weights([40], 584, x.dtype)
    gain = randn(576, dtype=x.dtype)
    counters = make_counters() if with_counters else None
    options = {"norm": True, "eps": 1e-5}
    for first, kinds in ((8, copies), (4, SmallGemmConfig | TileGemmConfig)):
        weight = wide[:, first : first + 576]
        out = launch._launch_fused_linear(x, [weight], [], gain, **options, counters=counters)
        assert isinstance(started[-1], kinds)
        assert with_counters or started[-1].splits == 1
        want = oracle(x, [weight], None, gain, **options)
        low = fused_linear_reference(x, [weight.contiguous()], [], gain, **options)
        rounding = torch.finfo(x.dtype).eps / 2 * want.abs().max()
        assert (out - want).abs().max() <= 2 * ((low - want).abs().max() + rounding)
    configs._measured.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 40, 64, 65])
def test_the_op_chooses_for_itself(num_tokens: int, dtype: torch.dtype) -> None:
    x = randn(num_tokens, 96, dtype=dtype)
    weights = make_weights([48, 48], 96, dtype)
    options = {"norm": True, "eps": 1e-6, "activation": "silu", "gated": True}
    out = launch._launch_fused_linear(x, weights, [], **options, counters=make_counters())
    want = oracle(x, weights, **options)
    low = fused_linear_reference(x, weights, [], **options)
    budget = 2 * ((low - want).abs().max() + torch.finfo(dtype).eps / 2 * want.abs().max())
    assert (out - want).abs().max() <= budget
    if num_tokens > ALWAYS_KERNEL_ROWS and (dtype == torch.float32 or DEVICE == "cpu"):
        assert torch.equal(out, low)


def test_no_rows_give_an_empty_output() -> None:
    weights = make_weights([8, 4], 32, torch.float32)
    x = torch.zeros(0, 32, device=DEVICE)
    assert fused_linear(x, weights, norm=True).shape == (0, 12)
    assert launch._launch_fused_linear(x, weights, []).shape == (0, 12)


def test_the_cpu_kernel_is_linear_of_rms_norm() -> None:
    x = torch.randn(3, 32)
    gain = torch.randn(32)
    weights = [torch.randn(8, 32), torch.randn(8, 32)]
    bias = torch.randn(8)
    h = gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    want = torch.cat([F.linear(h, weights[0]), F.linear(h, weights[1], bias)], dim=-1)
    out = fused_linear(x, weights, [None, bias], gain, norm=True, eps=1e-6)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


def test_opcheck() -> None:
    op = torch.ops.torch_paged.fused_linear.default
    x = torch.randn(3, 16)
    weights = [torch.randn(8, 16), torch.randn(8, 16)]
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32)
    gated = {"norm": True, "activation": "silu", "gated": True, "counters": counters}
    torch.library.opcheck(op, (x, weights, [None, torch.randn(8)], torch.randn(16)), gated)
    torch.library.opcheck(op, (x, weights, []), {"residual": torch.randn(3, 16)})


def test_compiles_without_graph_breaks() -> None:
    x = torch.randn(3, 16)
    weights = [torch.randn(8, 16), torch.randn(8, 16)]

    def step(x: Tensor) -> Tensor:
        return fused_linear(x, weights, norm=True, eps=1e-6, activation="silu", gated=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), step(x))
