"""copy_blocks against indexing."""

from __future__ import annotations

import pytest
import torch

from torch_paged.ops.copy_blocks import (
    _launch_copy_blocks,
    copy_blocks,
    copy_blocks_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("launch", [_launch_copy_blocks, copy_blocks_reference])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
# Heads, block size, head_dim: one element, below, at and past one program's 2048, and odd.
BLOCKS = [(1, 1, 1), (3, 8, 40), (2, 16, 64), (1, 16, 129), (3, 32, 80)]


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def _cache(block: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(block))
    cache = torch.randint(0, 255, (9, *block), generator=generator).to(dtype)
    if dtype.is_floating_point:
        # Slots that nobody has written yet may hold anything.
        cache[0, 0, -1] = float("nan")
    return cache.to(DEVICE)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_are_copied_bit_for_bit_and_the_rest_is_left(block, dtype, launch):
    cache = _cache(block, dtype)
    expected = cache.clone()
    # One source may serve several destinations.
    for src, dst in ((0, 8), (3, 1), (3, 5)):
        expected[dst] = cache[src]
    assert launch(cache, _ids(0, 3, 3), _ids(8, 1, 5)) is None
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@BOTH
def test_keys_inside_a_joint_buffer_leave_the_values_alone(launch):
    both = _cache((2, 2, 16, 24), torch.float32)
    keys, before = both[:, 0], both.clone()
    launch(keys, _ids(2), _ids(7))
    torch.testing.assert_close(both[7, 0], before[2, 0], rtol=0, atol=0)
    torch.testing.assert_close(both[:, 1], before[:, 1], rtol=0, atol=0)


@BOTH
def test_no_pairs_change_nothing(launch):
    cache = _cache((2, 4), torch.uint8)
    before = cache.clone()
    launch(cache, _ids(), _ids())
    assert torch.equal(cache, before)


def test_cache_past_two_gibi_elements():
    # Blocks that nobody touches are never allocated.
    cache = torch.empty(2**20 + 2, 2, 16, 64, dtype=torch.uint8, device=DEVICE)
    source, target = 2**20 + 1, 2**20
    cache[source] = torch.randint(0, 255, cache.shape[1:], device=DEVICE)
    cache[0] = cache[1] = cache[target] = 0
    _launch_copy_blocks(cache, _ids(source), _ids(target))
    assert torch.equal(cache[target], cache[source]) and not cache[:2].any()


def test_opcheck():
    args = (_cache((2, 16, 8), torch.float32)[1:], _ids(1, 2), _ids(3, 4))
    torch.library.opcheck(torch.ops.torch_paged.copy_blocks.default, args)


def test_compiles_without_graph_breaks():
    compiled = torch.compile(copy_blocks, fullgraph=True, backend="eager")
    cache = _cache((2, 16, 8), torch.uint8)
    compiled(cache, _ids(1), _ids(2))
    assert torch.equal(cache[1], cache[2])


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_replay_copies_the_new_pairs():
    cache, src, dst = _cache((2, 16, 128), torch.uint8), _ids(1), _ids(2)
    copy_blocks(cache, src, dst)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_blocks(cache, src, dst)
    dst.fill_(5)
    graph.replay()
    assert torch.equal(cache[1], cache[5])


@pytest.mark.parametrize(
    ("cache", "src", "dst", "error"),
    [
        (torch.ones(4), [1], [2], "cache must be"),
        (torch.ones(4, 3, 2).transpose(1, 2), [1], [2], "contiguous blocks"),
        (torch.ones(4, 3), [1], [2, 3], r"dst must be int64 \[num_pairs\]"),
        (torch.ones(4, 3), [1.0], [2], "src must be int64"),
    ],
    ids=["1-d", "strided", "lengths", "floating"],
)
def test_wrong_arguments_are_named(cache, src, dst, error):
    with pytest.raises(ValueError, match=error):
        copy_blocks(cache, torch.tensor(src), torch.tensor(dst))
