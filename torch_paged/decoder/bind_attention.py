"""Binding of attention instructions to the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_paged.decoder.inputs import Binding, Call, StepInputs, Values, gain
from torch_paged.decoder.plan import Attention
from torch_paged.decoder.rotary import constant
from torch_paged.decoder.spec import AttentionSpec
from torch_paged.ops.paged_attention.whole_prompt import whole_prompt_attention
from torch_paged.ops.unchecked import (
    fused_decode_attention,
    paged_decode_attention,
    paged_prefill_attention,
    rotary_cache_write,
)

Heads = tuple[Tensor, Tensor, Tensor]


def _split_heads(spec: AttentionSpec, names: tuple[str, ...]) -> Callable[[Values], Heads]:
    """Return a reader of query [T, Hq, D], key [T, Hkv, D] and value [T, Hkv, Dv] views."""
    hq, hkv, d, dv = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    if spec.layout == "separate":
        q, k, v = names

        def separate(values: Values) -> Heads:
            query, key, value = values[q], values[k], values[v]
            rows = query.shape[0]
            return query.view(rows, hq, d), key.view(rows, hkv, d), value.view(rows, hkv, dv)

        return separate
    (packed,) = names
    if spec.layout == "concat":

        def concat(values: Values) -> Heads:
            qkv = values[packed]
            query, key, value = qkv.split((hq * d, hkv * d, hkv * dv), dim=-1)
            rows = qkv.shape[0]
            return query.view(rows, hq, d), key.view(rows, hkv, d), value.view(rows, hkv, dv)

        return concat

    # The kernels want heads next to each other: one copy of the step's few rows.
    if spec.layout == "per_head":

        def per_head(values: Values) -> Heads:
            qkv = values[packed]
            rows, group = qkv.shape[0], hq // hkv
            heads = qkv.view(rows, hkv, (group + 1) * d + dv)
            query, key, value = heads.split((group * d, d, dv), dim=-1)
            return query.reshape(rows, hq, d), key.contiguous(), value.contiguous()

        return per_head

    def quarters(values: Values) -> Heads:
        qkv = values[packed]
        rows = qkv.shape[0]
        query, value, key = qkv.view(rows, 4, 3, hq // 4, d).unbind(2)
        return query.reshape(rows, hq, d), key.reshape(rows, hq, d), value.reshape(rows, hq, d)

    return quarters


@dataclass(frozen=True, slots=True)
class _HeadNorms:
    """Per-head q/k norm folded into the attention op: gains and how they apply."""

    q: Tensor | None
    k: Tensor | None
    eps: float
    offset: float
    cast: bool


def _head_norms(spec: AttentionSpec) -> _HeadNorms:
    if spec.q_norm is None or spec.k_norm is None or spec.qk_norm_full:
        return _HeadNorms(None, None, 0.0, 0.0, True)
    norm = spec.q_norm
    return _HeadNorms(
        gain(spec.q_norm), gain(spec.k_norm), norm.eps, norm.offset, norm.cast_before_gain
    )


def _sinks(spec: AttentionSpec) -> Tensor | None:
    if spec.sinks is None:
        return None
    ref, name = spec.sinks
    return getattr(ref.module, name).detach()


def _alibi_slopes(spec: AttentionSpec, like: Tensor) -> Tensor | None:
    if not spec.alibi:
        return None
    dtype = torch.bfloat16 if spec.alibi_rounded else torch.float32
    return constant(spec.alibi, like.device, dtype)


# (heads of the rows, cos, sin, slots) -> [num_rows, num_heads, v_head_dim]
_Attend = Callable[[Heads, "Tensor | None", "Tensor | None", Tensor], Tensor]


def _decode_rows(ins: Attention, binding: Binding) -> _Attend:
    """One kernel: norm, rotary, cache write and attention of one token a row."""
    spec = ins.spec
    norms, sinks = _head_norms(spec), _sinks(spec)
    k_cache, v_cache = binding.keys[ins.layer], binding.values[ins.layer]
    block_table = binding.block_table(ins.layer)
    context_lens, counters = binding.state.context_lens, binding.state.counters
    slopes = _alibi_slopes(spec, k_cache)

    def attend(heads: Heads, cos: Tensor | None, sin: Tensor | None, slots: Tensor) -> Tensor:
        query, key, value = heads
        return fused_decode_attention(
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
            scale=spec.scale,
            q_norm=norms.q,
            k_norm=norms.k,
            eps=norms.eps,
            norm_offset=norms.offset,
            cast_before_gain=norms.cast,
            interleaved=spec.interleaved,
            window=spec.window,
            softcap=spec.softcap,
            sinks=sinks,
            alibi_slopes=slopes,
        )

    return attend


def _rotation(
    tables: tuple[str, str] | None, values: Values
) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if tables is None else (values[tables[0]], values[tables[1]])


def _decode_in_front(
    attend: _Attend, heads: Heads, cos: Tensor | None, sin: Tensor | None, slots: Tensor | None
) -> Tensor | None:
    """Attend from the first tokens of a packing, which are of decoding rows, if there are any."""
    if slots is None:
        return None
    count = slots.shape[0]
    query, key, value = (part[:count] for part in heads)
    if cos is not None and sin is not None:
        cos, sin = cos[:count], sin[:count]
    return attend((query, key, value), cos, sin, slots)


def bind_decode_attention(ins: Attention, binding: Binding) -> Call:
    """Attention of the rows of a decode step."""
    spec, target, tables = ins.spec, ins.target, ins.tables
    heads, attend = _split_heads(spec, ins.projections), _decode_rows(ins, binding)
    width = spec.num_heads * spec.v_head_dim

    def call(values: Values, inputs: StepInputs) -> None:
        cos, sin = _rotation(tables, values)
        out = attend(heads(values), cos, sin, inputs.slots)
        values[target] = out.view(out.shape[0], width)

    return call


def bind_prefill_attention(ins: Attention, binding: Binding) -> Call:
    """Norm, rotary and cache write of packed prompts, then attention over the paged cache.

    Rows that decode beside them take the kernel of a decode step.
    """
    spec, target, tables = ins.spec, ins.target, ins.tables
    heads, norms = _split_heads(spec, ins.projections), _head_norms(spec)
    attend_decoding, attend = _decode_rows(ins, binding), _bind_attend(ins, binding)
    k_cache, v_cache = binding.keys[ins.layer], binding.values[ins.layer]
    table = binding.tables[ins.layer]
    width = spec.num_heads * spec.v_head_dim

    def call(values: Values, inputs: StepInputs) -> None:
        assert inputs.slot_mappings
        query, key, value = heads(values)
        cos, sin = _rotation(tables, values)
        # Before the next op rotates all queries and keys in place, theirs for nothing.
        decoded = _decode_in_front(attend_decoding, (query, key, value), cos, sin, inputs.decoding)
        rotary_cache_write(
            query,
            key,
            value,
            cos,
            sin,
            k_cache,
            v_cache,
            inputs.slot_mappings[table],
            q_norm=norms.q,
            k_norm=norms.k,
            eps=norms.eps,
            norm_offset=norms.offset,
            cast_before_gain=norms.cast,
            interleaved=spec.interleaved,
        )
        out = _within_prompt(spec, inputs, query, key, value)
        if out is None:
            out = attend(query, inputs)
        if decoded is not None:
            out[: decoded.shape[0]].copy_(decoded)
        values[target] = out.reshape(out.shape[0], width)

    return call


def _bind_attend(ins: Attention, binding: Binding) -> Callable[[Tensor, StepInputs], Tensor]:
    """Attention of tokens [num_tokens, num_heads, head_dim] whose keys and values are written."""
    spec, sinks, state = ins.spec, _sinks(ins.spec), binding.state
    caches = (binding.keys[ins.layer], binding.values[ins.layer])
    block_table, table = binding.block_table(ins.layer), binding.tables[ins.layer]
    kinds = {
        "scale": spec.scale,
        "window": spec.window,
        "softcap": spec.softcap,
        "sinks": sinks,
        "alibi_slopes": _alibi_slopes(spec, caches[0]),
    }

    def attend(query: Tensor, inputs: StepInputs) -> Tensor:
        rows = inputs.token_rows
        if rows is not None:
            return paged_decode_attention(
                query,
                *caches,
                rows.block_tables[table],
                rows.slots,
                rows.context_lens,
                state.counters,
                **kinds,
            )
        assert inputs.cu_seqlens is not None
        return paged_prefill_attention(
            query,
            *caches,
            block_table,
            inputs.slots,
            inputs.cu_seqlens,
            state.prefix_lens,
            max_query_len=inputs.max_query_len,
            **kinds,
        )

    return attend


def _within_prompt(
    spec: AttentionSpec, inputs: StepInputs, query: Tensor, key: Tensor, value: Tensor
) -> Tensor | None:
    """Attend within a whole prompt, where that needs no cache and is served."""
    if not inputs.whole_prompt or spec.softcap or spec.sinks or spec.alibi:
        return None
    if 0 < spec.window < query.shape[0]:
        return None
    return whole_prompt_attention(query, key, value, spec.scale)
