"""Reading of multi-head latent attention, which has one form in transformers."""

from __future__ import annotations

from typing import Any

from torch_paged.decoder.slots import plain_linear_slot, plain_slot
from torch_paged.decoder.spec import LatentAttentionSpec, LinearSpec, ModuleRef, NormSpec, Rotation
from torch_paged.patches.parts import linear, norm
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.traits import Traits


def read_latent_attention(
    model: Any, name: str, config: Any, table: int, traits: Traits
) -> LatentAttentionSpec:
    """Read an attention module whose cache keeps latents."""
    module: Any = model.get_submodule(name)
    hidden, heads, rank = config.hidden_size, module.num_heads, module.kv_lora_rank
    nope, rope, v_dim = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    if module.num_key_value_groups != 1:
        raise SpecRefusal(f"{name} repeats its keys and values")
    query_width = heads * (nope + rope)
    query_norm = None
    if getattr(module, "q_proj", None) is not None:
        query: tuple[LinearSpec, ...] = (linear(model, f"{name}.q_proj", hidden, query_width),)
    else:
        low = module.q_lora_rank
        query = (
            linear(model, f"{name}.q_a_proj", hidden, low),
            linear(model, f"{name}.q_b_proj", low, query_width),
        )
        query_norm = norm(model, f"{name}.q_a_layernorm", traits)
    latent_norm = norm(model, f"{name}.kv_a_layernorm", traits)
    expand = linear(model, f"{name}.kv_b_proj", rank, heads * (nope + v_dim))
    _refuse_what_is_called(latent_norm, expand)
    return LatentAttentionSpec(
        query=query,
        query_norm=query_norm,
        compress=linear(model, f"{name}.kv_a_proj_with_mqa", hidden, rank + rope),
        latent_norm=latent_norm,
        expand=expand,
        output=linear(model, f"{name}.{traits.output}", heads * v_dim, hidden),
        num_heads=heads,
        rank=rank,
        nope_dim=nope,
        rope_dim=rope,
        v_head_dim=v_dim,
        scale=float(module.scaling),
        rotary=table,
        rotation=_rotation(config, traits),
    )


def _rotation(config: Any, traits: Traits) -> Rotation:
    if traits.latent == "config":
        return "pairs_to_halves" if config.rope_interleave else "halves"
    return "pairs" if traits.latent == "pairs" else "halves"


def _refuse_what_is_called(latent_norm: NormSpec, expand: LinearSpec) -> None:
    """Both modules are bypassed: their arithmetic is spread over the step."""
    slots = (plain_slot(latent_norm.ref.module), plain_linear_slot(expand.ref.module))
    for ref, slot in zip((latent_norm.ref, expand.ref), slots, strict=True):
        if slot.kind != "fused":
            raise SpecRefusal(f"{ref.name} cannot be taken apart: {slot.why}")
    module: Any = expand.ref.module
    if module.bias is not None or not module.weight.is_contiguous():
        raise SpecRefusal(f"{expand.ref.name} has a bias, or a weight that is not contiguous")
    _refuse_mixed(latent_norm.ref, expand.ref)


def _refuse_mixed(norm_ref: ModuleRef, expand_ref: ModuleRef) -> None:
    gain, weight = norm_ref.module.weight, expand_ref.module.weight
    if gain.dtype != weight.dtype:
        raise SpecRefusal(f"{norm_ref.name} is {gain.dtype}, {expand_ref.name} {weight.dtype}")
