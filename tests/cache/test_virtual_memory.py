"""Address ranges against a driver that keeps CUDA's rules for virtual memory, without a device."""

from __future__ import annotations

import enum
import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_paged.cache import virtual_memory
from torch_paged.cache.pool import KVPool, LayerShape
from torch_paged.cache.virtual_memory import AddressRange, round_up
from torch_paged.errors import OutOfBlocks, TorchPagedError

GRANULE = 2 * 2**20
DEVICE = torch.device("cuda", 0)


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver:
    """Accepts what the CUDA driver accepts: whole mappings, aligned, never twice, in order."""

    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, capacity=64 * GRANULE):
        self.free_bytes = capacity
        self.next_address = 1 << 32
        self.ranges = {}  # address -> size
        self.mappings = {}  # address -> size
        self.accessible = set()
        self.handles = {}  # handle -> size, while it is held
        self.fail_next = None  # name of the call that fails next

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self):
        return SimpleNamespace()

    def _status(self, name, valid=True):
        if self.fail_next == name:
            self.fail_next = None
            return CUresult.CUDA_ERROR_INVALID_VALUE
        return CUresult.CUDA_SUCCESS if valid else CUresult.CUDA_ERROR_INVALID_VALUE

    def cuMemGetAllocationGranularity(self, properties, option):
        return CUresult.CUDA_SUCCESS, GRANULE

    def cuMemAddressReserve(self, size, alignment, address, flags):
        status = self._status("cuMemAddressReserve", size > 0 and size % GRANULE == 0)
        start, self.next_address = self.next_address, self.next_address + size + GRANULE
        if status == CUresult.CUDA_SUCCESS:
            self.ranges[start] = size
        return status, start

    def cuMemCreate(self, size, properties, flags):
        if size > self.free_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        status = self._status("cuMemCreate", size > 0 and size % GRANULE == 0)
        if status == CUresult.CUDA_SUCCESS:
            self.free_bytes -= size
            self.handles[handle := len(self.handles) + 1] = size
            return status, handle
        return status, 0

    def cuMemMap(self, address, size, offset, handle, flags):
        inside = any(a <= address and address + size <= a + s for a, s in self.ranges.items())
        overlaps = any(a < address + size and address < a + s for a, s in self.mappings.items())
        whole = self.handles.get(handle) == size and offset == 0
        status = self._status("cuMemMap", inside and not overlaps and whole)
        if status == CUresult.CUDA_SUCCESS:
            self.mappings[address] = size
        return (status,)

    def cuMemRelease(self, handle):
        size = self.handles.pop(handle)
        if size not in self.mappings.values():
            self.free_bytes += size
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, size, access, count):
        status = self._status("cuMemSetAccess", self.mappings.get(address) == size)
        if status == CUresult.CUDA_SUCCESS:
            self.accessible.add(address)
        return (status,)

    def cuMemUnmap(self, address, size):
        end = address
        while end < address + size and end in self.mappings:
            end += self.mappings[end]
        status = self._status("cuMemUnmap", size > 0 and end == address + size)
        if status == CUresult.CUDA_SUCCESS:
            for start in [a for a in self.mappings if address <= a < end]:
                self.free_bytes += self.mappings.pop(start)
                self.accessible.discard(start)
        return (status,)

    def cuMemAddressFree(self, address, size):
        mapped = any(address <= a < address + size for a in self.mappings)
        status = self._status("cuMemAddressFree", self.ranges.get(address) == size and not mapped)
        if status == CUresult.CUDA_SUCCESS:
            del self.ranges[address]
        return (status,)


class Device:
    """The parts of torch.cuda that ranges ask about."""

    def __init__(self):
        self.waits = 0
        self.capturing = False

    def synchronize(self, device):
        if self.capturing:
            raise RuntimeError("operation not permitted when a stream is capturing")
        self.waits += 1


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    return device


@pytest.fixture
def driver(monkeypatch, device):
    driver = FakeDriver()
    monkeypatch.setattr(virtual_memory, "_load_driver", lambda: driver)
    monkeypatch.setattr(virtual_memory, "unsupported_reason", lambda device: None)
    virtual_memory.granularity.cache_clear()
    yield driver
    virtual_memory.granularity.cache_clear()
    virtual_memory._deferred.clear()


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 8), (8, 8), (9, 16)])
def test_round_up(nbytes, expected):
    assert round_up(nbytes, 8) == expected


