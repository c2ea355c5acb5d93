"""Every symbol of transformers that is private or has moved between releases, in one file.

Those of candidate generators are in draft_seams.py, of layers with a state in state_seams.py, of
caches over blocks in lease_seams.py, of attention in attention_seams.py.

tests/patches/test_seams.py holds these on the oldest and the newest supported release.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import logits_process as logits_process
from transformers.generation import stopping_criteria
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateDecoderOnlyOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from torch_paged.patches.lease_seams import is_plain_layer, state_shapes

# 5.24 renamed the forward argument and the output field `past_key_values`, in models without
# attention `cache_params`, to `cache`.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")

_OUTPUT_FIELDS = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
_OUTPUT_CACHE_FIELD = next(name for name in CACHE_NAMES if name in _OUTPUT_FIELDS)

LogitsProcessorList = logits_process.LogitsProcessorList
StoppingCriteriaList = stopping_criteria.StoppingCriteriaList
MaxLengthCriteria = stopping_criteria.MaxLengthCriteria
EosTokenCriteria = stopping_criteria.EosTokenCriteria
StopStringCriteria = stopping_criteria.StopStringCriteria

# Pure functions of the scores, without state and without the ids: safe inside a graph. Those that
# go through torch.distributions are not: it checks its arguments on the host.
SCORE_WARPERS: dict[type, tuple[str, ...]] = {
    logits_process.TemperatureLogitsWarper: ("temperature",),
    logits_process.TopKLogitsWarper: ("top_k", "filter_value"),
    logits_process.TopPLogitsWarper: ("top_p", "filter_value", "min_tokens_to_keep"),
    logits_process.MinPLogitsWarper: ("min_p", "filter_value", "min_tokens_to_keep"),
    logits_process.TypicalLogitsWarper: ("mass", "filter_value", "min_tokens_to_keep"),
    logits_process.EpsilonLogitsWarper: ("epsilon", "filter_value", "min_tokens_to_keep"),
    logits_process.InfNanRemoveLogitsProcessor: (),
    logits_process.LogitNormalization: (),
}

# Those that leave unlikely tokens out.
SCORE_FILTERS = (
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.TopHLogitsWarper,
)

DecodingMethod = Callable[..., Any]


class MethodSeam:
    """One patched method of a mixin of models, gone with the last accelerated model."""

    def __init__(self, name: str, owner: type = GenerationMixin) -> None:
        self._name = name
        self._owner = owner
        self._lock = threading.Lock()
        self._users = 0
        self._original: DecodingMethod | None = None
        self._installed: DecodingMethod | None = None

    @property
    def original(self) -> DecodingMethod:
        """Return transformers' own method (or whatever stood there when we came)."""
        return self._original if self._original is not None else self._current()

    def _current(self) -> DecodingMethod:
        method: DecodingMethod = getattr(self._owner, self._name)
        return method

    def install(self, replacement: DecodingMethod) -> None:
        """Patch on the first use; later uses only count.

        A foreign patch over ours calls ours, so patching over it again would loop for ever.
        """
        with self._lock:
            gone = self._current() is self._original
            if self._users == 0 and (self._installed is None or gone):
                self._original = self._current()
                self._installed = replacement
                setattr(self._owner, self._name, replacement)
            self._users += 1

    def uninstall(self) -> None:
        """Put the original back after the last use, unless someone patched over ours."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._current() is self._installed:
                setattr(self._owner, self._name, self._original)
                self._original = self._installed = None


# Every decoding method that generate looks up on the type.
DECODING_SEAMS = {
    name: MethodSeam(name)
    for name in dict.fromkeys(GENERATION_MODES_MAPPING.values())
    if hasattr(GenerationMixin, name)
}
SAMPLE_SEAM = DECODING_SEAMS["_sample"]
# The doors of continuous batching; its context manager goes through the first.
BATCHING_SEAMS = {
    name: MethodSeam(name, continuous_api.ContinuousMixin)
    for name in ("init_continuous_batching", "generate_batch")
}
ContinuousBatchingManager = continuous_api.ContinuousBatchingManager
ContinuousBatchingConfig = continuous_api.ContinuousBatchingConfig
BackgroundThreadStatus = continuous_api.BackgroundThreadStatus
OutputRouter = continuous_api.OutputRouter
GenerationOutput = continuous_api.GenerationOutput
BatchingStatus = continuous_api.RequestStatus


@functools.cache
def sequence_bias_margin() -> int:
    """Return how many ids a row must have before a prefix for its bias to count: 0 in 5.24."""
    bias = logits_process.SequenceBiasLogitsProcessor([[[1, 2], 1.0]])
    scores = bias(
        torch.ones((1, 1), dtype=torch.long, device="cpu"), torch.zeros(1, 3, device="cpu")
    )
    return 0 if float(scores[0, 2]) else 1


def overrides_method(model: nn.Module, name: str) -> bool:
    """Say whether the model's class brings a decoding method of its own."""
    return getattr(type(model), name) is not getattr(GenerationMixin, name)


