"""experts: both kernels against a float64 oracle, the grouping, and the contract around them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from torch_paged.ops.experts import CLAMPED_SWIGLU, experts, experts_reference, group
from torch_paged.ops.experts.configs import (
    ExpertsConfig,
    GemvConfig,
    Problem,
    TileConfig,
    choose_config,
)
from torch_paged.ops.experts.launch import _launch_experts
from torch_paged.ops.experts.reference import gate_reference
from torch_paged.ops.glu import ACTIVATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

GEMV = ExpertsConfig(0, GemvConfig(4, 32, 4), GemvConfig(8, 16, 4, splits=2))
TILE = ExpertsConfig(16, TileConfig(16, 32, 4, stages=2), TileConfig(16, 32, 4, stages=2))
TILE_SPLIT = ExpertsConfig(16, TileConfig(16, 16, 4, stages=3), TileConfig(32, 16, 4, 2, 2))

KERNELS = [
    pytest.param(torch.float32, GEMV, id="gemv-fp32"),
    pytest.param(torch.bfloat16, GEMV, id="gemv-bf16"),
    pytest.param(torch.float32, TILE, id="tile-fp32"),
    pytest.param(torch.float16, TILE, id="tile-fp16"),
    pytest.param(torch.bfloat16, TILE_SPLIT, id="split-bf16"),
]
CONFIGS = [
    pytest.param(GEMV, id="gemv"),
    pytest.param(TILE, id="tile"),
    pytest.param(TILE_SPLIT, id="split"),
]


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves unwritten reads as NaN, or as a number far outside."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else 1 << 28)

    monkeypatch.setattr(torch, "empty", poisoned)


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


class Layer(NamedTuple):
    """Parameters of the experts of a layer."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def double(self) -> Layer:
        return Layer(*(None if t is None else t.double() for t in self))


def make_layer(
    num_experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    biased: bool = False,
) -> Layer:
    shapes = [(num_experts, 2 * inner, hidden), (num_experts, hidden, inner)]
    matrices = []
    for seed, (experts_, features, k) in enumerate(shapes):
        shape = (experts_, k, features) if transposed else (experts_, features, k)
        matrix = randn(*shape, dtype=dtype, scale=k**-0.5, seed=seed)
        matrices.append(matrix.transpose(1, 2) if transposed else matrix)
    if not biased:
        return Layer(*matrices)
    biases = [randn(*shape[:2], dtype=dtype, seed=7) for shape in shapes]
    return Layer(*matrices, *biases)


def make_routing(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Random distinct experts of each token, in random order, and weights that sum to one."""
    generator = torch.Generator().manual_seed(num_tokens + 31 * num_experts)
    noise = torch.rand(num_tokens, num_experts, generator=generator)
    ids = noise.argsort(-1)[:, :top_k].int().contiguous()
    weights = torch.rand(num_tokens, top_k, generator=generator).softmax(-1)
    return ids.to(DEVICE), weights.to(DEVICE)


def oracle(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: Layer,
    residual: Tensor | None = None,
    **options: object,
) -> Tensor:
    """The equation in float64, token by token, without any rounding."""
    gating = {"activation": "silu", "interleaved": False, "alpha": 1.0, "limit": 0.0, **options}
    wide, out = layer.double(), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            h = wide.gate_up[expert] @ x[token].double()
            if wide.gate_up_bias is not None:
                h = h + wide.gate_up_bias[expert]
            y = wide.down[expert] @ gate_reference(h, **gating)
            out[token] += weight * (y if wide.down_bias is None else y + wide.down_bias[expert])
    return out if residual is None else residual.double() + out


def check(
    config: ExpertsConfig | None,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: Layer,
    residual: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Run the kernels and hold them to twice what Hugging Face's roundings would have cost."""
    kwargs = {**options, "residual": residual}
    out = _launch_experts(x, ids, weights, *layer, **kwargs, config=config)
    want = oracle(x, ids, weights, layer, residual, **options)
    low = experts_reference(x, ids, weights, *layer, **kwargs)
    assert out.shape == want.shape and out.dtype == x.dtype and out.is_contiguous()
    scale = want.abs().max()
    budget = 2 * ((low.double() - want).abs().max() + torch.finfo(x.dtype).eps / 2 * scale)
    error = (out.double() - want).abs().max()
    assert error <= budget, f"error {error:.3e} exceeds {budget:.3e}"
    if x.dtype == torch.float32:
        assert error <= 1e-5 * scale
    return out


@pytest.mark.parametrize("transposed", [False, True], ids=["k-first", "features-first"])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("dtype", "config"), KERNELS)
def test_any_number_of_tokens_matches_the_oracle(
    dtype: torch.dtype, config: ExpertsConfig, num_tokens: int, transposed: bool
) -> None:
    layer = make_layer(5, 40, 24, dtype, transposed=transposed)
    check(config, randn(num_tokens, 40, dtype=dtype), *make_routing(num_tokens, 5, 2), layer)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("transposed", [False, True], ids=["k-first", "features-first"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_layout_matches_the_oracle(
    config: ExpertsConfig, transposed: bool, biased: bool, interleaved: bool
) -> None:
    layer = make_layer(4, 48, 20, torch.float16, transposed=transposed, biased=biased)
    x, residual = (randn(3, 48, dtype=torch.float16, seed=s) for s in (3, 4))
    check(config, x, *make_routing(3, 4, 2), layer, residual, interleaved=interleaved)


@pytest.mark.parametrize("activation", sorted({*ACTIVATIONS, CLAMPED_SWIGLU}))
@pytest.mark.parametrize("config", CONFIGS)
def test_activations_match_the_oracle(config: ExpertsConfig, activation: str) -> None:
    layer = make_layer(3, 32, 16, torch.bfloat16, biased=True)
    x = randn(4, 32, dtype=torch.bfloat16, scale=2.0)
    options = {"activation": activation, "alpha": 1.702, "limit": 1.5}
    check(config, x, *make_routing(4, 3, 2), layer, **options)


@pytest.mark.parametrize("hidden", [1, 17, 64])
@pytest.mark.parametrize("inner", [1, 16, 31])
@pytest.mark.parametrize("config", CONFIGS)
def test_any_size_matches_the_oracle(config: ExpertsConfig, inner: int, hidden: int) -> None:
    layer = make_layer(3, hidden, inner, torch.float32, biased=True)
    x = randn(2, hidden, dtype=torch.float32)
    check(config, x, *make_routing(2, 3, 1), layer, interleaved=inner % 2 == 0)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 2), (33, 8)], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_any_number_of_experts(config: ExpertsConfig, num_experts: int, top_k: int) -> None:
    layer = make_layer(num_experts, 16, 8, torch.float32)
    x = randn(3, 16, dtype=torch.float32)
    check(config, x, *make_routing(3, num_experts, top_k), layer)


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_an_expert_of_all_tokens_takes_as_many_tiles_as_it_needs(config: ExpertsConfig) -> None:
    layer = make_layer(4, 16, 8, torch.float32)
    ids, weights = make_routing(37, 4, 2)
    ids[:, 0], ids[:, 1] = 2, torch.arange(37, device=DEVICE) % 2
    check(config, randn(37, 16, dtype=torch.float32), ids, weights, layer)


