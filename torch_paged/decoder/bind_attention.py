"""Binding of attention instructions to the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from torch_paged.decoder.inputs import Binding, Call, StepInputs, Values, gain
from torch_paged.decoder.plan import Attention
from torch_paged.decoder.spec import AttentionSpec
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

    def per_head(values: Values) -> Heads:
        qkv = values[packed]
        heads = qkv.view(qkv.shape[0], hkv, 2 * d + dv)
        query, key, value = heads.split((d, d, dv), dim=-1)
        # The kernels want heads next to each other; one copy of the step's few rows.
        return query.contiguous(), key.contiguous(), value.contiguous()

    return per_head


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


def bind_decode_attention(ins: Attention, binding: Binding) -> Call:
    """One kernel: norm, rotary, cache write and attention of the rows of a decode step."""
    spec, target, tables = ins.spec, ins.target, ins.tables
    heads = _split_heads(spec, ins.projections)
    norms, sinks = _head_norms(spec), _sinks(spec)
    k_cache, v_cache = binding.keys[ins.layer], binding.values[ins.layer]
    state = binding.state
    block_table = binding.block_table(ins.layer)
    context_lens, counters = state.context_lens, state.counters
    width = spec.num_heads * spec.v_head_dim

    def call(values: Values, inputs: StepInputs) -> None:
        query, key, value = heads(values)
        out = fused_decode_attention(
            query,
            key,
            value,
            None if tables is None else values[tables[0]],
            None if tables is None else values[tables[1]],
            k_cache,
            v_cache,
            block_table,
            inputs.slots,
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
        )
        values[target] = out.view(out.shape[0], width)

    return call


def bind_prefill_attention(ins: Attention, binding: Binding) -> Call:
    """Norm, rotary and cache write of packed prompts, then attention over the paged cache."""
    spec, target, tables = ins.spec, ins.target, ins.tables
    heads, norms = _split_heads(spec, ins.projections), _head_norms(spec)
    k_cache, v_cache = binding.keys[ins.layer], binding.values[ins.layer]
    table = binding.tables[ins.layer]
    attend = _bind_attend(ins, binding)
    width = spec.num_heads * spec.v_head_dim

    def call(values: Values, inputs: StepInputs) -> None:
        assert inputs.slot_mappings
        query, key, value = heads(values)
        rotary_cache_write(
            query,
            key,
            value,
            None if tables is None else values[tables[0]],
            None if tables is None else values[tables[1]],
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
        out = attend(query, inputs)
        values[target] = out.view(out.shape[0], width)

    return call


def _bind_attend(ins: Attention, binding: Binding) -> Callable[[Tensor, StepInputs], Tensor]:
    """Attention of tokens [num_tokens, num_heads, head_dim] whose keys and values are written."""
    spec, sinks, state = ins.spec, _sinks(ins.spec), binding.state
    caches = (binding.keys[ins.layer], binding.values[ins.layer])
    block_table, table = binding.block_table(ins.layer), binding.tables[ins.layer]
    kinds = dict(scale=spec.scale, window=spec.window, softcap=spec.softcap, sinks=sinks)

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
            state.context_lens,
            max_query_len=inputs.max_query_len,
            **kinds,
        )

    return attend
