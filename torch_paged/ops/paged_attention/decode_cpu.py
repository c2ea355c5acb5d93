"""The CPU kernel of decode attention: few torch calls for few float32 rows, else the reference.

After a step has streamed the weights, caches are cold and each torch call costs tens of
microseconds whatever it computes, so this path is written for their number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from torch_paged.ops.paged_attention.reference import (
    _head_norm,
    fused_decode_attention_reference,
)

# Rows are walked one by one; past this many the padded batch of the reference is quicker.
_MAX_ROWS = 16


def fused_decode_attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    counters: Tensor,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    interleaved: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Compute what :func:`fused_decode_attention` computes (`counters` is left as it is)."""
    special = interleaved or softcap > 0 or sinks is not None or alibi_slopes is not None
    plain = query.dtype == k_cache.dtype == torch.float32 and query.shape[0] <= _MAX_ROWS
    if special or not plain:
        return fused_decode_attention_reference(
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
    query = _head_norm(query, q_norm, eps, norm_offset, cast_before_gain)
    key = _head_norm(key, k_norm, eps, norm_offset, cast_before_gain)
    if cos is not None and sin is not None:
        rotation = _rotations(cos, sin, query.shape[-1])
        query, key = query @ rotation, key @ rotation
    slot_list = slots.tolist()
    rows = []
    for row, slot in enumerate(slot_list):
        if slot < 0:
            rows.append(query.new_zeros(1, query.shape[1], value.shape[2]))
            continue
        last = int(context_lens[slot])
        keys, values = _append(
            (k_cache, v_cache), (key[row], value[row]), block_table[slot], last, window
        )
        attended = scaled_dot_product_attention(
            query[row, None, :, None], keys, values, scale=scale, enable_gqa=True
        )
        rows.append(attended[:, :, 0])
    return torch.cat(rows) if len(rows) != 1 else rows[0]


_latest: tuple[Tensor, Tensor] | None = None


def _rotations(cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    """Return [B, D, D] such that ``x @ rotation`` turns the first 2R dims of x [B, H, D].

    Each column has two entries, so the product rounds as the two-term sum does. The matrices of
    the newest angles are kept: all layers of a step share them.
    """
    global _latest
    latest = _latest
    if latest is not None and latest[0] is cos and latest[1].shape[-1] == head_dim:
        return latest[1]
    half = cos.shape[-1]
    rotation = torch.eye(head_dim).repeat(cos.shape[0], 1, 1)
    first = torch.arange(half)
    second = first + half
    rotation[:, first, first] = rotation[:, second, second] = cos
    rotation[:, first, second] = sin
    rotation[:, second, first] = -sin
    _latest = (cos, rotation)
    return rotation


def _append(
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    table_row: Tensor,
    last: int,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Write a row's key and value at index `last`; return all it attends to [1, Hkv, L, D]."""
    block_size = caches[0].shape[2]
    first = max(0, last - window + 1) if window > 0 else 0
    first_block = first // block_size
    ids = table_row[first_block : last // block_size + 1].tolist()
    adjacent = ids == list(range(ids[0], ids[0] + len(ids)))
    base = first_block * block_size
    out = []
    for cache, token in zip(caches, new, strict=True):
        cache.select(0, ids[-1]).select(1, last % block_size).copy_(token)
        if adjacent:
            blocks = cache[ids[0] : ids[0] + len(ids)]
        else:
            blocks = cache.index_select(0, torch.tensor(ids))
        tokens = blocks.transpose(0, 1).flatten(1, 2)
        out.append(tokens[None, :, first - base : last + 1 - base])
    return out[0], out[1]