@pytest.mark.parametrize("config", CONFIGS)
def test_row_strides_are_free(config: ExpertsConfig) -> None:
    layer = make_layer(3, 32, 16, torch.float32)
    wide = Layer(
        randn(3, 40, 48, dtype=torch.float32)[:, :32, 8:40],
        randn(3, 40, 48, dtype=torch.float32)[:, 4:36, 1:17],
    )
    x, residual = (randn(2, 50, dtype=torch.float32, seed=s)[:, 9:41] for s in (1, 2))
    for held in (layer, wide):
        check(config, x, *make_routing(2, 3, 2), held, residual)


@pytest.mark.parametrize("config", CONFIGS)
def test_nan_stays_in_its_row(config: ExpertsConfig) -> None:
    layer = make_layer(4, 32, 16, torch.bfloat16, biased=True)
    x = randn(5, 32, dtype=torch.bfloat16)
    x[3, 7] = float("nan")
    for activation in ("silu", "relu", CLAMPED_SWIGLU):
        options = {"activation": activation, "alpha": 1.7, "limit": 2.0, "config": config}
        out = _launch_experts(x, *make_routing(5, 4, 2), *layer, **options)
        assert out.isnan().all(dim=1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_of_experts_that_nobody_chose_are_not_read(config: ExpertsConfig) -> None:
    layer = make_layer(6, 32, 16, torch.float32, biased=True)
    ids, weights = make_routing(3, 6, 2)
    ids[:] = torch.tensor([4, 1], device=DEVICE)
    for tensor in layer:
        tensor[[0, 2, 3, 5]] = float("nan")
    out = _launch_experts(randn(3, 32, dtype=torch.float32), ids, weights, *layer, config=config)
    assert out.isfinite().all()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_token_does_not_depend_on_its_neighbours(config: ExpertsConfig) -> None:
    layer = make_layer(5, 48, 24, torch.bfloat16)
    x = randn(18, 48, dtype=torch.bfloat16)
    ids, weights = make_routing(18, 5, 2)
    rows = [
        _launch_experts(x[:n], ids[:n], weights[:n], *layer, config=config)[0]
        for n in ((1, 2, 3) if config is GEMV else (1, 2, 18))
    ]
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9, 130])
def test_the_op_chooses_for_itself(num_tokens: int, dtype: torch.dtype) -> None:
    layer = make_layer(6, 64, 48, dtype)
    x = randn(num_tokens, 64, dtype=dtype)
    check(None, x, *make_routing(num_tokens, 6, 2), layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 32, 64, 200, 8192])
