"""Paged attention under the models' own forward, for models without a spec.

The attention function finds its state through a context variable and the module that calls it,
not through keyword arguments: `generate` refuses unknown ones and some models drop them. The name
is not in the mask interface, so no mask is built; prompts come without padding. What the masks
would have hidden is read once, while probing: a layer's window may stand nowhere else.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_paged.cache.pool import LayerShape
from torch_paged.decoder.inputs import Binding, StepInputs
from torch_paged.ops.paged_attention import fused_decode_attention, paged_prefill_attention
from torch_paged.ops.rotary_cache_write import rotary_cache_write
from torch_paged.patches.attention_seams import (
    register_attention,
    register_masks,
    switch_attention,
)
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import PassThroughCache
from torch_paged.patches.visibility import window_of

NAME = "torch_paged"
_PROBE_NAME = "torch_paged_probe"

# Keyword arguments that change nothing here: positions are applied, masks are causal by contract.
_HARMLESS = {
    "is_causal",
    "position_ids",
    "use_cache",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "head_mask",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "return_dict",
    "num_items_in_batch",
    "kernel_options",
    "kwargs",
    "cache",
    "past_key_values",
    "position_embeddings",
    "token_type_ids",
}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of attention: its cache shape and the parts that never change."""

    shape: LayerShape
    num_heads: int
    scale: float
    window: int
    softcap: float
    has_sinks: bool


@dataclass(slots=True)
class Probe:
    """Runs dense attention and notes the layers in the order of their calls.

    Attributes:
        reads_masks: let the model build its masks, and take the windows from them.
        layers: id of an attention module -> its layers of the cache, one for each of its calls.
        cache: what the model believes to be its cache.
        cache_layers: numbers that the model's cache gives to its layers with keys and values.
        keeps_what_it_attends: each call attends to exactly what the model just put in its cache.
    """

    cache: PassThroughCache
    reads_masks: bool = False
    cache_layers: tuple[int, ...] = ()
    layers: dict[int, list[int]] = field(default_factory=dict)
    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[Tensor, int]] = field(default_factory=list)
    keeps_what_it_attends: bool = True

    def attend(
        self, module: nn.Module, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, s: Any
    ) -> Tensor:
        self.layers.setdefault(id(module), []).append(len(self.calls))
        self.calls.append(call)
        held, numbers = self.cache.held, self.cache_layers[: len(self.calls)]
        if tuple(layer for layer, *_ in held) != numbers:
            self.keeps_what_it_attends = False
        elif held[-1][1] is not k or held[-1][2] is not v:
            self.keeps_what_it_attends = False
        return _dense_attention(call, q, k, v, s)

    def window(self, mask: Tensor) -> int:
        """Return the window of a mask that came back to us; refuses one of the model's own."""
        for known, window in self.masks:
            if known is mask:
                return window
        raise SpecRefusal("attention takes a mask of the model's own making")


