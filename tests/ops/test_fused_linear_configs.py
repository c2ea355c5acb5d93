"""The choice of a configuration: the table is usable and every problem gets one that fits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_paged.ops.fused_linear import ALWAYS_KERNEL_ROWS, MAX_KERNEL_ROWS, configs, fused_linear
from torch_paged.ops.fused_linear.configs import (
    KINDS,
    ONE_TILE_BLOCK_K,
    TOKEN_BUCKETS,
    Composed,
    GemvConfig,
    Problem,
    SmallGemmConfig,
    TileGemmConfig,
    choose_config,
    folds,
    tma_serves,
    token_bucket,
)
from torch_paged.ops.fused_linear.table import TABLE
from torch_paged.ops.fused_linear.wide_config import (
    AheadGemmConfig,
    WideGemmConfig,
    ranked_configs,
    stage_bytes,
)

H200 = (90, 132)
ENTRIES = [(key, shape, entry) for key, t in TABLE.items() for shape, entry in t.items()]


def assert_valid(config: object, problem: Problem) -> None:
    assert not isinstance(config, Composed)
    fields = config._asdict().items()
    sizes = [v for k, v in fields if k not in ("registers", "stages", "splits", "prefetch")]
    assert all(n > 0 and n & (n - 1) == 0 for n in sizes)
    if isinstance(config, GemvConfig):
        assert config.k_warps <= config.warps <= 16
    elif isinstance(config, SmallGemmConfig):
        assert config.rows >= 8
        # A thread's share of the sums, in registers.
        assert config.rows * max(problem.num_tokens, 8) * (1 + problem.gated) <= 96 * 32
    elif isinstance(config, AheadGemmConfig):
        rows, tokens = config.rows * (1 + problem.gated), token_bucket(problem.num_tokens)
        assert 64 <= config.rows and problem.num_tokens <= 128
        assert problem.in_features <= config.block_k * config.splits
        assert stage_bytes(rows, max(tokens, 16), config.block_k) <= 224 << 10
    elif isinstance(config, WideGemmConfig):
        assert 0 < config.prefetch <= 2048 and config.prefetch % 16 == 0
        rows = config.rows * (1 + problem.gated)
        # The tensor cores take 64 rows, the copies boxes of 256 and whole lines of 128 bytes.
        assert 64 <= config.rows <= 256 and config.tokens <= 256 and config.block_k % 64 == 0
        assert rows * config.tokens <= 128 * 32 * config.warps
        stages = config.stages * stage_bytes(rows, config.tokens, config.block_k)
        assert config.stages >= 2 and stages <= 224 << 10
    else:
        streams = 1 + problem.gated
        tile = 2 * config.block_k * (config.rows * streams + problem.num_tokens)
        assert config.rows >= 16 and config.block_k >= 16
        one_tile = config.block_k >= ONE_TILE_BLOCK_K
        assert not one_tile or problem.in_features <= config.block_k * config.splits
        assert (1 if one_tile else config.stages) * tile <= 192 << 10
    if hasattr(config, "registers"):
        assert config.registers * config.warps * 32 <= 65536


@pytest.mark.parametrize(("key", "shape", "entry"), ENTRIES)
def test_every_entry_of_the_table_is_a_valid_configuration(
    key: tuple[int, int], shape: tuple[int, int, int, bool], entry: tuple[str | int, ...]
) -> None:
    bucket, num_rows, in_features, gated = shape
    assert bucket in TOKEN_BUCKETS
    kind, *fields = entry
    if kind == "torch":
        assert bucket > ALWAYS_KERNEL_ROWS and not fields
    else:
        assert_valid(KINDS[kind](*fields), Problem(bucket, num_rows, in_features, gated))


@pytest.mark.parametrize("key", [H200, (90, 114), (80, 108), (89, 24), (100, 148), (75, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 257])
def test_every_problem_gets_a_valid_configuration(
    key: tuple[int, int], dtype: torch.dtype, num_tokens: int
) -> None:
    for num_rows in (1, 192, 1024, 6144, 28672, 151936):
        for in_features in (1, 80, 576, 1024, 4096, 14336):
            for gated in (False, True):
                problem = Problem(num_tokens, num_rows, in_features, gated)
                config = choose_config(key, problem, dtype, True)
                if isinstance(config, Composed):
                    turing = key[0] == 75 and dtype == torch.float16 and num_tokens > 8
                    assert turing or num_tokens > ALWAYS_KERNEL_ROWS
                    continue
                assert_valid(config, problem)
                assert num_tokens <= MAX_KERNEL_ROWS
                if dtype == torch.float32:
                    assert isinstance(config, GemvConfig)


def test_no_sum_is_split_without_counters() -> None:
    problem = Problem(32, 4096, 4096, False)
    assert choose_config(H200, problem, torch.bfloat16, True).splits > 1
    assert choose_config(H200, problem, torch.bfloat16, False).splits == 1


def test_a_measured_shape_lends_its_configuration_to_its_neighbours_only() -> None:
    measured = choose_config(H200, Problem(1, 4096, 4096, False), torch.bfloat16, True)
    near = choose_config(H200, Problem(1, 4800, 4096, False), torch.bfloat16, True)
    assert near == measured
    far = choose_config(H200, Problem(64, 64, 262144, False), torch.bfloat16, True)
    assert isinstance(far, TileGemmConfig) and far.rows == 64


def test_more_rows_than_the_kernels_take_get_none() -> None:
    problem = Problem(MAX_KERNEL_ROWS + 1, 4096, 4096, False)
    assert choose_config(H200, problem, torch.bfloat16, True) == Composed()


def test_steps_that_do_not_fit_a_sum_are_left_to_shapes_that_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {(1, 4096, 2048, False): ("gemv", 2, 2, 4, 4, 64)}  # steps of 2048
    entries[1, 5120, 3584, False] = ("gemv", 2, 2, 4, 1, 64)  # of 512
    monkeypatch.setattr(configs, "TABLE", {H200: entries})
    for in_features, k_warps in ((2048, 4), (2560, 1), (3072, 1), (3584, 1)):
        configs._measured.cache_clear()
        problem = Problem(1, 4096, in_features, False)
        assert choose_config(H200, problem, torch.bfloat16, True).k_warps == k_warps


@pytest.mark.parametrize("num_tokens", [65, 128, 129, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_rows_take_the_wide_kernel_on_hopper_unless_torch_was_quicker(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_tokens: int
) -> None:
    problem = Problem(num_tokens, 6144, 4096, False)
    shape = (token_bucket(num_tokens), 6144, 4096, False)
    monkeypatch.setattr(configs, "TABLE", {H200: {}})
    configs._measured.cache_clear()
    config = choose_config(H200, problem, dtype, True)
    assert isinstance(config, WideGemmConfig if num_tokens <= 128 else Composed)
    if num_tokens <= 128:
        assert choose_config(H200, problem, dtype, False).splits == 1
    assert choose_config((80, 108), problem, dtype, True) == Composed()
    assert choose_config((100, 148), problem, dtype, True) == Composed()
    assert choose_config(H200, problem, torch.float32, True) == Composed()
    wide = ("wide_gemm", 128, 128, 64, 8, 1, 4)
    for entry, kind in ((("torch",), Composed), (wide, WideGemmConfig)):
        monkeypatch.setattr(configs, "TABLE", {H200: {shape: entry}})
        configs._measured.cache_clear()
        assert isinstance(choose_config(H200, problem, dtype, True), kind)


@pytest.fixture(autouse=True)
def fresh_measurements() -> Iterator[None]:
    yield
    configs._measured.cache_clear()


@pytest.mark.parametrize(
    ("entry", "want"),
    [
        (("wide_gemm", 128, 128, 64, 8, 2, 4), "epilogue"),
        (("plain_tile_gemm", 64, 64, 8, 2, 4), "epilogue"),
        (("tile_gemm", 64, 64, 8, 2, 4), "all"),
        (("ahead_gemm", 64, 512, 8, 8), "epilogue"),  # "all" at fewer rows
        (("torch",), "none"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_measured_kernel_says_what_it_takes_in(
    monkeypatch: pytest.MonkeyPatch, entry: tuple[str | int, ...], want: str
) -> None:
    shape = (128, 6144, 4096, False)
    monkeypatch.setattr(configs, "TABLE", {H200: {shape: entry}})
    monkeypatch.setattr(configs, "device_key", lambda device: H200)
    configs._measured.cache_clear()
    device = torch.device("cuda", 0)
    assert folds(device, torch.bfloat16, 128, (6144, 4096), False) == want
    assert folds(device, torch.bfloat16, 8, (6144, 4096), False) == "all"
    assert folds(device, torch.bfloat16, 512, (6144, 4096), False) == "none"


def test_tile_copies_need_rows_at_multiples_of_16_bytes() -> None:
    matrix = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert tma_serves([matrix, matrix[:, 8:21], matrix[1:]])
    assert tma_serves([torch.zeros(1, 13, dtype=torch.bfloat16)])
    assert not tma_serves([matrix, matrix[:, 4:]])
    assert not tma_serves([torch.zeros(4, 63, dtype=torch.bfloat16)])
    assert not tma_serves([matrix[:1].expand(4, 64)])
    assert not tma_serves([matrix[:0]])


PROBLEMS = [
    Problem(num_tokens, num_rows, in_features, gated)
    for num_tokens in (9, 16, 17, 32, 33, 64, 65, 128, 256)
    for num_rows, in_features in ((1024, 3072), (6144, 1024), (28672, 4096), (48, 80))
    for gated in (False, True)
]


def test_wide_tiles_hold_at_most_twice_the_rows_of_x_and_past_64_none_below_64() -> None:
    for problem in PROBLEMS:
        ranked = ranked_configs(132, *problem)
        few = problem.num_tokens <= ALWAYS_KERNEL_ROWS
        assert ranked and len(set(ranked)) == len(ranked)
        for config in ranked:
            assert_valid(config, problem)
            assert config.tokens < 2 * max(problem.num_tokens, 16 if few else 64)
            assert config.warps == 8 if not few or config.rows > 64 else config.warps in (4, 8)
            # Weights are read from memory once, and from L2 once more at most.
            assert config.tokens >= (problem.num_tokens / 2 if few else 64)


@pytest.mark.parametrize(
    ("problem", "first", "length"),
    [
        ((70, 6144, 4096, False), [(256, 128, 64, 8, 4, 4), (256, 128, 64, 8, 8, 4)], 48),
        ((128, 6144, 1024, True), [(64, 64, 64, 8, 1, 6), (64, 128, 64, 8, 2, 6)], 16),
        ((100, 1024, 3072, False), [(64, 128, 64, 8, 6, 6), (64, 128, 64, 8, 8, 6)], 48),
    ],
    ids=["qkv-8b", "gate_up-0.6b", "down-0.6b"],
)
def test_the_ranking_for_many_rows_is_that_of_the_measured_model(
    problem: tuple[int, int, int, bool], first: list[tuple[int, ...]], length: int
) -> None:
    ranked = ranked_configs(132, *problem)
    assert [config[:6] for config in ranked[:2]] == first and len(ranked) == length


WIDE = ("wide_gemm", 64, 32, 64, 4, 4, 6)
AHEAD = ("ahead_gemm", 64, 512, 8, 2)


@pytest.mark.parametrize("num_tokens", [9, 16, 32, 64])
@pytest.mark.parametrize(("entry", "want"), [(WIDE, "epilogue"), (AHEAD, "all")])
def test_a_table_may_name_a_kernel_of_tile_copies_for_few_rows(
    monkeypatch: pytest.MonkeyPatch, entry: tuple[str | int, ...], want: str, num_tokens: int
) -> None:
    problem = Problem(num_tokens, 4096, 1024, False)
    shape = (token_bucket(num_tokens), 4096, 1024, False)
    monkeypatch.setattr(configs, "TABLE", {H200: {shape: entry}})
    monkeypatch.setattr(configs, "device_key", lambda device: H200)
    configs._measured.cache_clear()
    config = choose_config(H200, problem, torch.bfloat16, True)
    assert config == KINDS[entry[0]](*entry[1:])
    device = torch.device("cuda", 0)
    assert folds(device, torch.bfloat16, num_tokens, (4096, 1024), False) == want
    # Elsewhere, and for shapes that no neighbour was measured for, the rule holds.
    assert isinstance(choose_config(H200, problem, torch.float32, True), GemvConfig)
    usual = SmallGemmConfig if num_tokens <= 16 else TileGemmConfig
    assert isinstance(choose_config((80, 108), problem, torch.bfloat16, True), usual)
    far = Problem(num_tokens, 64, 262144, False)
    assert isinstance(choose_config(H200, far, torch.bfloat16, True), usual)
    whole = choose_config(H200, problem, torch.bfloat16, False)
    assert whole.splits == 1
    assert isinstance(whole, WideGemmConfig if entry is WIDE else TileGemmConfig)
    for can_split in (False, True):
        config = configs.without_copies(H200, problem, can_split)
        assert isinstance(config, usual) and (can_split or config.splits == 1)


def test_one_tile_of_weights_is_left_to_shapes_that_it_covers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {(32, 4096, 1024, False): AHEAD, (32, 4096, 1280, False): WIDE}
    monkeypatch.setattr(configs, "TABLE", {H200: entries})
    for problem, kind in (
        (Problem(32, 4608, 1024, False), AheadGemmConfig),
        (Problem(32, 4096, 1000, False), AheadGemmConfig),
        (Problem(32, 4096, 1088, False), WideGemmConfig),
    ):
        configs._measured.cache_clear()
        assert isinstance(choose_config(H200, problem, torch.bfloat16, True), kind)


def test_one_tile_of_weights_is_left_to_rows_beside_which_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tall = ("ahead_gemm", 64, 1024, 8, 1)
    entries = {(32, 4096, 1024, False): tall, (64, 4096, 1024, False): tall}
    monkeypatch.setattr(configs, "TABLE", {H200: entries})
    for num_tokens, kind in ((20, AheadGemmConfig), (32, AheadGemmConfig), (40, TileGemmConfig)):
        configs._measured.cache_clear()
        problem = Problem(num_tokens, 4096, 1024, False)
        assert isinstance(choose_config(H200, problem, torch.bfloat16, True), kind)


def test_past_64_rows_what_tile_copies_cannot_read_is_left_to_torch() -> None:
    assert configs.without_copies(H200, Problem(65, 4096, 1024, False), True) == Composed()


X = torch.zeros(2, 16)
W = torch.zeros(8, 16)


@pytest.mark.parametrize(
    ("weights", "options", "error", "message"),
    [
        ([], {}, ValueError, "weights must be 1 to 3"),
        ([W] * 4, {}, ValueError, "weights must be 1 to 3"),
        ([W], {"gated": True, "activation": "silu"}, ValueError, "exactly 2"),
        ([W, W[:4]], {"gated": True, "activation": "silu"}, ValueError, "one shape"),
        ([W, W], {"gated": True}, ValueError, "activation must be one of"),
        ([W], {"activation": "swish"}, ValueError, "activation must be one of"),
        ([W[:, :8]], {}, ValueError, r"\[out_features, 16\]"),
        ([torch.zeros(16, 8).T], {}, ValueError, "contiguous in its last dim"),
        ([W.bfloat16()], {}, TypeError, "dtype of x"),
        ([W], {"biases": [W[0], W[0]]}, ValueError, "biases must be empty or 1"),
        ([W], {"biases": [W[0]]}, ValueError, r"contiguous \[8\]"),
        ([W], {"norm_weight": X[0]}, ValueError, "without norm=True"),
        ([W], {"norm_weight": X[0, :8], "norm": True}, ValueError, r"contiguous \[16\]"),
        ([W], {"residual": X}, ValueError, r"residual must be \[2, 8\]"),
        ([W], {"residual": torch.zeros(2, 8).half()}, TypeError, "dtype of x"),
        ([W], {"counters": torch.zeros(4, dtype=torch.int32)}, ValueError, "counters must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    weights: list[torch.Tensor],
    options: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        fused_linear(X, weights, **options)
