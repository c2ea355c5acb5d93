"""The step of the patched tier: the model's own forward over a paged cache."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_paged.cache.pool import LayerShape
from torch_paged.decoder.inputs import Binding, StepInputs
from torch_paged.decoder.watch import ModuleWatch
from torch_paged.patches.attention_switch import PagedRun, Probe, paged_attention
from torch_paged.patches.mixer_states import MixerStates
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import (
    CACHE_NAMES,
    PassThroughCache,
    cache_windows,
    forward_arguments,
)
from torch_paged.patches.state_seams import StateCache, layers_with_keys, layers_with_state

_PROBE_TOKENS = 4
_NO_KEYS = LayerShape(1, 1, 1)
# Layer types whose state is the keys and values that attention sees, and what StateCache keeps.
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}
_KNOWN_LAYERS |= {"linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"}


class PatchedStep:
    """Runs `model(...)` with attention switched to the paged cache; see `StepModel`.

    Args:
        model: held weakly.

    Attributes:
        fills_caches: what attention reads is what the model keeps in a cache of its own.
        cache_layers: of each layer of ours, its number in the model's cache.
        keeps_state: layers keep a state besides keys and values; see `StepModel`.

    Raises:
        SpecRefusal: the forward does not go through the attention interface as it must.
    """

    # What these would tell, the model's own forward sees to.
    counts_columns = False
    cache_repeats = 1
    max_positions = 0

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.watch = ModuleWatch(model, None)
        self._binding: Binding | None = None
        self._key: tuple[object, ...] = ()
        config = model.config.get_text_config()
        self.cache_layers = tuple(layers_with_keys(config))
        arguments = forward_arguments(model)
        self._takes_positions = "position_ids" in arguments
        if not self._takes_positions and self.cache_layers:
            raise SpecRefusal("its forward takes no position_ids")
        self._variant = 0
        self._cache_name = _cache_argument(model)
        self._keeps_logits = "logits_to_keep" in arguments
        _refuse_other_state(model, config)
        self.keeps_state = bool(layers_with_state(config))
        # Without masks, as steps run; then with them, for what they would have hidden.
        self._vocab_size = self._probe(model, Probe(self._noting_cache(config)))
        cache = self._noting_cache(config)
        probe = Probe(cache, reads_masks=True, cache_layers=self.cache_layers)
        self._probe(model, probe)
        _check_windows(config, probe)
        self._states: MixerStates | None = None
        if isinstance(cache, StateCache):
            self._states = MixerStates(config, cache)
        self.fills_caches = probe.keeps_what_it_attends
        self._layers, self.calls = probe.layers, tuple(probe.calls)
        self._windows = tuple(call.window for call in self.calls)

    def _noting_cache(self, config: Any) -> PassThroughCache:
        return StateCache(config, notes=True) if self.keeps_state else PassThroughCache(notes=True)

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None
        return model

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        # Blocks count the tokens of a model whose layers keep no keys at all, too.
        return tuple(call.shape for call in self.calls) or (_NO_KEYS,)

    @property
    def layer_flops(self) -> float:
        """Not known: of experts, a token meets only some."""
        return 0.0

    @property
    def layer_windows(self) -> tuple[int, ...]:
        return self._windows or (0,)

    @property
    def has_window(self) -> bool:
        """Say whether any layer attends to a window only."""
        return any(self._windows)

    @property
    def storage_key(self) -> tuple[object, ...]:
        return self._key

    def bind(self, binding: Binding) -> None:
        self._binding = binding
        if self._states is not None:
            self._states.allocate(binding.state.max_num_seqs, self.device)

    def unbind(self) -> None:
        self._binding = None
        if self._states is not None:
            self._states.free()

    def fill_states(self, cache: Any, slots: Tensor) -> None:
        """Put the states of `slots` [num_rows] into a cache of the model's own."""
        if self._states is not None:
            self._states.fill(cache, slots)

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        if self._states is not None:
            self._states.copy(sources, targets)

    @property
    def has_spans(self) -> bool:
        return False

    def recomputes(self, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        return False

    def first_floor(self, span: Tensor) -> Tensor:
        return torch.zeros_like(span)

    def remember_spans(self, first: Tensor, last: Tensor) -> None:
        """Such models are refused."""

    @property
    def variant(self) -> int:
        return self._variant

    def refresh(self) -> bool:
        # First: it may take an adapter out of the weights.
        self._variant = self.watch.variant()
        key = self.watch.storage_key()
        moved = key != self._key
        self._key = key
        return moved

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def tensors(self) -> Sequence[Tensor]:
        return self.watch.tensors()

    def prefill(self, inputs: StepInputs) -> Tensor:
        assert inputs.last_index is not None
        if self._states is None:
            return self._prompt_logits(inputs, PassThroughCache(), inputs.last_index)
        # A mixer would carry its state from one packed prompt into the next.
        rows, wanted = len(inputs.lengths), inputs.last_index
        is_scored = wanted.shape[0] > rows
        parts, end = [], 0
        for row, length in enumerate(inputs.lengths):
            part, cache = _one_row(inputs, row, end, end + length), self._states.begin()
            last = None if is_scored else wanted[row : row + 1] - end
            parts.append(self._prompt_logits(part, cache, last))
            self._states.store(cache, part.slots)
            end += length
        logits = torch.cat(parts)
        return logits.index_select(0, wanted) if is_scored else logits

    def _prompt_logits(
        self, inputs: StepInputs, cache: PassThroughCache, wanted: Tensor | None
    ) -> Tensor:
        """Return logits of the `wanted` tokens of a packed prompt, or of all."""
        assert inputs.positions is not None
        kwargs: dict[str, Any] = {}
        if self._takes_positions:
            kwargs["position_ids"] = inputs.positions[None].long()
        if inputs.embeddings is not None:
            kwargs["inputs_embeds"] = inputs.embeddings[None]
        else:
            assert inputs.ids is not None
            kwargs["input_ids"] = inputs.ids[None]
        if wanted is None:
            return self._forward(inputs, False, cache, kwargs)[0]
        if self._keeps_logits:
            kwargs["logits_to_keep"] = wanted
            return self._forward(inputs, False, cache, kwargs)[0]
        return self._forward(inputs, False, cache, kwargs)[0].index_select(0, wanted)

    def extend(self, inputs: StepInputs) -> Tensor:
        return self.prefill(inputs)

    def decode(self, slots: Tensor) -> Tensor:
        assert self._binding is not None
        state = self._binding.state
        rows = slots.clamp(min=0).long()
        kwargs = {"input_ids": state.last_token[rows][:, None]}
        if self._takes_positions:
            kwargs["position_ids"] = state.positions[rows][:, None].long()
        if self._states is None:
            return self._forward(StepInputs(slots), True, PassThroughCache(), kwargs)[:, -1]
        cache = self._states.load(slots)
        logits = self._forward(StepInputs(slots), True, cache, kwargs)[:, -1]
        self._states.store(cache, slots)
        return logits

    def _forward(
        self, inputs: StepInputs, decode: bool, cache: PassThroughCache, kwargs: dict[str, Any]
    ) -> Tensor:
        assert self._binding is not None, "bind() comes first"
        model = self.model
        run = PagedRun(self._layers, self._windows, self._binding, inputs, decode)
        with paged_attention(model, run):
            kwargs[self._cache_name] = cache
            return model(use_cache=True, return_dict=True, **kwargs).logits

    def _probe(self, model: Any, probe: Probe) -> int:
        """Let `probe` see one short forward; return the size of the vocabulary."""
        device = model.get_input_embeddings().weight.device
        ids = torch.arange(_PROBE_TOKENS, device=device)[None]
        kwargs: dict[str, Any] = {self._cache_name: probe.cache}
        if self._takes_positions:
            kwargs["position_ids"] = ids
        try:
            with torch.no_grad(), paged_attention(model, probe):
                out = model(input_ids=ids, use_cache=True, return_dict=True, **kwargs)
        except SpecRefusal:
            raise
        except Exception as error:  # a model may object to our cache or name in its own way
            raise SpecRefusal(
                f"its forward does not run with switched attention: "
                f"{type(error).__name__}: {error}"
            ) from error
        config = model.config.get_text_config()
        num_layers = len(self.cache_layers) if self.keeps_state else config.num_hidden_layers
        if len(probe.calls) < num_layers:
            raise SpecRefusal(
                f"{len(probe.calls)} of {num_layers} layers go through the attention interface"
            )
        vocab_size: int = out.logits.shape[-1]
        return vocab_size


def _cache_argument(model: nn.Module) -> str:
    arguments = forward_arguments(model)
    for name in CACHE_NAMES:
        if name in arguments:
            return name
    raise SpecRefusal("its forward takes no cache")


def _one_row(inputs: StepInputs, row: int, start: int, end: int) -> StepInputs:
    """Return one row of packed prompts as a packing of its own."""
    assert inputs.positions is not None and inputs.cu_seqlens is not None
    bounds = inputs.cu_seqlens[row : row + 2]
    return StepInputs(
        slots=inputs.slots[row : row + 1],
        ids=None if inputs.ids is None else inputs.ids[start:end],
        embeddings=None if inputs.embeddings is None else inputs.embeddings[start:end],
        positions=inputs.positions[start:end],
        cu_seqlens=bounds - bounds[0],
        slot_mappings=tuple(mapping[start:end] for mapping in inputs.slot_mappings),
        max_query_len=end - start,
        lengths=(end - start,),
    )


def _refuse_other_state(model: Any, config: Any) -> None:
    others = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if others:
        raise SpecRefusal(f"layers of type {', '.join(sorted(others))} keep a state of their own")
    if getattr(model, "_is_stateful", False) and not layers_with_state(config):
        raise SpecRefusal("its layers keep a state of their own")
    if getattr(config, "num_kv_shared_layers", 0):
        raise SpecRefusal("its layers share keys and values")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {
        v.get("rope_type") for v in rope.values() if isinstance(v, dict)
    }
    changing = kinds & {"dynamic", "longrope"}
    if changing:
        raise SpecRefusal(
            f"rotary type {changing.pop()!r} changes with the length of the sequence"
        )


def _check_windows(config: Any, probe: Probe) -> None:
    """generate's own cache must not forget what the masks of a layer show."""
    remembers = cache_windows(config)
    windows = [remembers[layer] for layer in layers_with_keys(config)]
    if not any(windows):
        return
    for index, call in enumerate(probe.calls):
        remembered = windows[index] if len(windows) == len(probe.calls) else max(windows)
        if remembered and remembered != call.window:
            raise SpecRefusal(
                f"layer {index} attends to {call.window or 'all'} tokens "
                f"but its cache remembers {remembered}"
            )
