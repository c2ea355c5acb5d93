"""Reading of the parts that all families share: modules, projections, norms and activations."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_paged.decoder.slots import override_reason
from torch_paged.decoder.spec import Activation, LinearSpec, ModuleRef, NormSpec
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import is_output_capturing_hook
from torch_paged.patches.traits import Traits

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def ref(model: nn.Module, name: str) -> ModuleRef:
    """Return the module of `model` at a dotted name."""
    return ModuleRef(name, model.get_submodule(name))


def linear(model: nn.Module, name: str, in_features: int, out_features: int) -> LinearSpec:
    return LinearSpec(ref(model, name), in_features, out_features)


def activation_of(name: object) -> Activation:
    """Translate a config's activation name; refuses the ones without a kernel."""
    if name not in _ACTIVATIONS:
        raise SpecRefusal(f"activation {name!r} has no kernel")
    return _ACTIVATIONS[str(name)]


def norm(model: nn.Module, name: str, traits: Traits) -> NormSpec:
    module_ref = ref(model, name)
    module: Any = module_ref.module
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", traits.norm_eps)
    if eps is None:
        raise SpecRefusal(f"{name} has no epsilon that is known here")
    return NormSpec(
        module_ref, traits.norm_kind, float(eps), traits.norm_offset, traits.cast_before_gain
    )


def layer_norm(model: nn.Module, name: str) -> NormSpec:
    """Read an nn.LayerNorm."""
    module_ref = ref(model, name)
    return NormSpec(module_ref, "layer", float(module_ref.module.eps))


def plain_ref(model: Any, name: str) -> ModuleRef:
    """Return a module that only its parameters are taken of; its own forward must not matter."""
    found = ref(model, name)
    reason = override_reason(found.module, ignore_hook=is_output_capturing_hook)
    if reason:
        raise SpecRefusal(f"{name} cannot be bypassed: {reason}")
    return found


def refuse_set(config: Any, *names: str) -> None:
    """Refuse a config that sets a field whose arithmetic has no fused form."""
    for name in names:
        if getattr(config, name, None):
            raise SpecRefusal(f"{name}={getattr(config, name)!r} has no fused form")
