"""The arguments of one call, as a decoding method is given them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from torch_paged.generate.limits import Limits, read_limits
from torch_paged.generate.masks import MaskFacts, read_mask


@dataclass(frozen=True)
class Call:
    """The arguments of one `_sample` call, and what the host reads of them once."""

    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    synced_gpus: bool
    streamer: Any
    model_kwargs: dict[str, Any]

    @cached_property
    def mask_facts(self) -> MaskFacts | None:
        """What the host knows of the attention mask, None where there is no mask."""
        mask = self.model_kwargs.get("attention_mask")
        return None if mask is None else read_mask(mask)

    @cached_property
    def limits(self) -> Limits:
        """When its rows end."""
        return read_limits(self.stopping_criteria, self.generation_config, self.input_ids.shape[1])


__all__ = ["Call"]
