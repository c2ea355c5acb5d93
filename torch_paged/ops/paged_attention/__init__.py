"""Attention over a paged KV cache: one token a row (decode) and packed prompts (prefill)."""

from torch_paged.ops.paged_attention.decode import (
    fused_decode_attention,
    fused_decode_attention_reference,
    paged_decode_attention,
    paged_decode_attention_reference,
)
from torch_paged.ops.paged_attention.prefill import (
    paged_prefill_attention,
    paged_prefill_attention_reference,
)

__all__ = [
    "fused_decode_attention",
    "fused_decode_attention_reference",
    "paged_decode_attention",
    "paged_decode_attention_reference",
    "paged_prefill_attention",
    "paged_prefill_attention_reference",
]
