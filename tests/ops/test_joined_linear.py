"""joined_linear: its kernel against float64, what it does with others, and the contract."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_paged.ops.fused_linear import NUM_COUNTERS, configs, joined
from torch_paged.ops.fused_linear.configs import GemvConfig, Problem, joined_config
from torch_paged.ops.fused_linear.joined import (
    _launch_joined_linear,
    joined_linear,
    joined_linear_reference,
)
from torch_paged.ops.glu import activation_reference
from torch_paged.ops.rms_norm.kernel import _launch_rms_norm_add

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# One group of warps along in_features, two, and all of them; one chunk of a warp, and several.
GRIDS = [
    pytest.param(GemvConfig(2, 2, 4, 1), id="1x2"),
    pytest.param(GemvConfig(1, 1, 4, 2), id="2x1"),
    pytest.param(GemvConfig(2, 4, 4, 4), id="4x4"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [dtype for dtype in DTYPES if dtype.itemsize == 2]


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves unwritten reads as NaN."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poisoned(out: Tensor) -> Tensor:
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


def make_call(
    num_tokens: int, sizes: list[int], in_features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return branch, stream and weights."""
    rows = [randn(num_tokens, in_features, dtype=dtype, scale=s, seed=int(s)) for s in (3, 1)]
    scale = in_features**-0.5
    weights = [
        randn(n, in_features, dtype=dtype, scale=scale, seed=i + 5) for i, n in enumerate(sizes)
    ]
    return rows[0], rows[1], weights


