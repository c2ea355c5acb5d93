"""Reading of feed-forward blocks of experts, which share one form in transformers."""

from __future__ import annotations

from typing import Any

from torch_paged.decoder.slots import override_reason, parameter_reason
from torch_paged.decoder.spec import (
    Activation,
    ExpertsSpec,
    LinearSpec,
    MlpSpec,
    ModuleRef,
    OpaqueMlpSpec,
    RouterSpec,
)
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import is_output_capturing_hook
from torch_paged.patches.traits import ExpertsNames


def has_experts(model: Any, layer: str, names: ExpertsNames) -> bool:
    """Say whether a layer's block has experts; some layers of a family may have a plain MLP."""
    block: Any = model.get_submodule(f"{layer}.{names.block}")
    return hasattr(block, names.experts)


def read_experts(
    model: Any, layer: str, names: ExpertsNames, activation: Activation
) -> ExpertsSpec | OpaqueMlpSpec:
    """Read the block of a layer; one that has no fused form is called as it is.

    Such are quantised experts, and those that a library has wrapped or replaced.
    """
    try:
        return _read_block(model, layer, names, activation)
    except SpecRefusal as refusal:
        name = f"{layer}.{names.block}"
        if names.shared is not None and not names.shared.startswith(f"{names.block}."):
            raise  # the block is not all of it
        return OpaqueMlpSpec(ModuleRef(name, model.get_submodule(name)), str(refusal))


def _read_block(
    model: Any, layer: str, names: ExpertsNames, activation: Activation
) -> ExpertsSpec:
    _own_module(model, f"{layer}.{names.block}")
    experts = _own_module(model, f"{layer}.{names.block}.{names.experts}")
    module: Any = experts.module
    _refuse_other_forms(experts, model)
    num_experts, first, second = module.gate_up_proj.shape
    transposed = bool(module.is_transposed)
    inner = (second if transposed else first) // 2
    return ExpertsSpec(
        ref=experts,
        router=_read_router(model, f"{layer}.{names.block}.{names.router}", names, num_experts),
        inner=inner,
        activation="clamped_swiglu" if names.clamped else activation,
        alpha=float(module.alpha) if names.clamped else 1.0,
        limit=float(module.limit) if names.clamped else 0.0,
        transposed=transposed,
        interleaved=not module.is_concatenated,
        shared=_read_shared(model, layer, names, activation),
        shared_gate=_read_shared_gate(model, layer, names),
    )


def _own_module(model: Any, name: str) -> ModuleRef:
    """Return a module of the model's own file that nobody has changed."""
    module = model.get_submodule(name)
    if type(module).__module__ != type(model).__module__:
        raise SpecRefusal(f"{name} is a {type(module).__qualname__}, which has no fused form")
    reason = override_reason(module, ignore_hook=is_output_capturing_hook)
    reason = reason or parameter_reason(module)
    if reason:
        raise SpecRefusal(f"{name} cannot be fused: {reason}")
    return ModuleRef(name, module)


def _refuse_other_forms(experts: ModuleRef, model: Any) -> None:
    module: Any = experts.module
    # Later releases than the oldest supported one have these flags.
    other = ("has_post_expert_norm", "_is_expert_parallel")
    if not module.has_gate or any(getattr(module, name, False) for name in other):
        raise SpecRefusal(f"{experts.name} has a form that is not known here")
    wanted = model.get_input_embeddings().weight.dtype
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dtype != wanted:
            raise SpecRefusal(
                f"{name} of {experts.name} is {parameter.dtype} in a model of {wanted}"
            )


def _read_router(model: Any, name: str, names: ExpertsNames, num_experts: int) -> RouterSpec:
    router = _own_module(model, name)
    module: Any = router.module
    # Transformers keeps the sum of the weights above a bound that no sum comes near by default.
    if getattr(module, "norm_min", 0.0) > 1e-6:
        raise SpecRefusal(f"norm_min={module.norm_min!r} of {name} has no fused form")
    num_groups, top_groups = _read_groups(module, name, names, num_experts)
    normalise = names.normalise
    if normalise is None:
        normalise = bool(module.norm_topk_prob)
    correction = None
    if names.correction is not None:
        owner, _, attribute = names.correction.rpartition(".")
        owner_name = f"{name}.{owner}" if owner else name
        correction = (ModuleRef(owner_name, model.get_submodule(owner_name)), attribute)
    return RouterSpec(
        ref=router,
        num_experts=num_experts,
        top_k=int(module.top_k),
        scoring=names.scoring,
        normalise=normalise,
        scale=float(getattr(module, "routed_scaling_factor", 1.0)),
        correction=correction,
        float_logits=names.float_logits,
        float_weights=names.float_weights,
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=max(names.group_best, 1),
    )


def _read_groups(module: Any, name: str, names: ExpertsNames, num_experts: int) -> tuple[int, int]:
    """Return how many groups of experts there are, and from how many of them a token chooses."""
    method = getattr(module, "topk_method", None)
    if method not in (None, "greedy", "group_limited_greedy"):
        raise SpecRefusal(f"{name} chooses by {method!r}")
    num_groups = int(getattr(module, "num_group", 1) or 1)
    top_groups = int(getattr(module, "topk_group", num_groups) or num_groups)
    if method == "greedy" or top_groups >= num_groups:
        return 1, 1
    size = num_experts // num_groups
    # With fewer in its groups, Hugging Face goes on among experts that it has ruled out.
    if not names.group_best or num_experts % num_groups or module.top_k > top_groups * size:
        raise SpecRefusal(f"its choice among groups of experts in {name} has no fused form")
    return num_groups, top_groups


def _linear(model: Any, name: str) -> LinearSpec:
    module: Any = model.get_submodule(name)
    return LinearSpec(ModuleRef(name, module), module.in_features, module.out_features)


def _read_shared(
    model: Any, layer: str, names: ExpertsNames, activation: Activation
) -> MlpSpec | None:
    if names.shared is None or _missing(model, f"{layer}.{names.shared}"):
        return None
    prefix, parts = f"{layer}.{names.shared}", names.shared_mlp
    inputs = tuple(_linear(model, f"{prefix}.{part}") for part in parts.inputs)
    return MlpSpec(inputs, _linear(model, f"{prefix}.{parts.output}"), activation, parts.gated)


def _missing(model: Any, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute) is None


def _read_shared_gate(model: Any, layer: str, names: ExpertsNames) -> LinearSpec | None:
    return None if names.shared_gate is None else _linear(model, f"{layer}.{names.shared_gate}")
