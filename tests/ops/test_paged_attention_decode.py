"""Decode attention: kernel and reference against dense float64 attention over poisoned pools."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torch_paged.ops import paged_attention as ops
from torch_paged.ops.paged_attention import config as attention_config
from torch_paged.ops.paged_attention.config import DecodeConfig
from torch_paged.ops.paged_attention.decode_launch import (
    _launch_fused_decode_attention,
    _launch_paged_decode_attention,
)

sys.path.append(str(Path(__file__).parent))

from paged_attention_case import (  # noqa: E402
    DEVICE,
    DTYPES,
    Pool,
    assert_within_budget,
    dense_attention,
    make_pool,
)

LENGTHS = [1, 15, 16, 17, 31, 33, 257]
# Many ranges at small sizes: every length above 32 is merged from several.
SPLIT = DecodeConfig(
    tile_bytes=2048,
    single_tokens=32,
    min_split_tokens=32,
    programs_per_sm=64,
    max_splits=6,
    early_tile=True,
)
LATE = dataclasses.replace(SPLIT, early_tile=False)
# As where programs are many: a row each, in several tiles.
WAVES = DecodeConfig(tile_bytes=2048, programs_per_sm=0, early_tile=False, heads_first=True)
CONFIGS = {
    "default": None,
    "split": SPLIT,
    "late": LATE,
    "waves": WAVES,
    "waves, early": dataclasses.replace(WAVES, early_tile=True),
    "split, heads first": dataclasses.replace(SPLIT, heads_first=True),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _counters(num_rows: int, num_kv_heads: int) -> Tensor:
    return torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=DEVICE)


def _check_decode(
    lengths: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_dim: int = 0,
    dtype: torch.dtype = torch.float32,
    fused: bool = True,
    config: DecodeConfig | None = None,
    block_size: int = 16,
    scale: float = 0.25,
    **features: object,
) -> None:
    """Run kernel and reference on one pool and hold both to the budget, row by row."""
    pool = make_pool(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=dtype,
        block_size=block_size,
        new_token_cached=not fused,
    )
    query = torch.randn(len(lengths), num_heads, head_dim, dtype=dtype, device=DEVICE)
    counters = _counters(len(lengths), num_kv_heads)
    indices = (pool.block_table, pool.slots, pool.context_lens, counters, scale)
    outputs = []
    for run in ("kernel", "reference"):
        k_cache, v_cache = pool.k_cache.clone(), pool.v_cache.clone()
        extra = {"config": config} if run == "kernel" else {}
        if fused:
            new = _new_tokens(pool, num_kv_heads)
            function = (
                _launch_fused_decode_attention
                if run == "kernel"
                else ops.fused_decode_attention_reference
            )
            arguments = (query, *new, None, None, k_cache, v_cache, *indices)
            output = _on_device(function, run, arguments, features, extra)
            if run == "kernel":
                _check_cache_write(pool, new, k_cache, v_cache)
        else:
            function = (
                _launch_paged_decode_attention
                if run == "kernel"
                else ops.paged_decode_attention_reference
            )
            arguments = (query, k_cache, v_cache, *indices)
            output = _on_device(function, run, arguments, features, extra)
        outputs.append(output)
    assert not counters.any()
    exact = torch.zeros(outputs[0].shape, dtype=torch.float64, device=DEVICE)
    low = torch.zeros_like(outputs[0])
    for row in range(len(lengths)):
        if lengths[row] == 0:
            assert all((output[row] == 0).all() for output in outputs)
            continue
        dense = (query[row : row + 1], pool.keys[row], pool.values[row])
        exact[row] = dense_attention(*dense, torch.float64, scale=scale, **features)[0]
        low[row] = dense_attention(*dense, dtype, scale=scale, **features)[0]
    for output in outputs:
        assert_within_budget(output, exact, low)


def _on_device(function, run, arguments, features, extra):
    if run == "kernel":
        return function(*arguments, **features, **extra)
    # The reference indexes with CPU lists: it is the CPU kernel.
    moved = [a.cpu() if isinstance(a, Tensor) else a for a in arguments]
    moved_features = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in features.items()}
    return function(*moved, **moved_features).to(DEVICE)


def _new_tokens(pool: Pool, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return each row's last key and value; padding rows get NaN, which must go nowhere."""
    pairs = []
    for rows, cache in ((pool.keys, pool.k_cache), (pool.values, pool.v_cache)):
        empty = torch.full((num_kv_heads, cache.shape[-1]), math.nan).to(cache)
        pairs.append(torch.stack([row[-1] if len(row) else empty for row in rows]))
    return pairs[0], pairs[1]


