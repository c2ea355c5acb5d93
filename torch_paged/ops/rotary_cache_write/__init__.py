"""Query/key norm, rotary embedding and KV cache write in one pass over q, k and v.

    q, k = rms_norm(q), rms_norm(k)                    when gains are given, rounded to the dtype
    [a, b] -> [a cos - b sin, b cos + a sin]           fp32, rounded once
    k_cache[block, :, offset], v_cache[...] = k, v     slot = block * block_size + offset

(a, b) are dimensions (r, r + R) of a head, or (2r, 2r + 1) when interleaved, for r < R; the
dimensions from 2R on pass through. The norm spans a head, or the whole projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.registration import register_op
from torch_paged.ops.rotary_cache_write.kernel import _launch_rotary_cache_write
from torch_paged.ops.rotary_cache_write.reference import rotary_cache_write_reference

__all__ = ["rotary_cache_write", "rotary_cache_write_reference"]


def _rotary_cache_write_fake(
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
    return None


_ROTARY_CACHE_WRITE = register_op(
    "rotary_cache_write(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor? cos, "
    "Tensor? sin, Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor slot_mapping, "
    "Tensor? q_norm=None, Tensor? k_norm=None, float eps=0.0, float norm_offset=0.0, "
    "bool cast_before_gain=True, bool interleaved=False, bool full_width_norm=False) -> ()",
    cpu=rotary_cache_write_reference,
    cuda=_launch_rotary_cache_write,
    fake=_rotary_cache_write_fake,
)


def rotary_cache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    interleaved: bool = False,
    full_width_norm: bool = False,
) -> None:
    """Norm and rotate `query` and `key` in place, and write key and value into their blocks.

    Args:
        query: [num_tokens, num_query_heads, head_dim], floating, written; head_dim contiguous,
            the other strides free, so q, k and v may be views into one projection.
        key: [num_tokens, num_kv_heads, head_dim] in the dtype of `query`, written.
        value: [num_tokens, num_kv_heads, value_dim] in the dtype of `query`.
        cos: fp32 [num_tokens, num_freqs], contiguous, or None for no rotation; the first
            2 * num_freqs dimensions of a head turn.
        sin: like `cos`.
        k_cache: [num_blocks, num_kv_heads, block_size, head_dim], written; last dimension
            contiguous. Keys are rounded to its dtype.
        v_cache: [num_blocks, num_kv_heads, block_size, value_dim], likewise.
        slot_mapping: int64 [num_tokens], contiguous, block * block_size + offset of each token;
            -1 leaves the cache alone.
        q_norm: gain of the query norm, [head_dim], or [num_query_heads * head_dim] under
            `full_width_norm`; None for no norm.
        k_norm: gain of the key norm, likewise.
        eps, norm_offset, cast_before_gain: as in `torch_paged.ops.rms_norm`; the results are
            rounded to the dtype of `query` before the rotation.
        interleaved: rotate (even, odd) pairs instead of the two halves.
        full_width_norm: norm the whole projection instead of each head.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    if not torch.compiler.is_compiling():
        _check(query, key, value, cos, sin, k_cache, v_cache, slot_mapping)
        _check_norm("q_norm", q_norm, query, norm_offset, cast_before_gain, full_width_norm)
        _check_norm("k_norm", k_norm, key, norm_offset, cast_before_gain, full_width_norm)
    _ROTARY_CACHE_WRITE(
        query,
        key,
        value,
        cos,
        sin,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm,
        k_norm,
        eps,
        norm_offset,
        cast_before_gain,
        interleaved,
        full_width_norm,
    )


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3 or not x.is_floating_point() or x.dtype != query.dtype:
            raise ValueError(
                f"{name} must be floating [num_tokens, num_heads, head_dim] in the dtype of "
                f"query, got {x.dtype} {list(x.shape)}"
            )
        if x.stride(2) != 1 or x.shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} must have {query.shape[0]} tokens and contiguous heads, got "
                f"{list(x.shape)} with strides {x.stride()}"
            )
    for name, cache, x in (("k_cache", k_cache, key), ("v_cache", v_cache, value)):
        if (
            cache.dim() != 4
            or cache.shape[1] != x.shape[1]
            or cache.shape[3] != x.shape[2]
            or cache.shape[2] != k_cache.shape[2]
            or cache.stride(3) != 1
        ):
            raise ValueError(
                f"{name} must be [num_blocks, {x.shape[1]}, block_size, {x.shape[2]}] with a "
                f"contiguous last dimension, got {list(cache.shape)} with strides "
                f"{cache.stride()}"
            )
    fits = slot_mapping.shape == query.shape[:1] and slot_mapping.is_contiguous()
    if slot_mapping.dtype != torch.int64 or not fits:
        raise ValueError(
            f"slot_mapping must be contiguous int64 [{query.shape[0]}], got {slot_mapping.dtype} "
            f"{list(slot_mapping.shape)} with strides {slot_mapping.stride()}; "
            "call .long().contiguous()"
        )
    if key.shape[2] != query.shape[2] or key.shape[1] != value.shape[1]:
        raise ValueError(
            f"key must be [num_tokens, {value.shape[1]}, {query.shape[2]}], the heads of value "
            f"and the head_dim of query, got {list(key.shape)}"
        )
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must both be given or both be None")
    if cos is None or sin is None:
        return
    for name, table in (("cos", cos), ("sin", sin)):
        if (
            table.dtype != torch.float32
            or table.dim() != 2
            or table.shape != cos.shape
            or table.shape[0] != query.shape[0]
            or 2 * table.shape[1] > query.shape[2]
            or not table.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be contiguous float32 [{query.shape[0]}, num_freqs] with num_freqs "
                f"at most {query.shape[2] // 2}, got {table.dtype} {list(table.shape)}"
            )


def _check_norm(
    name: str,
    gain: Tensor | None,
    x: Tensor,
    norm_offset: float,
    cast_before_gain: bool,
    full_width_norm: bool,
) -> None:
    if gain is None:
        return
    width = x.shape[1] * x.shape[2] if full_width_norm else x.shape[2]
    if gain.shape != (width,) or not gain.is_contiguous():
        raise ValueError(f"{name} must be contiguous [{width}], got {list(gain.shape)}")
    if cast_before_gain and norm_offset == 0.0 and gain.dtype != x.dtype:
        raise ValueError(
            f"{name} must be {x.dtype} like query under cast_before_gain, since the product "
            f"would be promoted, got {gain.dtype}; norm on its own with rms_norm"
        )
