"""The ops of a decoder without the argument checks of their public functions.

For bound plans, which made every argument themselves and run each op once a layer and step.
Arguments are those of the schemas.
"""

from __future__ import annotations

from importlib import import_module

from torch_paged.ops.registration import registered

for _name in (
    "embed",
    "experts",
    "fused_linear.joined",
    "glu",
    "head_linear",
    "latent_attention",
    "lora_expand",
    "lora_shrink",
    "paged_attention",
    "rms_norm",
    "route_experts",
    "rotary_by_span",
    "rotary_cache_write",
    "rotary_table",
):
    import_module(f"torch_paged.ops.{_name}")

activation = registered("activation")
add_rms_norm = registered("add_rms_norm")
embed = registered("embed")
experts = registered("experts")
fused_decode_attention = registered("fused_decode_attention")
fused_linear = registered("fused_linear")
glu = registered("glu")
head_linear = registered("head_linear")
joined_linear = registered("joined_linear")
latent_cache_write = registered("latent_cache_write")
latent_decode_attention = registered("latent_decode_attention")
latent_prefill_attention = registered("latent_prefill_attention")
lora_expand_ = registered("lora_expand_")
lora_shrink = registered("lora_shrink")
paged_decode_attention = registered("paged_decode_attention")
paged_prefill_attention = registered("paged_prefill_attention")
rms_norm = registered("rms_norm")
rms_norm_add = registered("rms_norm_add")
route_experts = registered("route_experts")
rotary_by_span = registered("rotary_by_span")
rotary_cache_write = registered("rotary_cache_write")
rotary_table = registered("rotary_table")