def test_new_range_reserves_whole_granules_and_maps_nothing(driver):
    held = AddressRange(DEVICE, 3 * GRANULE + 1)
    assert (held.reserved_bytes, held.mapped_bytes) == (4 * GRANULE, 0)
    assert driver.ranges == {held.address: 4 * GRANULE} and not driver.mappings


def test_mapping_grows_in_granules_at_the_end(driver):
    held = AddressRange(DEVICE, 8 * GRANULE)
    held.map(1)
    held.map(GRANULE)
    held.map(3 * GRANULE + 1)
    assert held.mapped_bytes == 4 * GRANULE
    assert driver.mappings == {held.address: GRANULE, held.address + GRANULE: 3 * GRANULE}
    assert driver.accessible == set(driver.mappings)
    assert driver.handles == {}, "handles are not kept"


def test_range_that_is_too_small_is_reported(driver):
    held = AddressRange(DEVICE, 2 * GRANULE)
    with pytest.raises(OutOfBlocks, match="range"):
        held.map(2 * GRANULE + 1)
    assert held.mapped_bytes == 0 and not driver.mappings


def test_device_without_memory_is_reported(driver):
    driver.free_bytes = GRANULE
    held = AddressRange(DEVICE, 8 * GRANULE)
    with pytest.raises(OutOfBlocks, match="no 4194304 bytes left"):
        held.map(2 * GRANULE)
    assert held.mapped_bytes == 0 and driver.free_bytes == GRANULE


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_failed_growth_leaves_nothing_behind(driver, call):
    held = AddressRange(DEVICE, 8 * GRANULE)
    held.map(GRANULE)
    before = driver.free_bytes, dict(driver.mappings)
    driver.fail_next = call
    with pytest.raises(TorchPagedError, match="INVALID_VALUE"):
        held.map(3 * GRANULE)
    assert (driver.free_bytes, driver.mappings) == before and not driver.handles
    held.map(3 * GRANULE)
    assert held.mapped_bytes == 3 * GRANULE


def test_unmap_waits_for_the_device_and_keeps_the_addresses(driver, device):
    held = AddressRange(DEVICE, 8 * GRANULE)
    held.map(GRANULE)
    held.map(2 * GRANULE)
    address, waits = held.address, device.waits
    held.unmap()
    assert device.waits == waits + 1 and not driver.mappings
    held.map(GRANULE)
    assert list(driver.mappings) == [address]


def test_unmap_of_an_unmapped_range_does_not_wait(driver, device):
    held = AddressRange(DEVICE, GRANULE)
    held.unmap()
    assert device.waits == 0


def test_unmap_that_cannot_wait_keeps_the_memory(driver, device):
    held = AddressRange(DEVICE, GRANULE)
    held.map(1)
    device.capturing = True
    with pytest.raises(RuntimeError, match="capturing"):
        held.unmap()
    assert held.mapped_bytes == GRANULE and driver.mappings


def test_trim_undoes_the_last_growth(driver):
    held = AddressRange(DEVICE, 8 * GRANULE)
    held.map(GRANULE)
    held.map(4 * GRANULE)
    held.trim(GRANULE)
    assert driver.mappings == {held.address: GRANULE}
    held.trim(GRANULE)
    assert held.mapped_bytes == GRANULE


def test_garbage_range_returns_memory_and_addresses(driver):
    free = driver.free_bytes
    gc.disable()
    try:
        held = AddressRange(DEVICE, 8 * GRANULE)
        held.map(3 * GRANULE)
        del held
    finally:
        gc.enable()
    assert not driver.ranges and not driver.mappings and driver.free_bytes == free


def test_range_that_dies_during_a_capture_is_freed_by_the_next(driver, device):
    held = AddressRange(DEVICE, 8 * GRANULE)
    held.map(1)
    device.capturing = True
    del held
    assert len(driver.mappings) == 1
    device.capturing = False
    other = AddressRange(DEVICE, GRANULE)
    assert not driver.mappings and list(driver.ranges) == [other.address]


def test_forked_process_does_not_touch_the_driver(driver, monkeypatch):
    held = AddressRange(DEVICE, GRANULE)
    held.map(1)
    monkeypatch.setattr(virtual_memory.os, "getpid", lambda: -1)
    del held
    assert len(driver.mappings) == 1


def test_missing_bindings_are_a_reason(monkeypatch):
    def missing():
        raise ImportError("cuda")

    monkeypatch.setattr(virtual_memory, "_load_driver", missing)
    reason = virtual_memory.unsupported_reason.__wrapped__(DEVICE)
    assert reason == "the package cuda-bindings is not installed"


