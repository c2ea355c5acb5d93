"""Where the device's default generator stood after each of the newest steps."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class DrawHistory:
    """States of the device's default generator after the newest steps."""

    def __init__(self, device: torch.device, lag: int) -> None:
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        else:
            self._generator = torch.default_generator
        self._states: deque[Tensor] = deque(maxlen=lag + 2)

    def note(self) -> None:
        self._states.append(self._generator.get_state())

    def rewind(self, num_steps: int) -> None:
        """Put the generator back to where it stood `num_steps` steps ago."""
        self._generator.set_state(self._states[-1 - num_steps])


__all__ = ["DrawHistory"]
