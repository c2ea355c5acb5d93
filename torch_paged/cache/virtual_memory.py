"""Device memory that grows and is given back without moving, through CUDA's virtual memory.

An `AddressRange` reserves addresses once; physical memory is mapped under a growing head of it.
Needs the package ``cuda-bindings``; nothing here runs, or is imported, without a CUDA device.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from torch_paged.errors import OutOfBlocks, TorchPagedError

# Ranges that became garbage while the device could not be waited for (a graph was being
# captured); they are unmapped at the next opportunity.
_deferred: list[_Mapping] = []
_deferred_lock = threading.Lock()


@dataclass(slots=True)
class _Mapping:
    """What must be undone for one range; apart from it, so that a finalizer can hold it."""

    driver: ModuleType
    device: torch.device
    pid: int
    address: int = 0
    reserved_bytes: int = 0
    mapped_bytes: int = 0

    def unmap(self) -> None:
        """Unmap everything; the caller has made sure that the device no longer uses it."""
        if self.mapped_bytes:
            _check(self.driver, self.driver.cuMemUnmap(self.address, self.mapped_bytes))
            self.mapped_bytes = 0

    def free(self) -> None:
        """Unmap everything and give the addresses back."""
        self.unmap()
        if self.reserved_bytes:
            _check(self.driver, self.driver.cuMemAddressFree(self.address, self.reserved_bytes))
            self.reserved_bytes = 0


class AddressRange:
    """A reserved range of device addresses, the head of which is backed by memory.

    The memory goes back to the device when the range and all tensors over it are garbage, or at
    `unmap`, after which tensors made before must not be touched.

    Attributes:
        address: the first address, which never changes.
        granularity: the size in bytes of which mappings are multiples (2 MiB).
    """

    def __init__(self, device: torch.device, reserve_bytes: int) -> None:
        reason = unsupported_reason(device)
        if reason is not None:
            raise NotImplementedError(f"virtual memory on {device}: {reason}")
        driver = _load_driver()
        collect_deferred()
        self.device = device
        self.granularity = granularity(device)
        size = round_up(max(reserve_bytes, 1), self.granularity)
        self._mapping = _Mapping(driver, device, os.getpid())
        (address,) = _check(driver, driver.cuMemAddressReserve(size, self.granularity, 0, 0))
        self._mapping.address, self._mapping.reserved_bytes = int(address), size
        finalizer = weakref.finalize(self, _collect, self._mapping)
        finalizer.atexit = False  # the driver takes everything back when the process ends

    @property
    def address(self) -> int:
        """The first address of the range."""
        return self._mapping.address

    @property
    def reserved_bytes(self) -> int:
        """Size of the range."""
        return self._mapping.reserved_bytes

    @property
    def mapped_bytes(self) -> int:
        """Size of the head that is backed by memory."""
        return self._mapping.mapped_bytes

    def map(self, nbytes: int) -> None:
        """Back at least the first `nbytes` with memory; the new part is not zeroed.

        Raises:
            OutOfBlocks: the range or the device is too small; nothing was changed.
        """
        mapping, driver = self._mapping, self._mapping.driver
        extra = round_up(nbytes, self.granularity) - mapping.mapped_bytes
        if extra <= 0:
            return
        if mapping.mapped_bytes + extra > mapping.reserved_bytes:
            raise OutOfBlocks(
                f"{nbytes} bytes asked for of a range of {mapping.reserved_bytes} addresses"
            )
        head = mapping.address + mapping.mapped_bytes
        properties = _allocation_properties(driver, self.device)
        status, *created = driver.cuMemCreate(extra, properties, 0)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfBlocks(f"the device has no {extra} bytes left for the KV pool")
        (handle,) = _check(driver, (status, *created))
        try:
            _check(driver, driver.cuMemMap(head, extra, 0, handle, 0))
        finally:
            # The mapping keeps the memory; the handle is of no further use.
            _check(driver, driver.cuMemRelease(handle))
        try:
            access = _access(driver, properties)
            _check(driver, driver.cuMemSetAccess(head, extra, [access], 1))
        except BaseException:
            driver.cuMemUnmap(head, extra)
            raise
        mapping.mapped_bytes += extra

    def unmap(self) -> None:
        """Give the memory back, keep the addresses; waits for the device first."""
        if self._mapping.mapped_bytes:
            torch.cuda.synchronize(self.device)
            self._mapping.unmap()

    def trim(self, nbytes: int) -> None:
        """Undo the last call of `map`, before which `nbytes` were mapped and nothing ran since."""
        mapping = self._mapping
        extra = mapping.mapped_bytes - nbytes
        if extra > 0:
            driver = mapping.driver
            _check(driver, driver.cuMemUnmap(mapping.address + nbytes, extra))
            mapping.mapped_bytes = nbytes

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` as a uint8 tensor, which keeps the range alive."""
        if not 0 < nbytes <= self.mapped_bytes:
            raise ValueError(f"nbytes must be in (0, {self.mapped_bytes}], got {nbytes}")
        with torch.inference_mode(False):
            tensor = torch.as_tensor(_ArrayInterface(self, nbytes), device=self.device)
        if tensor.data_ptr() != self.address:
            raise TorchPagedError("torch copied the mapped memory instead of wrapping it")
        return tensor