def normed(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * (weight.double() + offset)


def oracle(
    branch: Tensor,
    stream: Tensor,
    join_weight: Tensor | None,
    join_eps: float,
    join_offset: float,
    join_cast: bool,
    weights: list[Tensor],
    biases: list[Tensor | None],
    norm_weight: Tensor | None = None,
    *,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    activation: str = "",
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """The module's equation in float64, without any rounding."""
    total = stream.double() + normed(branch.double(), join_weight, join_eps, join_offset)
    x = normed(total, norm_weight, eps, norm_offset) if norm else total
    parts = [x @ w.double().T for w in weights]
    for part, bias in zip(parts, biases, strict=False):
        if bias is not None:
            part += bias.double()
    if gated:
        return activation_reference(parts[0], activation) * parts[1], total
    y = torch.cat(parts, dim=-1)
    return activation_reference(y, activation) if activation else y, total


def check(
    config: GemvConfig | None,
    branch: Tensor,
    stream: Tensor,
    join_weight: Tensor | None,
    weights: list[Tensor],
    biases: list[Tensor | None] | None = None,
    norm_weight: Tensor | None = None,
    join_offset: float = 0.0,
    join_cast: bool = True,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Run the kernel and hold it to twice what Hugging Face's roundings would have cost."""
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
    arguments = (join_weight, 1e-6, join_offset, join_cast)
    rest = (biases or [], norm_weight)
    outs = _launch_joined_linear(
        *(branch, stream, *arguments, weights, *rest),
        **options,
        counters=counters,
        **({} if config is None else {"config": config}),
    )
    wanted = oracle(branch, stream, *arguments, weights, *rest, **options)
    dense = [weight.contiguous() for weight in weights]
    rows = (branch.contiguous(), stream.contiguous())
    lows = joined_linear_reference(*rows, *arguments, dense, *rest, **options)
    assert not counters.any()
    for out, want, low in zip(outs, wanted, lows, strict=True):
        assert out.shape == want.shape and out.dtype == low.dtype and out.is_contiguous()
        scale = want.abs().max()
        rounding = torch.finfo(out.dtype).eps / 2 * scale
        budget = 2 * ((low.double() - want).abs().max() + rounding)
        error = (out.double() - want).abs().max()
        assert error <= budget, f"error {error:.3e} exceeds {budget:.3e}"
    return outs


@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [(1, torch.bfloat16), (2, torch.float16), (3, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("config", GRIDS)
def test_three_weights_match_the_oracle(
    config: GemvConfig, dtype: torch.dtype, num_tokens: int
) -> None:
    in_features = 1208  # with bfloat16 several tiles, the last one in part
    branch, stream, weights = make_call(num_tokens, [24, 9, 17], in_features, dtype)
    biases = [randn(24, dtype=dtype), None, randn(17, dtype=dtype)]
    gains = [randn(in_features, dtype=dtype, seed=seed) for seed in (1, 2)]
    prologue = {"norm": True, "eps": 1e-5, "norm_offset": 1.0}
    check(config, branch, stream, gains[0], weights, biases, gains[1], 1.0, **prologue)


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("config", GRIDS)
def test_gated_weights_match_the_oracle(
    config: GemvConfig, dtype: torch.dtype, num_tokens: int
) -> None:
    branch, stream, weights = make_call(num_tokens, [21, 21], 520, dtype)
    biases = [None, randn(21, dtype=dtype)]
    gains = [randn(520, dtype=dtype, seed=seed) for seed in (1, 2)]
    options = {"activation": "gelu_tanh", "gated": True}
    check(config, branch, stream, gains[0], weights, biases, gains[1], norm=True, **options)
    check(config, branch, stream, gains[0], weights, None, **options)


@pytest.mark.parametrize("in_features", [1, 31, 33, 255, 256, 257, 512, 575, 1024])
@pytest.mark.parametrize("out_features", [1, 7, 16])
@pytest.mark.parametrize("config", GRIDS)
def test_any_size_matches_the_oracle(
    config: GemvConfig, out_features: int, in_features: int
) -> None:
    branch, stream, weights = make_call(2, [out_features], in_features, torch.float16)
    gain = randn(in_features, dtype=torch.float16)
    check(config, branch, stream, gain, weights, None, gain, norm=True, eps=1e-5)


@pytest.mark.parametrize("norm", [False, True], ids=["bare", "norm"])
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize(
    ("gain_dtype", "offset"),
    [(None, 0.0), (torch.bfloat16, 0.0), (torch.bfloat16, 1.0), (torch.float32, 1.0)],
)
def test_every_norm_matches_the_oracle(
    gain_dtype: torch.dtype | None, offset: float, cast: bool, norm: bool
) -> None:
    branch, stream, weights = make_call(2, [12], 72, torch.bfloat16)
    gain = None if gain_dtype is None else randn(72, dtype=gain_dtype)
    prologue = {"norm": norm, "eps": 1e-6, "cast_before_gain": cast}
    gain_behind = gain if norm else None
    prologue["norm_offset"] = offset if norm else 0.0
    check(
        GemvConfig(2, 1, 4, 2),
        *(branch, stream, gain, weights, None, gain_behind, offset, cast),
        **prologue,
    )


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_a_plain_activation_matches_the_oracle(activation: str) -> None:
    branch, stream, weights = make_call(1, [20], 80, torch.float16)
    gain = randn(80, dtype=torch.float16)
    check(None, branch, stream, gain, weights, None, gain, norm=True, activation=activation)


# In float32 a product and a sum become one operation where the compiler likes.
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("config", GRIDS)
def test_the_sum_is_that_of_rms_norm_add_to_the_bit(
    config: GemvConfig, offset: float, cast: bool, dtype: torch.dtype
) -> None:
    """Whatever the order, these squares add up to the same."""
    branch, stream, weights = make_call(2, [8], 600, dtype)
    branch = branch.sign() * torch.exp2(branch.abs().clamp(max=3).floor())
    gain = randn(600, dtype=dtype)
    join = (gain, 1e-6, offset, cast)
    _, total = _launch_joined_linear(branch, stream, *join, weights, [], config=config)
    assert torch.equal(total, _launch_rms_norm_add(branch, stream, *join))


@pytest.mark.parametrize("first", [0, 1, 2, 8])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_row_strides_and_alignments_are_free(dtype: torch.dtype, first: int) -> None:
    branch, stream, weights = make_call(2, [9, 8], 352, dtype)
    gain = randn(320, dtype=dtype)
    columns = slice(first, first + 320)
    for views in (
        (branch[:, columns], stream[:, :320].contiguous(), [w[:, :320] for w in weights]),
        (branch[:, :320].contiguous(), stream[:, columns], [w[:, :320] for w in weights]),
        (branch[:, :320], stream[:, :320], [w[:, columns] for w in weights]),
    ):
        check(GemvConfig(2, 1, 4, 2), views[0], views[1], gain, views[2])


def test_nan_stays_in_its_row() -> None:
    branch, stream, weights = make_call(3, [8], 64, torch.float32)
    config = GemvConfig(2, 1, 4, 2)
    for rows in (branch, stream):
        rows[1, 7] = float("nan")
        outs = _launch_joined_linear(
            *(branch, stream, None, 1e-6, 0.0, True, weights, []), norm=True, config=config
        )
        assert all(out.isnan().any(dim=1).tolist() == [False, True, False] for out in outs)
        rows[1, 7] = 0.0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("config", GRIDS)
def test_a_row_does_not_depend_on_its_neighbours(config: GemvConfig, dtype: torch.dtype) -> None:
    branch, stream, weights = make_call(4, [24], 600, dtype)
    gain = randn(600, dtype=dtype)
    join = (gain, 1e-6, 1.0, False)
    first = [
        _launch_joined_linear(branch[:n], stream[:n], *join, weights, [], config=config)
        for n in (1, 2, 3, 4)
    ]
    for outs in zip(*first, strict=True):
        assert all(torch.equal(out[0], outs[0][0]) for out in outs)


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
def test_the_launch_of_few_rows_has_one_group_of_warps_along_in_features(
    gated: bool, num_tokens: int
) -> None:
    chosen = joined_config((90, 132), GemvConfig(1, 1, 4, 4), Problem(num_tokens, 64, 64, gated))
    assert chosen is not None and chosen.k_warps == 1


def test_a_vocabulary_is_multiplied_by_a_kernel_of_its_own() -> None:
    gemv = GemvConfig(2, 4, 8, 1)
    for problem, is_joined in (
        (Problem(1, 65536, 2560, False), True),
        (Problem(1, 65537, 2560, False), False),
    ):
        assert (joined_config((90, 132), gemv, problem) is not None) == is_joined
        assert joined_config((80, 108), gemv, problem) is None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launches, in order."""
    seen: list[str] = []
    names = ("start_joined_gemv", "_launch_rms_norm_add", "_launch_fused_linear")
    for name in names:
        function = getattr(joined, name)

        def recorded(
            *args: object, name: str = name, function: object = function, **options: object
        ) -> object:
            seen.append(name)
            return function(*args, **options)

        monkeypatch.setattr(joined, name, recorded)
    return seen


ONE = ["start_joined_gemv"]
TWO = ["_launch_rms_norm_add", "_launch_fused_linear"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "launches"), [(1, ONE), (2, ONE), (3, TWO), (20, TWO)])
def test_the_op_chooses_for_itself(
    kernels: list[str], num_tokens: int, launches: list[str], dtype: torch.dtype
) -> None:
    launches = TWO if dtype == torch.float32 else launches
    branch, stream, weights = make_call(num_tokens, [48, 48], 96, dtype)
    gain = randn(96, dtype=dtype)
    prologue = {"norm": True, "eps": 1e-6, "activation": "silu", "gated": True}
    check(None, branch, stream, gain, weights, None, gain, 1.0, **prologue)
    assert kernels == launches


def test_where_the_linear_is_no_gemv_there_are_two_kernels(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {(1, 40, 96, False): ("small_gemm", 8, 1, 4, 1, 128)}
    key = configs.device_key(torch.device(DEVICE))
    monkeypatch.setattr(configs, "TABLE", {key: entry})
    configs._measured.cache_clear()
    branch, stream, weights = make_call(1, [40], 96, torch.float16)
    check(None, branch, stream, None, weights)
    assert kernels == TWO
    configs._measured.cache_clear()


@pytest.mark.parametrize("wide", ["gain", "stream"])
def test_a_sum_in_a_wider_dtype_takes_two_kernels(kernels: list[str], wide: str) -> None:
    branch, stream, _ = make_call(1, [8], 96, torch.bfloat16)
    weights = [randn(8, 96, dtype=torch.float32)]
    gain = randn(96, dtype=torch.float32 if wide == "gain" else torch.bfloat16)
    stream = stream.float() if wide == "stream" else stream
    outs = _launch_joined_linear(branch, stream, gain, 1e-6, 0.0, True, weights, [])
    assert kernels == TWO
    assert all(out.dtype == torch.float32 for out in outs)
    wanted = joined_linear_reference(branch, stream, gain, 1e-6, 0.0, True, weights, [])
    # Rounded to bfloat16 within, if by another last bit.
    torch.testing.assert_close(outs, wanted, rtol=0.02, atol=0.02)


def test_no_rows_give_empty_outputs() -> None:
    rows = torch.zeros(0, 32, device=DEVICE)
    weights = [randn(8, 32, dtype=torch.float32), randn(4, 32, dtype=torch.float32)]
    for outs in (
        joined_linear(rows, rows, None, weights, join_eps=1e-6),
        _launch_joined_linear(rows, rows, None, 1e-6, 0.0, True, weights, []),
    ):
        assert [out.shape for out in outs] == [(0, 12), (0, 32)]


def test_the_cpu_kernel_is_one_op_after_the_other() -> None:
    branch, stream, gain = torch.randn(3, 32), torch.randn(3, 32), torch.randn(32)
    weight = torch.randn(8, 32)
    y, total = joined_linear(branch, stream, gain, [weight], join_eps=1e-6, join_offset=1.0)
    rows = branch * torch.rsqrt(branch.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + gain)
    torch.testing.assert_close(total, stream + rows, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y, total @ weight.T, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_refused() -> None:
    rows, weights = torch.ones(2, 4), [torch.ones(3, 4)]
    with pytest.raises(ValueError, match="branch must be"):
        joined_linear(torch.ones(2, 1, 4), torch.ones(2, 1, 4), None, weights, join_eps=0.0)
    with pytest.raises(ValueError, match="residual must be"):
        joined_linear(rows, torch.ones(2, 5), None, weights, join_eps=0.0)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        joined_linear(rows, rows, torch.ones(3), weights, join_eps=0.0)
    with pytest.raises(ValueError, match="weights\\[0\\] must be"):
        joined_linear(rows, rows, None, [torch.ones(3, 5)], join_eps=0.0)
    with pytest.raises(TypeError, match="must have the dtype"):
        joined_linear(rows, rows.double(), None, weights, join_eps=0.0)
    with pytest.raises(ValueError, match="exactly 2"):
        joined_linear(rows, rows, None, weights, join_eps=0.0, activation="silu", gated=True)


def test_opcheck() -> None:
    op = torch.ops.torch_paged.joined_linear.default
    branch, stream = torch.randn(2, 16), torch.randn(2, 16)
    weights = [torch.randn(8, 16), torch.randn(8, 16)]
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32)
    gain = torch.randn(16)
    gated = {"norm": True, "activation": "silu", "gated": True, "counters": counters}
    biases = [None, torch.randn(8)]
    arguments = (branch, stream, gain, 1e-6, 1.0, False, weights, biases, gain)
    torch.library.opcheck(op, arguments, gated)
    torch.library.opcheck(op, (branch, stream, None, 1e-6, 0.0, True, weights, []))


def test_compiles_without_graph_breaks() -> None:
    branch, stream, gain = torch.randn(2, 16), torch.randn(2, 16), torch.randn(16)
    weights = [torch.randn(8, 16), torch.randn(8, 16)]

    def step(branch: Tensor) -> tuple[Tensor, Tensor]:
        return joined_linear(branch, stream, gain, weights, join_eps=1e-6, norm=True, eps=1e-6)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for out, want in zip(compiled(branch), step(branch), strict=True):
        assert torch.equal(out, want)