@dataclass(slots=True)
class PagedRun:
    """One step over the paged cache.

    Attributes:
        layers: see `Probe`.
        windows: of each layer.
    """

    layers: dict[int, list[int]]
    windows: tuple[int, ...]
    binding: Binding
    inputs: StepInputs
    decode: bool
    seen: Counter[int] = field(default_factory=Counter)

    def attend(
        self, module: nn.Module, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, s: Any
    ) -> Tensor:
        """Attend [B, H, 1, D] rows or packed [1, H, T, D] prompts; [tokens, heads, Dv]."""
        layer = self.layers[id(module)][self.seen[id(module)]]
        self.seen[id(module)] += 1
        state, inputs = self.binding.state, self.inputs
        k_cache, v_cache = self.binding.keys[layer], self.binding.values[layer]
        block_table, table = self.binding.block_table(layer), self.binding.tables[layer]
        limits = {"window": self.windows[layer], "softcap": call.softcap, "sinks": s}

        def decode(query: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> Tensor:
            return fused_decode_attention(
                query,
                key,
                value,
                None,
                None,
                k_cache,
                v_cache,
                block_table,
                slots,
                state.context_lens,
                state.counters,
                scale=call.scale,
                **limits,
            )

        if self.decode:
            return decode(q.squeeze(2), k.squeeze(2), v.squeeze(2), inputs.slots)
        assert inputs.slot_mappings and inputs.cu_seqlens is not None
        query, key, value = (t.squeeze(0).transpose(0, 1).contiguous() for t in (q, k, v))
        decoded = None
        if inputs.decoding is not None:
            count = inputs.decoding.shape[0]
            decoded = decode(query[:count], key[:count], value[:count], inputs.decoding)
        mapping = inputs.slot_mappings[table]
        rotary_cache_write(query, key, value, None, None, k_cache, v_cache, mapping)
        out = paged_prefill_attention(
            query,
            k_cache,
            v_cache,
            block_table,
            inputs.slots,
            inputs.cu_seqlens,
            state.prefix_lens,
            max_query_len=inputs.max_query_len,
            scale=call.scale,
            **limits,
        )
        if decoded is not None:
            out[: decoded.shape[0]].copy_(decoded)
        return out


_ACTIVE: ContextVar[Probe | PagedRun | None] = ContextVar("torch_paged_attention", default=None)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: out [batch, tokens, heads, head_dim], no weights."""
    run = _ACTIVE.get()
    if run is None:
        raise RuntimeError(f"attention {NAME!r} runs only inside an accelerated model's step")
    strange = [n for n, v in kwargs.items() if v is not None and n not in _HARMLESS]
    if isinstance(run, Probe) and (strange or dropout):
        raise SpecRefusal(f"attention takes {', '.join(map(repr, strange or ['dropout']))}")
    if isinstance(run, Probe) and attention_mask is not None:
        # Attention obeys its mask; the argument is for kernels that build none.
        sliding_window = run.window(attention_mask)
    call = AttentionCall(
        LayerShape(key.shape[1], key.shape[3], value.shape[3]),
        query.shape[1],
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        int(sliding_window or 0),
        float(softcap or 0.0),
        s_aux is not None,
    )
    sinks = None if s_aux is None else s_aux.detach().reshape(-1)
    out = run.attend(module, call, query, key, value, sinks)
    return out.reshape(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _dense_attention(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    """Causal attention of [1, heads, tokens, dim]; returns [tokens, heads, Dv]."""
    groups = call.num_heads // call.shape.num_kv_heads
    k, v = (t.repeat_interleave(groups, dim=1).float() for t in (k, v))
    scores = q.float() @ k.transpose(2, 3) * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    at = torch.arange(q.shape[2], device=q.device)
    distance = at[:, None] - at[None, :]
    hidden = distance < 0
    if call.window:
        hidden |= distance >= call.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.float().reshape(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights @ v).to(q.dtype)[0].transpose(0, 1).contiguous()


def _mask_for_probe(
    batch_size: int, q_length: Any, kv_length: int, *args: Any, mask_function: Any, **kwargs: Any
) -> Tensor | None:
    """Mask of transformers' interface: a token that stands for what `mask_function` shows."""
    run = _ACTIVE.get()
    if not isinstance(run, Probe):
        return None
    length = q_length if isinstance(q_length, int) else q_length.shape[0]
    mask = torch.ones(batch_size, 1, length, kv_length, dtype=torch.bool, device="cpu")
    run.masks.append((mask, window_of(mask_function)))
    return mask


@contextlib.contextmanager
def paged_attention(model: nn.Module, run: Probe | PagedRun) -> Iterator[None]:
    """Let `model`'s forward attend through `run`; the caller holds the model's lock."""
    reads_masks = isinstance(run, Probe) and run.reads_masks
    name = _PROBE_NAME if reads_masks else NAME
    register_attention(name, _attention_forward)
    if reads_masks:
        register_masks(name, _mask_for_probe)
    token = _ACTIVE.set(run)
    try:
        with switch_attention(model, name):
            yield
    finally:
        _ACTIVE.reset(token)
