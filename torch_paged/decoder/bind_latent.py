"""Binding of latent attention: the projections of keys and values go with the queries.

The weight of `expand` is read in place, through views [num_heads, nope_dim, rank] and
[num_heads, v_head_dim, rank]: one takes queries into the space of the latents, the other takes
what attention returns out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_paged.decoder.inputs import Binding, Call, StepInputs, Values, gain
from torch_paged.decoder.plan_latent import LatentAttention
from torch_paged.decoder.spec import LatentAttentionSpec
from torch_paged.ops.paged_attention.whole_prompt import may_serve, whole_prompt_attention
from torch_paged.ops.unchecked import (
    head_linear,
    latent_cache_write,
    latent_decode_attention,
    latent_prefill_attention,
)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Views of the model's own parameters.

    Attributes:
        keys: [num_heads, nope_dim, rank].
        values: [num_heads, rank, v_head_dim].
        norm: gain [rank].
    """

    expand: Tensor
    keys: Tensor
    values: Tensor
    norm: Tensor


def _weights(spec: LatentAttentionSpec) -> _Weights:
    expand, norm = spec.expand.ref.module.weight.detach(), gain(spec.latent_norm)
    assert norm is not None
    heads = expand.view(spec.num_heads, spec.nope_dim + spec.v_head_dim, spec.rank)
    keys, values = heads.split((spec.nope_dim, spec.v_head_dim), dim=1)
    return _Weights(expand, keys, values.transpose(1, 2), norm)


def _latent_query(query: Tensor, weights: _Weights) -> Tensor:
    """Take the first dims of query [T, H, nope + rope] into the space of latents: [T, H, rank]."""
    latent: Tensor = head_linear(query[..., : weights.keys.shape[1]], weights.keys)
    return latent


def _from_latents(mixed: Tensor, weights: _Weights) -> Tensor:
    """Take means of latents [T, H, rank] to values of all heads, [T, H * v_head_dim]."""
    heads: Tensor = head_linear(mixed, weights.values)
    return heads.flatten(1)


def bind_latent_decode(ins: LatentAttention, binding: Binding) -> Call:
    """Attention of the rows of a decode step."""
    spec, weights = ins.spec, _weights(ins.spec)
    attend = _bind_decode_rows(ins, binding)

    def call(values: Values, inputs: StepInputs) -> None:
        query, compressed = values[ins.query], values[ins.compressed]
        query = query.view(query.shape[0], spec.num_heads, -1)
        cos, sin = (values[name] for name in ins.tables)
        mixed = attend(query, compressed, _latent_query(query, weights), cos, sin, inputs.slots)
        values[ins.target] = _from_latents(mixed, weights)

    return call


_DecodeRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _bind_decode_rows(ins: LatentAttention, binding: Binding) -> _DecodeRows:
    """Cache write and attention of one token a row."""
    spec, weights = ins.spec, _weights(ins.spec)
    caches = (binding.keys[ins.layer], binding.values[ins.layer])
    block_table = binding.block_table(ins.layer)
    context_lens = binding.state.context_lens

    def attend(
        query: Tensor, compressed: Tensor, latent: Tensor, cos: Tensor, sin: Tensor, slots: Tensor
    ) -> Tensor:
        latent_cache_write(
            query,
            compressed,
            cos,
            sin,
            *caches,
            weights.norm,
            spec.latent_norm.eps,
            spec.rotation,
            None,
            block_table,
            slots,
            context_lens,
        )
        rotated = query[..., spec.nope_dim :]
        return latent_decode_attention(
            latent, rotated, *caches, block_table, slots, context_lens, spec.scale
        )

    return attend


def bind_latent_prefill(ins: LatentAttention, binding: Binding) -> Call:
    """Cache write of packed prompts, then attention over cached latents, or within one prompt.

    Rows that decode beside them take the kernel of a decode step.
    """
    spec, weights = ins.spec, _weights(ins.spec)
    attend_decoding = _bind_decode_rows(ins, binding)
    attend = _bind_attend(ins, binding)
    caches = (binding.keys[ins.layer], binding.values[ins.layer])
    table = binding.tables[ins.layer]

    def call(values: Values, inputs: StepInputs) -> None:
        assert inputs.slot_mappings
        query, compressed = values[ins.query], values[ins.compressed]
        query = query.view(query.shape[0], spec.num_heads, -1)
        cos, sin = (values[name] for name in ins.tables)
        decoded = None
        latent = None
        if inputs.decoding is not None:
            # Before the next op rotates all queries and keys in place, theirs for nothing.
            latent, n = _latent_query(query, weights), inputs.decoding.shape[0]
            decoded = attend_decoding(
                query[:n], compressed[:n], latent[:n], cos[:n], sin[:n], inputs.decoding
            )
        latent_cache_write(
            query,
            compressed,
            cos,
            sin,
            *caches,
            weights.norm,
            spec.latent_norm.eps,
            spec.rotation,
            inputs.slot_mappings[table],
        )
        if inputs.whole_prompt and may_serve(query):
            out = _within_prompt(spec, weights, query, compressed)
            if out is not None:
                values[ins.target] = out
                return
        mixed = attend(_latent_query(query, weights) if latent is None else latent, query, inputs)
        if decoded is not None:
            mixed[: decoded.shape[0]].copy_(decoded)
        values[ins.target] = _from_latents(mixed, weights)

    return call


def _bind_attend(
    ins: LatentAttention, binding: Binding
) -> Callable[[Tensor, Tensor, StepInputs], Tensor]:
    """Attention of tokens whose latents are written."""
    spec, state = ins.spec, binding.state
    caches = (binding.keys[ins.layer], binding.values[ins.layer])
    block_table, table = binding.block_table(ins.layer), binding.tables[ins.layer]

    def attend(latent: Tensor, query: Tensor, inputs: StepInputs) -> Tensor:
        rotated = query[..., spec.nope_dim :]
        rows = inputs.token_rows
        if rows is not None:
            tables, slots, lens = rows.block_tables[table], rows.slots, rows.context_lens
            return latent_decode_attention(
                latent, rotated, *caches, tables, slots, lens, spec.scale
            )
        assert inputs.cu_seqlens is not None
        return latent_prefill_attention(
            latent,
            rotated,
            *caches,
            block_table,
            inputs.slots,
            inputs.cu_seqlens,
            state.prefix_lens,
            spec.scale,
        )

    return attend


def _within_prompt(
    spec: LatentAttentionSpec, weights: _Weights, query: Tensor, compressed: Tensor
) -> Tensor | None:
    """Attend within a whole prompt by full keys and values, where a kernel serves that."""
    num_tokens, nope = query.shape[0], spec.nope_dim
    latent, key = compressed.split((spec.rank, spec.rope_dim), dim=-1)
    heads = torch.nn.functional.linear(latent, weights.expand)
    heads = heads.view(num_tokens, spec.num_heads, -1)
    keys = torch.empty_like(query, memory_format=torch.contiguous_format)
    keys[..., :nope] = heads[..., :nope]
    keys[..., nope:] = key.unsqueeze(1)
    out = whole_prompt_attention(query, keys, heads[..., nope:], spec.scale)
    return None if out is None else out.reshape(num_tokens, -1)
