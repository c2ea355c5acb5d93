"""Linears of a plan and what is added to them: LoRA adapters of PEFT are a kind of linear.

PEFT is read by the shape of its modules and never imported. What an adapter adds is asked for
when a plan is bound; `ModuleWatch.variant` tells when the answer has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_paged.decoder.slots import (
    Slot,
    conv1d_slot,
    is_conv1d,
    override_reason,
    plain_linear_slot,
)

_LORA_LINEAR = ("peft.tuners.lora.layer", "Linear")


@dataclass(frozen=True, slots=True)
class Update:
    """What an adapter adds to a linear: ``scaling * up(down(x))``, all in one dtype.

    Attributes:
        down, up: plain linears without bias, [rank, in_features] and [out_features, rank].
    """

    name: str
    down: nn.Linear
    up: nn.Linear
    scaling: float

    @property
    def rank(self) -> int:
        return self.down.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.down.weight.dtype


@dataclass(frozen=True, slots=True)
class HeldLinear:
    """A linear as it computes now: a plain one and the updates of its active adapters.

    Attributes:
        base: a linear, or a Conv1D of transformers, whose weight is [in_features, out_features].
    """

    base: Any
    updates: tuple[Update, ...] = ()

    @property
    def weight(self) -> torch.Tensor:
        """The weight where it is, seen as [out_features, in_features]."""
        weight: torch.Tensor = self.base.weight.detach()
        return weight.T if is_conv1d(self.base) else weight


def linear_slot(module: nn.Module) -> Slot:
    """Fused for a plain nn.Linear, generic for a Conv1D; likewise for PEFT's LoRA over one."""
    held = _read(module)
    if isinstance(held, str):
        return Slot("opaque", held)
    names = ", ".join(f"{u.name} (rank {u.rank})" for u in held.updates)
    why = [f"with LoRA {names}"] if names else []
    if is_conv1d(held.base):
        return Slot("generic", ", ".join([conv1d_slot(held.base).why, *why]))
    return Slot("fused", "".join(why))


def held_linear(module: nn.Module) -> HeldLinear:
    """Return the linear of a module whose `linear_slot` is not opaque."""
    held = _read(module)
    assert isinstance(held, HeldLinear), held
    return held


def linear_updates(module: nn.Module) -> tuple[Update, ...]:
    """Return what adapters add to a linear; nothing where the module must be called."""
    held = _read(module)
    return held.updates if isinstance(held, HeldLinear) else ()


def is_lora_linear(module: nn.Module) -> bool:
    """Say whether this is PEFT's own wrapper of an unquantised linear, not a subclass of it."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == _LORA_LINEAR


def _read(module: nn.Module) -> HeldLinear | str:
    """Return the linear that `module` is, or why it must be called instead."""
    if not is_lora_linear(module):
        slot = _base_slot(module)
        return HeldLinear(module) if slot.kind != "opaque" else slot.why
    layer: Any = module
    base = layer.base_layer
    if reason := override_reason(layer):
        return reason
    if (slot := _base_slot(base)).kind == "opaque":
        return f"it is LoRA over a layer of which {slot.why}"
    if layer.disable_adapters or layer.merged:
        return HeldLinear(base)
    updates = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        if reason := _update_reason(layer, name):
            return f"its adapter {name} {reason}"
        scaling = float(layer.scaling[name])
        updates.append(Update(name, layer.lora_A[name], layer.lora_B[name], scaling))
    return HeldLinear(base, tuple(updates))


def _base_slot(module: nn.Module) -> Slot:
    return conv1d_slot(module) if is_conv1d(module) else plain_linear_slot(module)


def _update_reason(layer: Any, name: str) -> str:
    """Say how an adapter departs from ``scaling * up(down(x))``, or return ""."""
    # Older versions of PEFT lack some of these.
    variants = getattr(layer, "lora_variant", {})
    if name in variants:
        return f"is of a variant, {type(variants[name]).__name__}"
    if getattr(layer, "use_dora", {}).get(name) or name in layer.lora_magnitude_vector:
        return "has a magnitude vector"
    dropout = layer.lora_dropout[name]
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"drops out by a {type(dropout).__name__}"
    if type(dropout) is nn.Dropout and dropout.training and dropout.p > 0.0:
        return "applies dropout in training mode"
    if type(layer.scaling[name]) not in (int, float):
        return f"is scaled by a {type(layer.scaling[name]).__name__}"
    for half in (layer.lora_A[name], layer.lora_B[name]):
        if why := plain_linear_slot(half).why:
            return f"has a half of which {why}"
        if half.bias is not None:
            return "has a bias"
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    if down.dtype != up.dtype:
        return f"has halves in {down.dtype} and {up.dtype}"
    casts = getattr(layer, "cast_input_dtype_enabled", True)
    if down.dtype != layer.base_layer.weight.dtype and not casts:
        return "does not cast its input"
    return ""
