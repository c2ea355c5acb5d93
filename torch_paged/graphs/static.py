"""Static inputs of captured graphs: fixed device tensors, filled from pinned host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

# Host buffers per input: so many copies may be in flight before the host has to wait for one.
_NUM_STAGES = 4


class _Input:
    """One static tensor with its ring of host buffers."""

    __slots__ = ("events", "fill", "stages", "tensor", "turn")

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: float, device: torch.device
    ) -> None:
        self.fill = fill
        self.turn = 0
        # Plain memory: tensors made under inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.tensor = torch.full(shape, fill, dtype=dtype, device=device)
            pinned = device.type == "cuda"
            count = _NUM_STAGES if pinned else 1
            self.stages = [
                torch.empty(shape, dtype=dtype, pin_memory=pinned, device="cpu")
                for _ in range(count)
            ]
        self.events: list[torch.cuda.Event | None] = [None] * count


class StaticInputs:
    """Named device tensors of `capacity` rows that keep their addresses for good.

    Graphs read them, or prefixes of them. A batch of fewer rows than its bucket is padded with
    the input's fill value (slot -1, for instance). Not thread-safe.
    """

    def __init__(self, capacity: int, device: torch.device | str) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.device = torch.device(device)
        self._inputs: dict[str, _Input] = {}

    def add(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        row_shape: Sequence[int] = (),
        fill: float = 0,
    ) -> torch.Tensor:
        """Create the input `name`: `[capacity, *row_shape]`, filled; return its tensor."""
        if name in self._inputs:
            raise ValueError(f"there is an input {name!r} already")
        shape = (self.capacity, *row_shape)
        self._inputs[name] = _Input(shape, dtype, fill, self.device)
        return self._inputs[name].tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._inputs[name].tensor

    def __contains__(self, name: str) -> bool:
        return name in self._inputs

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    @property
    def nbytes(self) -> int:
        """Device bytes of all inputs."""
        return sum(item.tensor.nbytes for item in self._inputs.values())

    def copy_in(
        self,
        name: str,
        values: torch.Tensor | Sequence[int] | Sequence[float],
        *,
        num_rows: int | None = None,
    ) -> torch.Tensor:
        """Copy host values into the first rows, padding into the rest of the bucket.

        The copy is queued on the current stream; the host waits only if the last few copies of
        this input have not run yet. `values` may be changed as soon as this returns.

        Args:
            name: an input made by `add`.
            values: `[n, *row_shape]` on the host.
            num_rows: the bucket, at least n; rows ``n .. num_rows - 1`` receive the fill value,
                rows beyond stay as they are. None: n.

        Returns:
            The view `[num_rows, *row_shape]` of the static tensor.
        """
        item = self._inputs[name]
        host = torch.as_tensor(values, dtype=item.tensor.dtype)
        host, num_rows = self._checked(name, host, num_rows)
        turn = item.turn = (item.turn + 1) % len(item.stages)
        event, stage = item.events[turn], item.stages[turn]
        if event is not None:
            event.synchronize()
        stage[: len(host)].copy_(host)
        stage[len(host) : num_rows].fill_(item.fill)
        target = item.tensor[:num_rows]
        target.copy_(stage[:num_rows], non_blocking=True)
        if self.device.type == "cuda":
            event = item.events[turn] = event or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        return target

    def _checked(
        self, name: str, host: torch.Tensor, num_rows: int | None
    ) -> tuple[torch.Tensor, int]:
        row_shape = self._inputs[name].tensor.shape[1:]
        if host.device.type != "cpu":
            raise ValueError(f"{name}: values must be on the host, got {host.device}")
        if host.numel() == 0:
            host = host.reshape(0, *row_shape)
        if host.dim() == 0 or host.shape[1:] != row_shape:
            raise ValueError(
                f"{name}: values must be [n, {', '.join(map(str, row_shape))}], got "
                f"{list(host.shape)}"
            )
        num_rows = len(host) if num_rows is None else num_rows
        if not len(host) <= num_rows <= self.capacity:
            raise ValueError(
                f"{name}: num_rows must be in [{len(host)}, {self.capacity}], got {num_rows}"
            )
        return host, num_rows


__all__ = ["StaticInputs"]