@pytest.mark.parametrize("contiguous", [False, True], ids=["features-first", "k-first"])
@pytest.mark.parametrize("key", [(75, 40), (80, 108), (89, 58), (90, 132)], ids=str)
def test_chosen_configurations_are_tiles_that_fit(
    key: tuple[int, int], contiguous: bool, num_tokens: int, dtype: torch.dtype
) -> None:
    for sizes in ((8, 2, 2048, 8192), (32, 4, 2880, 2880), (128, 8, 2048, 768), (4, 2, 32, 48)):
        experts_, top_k, hidden, inner = sizes
        problem = Problem(num_tokens, top_k, experts_, hidden, inner, contiguous, contiguous)
        config = choose_config(key, problem, dtype)
        assert (config.tokens == 0) == (num_tokens == 1)
        assert config.gate_up.splits == 1, "a gate needs whole sums"
        for part, k, rows in (
            (config.gate_up, hidden, 2 * config.gate_up.rows),
            (config.down, inner, config.down.rows),
        ):
            for size in (rows, part.block_k, part.splits, part.warps):
                assert size & (size - 1) == 0
            assert part.splits == 1 or part.splits * part.block_k <= k
            if isinstance(part, TileConfig):
                stage = (rows + config.tokens) * part.block_k * dtype.itemsize
                assert stage * part.stages <= 96 << 10


@pytest.mark.parametrize("tokens", [16, 32])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 1, 1), (2, 8, 2), (33, 5, 3), (17, 40, 8), (64, 3, 2), (60, 11, 9)],
)
def test_groups_hold_each_pair_once_beside_its_kind(
    num_tokens: int, num_experts: int, top_k: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = make_routing(num_tokens, num_experts, top_k)
    made = group.group_pairs(ids, num_experts, tokens)
    order, flat = made.order.tolist(), ids.flatten().tolist()
    assert order == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    covered = []
    for expert, first, count in zip(*made.tiles.tolist(), strict=True):
        if expert >= 0:
            assert 0 < count <= tokens
            assert {flat[pair] for pair in order[first : first + count]} == {expert}
            covered += range(first, first + count)
    assert covered == list(range(len(flat)))
    monkeypatch.setattr(group, "MAX_KERNEL_PAIRS", 0)
    by_sort = group.group_pairs(ids, num_experts, tokens)
    used = made.tiles[0] >= 0
    assert torch.equal(by_sort.order, made.order)
    assert torch.equal(by_sort.tiles[0], made.tiles[0])
    assert torch.equal(by_sort.tiles[:, used], made.tiles[:, used])


def test_no_tokens() -> None:
    layer = make_layer(3, 16, 8, torch.float32)
    ids, weights = make_routing(0, 3, 2)
    x = torch.zeros(0, 16, device=DEVICE)
    assert experts(x, ids, weights, *layer).shape == (0, 16)
    assert _launch_experts(x, ids, weights, *layer).shape == (0, 16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(3, 16, 1)}, ValueError, "x must be floating"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "ids must be int32"),
        ({"weights": torch.zeros(3, 1)}, ValueError, r"must be \[3, top_k\]"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int32).T}, ValueError, "contiguous"),
        ({"gate_up": torch.zeros(4, 16, 17)}, ValueError, r"gate_up must be \[4, 16, 16\]"),
        ({"down": torch.zeros(4, 16, 8).half()}, TypeError, "must be torch.float32 like x"),
        ({"down": torch.zeros(4, 16)}, ValueError, "gate_up must be"),
        ({"gate_up_bias": torch.zeros(4, 8)}, ValueError, r"gate_up_bias must be \[4, 16\]"),
        ({"down_bias": torch.zeros(4, 16).half()}, TypeError, "down_bias must be"),
        ({"residual": torch.zeros(3, 15)}, ValueError, r"residual must be \[3, 16\]"),
        ({"activation": "swish"}, ValueError, "activation must be one of"),
    ],
)
def test_wrong_arguments_are_named(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments = {
        "x": torch.zeros(3, 16),
        "ids": torch.zeros(3, 2, dtype=torch.int32),
        "weights": torch.zeros(3, 2),
        "gate_up": torch.zeros(4, 16, 16),
        "down": torch.zeros(4, 16, 8),
    }
    with pytest.raises(error, match=message):
        experts(**arguments | changes)


def test_opcheck() -> None:
    op = torch.ops.torch_paged.experts.default
    x, ids = torch.randn(3, 16), torch.tensor([[0, 2], [1, 2], [3, 0]], dtype=torch.int32)
    matrices = (torch.randn(4, 16, 16), torch.randn(4, 16, 8))
    torch.library.opcheck(op, (x, ids, torch.rand(3, 2), *matrices))
    biases = (torch.randn(4, 16), torch.randn(4, 16))
    options = {"activation": CLAMPED_SWIGLU, "interleaved": True, "residual": torch.randn(3, 16)}
    torch.library.opcheck(op, (x, ids, torch.rand(3, 2), *matrices, *biases), options)


def test_compiles_without_graph_breaks() -> None:
    layer = Layer(torch.randn(4, 16, 16), torch.randn(4, 16, 8))
    ids, weights = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32), torch.rand(2, 2)

    def step(x: Tensor) -> Tensor:
        return experts(x, ids, weights, *layer, residual=x)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    x = torch.randn(2, 16)
    assert torch.equal(compiled(x), step(x))