def _check_cache_write(
    pool: Pool, new: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor
) -> None:
    """The new tokens are in place, bit for bit, and nothing else changed."""
    for cache, before, tokens in (
        (k_cache, pool.k_cache, new[0]),
        (v_cache, pool.v_cache, new[1]),
    ):
        expected = before.clone()
        for row, slot in enumerate(pool.slots.tolist()):
            if slot >= 0:
                index = int(pool.context_lens[slot])
                block = pool.block_table[slot, index // pool.block_size]
                expected[block, :, index % pool.block_size] = tokens[row]
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "written"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unwritten_slots_never_reach_the_output(
    dtype: torch.dtype, fused: bool, config: DecodeConfig | None
) -> None:
    _check_decode(
        LENGTHS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        fused=fused,
        config=config,
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(14, 2), (15, 5), (12, 2), (5, 1), (28, 4), (9, 9), (40, 1)]
)
def test_every_group_size_is_computed(num_heads: int, num_kv_heads: int) -> None:
    _check_decode(
        [18, 0, 70], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16, config=SPLIT
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 112, 128, 192, 256])
def test_every_head_dim_is_computed(head_dim: int, dtype: torch.dtype) -> None:
    _check_decode([17, 50], num_heads=6, num_kv_heads=2, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize(("head_dim", "v_dim"), [(48, 32), (32, 80), (192, 128)])
def test_values_may_have_another_head_dim(head_dim: int, v_dim: int) -> None:
    _check_decode(
        [1, 40, 70], num_heads=2, num_kv_heads=1, head_dim=head_dim, v_dim=v_dim, config=SPLIT
    )


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("window", [1, 8, 17])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "written"])
def test_window_counts_the_token_itself(window: int, block_size: int, fused: bool) -> None:
    _check_decode(
        [1, 8, 9, 16, 17, 18, 33, 130],
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        block_size=block_size,
        window=window,
        fused=fused,
        config=SPLIT,
    )


def test_long_window_is_split() -> None:
    _check_decode(
        [257, 120],
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        window=100,
        sinks=_sinks(4),
        config=SPLIT,
    )


def test_many_splits_are_merged_in_several_passes() -> None:
    config = dataclasses.replace(SPLIT, max_splits=20)
    _check_decode(
        [600, 300, 5], num_heads=3, num_kv_heads=1, head_dim=16, sinks=_sinks(3), config=config
    )


def _sinks(num_heads: int) -> Tensor:
    return torch.linspace(-1.0, 3.0, num_heads, device=DEVICE)


@pytest.mark.parametrize("window", [0, 32])
@pytest.mark.parametrize("lengths", [[5, 300], [1, 33]], ids=["300", "33"])
def test_sinks_count_once_a_row(lengths: list[int], window: int) -> None:
    for config in CONFIGS.values():
        _check_decode(
            lengths,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            window=window,
            sinks=_sinks(4),
            config=config,
        )


@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
def test_softcap_applies_to_scaled_scores(softcap: float) -> None:
    _check_decode(
        [20, 44, 100],
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        scale=8**-0.5,
        softcap=softcap,
        window=64,
        config=SPLIT,
    )


def test_large_scores_do_not_overflow_the_softcap() -> None:
    _check_decode([20, 70], num_heads=4, num_kv_heads=2, head_dim=64, scale=40.0, softcap=20.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alibi_is_relative_to_the_query(dtype: torch.dtype) -> None:
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(6)], device=DEVICE)
    _check_decode(
        [1, 33, 90],
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        dtype=dtype,
        alibi_slopes=slopes,
        sinks=_sinks(6),
        config=SPLIT,
    )


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "cached"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_alibi_in_bfloat16_is_rounded_at_every_key(
    fused: bool, config: DecodeConfig | None
) -> None:
    """From 257 on, not every position is a bfloat16; neither are most slopes."""
    slopes = torch.tensor([2.0 ** (-0.3 * (i + 1)) for i in range(6)], device=DEVICE)
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
    features = {"alibi_slopes": slopes.bfloat16(), "scale": 0.3}
    _check_decode([1, 33, 330], **heads, fused=fused, config=config, **features)