class _ArrayInterface:
    """The protocol through which torch wraps foreign device memory; torch holds on to it."""

    __slots__ = ("__cuda_array_interface__", "_owner")

    def __init__(self, owner: AddressRange, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (owner.address, False),
            "strides": None,
            "version": 2,
        }


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `nbytes`."""
    return -(-nbytes // multiple) * multiple


@functools.cache
def unsupported_reason(device: torch.device) -> str | None:
    """Say why virtual memory cannot be used on `device`, None if it can. Initialises CUDA."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "it is not an NVIDIA device"
    try:
        driver = _load_driver()
    except ImportError:
        return "the package cuda-bindings is not installed"
    try:
        torch.cuda.synchronize(device)  # makes the context
        ordinal = _check(driver, driver.cuDeviceGet(_index(device)))[0]
        attribute = driver.CUdevice_attribute
        flag = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not _check(driver, driver.cuDeviceGetAttribute(flag, ordinal))[0]:
            return "the device does not support it"
        granularity(device)
    except Exception as error:  # old drivers and bindings fail in many ways
        return f"the driver refused it: {error}"
    return None


@functools.cache
def granularity(device: torch.device) -> int:
    """Return the size in bytes of which mappings on `device` are multiples."""
    driver = _load_driver()
    options = driver.CUmemAllocationGranularity_flags
    flag = options.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    properties = _allocation_properties(driver, device)
    return int(_check(driver, driver.cuMemGetAllocationGranularity(properties, flag))[0])


def collect_deferred() -> None:
    """Unmap the ranges whose finalizers came at a bad moment."""
    if not _deferred:
        return
    with _deferred_lock:
        pending, _deferred[:] = _deferred[:], []
    for mapping in pending:
        _collect(mapping)


def _collect(mapping: _Mapping) -> None:
    """Finalizer of a range; never raises, never touches the driver of another process."""
    if os.getpid() != mapping.pid:
        return
    try:
        if torch.cuda.is_current_stream_capturing():
            raise TorchPagedError("a graph is being captured")
        torch.cuda.synchronize(mapping.device)
        mapping.free()
    except Exception:
        with _deferred_lock:
            _deferred.append(mapping)


@functools.cache
def _load_driver() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return importlib.import_module("cuda.cuda")  # the name before cuda-bindings 12.6


def _allocation_properties(driver: ModuleType, device: torch.device) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = _index(device)
    return properties


def _access(driver: ModuleType, properties: Any) -> Any:
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _check(driver: ModuleType, result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a driver call, or raise what it reports."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise TorchPagedError(f"CUDA driver call failed: {status!r}")
    return tuple(values)


__all__ = ["AddressRange", "collect_deferred", "granularity", "round_up", "unsupported_reason"]
