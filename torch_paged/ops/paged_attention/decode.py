"""Decode attention over the paged KV cache: one token a row, split over the context."""

from __future__ import annotations

import torch

from torch_paged.ops.paged_attention.checks import (
    check_cache,
    check_gain,
    check_heads,
    check_slots,
    check_window,
)
from torch_paged.ops.paged_attention.decode_launch import (
    _launch_fused_decode_attention,
    _launch_paged_decode_attention,
)
from torch_paged.ops.paged_attention.reference import (
    fused_decode_attention_reference,
    paged_decode_attention_reference,
)
from torch_paged.ops.registration import register_op


def _fake_fused_decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    counters: torch.Tensor,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    interleaved: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], v_cache.shape[-1])


def _fake_paged_decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    counters: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], v_cache.shape[-1])


_fused_decode_attention = register_op(
    "fused_decode_attention(Tensor query, Tensor key, Tensor value, Tensor? cos, Tensor? sin, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, Tensor slots, "
    "Tensor context_lens, Tensor(c!) counters, float scale, Tensor? q_norm=None, "
    "Tensor? k_norm=None, float eps=0.0, float norm_offset=0.0, bool cast_before_gain=True, "
    "bool interleaved=False, int window=0, float softcap=0.0, Tensor? sinks=None, "
    "Tensor? alibi_slopes=None) -> Tensor",
    cpu=fused_decode_attention_reference,
    cuda=_launch_fused_decode_attention,
    fake=_fake_fused_decode_attention,
)
_paged_decode_attention = register_op(
    "paged_decode_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor slots, Tensor context_lens, Tensor(a!) counters, float scale, int window=0, "
    "float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None) -> Tensor",
    cpu=paged_decode_attention_reference,
    cuda=_launch_paged_decode_attention,
    fake=_fake_paged_decode_attention,
)


def _check_counters(counters: torch.Tensor, num_rows: int, num_kv_heads: int) -> None:
    enough = counters.numel() >= num_rows * num_kv_heads
    if counters.dtype != torch.int32 or not enough or not counters.is_contiguous():
        raise ValueError(
            f"counters must be contiguous int32 zeros of at least {num_rows * num_kv_heads} "
            f"elements (num_rows * num_kv_heads), got {counters.dtype} {list(counters.shape)} "
            f"with strides {counters.stride()}"
        )


