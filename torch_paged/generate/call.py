"""The arguments of one call, as a decoding method is given them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one `_sample` call."""

    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    synced_gpus: bool
    streamer: Any
    model_kwargs: dict[str, Any]


__all__ = ["Call"]