def is_pretrained_model(model: object) -> bool:
    return isinstance(model, PreTrainedModel)


def can_generate(model: nn.Module) -> bool:
    """Say whether `generate` is transformers' own for this model."""
    return isinstance(model, GenerationMixin)


def special_token_tensors(config: GenerationConfig) -> tuple[Any, Any]:
    """Return the (pad, eos) tensors that `generate` put on its copy of the config, or None."""
    return (
        getattr(config, "_pad_token_tensor", None),
        getattr(config, "_eos_token_tensor", None),
    )


def end_tokens(criterion: Any, config: GenerationConfig) -> tuple[int, ...]:
    """Return the ids that a criterion ends rows with; `config` is that it was made by."""
    tensor = criterion.eos_token_id
    _, eos = special_token_tensors(config)
    return _on_host(tensor, config.eos_token_id if tensor is eos else None)


def pad_token(config: GenerationConfig) -> int | None:
    """Return the id that rows are filled with that have ended, None where there is none."""
    pad, eos = special_token_tensors(config)
    if pad is None:
        return None
    if config.pad_token_id is None and eos is not None:
        return int(_on_host(eos, config.eos_token_id)[0])  # as `generate` chooses it
    return int(_on_host(pad, config.pad_token_id)[0])


def _on_host(tensor: Any, given: Any) -> tuple[int, ...]:
    """Return ids that `generate` has put on the device from what was given, without waiting."""
    ids = (given,) if type(given) is int else given
    if isinstance(ids, list | tuple) and len(ids) == tensor.numel():
        if all(type(token) is int for token in ids):
            return tuple(ids)
    return tuple(tensor.reshape(-1).tolist())


