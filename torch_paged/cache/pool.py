"""The KV pool: one key tensor and one value tensor per layer, all with the same blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from torch_paged.cache.virtual_memory import (
    AddressRange,
    granularity,
    round_up,
    unsupported_reason,
)
from torch_paged.errors import OutOfBlocks

# Where rounding to the mapping granularity would lose a larger share of the blocks that max_bytes
# allows, plain tensors serve instead.
_MAX_ROUNDING_LOSS = 1 / 8
# Share of the device's free memory that is left to others.
_HEADROOM = 0.1

Shape = tuple[int, int, int]  # num_kv_heads, block_size, head_dim


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV shape of one layer; `v_head_dim` 0 means that the layer keeps no values."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.head_dim < 1 or self.v_head_dim < 0:
            raise ValueError(f"LayerShape needs positive sizes, got {self}")


class KVPool:
    """Growing KV storage: ``keys[i]``, ``values[i]``: `[num_blocks, Hkv, block_size, head_dim]`.

    On CUDA devices with virtual memory, growth maps more memory under the same addresses, and a
    pool that was released takes the same addresses again, so captured graphs stay valid. Elsewhere
    growth allocates anew, copies, and bumps `generation`. After growth `keys` and `values` hold
    new tensor objects. New memory is not zeroed.

    Args:
        layers: the shape of each layer that has a KV cache, in order.
        block_size: tokens per block.
        max_bytes: upper limit of `nbytes`; None leaves only the device's own limit. May be
            changed later through the attribute of that name.
        virtual_memory: None uses it where it works; True demands it, False avoids it.

    Attributes:
        block_bytes: bytes of one block over all layers.
        num_blocks: blocks that the tensors hold.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        max_bytes: int | None = None,
        virtual_memory: bool | None = None,
    ) -> None:
        if not layers:
            raise ValueError("layers must not be empty")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        self.layers = tuple(layers)
        self.block_size = block_size
        self.dtype = dtype
        self.device = _with_index(torch.device(device))
        self.max_bytes = max_bytes
        self.num_blocks = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        shapes = [
            (layer.num_kv_heads, block_size, dim)
            for layer in self.layers
            for dim in (layer.head_dim, layer.v_head_dim)
        ]
        self.block_bytes = sum(_block_bytes(shapes, dtype))
        self._storage = _choose_storage(shapes, dtype, self.device, max_bytes, virtual_memory)
        self._expose()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held; torch's own statistics do not see mapped memory."""
        return self._storage.nbytes

    @property
    def generation(self) -> int:
        """Rises whenever blocks have other addresses than before."""
        return self._storage.generation

    @property
    def is_virtual(self) -> bool:
        """Say whether addresses survive growth and release."""
        return isinstance(self._storage, _MappedStorage)

    def max_num_blocks(self) -> int:
        """Return how many blocks the pool could have now, given `max_bytes` and the device.

        Memory that torch keeps cached counts as available: `grow` claims it when it must.
        """
        budget = self._device_budget(with_cached=True)
        if self.max_bytes is not None:
            budget = self.max_bytes if budget is None else min(budget, self.max_bytes)
        if budget is None:
            raise ValueError("a pool on the CPU has no limit unless max_bytes is given")
        return max(self.num_blocks, self._storage.blocks_within(budget))

    def grow(self, num_blocks: int) -> bool:
        """Grow to at least `num_blocks`; return whether the tensors moved.

        Contents are kept. Mapped memory comes in granules, and every block that fits is taken:
        read `num_blocks` afterwards. Plain tensors move, so ask for them in large steps. A
        request for no more than there is does nothing.

        Raises:
            OutOfBlocks: `max_bytes` or the device, less a tenth of its free memory, does not
                allow it. `num_blocks` and the contents are kept; compare `generation`, because
                plain tensors may have moved before the memory ran out.
        """
        if num_blocks <= self.num_blocks:
            return False
        self._check_limits(num_blocks)
        before = self.generation
        try:
            self.num_blocks = self._storage.resize(num_blocks)
        finally:
            self._expose()
        return self.generation != before

    def release(self) -> None:
        """Give all memory back; tensors taken from the pool before must not be used any more.

        Waits for the device where memory is unmapped. `grow` takes memory again: at the same
        addresses if the pool is virtual, else as a move. Contents are lost.
        """
        self.num_blocks = 0
        self.keys.clear()
        self.values.clear()
        self._storage.release()
        self._expose()

    def _expose(self) -> None:
        tensors = self._storage.tensors(self.num_blocks)
        self.keys, self.values = tensors[0::2], tensors[1::2]

    def _check_limits(self, num_blocks: int) -> None:
        needed = self._storage.bytes_for(num_blocks)
        if self.max_bytes is not None and needed > self.max_bytes:
            raise OutOfBlocks(
                f"{num_blocks} KV blocks need {needed} bytes, max_bytes is {self.max_bytes}; "
                f"at most {self._storage.blocks_within(self.max_bytes)} blocks fit"
            )
        budget = self._device_budget(with_cached=not self.is_virtual)
        if budget is not None and needed > budget and self.is_virtual:
            torch.cuda.empty_cache()  # torch's cached memory cannot be mapped
            budget = self._device_budget(with_cached=False)
        if budget is not None and needed > budget:
            raise OutOfBlocks(
                f"{num_blocks} KV blocks need {needed} bytes, {budget} bytes are available on "
                f"{self.device} (free memory less 10%); free memory or lower the load"
            )

    def _device_budget(self, *, with_cached: bool) -> int | None:
        """Return how many bytes the pool may hold in all; None means that nothing limits it."""
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        if with_cached:
            free += torch.cuda.memory_reserved(self.device)
            free -= torch.cuda.memory_allocated(self.device)
        # Our own share counts as free: else small steps would eat up the headroom.
        return int((free + self.nbytes) * (1 - _HEADROOM))


