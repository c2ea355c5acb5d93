"""Reading of rotary modules: frequencies that stay, and those that follow the length."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_paged.decoder.spec import ModuleRef, RotaryChange, RotarySpec
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import longrope_frequencies

# Rotary kinds whose frequencies do not depend on the length of the sequence.
_STATIC = ("default", "linear", "llama3", "yarn")


def rotary(model: nn.Module, name: str, config: Any) -> RotarySpec:
    """Read a rotary module with one table."""
    return _read(model, name, config, None)


def rotaries(model: nn.Module, name: str, config: Any) -> dict[str, RotarySpec]:
    """Read the tables of a rotary module: one for each type of layer, or "" for all of them."""
    module: Any = model.get_submodule(name)
    if hasattr(module, "inv_freq"):
        return {"": rotary(model, name, config)}
    tables = {kind: _read(model, name, config, kind) for kind in module.layer_types}
    if len({type(t.change and t.change.long) for t in tables.values() if t.change}) > 1:
        raise SpecRefusal("its layers have two kinds of rotary that change with the length")
    return tables


def _read(model: nn.Module, name: str, config: Any, layer_type: str | None) -> RotarySpec:
    module: Any = model.get_submodule(name)
    prefix = "" if layer_type is None else f"{layer_type}_"
    parameters = config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    kind = (parameters or {}).get("rope_type", "default")
    ref, scaling = ModuleRef(name, module), float(getattr(module, f"{prefix}attention_scaling"))
    if kind in _STATIC:
        return RotarySpec(ref, f"{prefix}inv_freq", scaling)
    buffer = f"{prefix}original_inv_freq"
    table = getattr(module, buffer)
    if table.dtype != torch.float32:
        raise SpecRefusal(f"its frequencies of rotary type {kind!r} are rounded to {table.dtype}")
    if kind == "longrope":
        limit = int(parameters["original_max_position_embeddings"])
        long = tuple(longrope_frequencies(config, limit, layer_type).tolist())
        change = RotaryChange(limit, f"{prefix}inv_freq", long)
    elif kind == "dynamic" and table.shape[0] > 1:
        change = RotaryChange(
            int(config.max_position_embeddings),
            f"{prefix}inv_freq",
            base=float(parameters["rope_theta"]),
            factor=float(parameters["factor"]),
            memory=f"{prefix}max_seq_len_cached",
        )
        if not hasattr(module, change.memory):
            # Hugging Face falls back to the module's own until it has grown.
            setattr(module, change.memory, module.max_seq_len_cached)
    else:
        raise SpecRefusal(f"rotary type {kind!r} has no fused form")
    return RotarySpec(ref, buffer, scaling, change)