def merge_generation_config(
    model: Any, config: GenerationConfig | None, overrides: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Return the config in force, as `generate` merges it, and the overrides it does not know.

    Overrides go before `config`, that before the model's own, that before the defaults. A length
    limit that nobody set stays None.
    """
    merged = GenerationConfig() if config is None else copy.deepcopy(config)
    own = model.generation_config
    merged.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
    defaults = own._get_default_generation_params()
    defaults.pop("max_length")
    merged.update(**defaults, defaults_only=True)
    return merged, merged.update(**overrides)


def override_generation_config(
    model: Any, config: GenerationConfig, overrides: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The same as continuous batching merges it: what `config` leaves unset has no effect."""
    merged = copy.deepcopy(config)
    return merged, merged.update(**overrides)


def default_batching_config(config: GenerationConfig) -> Any:
    """Return what transformers would use where no ContinuousBatchingConfig is given."""
    given = getattr(config, "continuous_batching_config", None)
    return ContinuousBatchingConfig() if given is None else given


def progress_bar(total: int, *, disable: bool) -> Any:
    """Return transformers' progress bar over requests."""
    return transformers_logging.tqdm(total=total, disable=disable, unit="request")


def is_output_capturing_hook(hook: object) -> bool:
    """Recognise the hooks that one `output_hidden_states=True` call leaves on the layers."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def global_forward_hooks() -> tuple[Any, ...]:
    """Return torch's dictionaries of hooks that run for every module."""
    module = torch.nn.modules.module
    return (module._global_forward_hooks, module._global_forward_pre_hooks)


def call_cache(model_kwargs: dict[str, Any]) -> Any:
    """Return the cache of this call under either of its names, or None."""
    for name in CACHE_NAMES:
        if model_kwargs.get(name) is not None:
            return model_kwargs[name]
    return None


def forward_arguments(model: Any) -> frozenset[str]:
    """Return the names of the arguments of the class's forward, as `generate` looks at them."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def cache_is_user_defined(cache: Any) -> bool:
    """Say whether the caller passed this cache in (generate marks it)."""
    return bool(getattr(cache, "_is_user_defined", False))


def is_plain_dynamic_cache(cache: Any) -> bool:
    """Say whether this is the cache that generate makes by default."""
    return type(cache) is DynamicCache and not getattr(cache, "offloading", False)


def cache_length(cache: Any) -> int:
    """Return the columns of a dynamic cache; of one that counts none, 1 once it was used."""
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) and cache.layers:
        return int(cache.has_previous_state())
    return int(cache.get_seq_length())


def has_plain_layers(cache: Any, num_rows: int, shapes: Sequence[Any]) -> bool:
    """Say whether a cache has full keys and values of these rows for layers of these shapes.

    Args:
        shapes: of each layer, as `LayerShape` has them.
    """
    layers = cache.layers
    if len(layers) != len(shapes) or not all(map(is_plain_layer, layers)):
        return False
    length = cache_length(cache)
    for layer, shape in zip(layers, shapes, strict=True):
        sizes = (shape.head_dim, shape.v_head_dim)
        for found, dim in zip(state_shapes(layer), sizes, strict=True):
            if found != (num_rows, shape.num_kv_heads, length, dim):
                return False
    return True


def layer_states(cache: Any, layer: int) -> tuple[Any, Any]:
    """Return keys and values [num_rows, num_kv_heads, num_columns, head_dim] of a layer."""
    return cache.layers[layer].keys, cache.layers[layer].values


def dropped_mask_width(config: GenerationConfig) -> int | None:
    """Return the width of an attention mask that `generate` left out, for it was all ones."""
    return getattr(config, "_mask_length", None)


def cache_windows(config: Any) -> list[int]:
    """Return the tokens that each layer of generate's own cache remembers, 0 for all."""
    layers = DynamicCache(config=config).layers
    return [
        int(layer.sliding_window) if getattr(layer, "is_sliding", False) else 0 for layer in layers
    ]


def forgets_behind_windows(cache: Any, windows: Sequence[int]) -> bool:
    """Say whether a cache drops what the windows of its layers, 0 for none, do not show."""

    def forgets(layer: Any, window: int) -> bool:
        # One that remembers a single token keeps them all: its slice from -0 on is the whole.
        fits = getattr(layer, "is_sliding", False) and 1 < layer.sliding_window <= window
        return bool(fits) and not getattr(layer, "record_past", False)

    pairs = zip(cache.layers, windows, strict=False)
    return len(cache.layers) == len(windows) and all(forgets(*p) for p in pairs if p[1])


def has_own_input_preparation(model: nn.Module) -> bool:
    """Say whether prepare_inputs_for_generation was replaced on the instance (PEFT prompts)."""
    return "prepare_inputs_for_generation" in model.__dict__


def is_compiled(model: nn.Module) -> bool:
    """Say whether `model.compile()` was called: `self(...)` then runs the compiled call."""
    return getattr(model, "_compiled_call_impl", None) is not None


def decoder_only_output(*, sequences: Any, cache: Any, **fields: Any) -> Any:
    """Build what `generate` returns with return_dict_in_generate."""
    return GenerateDecoderOnlyOutput(sequences=sequences, **{_OUTPUT_CACHE_FIELD: cache}, **fields)


def replace_output_cache(output: Any, cache: Any) -> None:
    """Put a cache into what a decoding method returned."""
    output[_OUTPUT_CACHE_FIELD] = cache


def cache_name(model_kwargs: dict[str, Any]) -> str | None:
    """Return the name under which this call has its cache, or None."""
    return next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)


class PassThroughCache(Cache):
    """A cache that keeps nothing: `update` hands its input on to attention, which stores it.

    Attributes:
        held: layer, keys and values of each update, if asked for.
    """

    is_compileable = False

    def __init__(self, *, notes: bool = False) -> None:
        super().__init__(layers=[])
        self.held: list[tuple[int, Any, Any]] = []
        self._notes = notes

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int = 0, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if self._notes:
            self.held.append((layer_idx, key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return length, 0


def longrope_frequencies(config: Any, limit: int, layer_type: str | None) -> torch.Tensor:
    """Return the frequencies [rotary_dim / 2] of longrope for sequences longer than `limit`."""
    compute = ROPE_INIT_FUNCTIONS["longrope"]
    frequencies, _ = compute(config, None, seq_len=limit + 1, layer_type=layer_type)
    return frequencies


def checkpoints_activations(model: nn.Module) -> bool:
    """Say whether activations are recomputed in training, which drops the cache meanwhile."""
    # The older name warns where the newer one exists.
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), name):
            return bool(getattr(model, name))
    return False
