"""The ids of a batch in static tensors on the device, for samplers that look back at them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.decoder.state import SlotState


class TokenHistory:
    """The prompts and sampled tokens of rows that step together, padding included.

    Nothing is allocated, read by the host or of a shape that depends on the step, so all of it may
    be captured in a graph.

    Args:
        num_rows: exactly the live rows.
        capacity: columns of the longest sequence.

    Attributes:
        ids: [num_rows, capacity + 1] int64; the last column takes what belongs nowhere.
        length: [1] int64 columns that are known, as of the newest `observe`.
        is_later: [1] bool, whether `token` was sampled: not in the first step.
        token: [num_rows] int64 newest sampled tokens.
    """

    def __init__(self, num_rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        with torch.inference_mode(False):
            self.ids = torch.zeros((num_rows, capacity + 1), dtype=torch.int64, device=device)
            self._width = torch.zeros(1, dtype=torch.int64, device=device)
            self._slots = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._state: SlotState | None = None
        self.length = self.token = self._width
        self.is_later = self._width.bool()

    def start(self, prompt_ids: Tensor, state: SlotState, slots: Tensor) -> None:
        """Begin a batch: its prompts [num_rows, width], its state and its slots [num_rows]."""
        width = prompt_ids.shape[1]
        self.ids.zero_()
        self.ids[:, :width].copy_(prompt_ids)
        self._width.fill_(width)
        self._slots.copy_(slots)
        self._state = state

    def observe(self) -> None:
        """Take in the tokens of the step before; harmless when repeated within a step."""
        state = self._state
        assert state is not None, "start() comes first"
        sampled = state.num_generated.index_select(0, self._slots[:1]).long()
        self.length = self._width + sampled
        self.is_later = sampled > 0
        self.token = state.last_token.index_select(0, self._slots)
        column = torch.where(self.is_later, self.length - 1, self.capacity)
        self.ids.scatter_(1, column.expand(self.ids.shape[0], 1), self.token[:, None])

    def tail(self, count: int) -> Tensor:
        """Return the newest `count` ids of each row; what there is not is void."""
        offsets = torch.arange(-count, 0, device=self.ids.device)
        return self.ids.index_select(1, (self.length + offsets).clamp(min=0))


__all__ = ["TokenHistory"]
