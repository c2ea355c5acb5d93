"""Argument checks shared by the public functions of this folder."""

from __future__ import annotations

import torch


def check_cache(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
) -> None:
    """Raise unless query [.., Hq, D] fits k_cache [blocks, Hkv, bs, D] and v_cache [.., Dv]."""
    if query.dim() != 3 or query.stride(-1) != 1:
        raise ValueError(
            "query must be [num_tokens, num_heads, head_dim] with a contiguous last dimension, "
            f"got shape {list(query.shape)} with strides {query.stride()}"
        )
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache and v_cache must be [num_blocks, num_kv_heads, block_size, head_dim] and "
            f"agree but for head_dim, got {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError("k_cache and v_cache must have a contiguous last dimension")
    if query.shape[2] != k_cache.shape[3] or query.shape[1] % k_cache.shape[1] != 0:
        raise ValueError(
            "query must have the head_dim of k_cache and a multiple of its heads, "
            f"got query {list(query.shape)} and k_cache {list(k_cache.shape)}"
        )
    if k_cache.shape[2] not in (8, 16, 32):
        raise ValueError(f"block_size must be 8, 16 or 32, got {k_cache.shape[2]}")
    if not query.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(
            "query, k_cache and v_cache must have one dtype, "
            f"got {query.dtype}, {k_cache.dtype} and {v_cache.dtype}"
        )
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")


def check_slots(
    block_table: torch.Tensor, slots: torch.Tensor, context_lens: torch.Tensor
) -> None:
    """Raise unless the step's index tensors are int32 and of the right rank."""
    for name, tensor, rank, shape in (
        ("block_table", block_table, 2, "[num_slots, max_blocks]"),
        ("slots", slots, 1, "[num_rows]"),
        ("context_lens", context_lens, 1, "[num_slots]"),
    ):
        if tensor.dtype != torch.int32 or tensor.dim() != rank or tensor.stride(-1) != 1:
            raise TypeError(
                f"{name} must be contiguous int32 {shape}, "
                f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}; "
                "call .int().contiguous()"
            )


def check_heads(name: str, tensor: torch.Tensor | None, num_heads: int) -> None:
    """Raise unless `tensor` is None or holds one contiguous value a query head."""
    if tensor is not None and (tensor.shape != (num_heads,) or not tensor.is_contiguous()):
        raise ValueError(f"{name} must be contiguous [{num_heads}], got {list(tensor.shape)}")


def check_gain(name: str, gain: torch.Tensor | None, head_dim: int) -> None:
    """Raise unless `gain` is None or holds one contiguous value a dimension of a head."""
    if gain is not None and (gain.shape != (head_dim,) or not gain.is_contiguous()):
        raise ValueError(
            f"{name} must be contiguous [{head_dim}], got {list(gain.shape)} with strides "
            f"{gain.stride()}"
        )


def check_window(window: int, softcap: float) -> None:
    """Raise on a negative window or softcap; zero means none."""
    if window < 0 or softcap < 0:
        raise ValueError(f"window and softcap must be >= 0, got {window} and {softcap}")