def fused_decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    counters: torch.Tensor,
    *,
    scale: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    interleaved: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate one token a row, write it to the cache and attend over the whole context.

    The new key and value are written at index ``context_lens[slot]``; attention then covers
    ``context_lens[slot] + 1`` tokens. All of it is one kernel whose grid depends on shapes only,
    so a graph captured at short contexts stays right at long ones.

    Args:
        query: [num_rows, num_heads, head_dim], rows may be strided.
        key: [num_rows, num_kv_heads, head_dim], rows may be strided.
        value: [num_rows, num_kv_heads, v_head_dim], rows may be strided.
        cos: [num_rows, rotary_dim / 2] float32, or None for no rotation.
        sin: like `cos`.
        k_cache: [num_blocks, num_kv_heads, block_size, head_dim]; written.
        v_cache: [num_blocks, num_kv_heads, block_size, v_head_dim]; written.
        block_table: [num_slots, max_blocks] int32, blocks of each slot in order.
        slots: [num_rows] int32; a row with slot -1 is padding: zero output, nothing written.
        context_lens: [num_slots] int32, cached tokens before this one.
        counters: contiguous int32 zeros, at least num_rows * num_kv_heads; zero again afterwards.
        scale: factor on the scores.
        q_norm: [head_dim] contiguous gain of an RMS norm of each query head before the rotation.
        k_norm: [head_dim], likewise for keys.
        eps: epsilon of both norms.
        norm_offset: added to both gains.
        cast_before_gain: round the normalised value to the dtype before the gain.
        interleaved: rotate pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        window: when positive, the query at index i sees keys j with i - window < j <= i.
        softcap: when positive, scores become ``softcap * tanh(score / softcap)``.
        sinks: [num_heads], one extra logit a head in the softmax denominator.
        alibi_slopes: [num_heads], adds ``slope * (j - i)`` to the score of key j; in bfloat16
            ``scale * (slope * j)``, the product and j in that dtype, as Falcon has it.

    Returns:
        [num_rows, num_heads, v_head_dim] in the dtype of `query`.
    """
    if not torch.compiler.is_compiling():
        check_cache(query, k_cache, v_cache, scale)
        check_slots(block_table, slots, context_lens)
        check_heads("sinks", sinks, query.shape[1])
        check_heads("alibi_slopes", alibi_slopes, query.shape[1])
        check_window(window, softcap)
        _check_counters(counters, query.shape[0], k_cache.shape[1])
        check_gain("q_norm", q_norm, query.shape[2])
        check_gain("k_norm", k_norm, query.shape[2])
        _check_new_token(key, value, k_cache, v_cache)
        _check_rotary(query, cos, sin)
    return _fused_decode_attention(
        query,
        key,
        value,
        cos,
        sin,
        k_cache,
        v_cache,
        block_table,
        slots,
        context_lens,
        counters,
        scale,
        q_norm,
        k_norm,
        eps,
        norm_offset,
        cast_before_gain,
        interleaved,
        window,
        softcap,
        sinks,
        alibi_slopes,
    )


def _check_new_token(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    for name, tensor, cache in (("key", key, k_cache), ("value", value, v_cache)):
        if tensor.shape[1:] != (cache.shape[1], cache.shape[3]) or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be [num_rows, {cache.shape[1]}, {cache.shape[3]}] with a contiguous "
                f"last dimension, got {list(tensor.shape)} with strides {tensor.stride()}"
            )
        if tensor.dtype != cache.dtype:
            raise TypeError(
                f"{name} must have the cache's dtype {cache.dtype}, got {tensor.dtype}"
            )


def _check_rotary(query: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given together")
    if cos is None or sin is None:
        return
    num_rows, _, head_dim = query.shape
    if (
        cos.shape != sin.shape
        or cos.dim() != 2
        or cos.shape[0] != num_rows
        or 2 * cos.shape[1] > head_dim
        or cos.stride() != sin.stride()
        or cos.stride(-1) != 1
    ):
        raise ValueError(
            f"cos and sin must be alike [{num_rows}, at most {head_dim // 2}], "
            f"got {list(cos.shape)} and {list(sin.shape)}"
        )


def paged_decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    counters: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one token a row to its context, its own key and value already in the cache.

    As in :func:`fused_decode_attention`, `context_lens` does not count the row's own token:
    attention covers ``context_lens[slot] + 1`` tokens.

    Args:
        query: [num_rows, num_heads, head_dim], rows may be strided.
        k_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        v_cache: [num_blocks, num_kv_heads, block_size, v_head_dim].
        block_table: [num_slots, max_blocks] int32, blocks of each slot in order.
        slots: [num_rows] int32; a row with slot -1 is padding: zero output.
        context_lens: [num_slots] int32, cached tokens before this one.
        counters: contiguous int32 zeros, at least num_rows * num_kv_heads; zero again afterwards.
        scale: factor on the scores.
        window: when positive, the query at index i sees keys j with i - window < j <= i.
        softcap: when positive, scores become ``softcap * tanh(score / softcap)``.
        sinks: [num_heads], one extra logit a head in the softmax denominator.
        alibi_slopes: [num_heads], adds ``slope * (j - i)`` to the score of key j; in bfloat16
            ``scale * (slope * j)``, the product and j in that dtype, as Falcon has it.

    Returns:
        [num_rows, num_heads, v_head_dim] in the dtype of `query`.
    """
    if not torch.compiler.is_compiling():
        check_cache(query, k_cache, v_cache, scale)
        check_slots(block_table, slots, context_lens)
        check_heads("sinks", sinks, query.shape[1])
        check_heads("alibi_slopes", alibi_slopes, query.shape[1])
        check_window(window, softcap)
        _check_counters(counters, query.shape[0], k_cache.shape[1])
    return _paged_decode_attention(
        query,
        k_cache,
        v_cache,
        block_table,
        slots,
        context_lens,
        counters,
        scale,
        window,
        softcap,
        sinks,
        alibi_slopes,
    )


__all__ = [
    "fused_decode_attention",
    "fused_decode_attention_reference",
    "paged_decode_attention",
    "paged_decode_attention_reference",
]
