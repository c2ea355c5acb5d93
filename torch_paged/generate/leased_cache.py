"""What a returned cache shows of blocks: copied out when somebody looks, or takes them back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged.cache.pool import is_lack_of_memory
from torch_paged.engine.core import EngineCore
from torch_paged.engine.leased_blocks import LeasedBlocks
from torch_paged.engine.leases import Leases
from torch_paged.engine.out_of_memory import OutOfMemory
from torch_paged.errors import TorchPagedError
from torch_paged.patches import lease_seams


class Head(NamedTuple):
    """First columns that blocks do not have as they were: a mask hides some of them.

    Attributes:
        lengths: tokens of each row in these columns.
        states: by layer, keys and values [num_rows, num_kv_heads, num_columns, head_dim].
    """

    num_columns: int
    lengths: tuple[int, ...]
    states: tuple[tuple[Tensor, Tensor], ...]


class View(NamedTuple):
    """Where the tokens of blocks stand in a cache.

    Attributes:
        real: [num_rows, num_columns] on the model's device; None where every column is a token.
    """

    num_columns: int
    real: Tensor | None
    head: Head | None
    dtype: torch.dtype


class CacheLease:
    """Lends a cache the tensors of its layers, as `lease_seams.Lender` says.

    The layers hold it, and it holds the blocks: with the last layer these are free again.
    """

    def __init__(self, leases: Leases, blocks: LeasedBlocks, view: View) -> None:
        self._leases = leases
        self._blocks = blocks
        self._view = view
        self._layers: list[weakref.ref[lease_seams.LentLayer]] = []
        self._is_over = False
        self._number = leases.add(self, blocks.allocator, blocks.ids)

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def num_columns(self) -> int:
        return self._view.num_columns

    @property
    def view(self) -> View:
        return self._view

    @property
    def blocks(self) -> LeasedBlocks:
        return self._blocks

    @property
    def leases(self) -> Leases:
        """The leases that this is one of."""
        return self._leases

    def num_own(self) -> int:
        return self._blocks.num_own()

    def register(self, layer: lease_seams.LentLayer) -> None:
        self._layers.append(weakref.ref(layer))

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return self._leases.turns.entered(self._blocks.device)

    def copy(self) -> CacheLease:
        with self.turn():
            return CacheLease(self._leases, self._blocks.fork(), self._view)

    def end_if_left(self) -> None:
        """Free the blocks if all layers have tensors of their own, or another lease."""
        if not self._own_layers():
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._leases.end(self._number)

    def _own_layers(self) -> list[lease_seams.LentLayer]:
        layers = [layer for ref in self._layers if (layer := ref()) is not None]
        return [layer for layer in layers if lease_seams.lender(layer) is self]

    def state_shapes(self, layer: int, num_columns: int) -> tuple[torch.Size, torch.Size]:
        rows = len(self._blocks.lengths)
        keys, values = (
            torch.Size((rows, heads, num_columns, dim))
            for heads, dim in self._blocks.shapes(layer)
        )
        return keys, values

    def materialise(self) -> None:
        """Give the layers tensors of their own, and the blocks back.

        Raises:
            OutOfMemory: there is no memory for the tensors; nothing was changed.
            TorchPagedError: a CUDA graph is being captured, which would copy nothing now.
        """
        if self._is_over:
            return
        self._check_capture()  # before streams are put in order, which would spoil the capture
        with self.turn():
            if self._is_over:  # meanwhile
                return
            layers = self._own_layers()
            with _as_in_generate():
                tensors = self._copied_out([lease_seams.lent_place(layer) for layer in layers])
            for layer, (keys, values) in zip(layers, tensors, strict=True):
                lease_seams.settle(layer, keys, values)
            self._end()

    def lengths(self, num_columns: int) -> tuple[int, ...]:
        """Return the tokens of each row in the first columns."""
        real = self._view.real
        if num_columns == self._view.num_columns:
            return self._blocks.lengths
        if real is None:
            return (num_columns,) * len(self._blocks.lengths)
        return tuple(real[:, :num_columns].sum(-1).tolist())

    def _check_capture(self) -> None:
        if self._blocks.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise TorchPagedError(
                "the tensors of a returned cache are made when they are first looked at, and that "
                "cannot be while a CUDA graph is captured; look at cache.layers[0].keys before"
            )

    def _copied_out(self, places: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
        readers: dict[int, Callable[[int], tuple[Tensor, Tensor]]] = {}
        out = []
        try:
            for layer, num_columns in places:
                if num_columns not in readers:
                    readers[num_columns] = self._reader(num_columns)
                out.append(readers[num_columns](layer))
        except (RuntimeError, MemoryError) as error:
            if not is_lack_of_memory(error):
                raise
            raise OutOfMemory(
                f"no memory to copy a returned cache of {self.num_columns} columns out of its "
                f"{len(set(self._blocks.ids))} KV blocks: {error}; the cache is still whole: drop "
                "it (or the output that has it), or other tensors"
            ) from error
        return out

    def _reader(self, num_columns: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Return what makes the keys and values of a layer in the first columns."""
        head, rows = self._view.head, len(self._blocks.lengths)
        num_head = 0 if head is None else min(head.num_columns, num_columns)
        stops = self.lengths(num_columns)
        starts = (0,) * rows
        if head is not None:
            starts = head.lengths if num_head == head.num_columns else stops
        read = self._blocks.reader(starts, stops)
        put = _columns(self._view.real, num_head, num_columns, rows)

        def states(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = map(put, read(layer))
            if head is None:
                return keys, values
            first_keys, first_values = (s[:, :, :num_head] for s in head.states[layer])
            return torch.cat([first_keys, keys], -2), torch.cat([first_values, values], -2)

        return states


def lend(cache: Any, numbers: Sequence[int], lease: CacheLease) -> None:
    """Let the layers of a cache show what a lease has."""
    with _as_in_generate():
        example = torch.empty(0, dtype=lease.view.dtype, device=lease.blocks.device)
        lease_seams.lend(cache, numbers, lease, example)


def reusable(cache: Any, numbers: Sequence[int], core: EngineCore) -> CacheLease | None:
    """Return the lease behind all layers of a cache if a run on `core` can go on from it."""
    lease = lease_seams.lender_of(cache, numbers)
    if not isinstance(lease, CacheLease) or lease.is_over or lease.leases is not core.leases:
        return None
    return lease


def settle_foreign(cache: Any, core: EngineCore | None) -> None:
    """Give a cache its own tensors where another model lends them.

    Called without any model's lock: nobody waits for two.
    """
    for lease in lease_seams.lenders(cache):
        if core is None or lease.leases is not core.leases:
            lease.materialise()


def _columns(
    real: Tensor | None, start: int, stop: int, num_rows: int
) -> Callable[[Tensor], Tensor]:
    """Return what puts tokens [num_tokens, heads, dim] into columns `start` to `stop`."""
    index = None
    if real is not None:
        index = real[:, start:stop].reshape(-1).nonzero().squeeze(1)

    def put(tokens: Tensor) -> Tensor:
        sizes = tokens.shape[1:]
        if index is not None:
            padded = tokens.new_zeros((num_rows * (stop - start), *sizes))
            tokens = padded.index_copy_(0, index, tokens)
        return tokens.reshape(num_rows, stop - start, *sizes).transpose(1, 2).contiguous()

    return put


@contextlib.contextmanager
def _as_in_generate() -> Iterator[None]:
    """Make ordinary tensors without gradients, whatever is in force where somebody looks."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield


__all__ = ["CacheLease", "Head", "View", "lend", "reusable", "settle_foreign"]
