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
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import (
    CACHE_NAMES,
    PassThroughCache,
    cache_windows,
    forward_arguments,
)

_PROBE_TOKENS = 4
# Layer types whose state is the keys and values that attention sees.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}


class PatchedStep:
    """Runs `model(...)` with attention switched to the paged cache; see `StepModel`.

    Args:
        model: held weakly.

    Attributes:
        fills_caches: what attention reads is what the model keeps in a cache of its own.

    Raises:
        SpecRefusal: the forward does not go through the attention interface as it must.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self.watch = ModuleWatch(model, None)
        self._binding: Binding | None = None
        self._key: tuple[object, ...] = ()
        self._variant = 0
        self._cache_name = _cache_argument(model)
        self._keeps_logits = "logits_to_keep" in forward_arguments(model)
        _refuse_other_state(model)
        # Without masks, as steps run; then with them, for what they would have hidden.
        self._vocab_size = self._probe(model, Probe(PassThroughCache(notes=True)))
        probe = Probe(PassThroughCache(notes=True), reads_masks=True)
        self._probe(model, probe)
        _check_windows(model.config.get_text_config(), probe)
        self.fills_caches = probe.keeps_what_it_attends
        self._layers, self.calls = probe.layers, tuple(probe.calls)
        self._windows = tuple(call.window for call in self.calls)

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
        return tuple(call.shape for call in self.calls)

    @property
    def layer_windows(self) -> tuple[int, ...]:
        return self._windows

    @property
    def has_window(self) -> bool:
        """Say whether any layer attends to a window only."""
        return any(self._windows)

    @property
    def storage_key(self) -> tuple[object, ...]:
        return self._key

    def bind(self, binding: Binding) -> None:
        self._binding = binding

    def unbind(self) -> None:
        self._binding = None

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
        assert inputs.positions is not None and inputs.last_index is not None
        kwargs: dict[str, Any] = {"position_ids": inputs.positions[None].long()}
        if inputs.embeddings is not None:
            kwargs["inputs_embeds"] = inputs.embeddings[None]
        else:
            assert inputs.ids is not None
            kwargs["input_ids"] = inputs.ids[None]
        if self._keeps_logits:
            kwargs["logits_to_keep"] = inputs.last_index
            return self._forward(inputs, False, kwargs)[0]
        return self._forward(inputs, False, kwargs)[0].index_select(0, inputs.last_index)

    def decode(self, slots: Tensor) -> Tensor:
        assert self._binding is not None
        state = self._binding.state
        rows = slots.clamp(min=0).long()
        kwargs = {
            "input_ids": state.last_token[rows][:, None],
            "position_ids": state.positions[rows][:, None].long(),
        }
        return self._forward(StepInputs(slots), True, kwargs)[:, -1]

    def _forward(self, inputs: StepInputs, decode: bool, kwargs: dict[str, Any]) -> Tensor:
        assert self._binding is not None, "bind() comes first"
        model = self.model
        run = PagedRun(self._layers, self._windows, self._binding, inputs, decode)
        with paged_attention(model, run):
            kwargs[self._cache_name] = PassThroughCache()
            return model(use_cache=True, return_dict=True, **kwargs).logits

    def _probe(self, model: Any, probe: Probe) -> int:
        """Let `probe` see one short forward; return the size of the vocabulary."""
        device = model.get_input_embeddings().weight.device
        ids = torch.arange(_PROBE_TOKENS, device=device)[None]
        kwargs = {self._cache_name: probe.cache, "position_ids": ids}
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
        num_layers = model.config.get_text_config().num_hidden_layers
        if len(probe.calls) < num_layers:
            raise SpecRefusal(
                f"{len(probe.calls)} of {num_layers} layers go through the attention interface"
            )
        vocab_size: int = out.logits.shape[-1]
        return vocab_size


def _cache_argument(model: nn.Module) -> str:
    arguments = forward_arguments(model)
    if "position_ids" not in arguments:
        raise SpecRefusal("its forward takes no position_ids")
    for name in CACHE_NAMES:
        if name in arguments:
            return name
    raise SpecRefusal("its forward takes no cache")


def _refuse_other_state(model: Any) -> None:
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if others:
        raise SpecRefusal(f"layers of type {', '.join(sorted(others))} keep a state of their own")
    if getattr(model, "_is_stateful", False):
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
    windows = cache_windows(config)
    if not any(windows):
        return
    for index, call in enumerate(probe.calls):
        remembered = windows[index] if len(windows) == len(probe.calls) else max(windows)
        if remembered and remembered != call.window:
            raise SpecRefusal(
                f"layer {index} attends to {call.window or 'all'} tokens "
                f"but its cache remembers {remembered}"
            )
