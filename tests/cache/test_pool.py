"""The KV pool: growth, limits, release. CUDA tests cover mapped memory and plain tensors."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from torch_paged.cache import virtual_memory
from torch_paged.cache.pool import KVPool, LayerShape
from torch_paged.cache.virtual_memory import AddressRange, granularity, unsupported_reason
from torch_paged.errors import OutOfBlocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = [LayerShape(2, 8, 8), LayerShape(1, 4, 6), LayerShape(3, 16, 0)]
BLOCK_BYTES = 16 * 4 * (2 * (8 + 8) + 1 * (4 + 6) + 3 * 16)
MIB = 2**20
SLACK = 16 * MIB  # the driver's page tables
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(**options):
    options.setdefault("virtual_memory", False)
    return KVPool(LAYERS, 16, torch.float32, DEVICE, **options)


def tensors(pool):
    return [tensor for pair in zip(pool.keys, pool.values, strict=True) for tensor in pair]


def addresses(pool):
    return [tensor.data_ptr() for tensor in tensors(pool) if tensor.numel()]


def write_pattern(pool):
    for number, tensor in enumerate(tensors(pool)):
        tensor.copy_(torch.arange(tensor.numel(), device=DEVICE).view_as(tensor) + 1000 * number)


def pattern_is_intact(pool, num_blocks):
    return all(
        torch.equal(
            tensor[:num_blocks],
            torch.arange(tensor[:num_blocks].numel(), device=DEVICE, dtype=tensor.dtype).view_as(
                tensor[:num_blocks]
            )
            + 1000 * number,
        )
        for number, tensor in enumerate(tensors(pool))
    )


def test_new_pool_holds_nothing():
    pool = make()
    assert (pool.num_blocks, pool.nbytes, pool.generation) == (0, 0, 0)
    assert [tuple(key.shape) for key in pool.keys] == [
        (0, 2, 16, 8),
        (0, 1, 16, 4),
        (0, 3, 16, 16),
    ]


def test_tensors_have_the_shapes_of_their_layers():
    pool = make()
    pool.grow(5)
    assert [tuple(t.shape) for t in pool.keys] == [(5, 2, 16, 8), (5, 1, 16, 4), (5, 3, 16, 16)]
    assert [tuple(t.shape) for t in pool.values] == [(5, 2, 16, 8), (5, 1, 16, 6), (5, 3, 16, 0)]
    assert {t.dtype for t in tensors(pool)} == {torch.float32}
    assert pool.block_bytes == BLOCK_BYTES and pool.nbytes == 5 * BLOCK_BYTES


def test_growth_keeps_contents_and_reports_the_move():
    pool = make()
    assert pool.grow(3) is False
    write_pattern(pool)
    assert pool.grow(7) is True
    assert pool.generation == 1 and pool.num_blocks == 7
    assert pattern_is_intact(pool, 3)


def test_request_for_what_is_there_does_nothing():
    pool = make()
    pool.grow(4)
    before = addresses(pool)
    assert pool.grow(4) is False and pool.grow(1) is False
    assert addresses(pool) == before and pool.generation == 0


def test_release_gives_memory_back_and_taking_it_again_is_a_move():
    pool = make()
    pool.grow(4)
    pool.release()
    assert (pool.num_blocks, pool.nbytes) == (0, 0)
    assert pool.grow(2) is True
    assert pool.generation == 1


@pytest.mark.parametrize("slack", [0, 1, BLOCK_BYTES - 1])
def test_limit_is_honoured_to_the_block(slack):
    pool = make(max_bytes=5 * BLOCK_BYTES + slack)
    assert pool.max_num_blocks() == 5
    pool.grow(5)
    with pytest.raises(OutOfBlocks, match="at most 5 blocks fit"):
        pool.grow(6)
    assert pool.num_blocks == 5
    pool.max_bytes += BLOCK_BYTES
    pool.grow(6)


def test_no_block_fits_a_limit_of_zero():
    pool = make(max_bytes=0)
    assert pool.max_num_blocks() == 0
    with pytest.raises(OutOfBlocks):
        pool.grow(1)


def test_failed_growth_keeps_blocks_and_contents(monkeypatch):
    pool = make()
    pool.grow(3)
    write_pattern(pool)
    real, calls = torch.Tensor.new_empty, []

    def failing(tensor, *shape, **options):
        calls.append(shape)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        return real(tensor, *shape, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", failing)
    with pytest.raises(OutOfBlocks, match="no memory for 100 KV blocks"):
        pool.grow(100)
    monkeypatch.undo()
    assert pool.num_blocks == 3 and pool.generation == 1
    assert {tensor.shape[0] for tensor in tensors(pool)} == {3}
    assert pattern_is_intact(pool, 3)
    assert pool.grow(10) is True
    assert pool.nbytes == 10 * BLOCK_BYTES and pattern_is_intact(pool, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_dtype_sets_the_block_bytes(dtype):
    pool = KVPool(LAYERS, 16, dtype, DEVICE, virtual_memory=False)
    pool.grow(1)
    assert pool.block_bytes == BLOCK_BYTES * dtype.itemsize // 4
    assert pool.keys[0].dtype == dtype


def test_pool_made_under_inference_mode_is_writable_outside():
    with torch.inference_mode():
        pool = make()
        pool.grow(1)
        pool.grow(2)
    assert not any(tensor.is_inference() for tensor in tensors(pool))
    write_pattern(pool)


def test_pool_is_gone_with_its_last_reference():
    gc.disable()
    try:
        pool = make()
        pool.grow(2)
        gone = weakref.ref(pool), *map(weakref.ref, tensors(pool))
        del pool
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": []}, "layers"),
        ({"block_size": 0}, "block_size"),
        ({"max_bytes": -1}, "max_bytes"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    arguments = {"layers": LAYERS, "block_size": 16, "max_bytes": None} | options
    with pytest.raises(ValueError, match=message):
        KVPool(**arguments, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("sizes", [(0, 8, 8), (1, 0, 8), (1, 8, -1)])
def test_layer_shape_rejects_empty_sizes(sizes):
    with pytest.raises(ValueError, match="LayerShape"):
        LayerShape(*sizes)


def test_virtual_memory_on_the_cpu_is_refused_when_demanded():
    with pytest.raises(NotImplementedError, match="not an NVIDIA device"):
        KVPool(LAYERS, 16, torch.float32, "cpu", virtual_memory=True)


def test_unlimited_pool_on_the_cpu_has_no_maximum():
    with pytest.raises(ValueError, match="no limit"):
        KVPool(LAYERS, 16, torch.float32, "cpu").max_num_blocks()


def virtual(layers=None, **options):
    """A pool of 2 x 2 tensors of 64 KiB a block: 32 blocks to the granule."""
    layers = layers or [LayerShape(8, 256, 256)] * 2
    return KVPool(layers, 16, torch.bfloat16, "cuda", virtual_memory=True, **options)


@needs_cuda
def test_virtual_memory_is_used_on_this_device():
    assert unsupported_reason(torch.device("cuda", 0)) is None
    assert KVPool(LAYERS, 16, torch.float32, "cuda").is_virtual
    assert granularity(torch.device("cuda", 0)) == 2 * MIB


@needs_cuda
def test_mapped_growth_keeps_addresses_and_contents():
    pool = virtual()
    assert pool.grow(1) is False
    assert pool.num_blocks == 32 and pool.nbytes == 4 * 2 * MIB
    before, old = addresses(pool), tensors(pool)
    for number, tensor in enumerate(old):
        tensor.fill_(number + 1)
    assert pool.grow(33) is False and pool.grow(500) is False
    assert pool.num_blocks == 512 and pool.generation == 0
    assert addresses(pool) == before
    for number, tensor in enumerate(tensors(pool)):
        assert tensor.shape == (512, 8, 16, 256)
        assert (tensor[:32] == number + 1).all()
        tensor[32:] = 7.0
        assert (tensor[32:] == 7).all() and (old[number] == number + 1).all()


@needs_cuda
def test_mapped_tensors_work_in_kernels_and_copies():
    pool = virtual()
    pool.grow(40)
    key = pool.keys[1]
    key.normal_()
    assert torch.equal(key.cpu().to("cuda"), key)
    product = key[3, 0].float() @ key[3, 0].float().T
    assert torch.allclose(product, (key[3, 0].float().clone() @ key[3, 0].float().clone().T))
    assert key.is_contiguous() and key.device == torch.device("cuda", 0)


@needs_cuda
def test_mapped_memory_is_unseen_by_torch_and_goes_back_at_release():
    torch.cuda.synchronize()
    pool = virtual()
    free, _ = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    pool.grow(32 * 64)
    assert pool.nbytes == 4 * 128 * MIB
    taken = free - torch.cuda.mem_get_info()[0]
    assert pool.nbytes <= taken <= pool.nbytes + SLACK
    assert torch.cuda.memory_allocated() == allocated
    before = addresses(pool)
    pool.release()
    assert torch.cuda.mem_get_info()[0] >= free - SLACK
    assert (pool.num_blocks, pool.nbytes) == (0, 0)
    assert pool.grow(32) is False
    assert addresses(pool) == before and pool.generation == 0


@needs_cuda
def test_graph_survives_growth_and_release():
    pool = virtual()
    pool.grow(32)
    pool.keys[0].fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.keys[0][:32].add_(1)
    pool.grow(64)
    graph.replay()
    assert (pool.keys[0][:32] == 2).all()
    pool.release()
    pool.grow(32)
    pool.keys[0].fill_(5)
    graph.replay()
    assert (pool.keys[0] == 6).all()


@needs_cuda
def test_memory_goes_back_when_pool_and_tensors_are_garbage():
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    gc.disable()
    try:
        pool = virtual()
        pool.grow(32)
        key = pool.keys[0]
        key.fill_(3)
        del pool
        assert (key == 3).all()  # the tensor keeps its own range alive
        del key
    finally:
        gc.enable()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - 2 * MIB


@needs_cuda
@pytest.mark.parametrize("granules", [4, 5, 7, 8])
def test_limit_covers_whole_granules(granules):
    pool = virtual(max_bytes=granules * 2 * MIB)
    expected = 32 * (granules // 4)
    assert pool.max_num_blocks() == expected
    pool.grow(expected)
    assert pool.nbytes <= pool.max_bytes and pool.num_blocks == expected
    with pytest.raises(OutOfBlocks, match="max_bytes"):
        pool.grow(expected + 1)


@needs_cuda
def test_small_limit_is_served_by_plain_tensors():
    pool = KVPool(LAYERS, 16, torch.float32, "cuda", max_bytes=5 * BLOCK_BYTES)
    assert not pool.is_virtual and pool.max_num_blocks() == 5


@needs_cuda
def test_granules_of_unequal_layers_are_filled_to_the_smallest():
    pool = virtual([LayerShape(8, 256, 256), LayerShape(3, 80, 0)])
    pool.grow(33)
    assert pool.num_blocks == 64
    assert [t.shape[0] for t in tensors(pool)] == [64] * 4


@needs_cuda
@pytest.mark.parametrize("mapped", [True, False])
def test_a_tenth_of_free_memory_is_left_alone(mapped):
    pool = KVPool([LayerShape(8, 256, 256)], 16, torch.half, "cuda", virtual_memory=mapped)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    blocks = pool.max_num_blocks()
    assert 0.89 * free < blocks * pool.block_bytes <= 0.9 * free + 256 * MIB
    with pytest.raises(OutOfBlocks, match="are available"):
        pool.grow(int(blocks * 1.05))
    assert pool.nbytes == 0


@needs_cuda
def test_memory_cached_by_torch_is_claimed_for_mapping():
    pool = KVPool([LayerShape(8, 256, 256)], 16, torch.bfloat16, "cuda", virtual_memory=True)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(int(free * 0.8), dtype=torch.uint8, device="cuda")
    del hog
    assert torch.cuda.mem_get_info()[0] < 0.3 * free
    pool.grow(int(free * 0.5) // pool.block_bytes)
    assert pool.nbytes >= 0.49 * free


@needs_cuda
def test_failed_mapping_is_undone(monkeypatch):
    pool = virtual()
    pool.grow(32)
    pool.keys[0].fill_(4)
    free, _ = torch.cuda.mem_get_info()
    real, calls = AddressRange.map, []

    def failing(held, nbytes):
        calls.append(nbytes)
        if len(calls) == 3:
            raise OutOfBlocks("no memory")
        real(held, nbytes)

    monkeypatch.setattr(AddressRange, "map", failing)
    with pytest.raises(OutOfBlocks):
        pool.grow(100)
    monkeypatch.undo()
    assert torch.cuda.mem_get_info()[0] >= free - 2 * MIB
    assert pool.num_blocks == 32 and (pool.keys[0] == 4).all()
    pool.grow(100)
    assert pool.num_blocks == 128 and (pool.keys[0][:32] == 4).all()


@needs_cuda
def test_range_dropped_during_a_capture_is_unmapped_later():
    pool = virtual()
    pool.grow(32)
    target = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.add_(1)
        del pool
    graph.replay()
    assert target.item() == 1
    assert len(virtual_memory._deferred) == 4
    virtual()  # the next pool is the opportunity
    assert virtual_memory._deferred == []


@needs_cuda
def test_interpreter_exits_cleanly_with_a_mapped_pool():
    code = (
        "import torch; from torch_paged.cache.pool import *;"
        "pool = KVPool([LayerShape(8, 256, 256)], 16, torch.half, 'cuda', virtual_memory=True);"
        "pool.grow(32); key = pool.keys[0]; key.fill_(1); cycle = [pool, key]; cycle.append(cycle)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "rror" not in done.stderr, done.stderr