class _Storage(Protocol):
    """Backs the tensors of a pool, in the order key, value, key, value, ..."""

    generation: int

    @property
    def nbytes(self) -> int: ...

    def bytes_for(self, num_blocks: int) -> int: ...

    def blocks_within(self, budget: int) -> int: ...

    def resize(self, num_blocks: int) -> int: ...

    def tensors(self, num_blocks: int) -> list[torch.Tensor]: ...

    def release(self) -> None: ...


class _PlainStorage:
    """Ordinary tensors; growth allocates anew and copies, one tensor at a time."""

    def __init__(self, shapes: list[Shape], dtype: torch.dtype, device: torch.device) -> None:
        self.generation = 0
        self._dtype = dtype
        self._block_bytes = sum(_block_bytes(shapes, dtype))
        self._was_used = False
        with torch.inference_mode(False):
            self._tensors = [torch.empty(0, *s, dtype=dtype, device=device) for s in shapes]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def bytes_for(self, num_blocks: int) -> int:
        return num_blocks * self._block_bytes

    def blocks_within(self, budget: int) -> int:
        return budget // self._block_bytes

    def resize(self, num_blocks: int) -> int:
        self.generation += self._was_used
        self._was_used = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                for i, old in enumerate(self._tensors):
                    new = old.new_empty(num_blocks, *old.shape[1:])
                    rows = min(num_blocks, old.shape[0])
                    new[:rows].copy_(old[:rows])
                    self._tensors[i] = new
        except (RuntimeError, MemoryError) as error:
            if not is_lack_of_memory(error):
                raise
            raise OutOfBlocks(f"no memory for {num_blocks} KV blocks: {error}") from error
        return num_blocks

    def tensors(self, num_blocks: int) -> list[torch.Tensor]:
        return [tensor[:num_blocks] for tensor in self._tensors]

    def release(self) -> None:
        self._tensors = [tensor.new_empty(0, *tensor.shape[1:]) for tensor in self._tensors]


def is_lack_of_memory(error: Exception) -> bool:
    """Tell what an allocator says, on the host only in words, from other failures."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    told = ("out of memory", "can't allocate memory", "Storage size calculation overflowed")
    return any(words in str(error) for words in told)


class _MappedStorage:
    """Reserved addresses, one range per tensor, with memory mapped as the pool grows."""

    generation = 0  # addresses never change

    def __init__(self, shapes: list[Shape], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._granularity = granularity(device)
        self._sizes = _block_bytes(shapes, dtype)
        _, total = torch.cuda.mem_get_info(device)
        max_blocks = -(-total // sum(self._sizes))
        self._ranges = [
            AddressRange(device, max_blocks * size) if size else None for size in self._sizes
        ]

    @property
    def nbytes(self) -> int:
        return sum(held.mapped_bytes for held in self._ranges if held is not None)

    def bytes_for(self, num_blocks: int) -> int:
        return sum(round_up(num_blocks * size, self._granularity) for size in self._sizes)

    def blocks_within(self, budget: int) -> int:
        candidates = range(budget // sum(self._sizes) + 1)
        return bisect_right(candidates, budget, key=self.bytes_for) - 1

    def resize(self, num_blocks: int) -> int:
        pairs = [(r, s) for r, s in zip(self._ranges, self._sizes, strict=True) if r is not None]
        before = [held.mapped_bytes for held, _ in pairs]
        try:
            for held, size in pairs:
                held.map(num_blocks * size)
        except BaseException:
            for (held, _), nbytes in zip(pairs, before, strict=True):
                held.trim(nbytes)
            raise
        return min(held.mapped_bytes // size for held, size in pairs)

    def tensors(self, num_blocks: int) -> list[torch.Tensor]:
        with torch.inference_mode(False):
            return [
                torch.empty(num_blocks, *shape, dtype=self._dtype, device=self._device)
                if held is None or num_blocks == 0
                else held.tensor(num_blocks * size).view(self._dtype).view(num_blocks, *shape)
                for held, size, shape in zip(self._ranges, self._sizes, self._shapes, strict=True)
            ]

    def release(self) -> None:
        for held in self._ranges:
            if held is not None:
                held.unmap()


def _choose_storage(
    shapes: list[Shape],
    dtype: torch.dtype,
    device: torch.device,
    max_bytes: int | None,
    virtual_memory: bool | None,
) -> _Storage:
    if virtual_memory is False or (virtual_memory is None and device.type != "cuda"):
        return _PlainStorage(shapes, dtype, device)
    reason = unsupported_reason(device)
    if virtual_memory and reason is not None:
        raise NotImplementedError(f"virtual memory on {device}: {reason}")
    if reason is not None:
        return _PlainStorage(shapes, dtype, device)
    storage = _MappedStorage(shapes, dtype, device)
    if virtual_memory is None and max_bytes is not None:
        blocks = max_bytes // sum(_block_bytes(shapes, dtype))
        if storage.blocks_within(max_bytes) < blocks * (1 - _MAX_ROUNDING_LOSS):
            return _PlainStorage(shapes, dtype, device)
    return storage


def _block_bytes(shapes: list[Shape], dtype: torch.dtype) -> list[int]:
    return [prod(shape) * dtype.itemsize for shape in shapes]


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


__all__ = ["KVPool", "LayerShape", "is_lack_of_memory"]
