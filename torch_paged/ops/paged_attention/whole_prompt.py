"""Causal attention within one whole prompt, of which the cache holds nothing yet.

Nothing has to be looked up by blocks then, and from `WHOLE_PROMPT_TOKENS` on cuDNN's kernel is
quicker than the paged one (benchmarks/ops_attention.py). On a CPU torch's own is quicker than the
paged reference at any length.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

# Below it the two are alike.
WHOLE_PROMPT_TOKENS = 1024

# cuDNN plans anew for each length, which takes some 40 ms: prompts share the plans of multiples.
_LENGTH_STEP = 256


@functools.cache
def _hopper_or_newer(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def may_serve(query: torch.Tensor) -> bool:
    """Say whether `whole_prompt_attention` of such queries [num_tokens, ...] may be served."""
    if query.device.type == "cpu":
        return query.dtype == torch.float32
    if query.dtype == torch.float32 or query.shape[0] < WHOLE_PROMPT_TOKENS:
        return False
    return query.is_cuda and _hopper_or_newer(query.device.index or 0)


def whole_prompt_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor | None:
    """Attend causally within one prompt; None where the paged kernel is to serve it.

    Args:
        query: [num_tokens, num_heads, head_dim], last dim contiguous; keys and values likewise
            with num_kv_heads, which divides num_heads.
        scale: of the scores.

    Returns:
        [num_tokens, num_heads, v_head_dim], dtype of `query`.
    """
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    if not may_serve(query):
        return None
    if query.device.type == "cpu":
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
    if not torch.backends.cuda.can_use_cudnn_attention(parameters):
        return None
    num_tokens = query.shape[0]
    if rest := -num_tokens % _LENGTH_STEP:
        # Under the causal mask nothing attends to what stands behind it.
        q, k, v = (pad(part, (0, 0, 0, rest)) for part in (q, k, v))
    # Not through scaled_dot_product_attention: choosing a backend there is global state.
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    heads: torch.Tensor = cudnn(q, k, v, None, False, is_causal=True, scale=scale)[0]
    return heads.squeeze(0).transpose(0, 1)[:num_tokens]


__all__ = ["WHOLE_PROMPT_TOKENS", "may_serve", "whole_prompt_attention"]
