"""The table of families: the exact class a row was written for, and how to read it.

Types that share a module tree do not share its arithmetic, so rows match the class itself; a
subclass, or a class of the same name from elsewhere, has no row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torch_paged.decoder.slots import hook_dicts, override_reason
from torch_paged.decoder.spec import DecoderSpec
from torch_paged.decoder.watch import spec_modules
from torch_paged.patches.gpt_neox import read_gpt_neox
from torch_paged.patches.llama_like import Traits, read_llama_like
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import global_forward_hooks, is_output_capturing_hook

Reader = Callable[[Any], DecoderSpec]


def _llama_like(family: str, traits: Traits) -> Reader:
    return lambda model: read_llama_like(model, family, traits)


_GEMMA2 = Traits(
    norm_offset=1.0,
    cast_before_gain=False,
    sandwich=True,
    scaled_embedding=True,
    window="module",
)

# (module under transformers.models, class) -> reader
FAMILIES: dict[tuple[str, str], Reader] = {
    ("llama.modeling_llama", "LlamaForCausalLM"): _llama_like("llama", Traits()),
    ("mistral.modeling_mistral", "MistralForCausalLM"): _llama_like(
        "mistral", Traits(window="config")
    ),
    ("qwen2.modeling_qwen2", "Qwen2ForCausalLM"): _llama_like("qwen2", Traits(window="module")),
    ("qwen3.modeling_qwen3", "Qwen3ForCausalLM"): _llama_like(
        "qwen3", Traits(head_norms=("q_norm", "k_norm"), window="module")
    ),
    ("gemma2.modeling_gemma2", "Gemma2ForCausalLM"): _llama_like("gemma2", _GEMMA2),
    ("phi3.modeling_phi3", "Phi3ForCausalLM"): _llama_like(
        "phi3", Traits(fused_qkv=True, fused_gate_up=True, window="config")
    ),
    ("gpt_neox.modeling_gpt_neox", "GPTNeoXForCausalLM"): read_gpt_neox,
}


def read_spec(model: nn.Module) -> DecoderSpec:
    """Read `model` into a spec.

    Raises:
        SpecRefusal: no row for the class, or this instance departs from what its row says.
    """
    cls = type(model)
    reader = FAMILIES.get((cls.__module__.removeprefix("transformers.models."), cls.__name__))
    if reader is None or not cls.__module__.startswith("transformers.models."):
        raise SpecRefusal(f"no fused decoder for {cls.__module__}.{cls.__qualname__}")
    try:
        spec = reader(model)
    except AttributeError as error:
        raise SpecRefusal(f"its modules are not those of {cls.__qualname__}: {error}") from error
    _refuse_overridden_containers(model, spec)
    return spec


def _refuse_overridden_containers(model: nn.Module, spec: DecoderSpec) -> None:
    """Modules above the spec's own are not called, so nothing may hang there."""
    owned = [ref.module for ref in spec_modules(spec)]
    called = {id(module) for owner in owned for module in owner.modules()}
    for name, module in model.named_modules():
        reason = override_reason(module, ignore_hook=is_output_capturing_hook)
        if reason and id(module) not in called:
            raise SpecRefusal(f"{name or 'the model'} cannot be bypassed: {reason}")


def hook_reason(model: nn.Module) -> str:
    """Say which module has a user's forward hook, or return "".

    A hook fires once per forward with the shapes of that forward; a replayed step would not call
    it, and packed prompts would show it other shapes.
    """
    if any(global_forward_hooks()):
        return "there are global forward hooks"
    for name, module in model.named_modules():
        for hooks in hook_dicts(module):
            if any(not is_output_capturing_hook(hook) for hook in hooks.values()):
                return f"{name or 'the model'} has forward hooks"
    return ""


def dropout_reason(model: nn.Module) -> str:
    """Say what would drop out in training mode, or return ""."""
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.Dropout) else None
        rate = getattr(module, "attention_dropout", rate)
        if isinstance(rate, float) and rate > 0.0:
            return f"{name} applies dropout in training mode"
    return ""
