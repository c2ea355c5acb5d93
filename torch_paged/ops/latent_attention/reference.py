"""Plain torch latent attention: the oracle of the kernels and the CPU kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.rms_norm.reference import rms_norm_reference

# Scores of one chunk of queries: 16 Mi floats, so that long prompts stay near cache sizes.
_MAX_SCORE_ELEMENTS = 1 << 24


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotation: str) -> None:
    """Rotate `x` [T, H, 2 * R] in place; cos and sin are [T, R]."""
    half = cos.shape[-1]
    dtype = _compute_dtype(x)
    cos, sin = cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)
    halves = (slice(0, half), slice(half, 2 * half))
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    read = halves if rotation == "halves" else pairs
    written = pairs if rotation == "pairs" else halves
    a, b = x[..., read[0]].to(dtype), x[..., read[1]].to(dtype)
    rotated_a = (a * cos).sub_(b * sin)
    rotated_b = (b * cos).add_(a * sin)
    x[..., written[0]] = rotated_a
    x[..., written[1]] = rotated_b


def _own_slots(
    slots: Tensor, block_table: Tensor, context_lens: Tensor, block_size: int
) -> Tensor:
    """Return the flat cache index [B] of each row's token, -1 for padding."""
    live = slots >= 0
    index = slots.clamp(min=0).long()
    last = context_lens[index].long()
    blocks = block_table[index, last // block_size].long()
    return torch.where(live, blocks * block_size + last % block_size, -1)


def latent_cache_write_reference(
    query: Tensor,
    compressed: Tensor,
    cos: Tensor,
    sin: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotation: str,
    slot_mapping: Tensor | None = None,
    block_table: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> None:
    """Compute what :func:`latent_cache_write` computes."""
    rank, rope_dim = latent_cache.shape[3], rope_cache.shape[3]
    block_size = latent_cache.shape[2]
    latent, key = compressed.split((rank, rope_dim), dim=-1)
    latent.copy_(rms_norm_reference(latent, norm_weight, eps))
    _rotate(key.unsqueeze(1), cos, sin, rotation)
    _rotate(query[..., query.shape[2] - rope_dim :], cos, sin, rotation)
    if slot_mapping is None:
        assert slots is not None and block_table is not None and context_lens is not None
        slot_mapping = _own_slots(slots, block_table, context_lens, block_size)
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        slot_mapping, latent, key = slot_mapping[kept], latent[kept], key[kept]
    index = (slot_mapping // block_size, slot_mapping % block_size)
    latent_cache[:, 0].index_put_(index, latent.to(latent_cache.dtype))
    rope_cache[:, 0].index_put_(index, key.to(rope_cache.dtype))


def _gather(cache: Tensor, blocks: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Read the first `count` tokens of `blocks` as [count, dim]."""
    return cache[:, 0].index_select(0, blocks).flatten(0, 1)[:count].to(dtype)


def _attend(
    latent_query: Tensor,
    rope_query: Tensor,
    latents: Tensor,
    keys: Tensor,
    scale: float,
    first: int,
) -> Tensor:
    """Attention of queries [n, H, ...] from index `first` on over [L, rank] and [L, rope]."""
    num_queries, num_heads, rank = latent_query.shape
    scores = latent_query.reshape(-1, rank) @ latents.T
    scores += rope_query.reshape(-1, keys.shape[1]) @ keys.T
    scores = (scores * scale).view(num_queries, num_heads, -1)
    if num_queries > 1:
        index = torch.arange(latents.shape[0])
        hidden = index[None, :] > first + torch.arange(num_queries)[:, None]
        scores.masked_fill_(hidden[:, None, :], float("-inf"))
    return torch.softmax(scores, dim=-1) @ latents


def latent_decode_attention_reference(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Compute what :func:`latent_decode_attention` computes."""
    out = torch.zeros_like(latent_query, memory_format=torch.contiguous_format)
    dtype, block_size = _compute_dtype(latent_query), latent_cache.shape[2]
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        count = int(context_lens[slot]) + 1
        blocks = block_table[slot, : (count - 1) // block_size + 1].long()
        out[row] = _attend(
            latent_query[row : row + 1].to(dtype),
            rope_query[row : row + 1].to(dtype),
            _gather(latent_cache, blocks, count, dtype),
            _gather(rope_cache, blocks, count, dtype),
            scale,
            count - 1,
        )[0]
    return out


def latent_prefill_attention_reference(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Compute what :func:`latent_prefill_attention` computes."""
    out = torch.zeros_like(latent_query, memory_format=torch.contiguous_format)
    dtype, block_size = _compute_dtype(latent_query), latent_cache.shape[2]
    bounds, num_heads = cu_seqlens_q.tolist(), latent_query.shape[1]
    for row, slot in enumerate(slots.tolist()):
        length = bounds[row + 1] - bounds[row]
        if slot < 0 or length == 0:
            continue
        prefix = int(context_lens[slot])
        blocks = block_table[slot, : (prefix + length - 1) // block_size + 1].long()
        latents = _gather(latent_cache, blocks, prefix + length, dtype)
        keys = _gather(rope_cache, blocks, prefix + length, dtype)
        step = max(16, _MAX_SCORE_ELEMENTS // (num_heads * (prefix + length)))
        for begin in range(0, length, step):
            end = min(begin + step, length)
            tokens = slice(bounds[row] + begin, bounds[row] + end)
            out[tokens] = _attend(
                latent_query[tokens].to(dtype),
                rope_query[tokens].to(dtype),
                latents[: prefix + end],
                keys[: prefix + end],
                scale,
                prefix + begin,
            )
    return out


__all__ = [
    "latent_cache_write_reference",
    "latent_decode_attention_reference",
    "latent_prefill_attention_reference",
]
