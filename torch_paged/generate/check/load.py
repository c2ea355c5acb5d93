"""The model that a command line names: a folder, a model type, or a name on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from torch_paged.generate.support.zoo import causal_lm_types, tiny_model
from torch_paged.generate.support.zoo_fixes import NOT_BUILT


def load_model(
    name: str, *, dtype: torch.dtype, device: str, trust_remote_code: bool = False
) -> Any:
    """Load a folder or a hub id; build a model type with a tiny random config.

    Raises:
        ValueError: a type that cannot be built this small.
        OSError: transformers finds no such model.
    """
    if not Path(name).is_dir():
        if name in NOT_BUILT:
            raise ValueError(
                f"MODEL {name!r} is a type that is not built from a tiny config: "
                f"{NOT_BUILT[name]}; pass a folder or a name on the hub"
            )
        if name in causal_lm_types():
            return tiny_model(name).to(device, dtype)
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, trust_remote_code=trust_remote_code
    )
    return model.to(device).eval()


__all__ = ["load_model"]