# No memory is there: whoever reads it does not survive.
NOWHERE = 1 << 30


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("window", [0, 1, 17])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "cached"])
def test_table_entries_out_of_sight_are_not_followed(
    window: int, fused: bool, config: DecodeConfig | None
) -> None:
    lengths = [1, 16, 33, 65]  # at block boundaries and one past them
    pool = make_pool(lengths, num_kv_heads=2, head_dim=16, new_token_cached=not fused)
    query = torch.randn(len(lengths), 4, 16, device=DEVICE)
    new = _new_tokens(pool, 2)
    table = pool.block_table.clone()
    for row, length in enumerate(lengths):
        table[pool.slots[row], : max(length - window, 0) // 16 if window else 0] = NOWHERE
        table[pool.slots[row], -(-length // 16) :] = NOWHERE
    outputs = []
    for block_table in (pool.block_table, table):
        indices = (block_table, pool.slots, pool.context_lens, _counters(len(lengths), 2), 0.25)
        caches = (pool.k_cache.clone(), pool.v_cache.clone())
        if fused:
            out = _launch_fused_decode_attention(
                query, *new, None, None, *caches, *indices, window=window, config=config
            )
        else:
            out = _launch_paged_decode_attention(
                query, *caches, *indices, window=window, config=config
            )
        outputs.append(out)
    assert torch.isfinite(outputs[0]).all() and torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("window", [1, 2, 17, 40])
@pytest.mark.parametrize("lengths", [[16, 65, 3], [65]], ids=str)
@pytest.mark.parametrize("stale", ["NaN", "other rows"])
def test_blocks_behind_the_window_may_belong_to_others(
    lengths: list[int], window: int, stale: str
) -> None:
    """Of the kernel and of the reference, which is what runs on the CPU."""
    pool = make_pool(lengths, num_kv_heads=2, head_dim=16)
    query = torch.randn(len(lengths), 4, 16, device=DEVICE)
    free = (~pool.written().any(1)).nonzero()[0]
    others = free if stale == "NaN" else pool.block_table[pool.slots[0].long(), 0]
    table = pool.block_table.clone()
    for row, length in enumerate(lengths):
        table[pool.slots[row], : max(length - window, 0) // 16] = others.int()
    run: dict[str, list[Tensor]] = {"kernel": [], "reference": []}
    for block_table in (pool.block_table, table):
        counters = _counters(len(lengths), 2)
        args = (query, pool.k_cache, pool.v_cache, block_table, pool.slots, pool.context_lens)
        out = _launch_paged_decode_attention(*args, counters, 0.25, window=window)
        run["kernel"].append(out)
        args = tuple(t.cpu() for t in args)
        out = ops.reference.paged_decode_attention_reference(
            *args, counters.cpu(), 0.25, window=window
        )
        run["reference"].append(out)
    for before, after in run.values():
        assert torch.isfinite(before).all() and torch.equal(before, after)
    error = (run["kernel"][0].cpu() - run["reference"][0]).abs().max()
    assert error < 1e-5


@pytest.mark.parametrize(
    ("num_rows", "head_dim", "dtype", "warps"),
    [
        (128, 128, torch.bfloat16, 2),
        (128, 64, torch.float16, 2),
        (67, 128, torch.bfloat16, 2),
        (66, 128, torch.bfloat16, None),  # four programs an SM hold all
        (133, 128, torch.bfloat16, None),  # more than there is room for at once
        (128, 192, torch.bfloat16, None),
        (128, 128, torch.float32, None),
    ],
)
def test_rows_of_like_length_begin_at_once_where_all_fit(
    num_rows: int,
    head_dim: int,
    dtype: torch.dtype,
    warps: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200: 132 SMs, 8 KV heads."""
    device = torch.device("cuda", 0)
    query = SimpleNamespace(device=device, dtype=dtype, element_size=lambda: dtype.itemsize)
    query.shape = (num_rows, 32, head_dim)
    monkeypatch.setattr(attention_config, "sm_count", lambda device: 132)
    monkeypatch.setattr(attention_config, "device_capability", lambda index: (9, 0))
    shape = (device, dtype, num_rows, 8, head_dim)
    assert attention_config.cares_for_lengths(*shape) == (warps is not None)
    usual = attention_config.decode_config(query, num_rows * 8, 4096)
    with attention_config.rows_alike(True):
        chosen = attention_config.decode_config(query, num_rows * 8, 4096)
    assert (chosen != usual) == (warps is not None)
    assert warps in (None, chosen.num_warps)
    assert attention_config.decode_config(query, num_rows * 8, 4096) == usual


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "head_dim", "dtype", "warps"),
    [
        (198, 32, 128, torch.bfloat16, 4),  # twelve programs an SM
        (199, 32, 128, torch.bfloat16, 2),
        (512, 128, 64, torch.float16, 2),
        (512, 136, 64, torch.float16, 4),  # 17 query heads share a KV head
        (512, 32, 192, torch.bfloat16, 4),
        (512, 32, 128, torch.float32, 4),
    ],
)
def test_programs_of_two_warps_serve_the_largest_batches(
    num_rows: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    warps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200: 132 SMs, 8 KV heads."""
    query = SimpleNamespace(device=torch.device("cuda", 0), element_size=lambda: dtype.itemsize)
    query.shape = (num_rows, num_heads, head_dim)
    monkeypatch.setattr(attention_config, "sm_count", lambda device: 132)
    monkeypatch.setattr(attention_config, "device_capability", lambda index: (9, 0))
    assert attention_config.decode_config(query, num_rows * 8, 4096).num_warps == warps


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has one configuration")
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 64), (40, 8, 96), (32, 32, 80)], ids=str)
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("num_programs", [256, 1000, 2000])
def test_rows_of_any_length_are_right_in_programs_of_two_warps(
    num_programs: int, heads: tuple[int, int, int], window: int
) -> None:
    """They are told to be alike, or are too many for four warps each."""
    num_heads, num_kv_heads, head_dim = heads
    lengths = [(37 * i) % 300 for i in range(num_programs // num_kv_heads)]
    with attention_config.rows_alike(True):
        _check_decode(
            lengths,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            window=window,
        )


def test_nan_row_leaves_the_other_rows_alone() -> None:
    pool = make_pool([40, 40], num_kv_heads=2, head_dim=16, new_token_cached=False)
    query = torch.randn(2, 4, 16, device=DEVICE)
    key, value = _new_tokens(pool, 2)
    query[0], key[0], value[0] = math.nan, math.nan, math.nan
    indices = (pool.block_table, pool.slots, pool.context_lens, _counters(2, 2), 0.25)
    output = _launch_fused_decode_attention(
        query, key, value, None, None, pool.k_cache, pool.v_cache, *indices
    )
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    pool = make_pool(LENGTHS[:6], num_kv_heads=2, head_dim=32)
    query = torch.randn(6, 4, 32, device=DEVICE)
    rest = (pool.context_lens, _counters(6, 2), 0.25)
    caches = (pool.k_cache, pool.v_cache, pool.block_table)
    together = _launch_paged_decode_attention(query, *caches, pool.slots, *rest)
    for row in range(6):
        one = slice(row, row + 1)
        alone = _launch_paged_decode_attention(query[one], *caches, pool.slots[one], *rest)
        assert torch.equal(alone, together[one])


def test_empty_batch_gives_an_empty_output() -> None:
    pool = make_pool([4], num_kv_heads=2, head_dim=16)
    query = torch.empty(0, 4, 16, device=DEVICE)
    caches = (pool.k_cache, pool.v_cache)
    indices = (pool.block_table, pool.slots[:0], pool.context_lens, _counters(1, 2))
    for function in (_launch_paged_decode_attention, ops.paged_decode_attention_reference):
        output = function(query, *caches, *indices, 1.0)
        assert output.shape == (0, 4, 16)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("window", [0, 17])
def test_tokens_of_one_row_as_rows_that_share_a_table(
    window: int, config: DecodeConfig | None
) -> None:
    """A table of stride 0, and a padding row behind the others."""
    pool = make_pool([77], num_kv_heads=2, head_dim=16, num_queries=[5])
    query = torch.randn(6, 4, 16, device=DEVICE)
    slot = int(pool.slots[0])
    table = pool.block_table[slot : slot + 1].expand(6, -1)
    slots = torch.tensor([0, 1, 2, 3, 4, -1], dtype=torch.int32, device=DEVICE)
    lens = torch.arange(72, 78, dtype=torch.int32, device=DEVICE)
    counters = torch.zeros(12, dtype=torch.int32, device=DEVICE)
    caches = (pool.k_cache, pool.v_cache)
    out = _launch_paged_decode_attention(
        query, *caches, table, slots, lens, counters, 0.25, window=window, config=config
    )
    args = [a.cpu() for a in (query, *caches, table, slots, lens, counters)]
    reference = ops.paged_decode_attention_reference(*args, 0.25, window=window).to(DEVICE)
    dense = (query[:5], pool.keys[0], pool.values[0])
    exact = dense_attention(*dense, torch.float64, scale=0.25, window=window)
    low = dense_attention(*dense, torch.float32, scale=0.25, window=window)
    for result in (out, reference):
        assert_within_budget(result[:5], exact, low)
        assert not result[5].any()
    assert not counters.any()