def test_unsupported_device_cannot_make_a_range(monkeypatch):
    monkeypatch.setattr(virtual_memory, "unsupported_reason", lambda device: "because")
    with pytest.raises(NotImplementedError, match="cuda:0: because"):
        AddressRange(DEVICE, 1)


@settings(deadline=None)
@given(data=st.data())
def test_random_traces_keep_the_books(data):
    driver = FakeDriver(capacity=24 * GRANULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(virtual_memory, "_load_driver", lambda: driver)
        patch.setattr(virtual_memory, "unsupported_reason", lambda device: None)
        patch.setattr(virtual_memory, "granularity", lambda device: GRANULE)
        ranges = [AddressRange(DEVICE, 16 * GRANULE) for _ in range(2)]
        calls = st.tuples(st.integers(0, 1), st.integers(-1, 18 * GRANULE))
        for which, nbytes in data.draw(st.lists(calls, max_size=20)):
            held, before = ranges[which], ranges[which].mapped_bytes
            if nbytes < 0:
                held.unmap()
                assert held.mapped_bytes == 0
            else:
                try:
                    held.map(nbytes)
                    assert nbytes <= held.mapped_bytes < max(before, nbytes) + GRANULE
                except OutOfBlocks:
                    assert held.mapped_bytes == before
            mapped = sum(held.mapped_bytes for held in ranges)
            assert sum(driver.mappings.values()) == mapped
            assert driver.free_bytes == 24 * GRANULE - mapped
        held = None
        del ranges
        assert not driver.ranges and driver.free_bytes == 24 * GRANULE


@pytest.fixture
def pool_device(driver, monkeypatch):
    """Enough of a device for a pool; tensors are made on the CPU."""
    from torch_paged.cache import pool

    monkeypatch.setattr(pool, "unsupported_reason", lambda device: None)
    monkeypatch.setattr(pool, "_with_index", lambda device: DEVICE)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (driver.free_bytes, 64 * GRANULE)
    )
    monkeypatch.setattr(pool._MappedStorage, "tensors", lambda self, n: [n] * len(self._sizes))
    return driver


# 16 KiB and 48 KiB a block: 128 and 42 blocks to the granule.
UNEQUAL = [LayerShape(4, 128, 128), LayerShape(4, 384, 0)]


def make(**options):
    return KVPool(UNEQUAL, 16, torch.half, "cuda", **options)


def test_pool_takes_every_block_that_its_granules_hold(pool_device):
    pool = make()
    pool.grow(1)
    assert pool.num_blocks == 42 and pool.nbytes == 3 * GRANULE
    pool.grow(43)
    assert pool.num_blocks == 85 and pool.nbytes == 4 * GRANULE
    assert pool.keys == [85, 85] and pool.generation == 0


@pytest.mark.parametrize("granules", range(3, 12))
def test_pool_never_maps_more_than_its_limit(pool_device, granules):
    pool = make(max_bytes=granules * GRANULE, virtual_memory=True)
    most = pool.max_num_blocks()
    pool.grow(most)
    assert pool.nbytes <= pool.max_bytes
    assert pool.num_blocks == most
    with pytest.raises(OutOfBlocks, match="max_bytes"):
        pool.grow(most + 1)


def test_pool_leaves_a_tenth_of_the_device_in_steps_too(pool_device):
    pool = make()
    with pytest.raises(OutOfBlocks, match="free memory less 10%"):
        while True:
            pool.grow(pool.num_blocks + 1)
    assert 0.9 * 64 * GRANULE - 3 * GRANULE < pool.nbytes <= 0.9 * 64 * GRANULE
    assert pool.max_num_blocks() == pool.num_blocks


def test_pool_undoes_growth_that_fails_halfway(pool_device):
    pool = make()
    pool.grow(1)
    before = pool_device.free_bytes
    pool_device.fail_next = "cuMemSetAccess"
    with pytest.raises(TorchPagedError):
        pool.grow(300)
    assert pool_device.free_bytes == before and pool.num_blocks == 42
    pool.grow(300)
    assert pool.num_blocks >= 300


def test_released_pool_maps_the_same_addresses_again(pool_device):
    pool = make()
    pool.grow(300)
    before = min(pool_device.mappings)
    pool.release()
    assert not pool_device.mappings and pool.num_blocks == 0
    assert pool.grow(300) is False
    assert min(pool_device.mappings) == before
