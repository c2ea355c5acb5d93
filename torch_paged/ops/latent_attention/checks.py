"""Argument checks shared by the public functions of this folder."""

from __future__ import annotations

import torch
from torch import Tensor


def check_caches(latent_cache: Tensor, rope_cache: Tensor) -> None:
    """Raise unless these are [num_blocks, 1, block_size, dim] and agree but for dim."""
    for name, cache in (("latent_cache", latent_cache), ("rope_cache", rope_cache)):
        if cache.dim() != 4 or cache.shape[1] != 1 or cache.stride(3) != 1:
            raise ValueError(
                f"{name} must be [num_blocks, 1, block_size, dim] with a contiguous last "
                f"dimension, got {list(cache.shape)} with strides {cache.stride()}"
            )
    if latent_cache.shape[:3] != rope_cache.shape[:3] or latent_cache.shape[2] not in (8, 16, 32):
        raise ValueError(
            "latent_cache and rope_cache must have the same blocks of 8, 16 or 32 tokens, got "
            f"{list(latent_cache.shape)} and {list(rope_cache.shape)}"
        )


def check_queries(
    latent_query: Tensor,
    rope_query: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    scale: float,
) -> None:
    """Raise unless queries [num_tokens, num_heads, dim] fit their caches."""
    check_caches(latent_cache, rope_cache)
    for name, query, cache in (
        ("latent_query", latent_query, latent_cache),
        ("rope_query", rope_query, rope_cache),
    ):
        if query.dim() != 3 or query.stride(2) != 1 or query.shape[2] != cache.shape[3]:
            raise ValueError(
                f"{name} must be [num_tokens, num_heads, {cache.shape[3]}] with a contiguous last "
                f"dimension, got {list(query.shape)} with strides {query.stride()}"
            )
        if query.dtype != cache.dtype:
            raise TypeError(f"{name} must have the cache's dtype {cache.dtype}, got {query.dtype}")
    if latent_query.shape[:2] != rope_query.shape[:2]:
        raise ValueError(
            "latent_query and rope_query must agree in tokens and heads, got "
            f"{list(latent_query.shape)} and {list(rope_query.shape)}"
        )
    if latent_query.dtype != rope_query.dtype:
        raise TypeError(
            "latent_query and rope_query must have one dtype, got "
            f"{latent_query.dtype} and {rope_query.dtype}"
        )
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")


def check_place(
    num_tokens: int,
    slot_mapping: Tensor | None,
    block_table: Tensor | None,
    slots: Tensor | None,
    context_lens: Tensor | None,
) -> None:
    """Raise unless tokens are placed by a mapping, or by the slots of their rows."""
    by_rows = [tensor is not None for tensor in (block_table, slots, context_lens)]
    if any(by_rows) == (slot_mapping is not None) or any(by_rows) != all(by_rows):
        raise ValueError("give either slot_mapping, or block_table, slots and context_lens")
    if slot_mapping is not None and (
        slot_mapping.dtype != torch.int64
        or slot_mapping.shape != (num_tokens,)
        or not slot_mapping.is_contiguous()
    ):
        raise ValueError(
            f"slot_mapping must be contiguous int64 [{num_tokens}], got {slot_mapping.dtype} "
            f"{list(slot_mapping.shape)} with strides {slot_mapping.stride()}; call "
            ".long().contiguous()"
        )
