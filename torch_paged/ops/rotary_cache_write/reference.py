"""Plain-torch `rotary_cache_write`: the CPU kernel and the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.rms_norm.reference import rms_norm_reference

# Up to this many tokens are copied one by one: cheaper than an indexed write.
_FEW_TOKENS = 2


def _joined(query: Tensor, key: Tensor) -> Tensor | None:
    """View query and key as one tensor when they lie side by side in one projection."""
    num_tokens, num_heads, head_dim = query.shape
    if (
        query.stride(1) != head_dim
        or query.stride()[num_tokens == 1 :] != key.stride()[num_tokens == 1 :]
        or query.storage_offset() + num_heads * head_dim != key.storage_offset()
        or query.untyped_storage().data_ptr() != key.untyped_storage().data_ptr()
    ):
        return None
    shape = (num_tokens, num_heads + key.shape[1], head_dim)
    return query.as_strided(shape, query.stride())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate the leading dimensions of `x` in place; cos and sin are [T, 1, R]."""
    half = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first], x[..., second]
    if x.dtype != torch.float32:
        a, b = a.float(), b.float()
    rotated_a = (a * cos).sub_(b * sin)
    rotated_b = (b * cos).add_(a * sin)
    x[..., first] = rotated_a
    x[..., second] = rotated_b


def _normalize(
    x: Tensor, gain: Tensor, eps: float, offset: float, cast_before_gain: bool, full_width: bool
) -> None:
    rows = x.flatten(1) if full_width else x
    rows.copy_(rms_norm_reference(rows, gain, eps, offset, cast_before_gain))


def _write_cache(
    k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor
) -> None:
    block_size = k_cache.shape[2]
    slots = slot_mapping.tolist()
    if len(slots) <= _FEW_TOKENS:
        for t, slot in enumerate(slots):
            if slot >= 0:
                block, offset = divmod(slot, block_size)
                k_cache[block, :, offset].copy_(key[t])
                v_cache[block, :, offset].copy_(value[t])
        return
    if min(slots) < 0:
        kept = slot_mapping >= 0
        slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
    index = (slot_mapping // block_size, slot_mapping % block_size)
    k_cache.transpose(1, 2).index_put_(index, key.to(k_cache.dtype))
    v_cache.transpose(1, 2).index_put_(index, value.to(v_cache.dtype))


def rotary_cache_write_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    interleaved: bool = False,
    full_width_norm: bool = False,
) -> None:
    """Compute the module's equation with torch, in place."""
    if q_norm is not None:
        _normalize(query, q_norm, eps, norm_offset, cast_before_gain, full_width_norm)
    if k_norm is not None:
        _normalize(key, k_norm, eps, norm_offset, cast_before_gain, full_width_norm)
    if cos is not None and sin is not None:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        joined = _joined(query, key)
        for x in (query, key) if joined is None else (joined,):
            _rotate(x, cos, sin, interleaved)
    _write_cache(k_cache, v_cache, key, value, slot_mapping)
