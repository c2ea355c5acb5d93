"""Plain torch attention over the paged KV cache: the oracle of the kernels and the CPU kernel.

The arithmetic is that of eager attention: ``softmax(q k^T * scale + mask) v`` in float32 (float64
for float64 inputs), with query heads viewed as ``[num_kv_heads, group]`` so that keys and values
are never repeated.
"""

from __future__ import annotations

import torch

# Scores of one query chunk in prefill: 16 Mi floats, so that long prompts stay near cache sizes.
_MAX_SCORE_ELEMENTS = 1 << 24


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _head_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast_before_gain: bool
) -> torch.Tensor:
    """RMS norm over the last dimension, rounded to the dtype of `x`."""
    if weight is None:
        return x
    dtype = _compute_dtype(x)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_gain and offset == 0:
        normed = normed.to(x.dtype).to(dtype)
    return (normed * (weight.to(dtype) + offset)).to(x.dtype)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` dimensions of every head of `x` [B, H, D]."""
    if cos is None or sin is None:
        return x
    half = cos.shape[-1]
    dtype = _compute_dtype(x)
    cos, sin = cos[:, None, :].to(dtype), sin[:, None, :].to(dtype)
    rotated = x[..., : 2 * half].to(dtype)
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _gather_tokens(
    cache: torch.Tensor, blocks: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    """Read blocks [B, n] of `cache` as [B, num_kv_heads, stop - start, D] in one copy."""
    num_heads, block_size, head_dim = cache.shape[1:]
    heads = torch.arange(num_heads, device="cpu")
    if cache.stride(0) == num_heads * cache.stride(1):
        index = blocks[:, None, :] * num_heads + heads[None, :, None]
        tokens = cache.flatten(0, 1).index_select(0, index.reshape(-1))
    else:
        tokens = cache[blocks[:, None, :], heads[None, :, None]]
    tokens = tokens.view(blocks.shape[0], num_heads, blocks.shape[1] * block_size, head_dim)
    return tokens[:, :, start:stop].to(dtype)


def _window_columns(last: torch.Tensor, window: int, block_size: int) -> torch.Tensor:
    """Return the columns [B, n] of the block table that tokens at `last` [B] see.

    Rows that see fewer repeat their last one: what lies around it may be gone.
    """
    final = last // block_size
    first = (last - window + 1).clamp(min=0) // block_size
    count = int((final - first).max()) + 1
    return torch.minimum(first[:, None] + torch.arange(count, device="cpu"), final[:, None])


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_index: torch.Tensor,
    key_index: torch.Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    masked: bool,
) -> torch.Tensor:
    """Attention of query [B, Hkv, G, n, D] over keys [B, Hkv, L, D]; indices [B, n] and [B, L]."""
    batch, num_kv_heads, group, num_queries, head_dim = query.shape
    rows = query.reshape(batch, num_kv_heads, group * num_queries, head_dim)
    scores = torch.matmul(rows, keys.transpose(-1, -2)) * scale
    scores = scores.view(batch, num_kv_heads, group, num_queries, -1)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None or masked:
        distance = (key_index[:, None, :] - query_index[:, :, None])[:, None, None]
    if alibi_slopes is not None:
        slopes = alibi_slopes.view(1, num_kv_heads, group, 1, 1)
        if slopes.dtype == torch.bfloat16:
            biases = slopes * key_index[:, None, None, None, :]
            scores = scores + biases.to(scores.dtype) * scale
        else:
            scores = scores + slopes.to(scores.dtype) * distance
    if masked:
        hidden = distance > 0
        if window > 0:
            hidden = hidden | (distance <= -window)
        scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, num_kv_heads, group, 1, 1)
        scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.reshape(batch, num_kv_heads, group * num_queries, -1)
    return torch.matmul(weights, values).view(*query.shape[:-1], values.shape[-1])


def paged_decode_attention_reference(
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
    """Compute what :func:`paged_decode_attention` computes (`counters` is left as it is)."""
    batch, num_heads, _ = query.shape
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    slot_list = slots.tolist()
    output = query.new_zeros(batch, num_heads, v_cache.shape[-1])
    live = [row for row, slot in enumerate(slot_list) if slot >= 0]
    if not live:
        return output
    live_slots = torch.tensor([slot_list[row] for row in live], device="cpu")
    last = context_lens[live_slots].long()  # index of the query's own token
    low, high = (int(value) for value in last.aminmax())
    masked = low != high
    dtype = _compute_dtype(query)
    if masked and window > 0:
        columns = _window_columns(last, window, block_size)
        blocks = block_table[live_slots[:, None], columns].long()
        count = blocks.shape[1] * block_size
        keys = _gather_tokens(k_cache, blocks, 0, count, dtype)
        values = _gather_tokens(v_cache, blocks, 0, count, dtype)
        key_index = columns[:, :1] * block_size + torch.arange(count, device="cpu")
        hidden = (key_index > last[:, None]) | (key_index <= last[:, None] - window)
        # A weight of zero times NaN is NaN, so values out of sight are cleared as well.
        values.masked_fill_(hidden[:, None, :, None], 0.0)
    else:
        first_key = max(0, low - window + 1) if window > 0 else 0
        first_block = first_key // block_size
        blocks = block_table[live_slots, first_block : high // block_size + 1].long()
        base = first_block * block_size
        if masked:
            # Entries past a row's own blocks are unset; their tokens are hidden below.
            blocks = blocks.clamp_(0, k_cache.shape[0] - 1)
        keys = _gather_tokens(k_cache, blocks, first_key - base, high + 1 - base, dtype)
        values = _gather_tokens(v_cache, blocks, first_key - base, high + 1 - base, dtype)
        key_index = torch.arange(first_key, high + 1, device="cpu")[None]
        if masked:
            tail = values[:, :, low + 1 - first_key :]
            unwritten = key_index[:, low + 1 - first_key :] > last[:, None]
            tail.masked_fill_(unwritten[:, None, :, None], 0.0)
    rows = query if len(live) == batch else query[live]
    result = _attend(
        rows.to(dtype).reshape(len(live), num_kv_heads, -1, 1, head_dim),
        keys,
        values,
        last[:, None],
        key_index,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        masked=masked,
    )
    output[live] = result.reshape(len(live), num_heads, -1).to(query.dtype)
    return output


def fused_decode_attention_reference(
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
    """Compute what :func:`fused_decode_attention` computes (`counters` is left as it is)."""
    query = _rotate(
        _head_norm(query, q_norm, eps, norm_offset, cast_before_gain), cos, sin, interleaved
    )
    key = _rotate(
        _head_norm(key, k_norm, eps, norm_offset, cast_before_gain), cos, sin, interleaved
    )
    live = (slots >= 0).nonzero().flatten()
    live_slots = slots[live].long()
    last = context_lens[live_slots].long()
    block_size = k_cache.shape[2]
    blocks = block_table[live_slots, last // block_size].long()
    k_cache[blocks, :, last % block_size] = key[live].to(k_cache.dtype)
    v_cache[blocks, :, last % block_size] = value[live].to(v_cache.dtype)
    return paged_decode_attention_reference(
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


def paged_prefill_attention_reference(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what :func:`paged_prefill_attention` computes."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    dtype = _compute_dtype(query)
    output = query.new_zeros(query.shape[0], num_heads, v_cache.shape[-1])
    bounds = cu_seqlens_q.tolist()
    for row, slot in enumerate(slots.tolist()):
        length = bounds[row + 1] - bounds[row]
        if slot < 0 or length == 0:
            continue
        prefix = int(context_lens[slot])
        first_key = max(0, prefix - window + 1) if window > 0 else 0
        first_block = first_key // block_size
        base = first_block * block_size
        total = prefix + length
        blocks = block_table[slot, first_block : (total - 1) // block_size + 1].long()[None]
        keys = _gather_tokens(k_cache, blocks, first_key - base, total - base, dtype)
        values = _gather_tokens(v_cache, blocks, first_key - base, total - base, dtype)
        step = max(16, _MAX_SCORE_ELEMENTS // (num_heads * (total - first_key)))
        for begin in range(0, length, step):
            end = min(begin + step, length)
            low = max(first_key, prefix + begin - window + 1) if window > 0 else 0
            high = prefix + end
            tokens = slice(bounds[row] + begin, bounds[row] + end)
            rows = query[tokens].to(dtype).transpose(0, 1)
            result = _attend(
                rows.reshape(1, num_kv_heads, group, end - begin, head_dim),
                keys[:, :, low - first_key : high - first_key],
                values[:, :, low - first_key : high - first_key],
                torch.arange(prefix + begin, high, device="cpu")[None],
                torch.arange(low, high, device="cpu")[None],
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
                masked=end - begin > 1,
            )
            result = result.reshape(num_heads, end - begin, -1).transpose(0, 1)
            output[tokens] = result.to(query.dtype)
    return output
