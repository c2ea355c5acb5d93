"""Slots of a plan: whether a module's arithmetic may be ours, or the module must be called.

fused: ours, and open to the peephole rules. generic: ours, from a library op. opaque: the module
found there is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import nn

SlotKind = Literal["fused", "generic", "opaque"]

# Backward hooks do not run in a decode step.
_HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks")


class Slot(NamedTuple):
    """How a module takes part in the plan, and why it is not fused when it is not."""

    kind: SlotKind
    why: str = ""


def hook_dicts(module: nn.Module) -> list[dict[int, object]]:
    """Return the live dictionaries that hold the hooks of `module`."""
    return [getattr(module, name) for name in _HOOK_DICTS]


def is_gradient_hook(hook: object) -> bool:
    """Recognise what gradient checkpointing leaves on embeddings: outputs that require gradients.

    It changes no value, is installed anew whenever checkpointing is switched on, and stays.
    """
    package = getattr(hook, "__module__", "").partition(".")[0]
    name = getattr(hook, "__qualname__", "").rpartition(".")[2]
    known = ("make_inputs_require_grads", "make_inputs_require_grad")
    return package in ("transformers", "peft") and name in known


def _no_hook_ignored(hook: object) -> bool:
    return False


def is_replaced_on_class(cls: type) -> bool:
    """Say whether a class has another forward than the one that its file defines.

    For when a model is read: afterwards a class's forward counts for what calls it.
    Decorators keep a function's names, so the outermost one must be of the class's own package or
    torch's.
    """
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    if owner is nn.Module:
        return False
    forward = vars(owner)["forward"]
    names = getattr(forward, "__module__", None), getattr(forward, "__qualname__", None)
    written_in = getattr(forward, "__globals__", {}).get("__name__", "")
    packages = (owner.__module__.partition(".")[0], "torch")
    is_own = names == (owner.__module__, f"{owner.__qualname__}.forward")
    return not is_own or written_in.partition(".")[0] not in packages


def override_reason(
    module: nn.Module, ignore_hook: Callable[[object], bool] = _no_hook_ignored
) -> str:
    """Say what makes calling `module` differ from its class's forward, or return ""."""
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance"
    if hasattr(module, "_hf_hook"):
        return "it has an accelerate hook"
    hooks = [hook for held in hook_dicts(module) for hook in held.values()]
    if not all(ignore_hook(hook) or is_gradient_hook(hook) for hook in hooks):
        return "it has hooks"
    if hasattr(module, "parametrizations"):
        return "it is parametrized"
    return ""


def parameter_reason(module: nn.Module) -> str:
    """Say which parameter is not a plain floating tensor as our kernels read it, or return ""."""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter.data) is not torch.Tensor:
            return f"its {name} is a {type(parameter.data).__name__}"
        if not parameter.is_floating_point():
            return f"its {name} holds {parameter.dtype}"
        # Matrices of experts, of three dims, are read by their strides.
        if 0 < parameter.dim() < 3 and parameter.stride(-1) != 1:
            return f"its {name} is not contiguous"
    return ""


# Linears of transformers, known by name: this package imports none of it.
_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_FALCON_LINEAR = ("transformers.models.falcon.modeling_falcon", "FalconLinear")


def _is_linear(module: nn.Module) -> bool:
    cls = type(module)
    if (cls.__module__, cls.__name__) == _FALCON_LINEAR:
        return module.bias is None  # it rounds before it adds a bias
    return cls is nn.Linear


def is_conv1d(module: nn.Module) -> bool:
    """Say whether this is transformers' linear whose weight is [in_features, out_features]."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == _CONV1D


def plain_linear_slot(module: nn.Module) -> Slot:
    """Fused only for a plain nn.Linear over plain floating tensors, without hooks."""
    if not _is_linear(module):
        return Slot("opaque", f"it is a {type(module).__name__}")
    return _read_slot(module)


def conv1d_slot(module: nn.Module) -> Slot:
    """Generic for a Conv1D in its plain form: our kernels read weights along input features."""
    slot = _read_slot(module)
    return slot if slot.why else Slot("generic", "torch's linear over a weight that is [in, out]")


def _read_slot(module: nn.Module) -> Slot:
    reason = override_reason(module) or parameter_reason(module)
    if not reason and module._parameters.get("weight") is None:
        reason = "it has no weight of its own"
    return Slot("opaque", reason) if reason else Slot("fused")


def plain_slot(module: nn.Module) -> Slot:
    """Fused for a module whose class is known to the family row, if nothing overrides it."""
    if hasattr(module, "_disable_adapters"):
        return Slot("opaque", f"it is a {type(module).__name__} of PEFT")
    reason = override_reason(module) or parameter_reason(module)
    if reason:
        return Slot("opaque", reason)
    if isinstance(module, nn.LayerNorm):
        return Slot("generic", "torch's layer_norm")
    return Slot("fused")
