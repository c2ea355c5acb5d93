"""What transformers' caches keep besides keys and values: their layers with a state.

tests/patches/test_state_seams.py holds these on the oldest and the newest supported release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from torch_paged.patches.seams import PassThroughCache

_STATE_KINDS = ("conv", "recurrent")
# Layers of these types mix no tokens; older releases' caches have a layer for them all the same.
_NOT_MIXERS = ("moe", "mlp")


class StateCache(PassThroughCache):
    """Hands keys and values on, and keeps the states of layers that have one as transformers does.

    Attributes:
        state_layers: indices of these layers.
    """

    def __init__(self, config: Any, *, notes: bool = False) -> None:
        super().__init__(notes=notes)
        self.layers = [_state_layer(layer) for layer in DynamicCache(config=config).layers]
        self.state_layers = layers_with_state(config)

    def states(self) -> Iterator[tuple[int, str, int, Any]]:
        """Yield layer, kind, number and tensor [num_rows, ...] of each state there is."""
        for layer in self.state_layers:
            for kind in _STATE_KINDS:
                for number, state in getattr(self.layers[layer], f"{kind}_states").items():
                    if state is not None:
                        yield layer, kind, number, state


def put_state(cache: Any, layer: int, kind: str, number: int, state: Any) -> None:
    """Have a state [num_rows, ...] in a layer of a cache as if a forward had left it."""
    kept = cache.layers[layer]
    getattr(kept, f"{kind}_states")[number] = state
    getattr(kept, f"is_{kind}_states_initialized")[number] = True
    kept.has_previous_state[number] = True
    if kind == "conv":
        kept.conv_kernel_size[number] = state.shape[-1]
        kept.dtype, kept.device = state.dtype, state.device


def _state_layer(layer: Any) -> Any:
    """Return an empty layer that keeps the states which `layer` would keep, and nothing else."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return LinearAttentionLayer(number_of_states=layer.number_of_states)
    return DynamicLayer()


def layers_with_state(config: Any) -> list[int]:
    """Return the layers of a text config that keep a state besides keys and values."""
    layers = DynamicCache(config=config).layers
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    return [
        index
        for index, (layer, kind) in enumerate(zip(layers, types, strict=True))
        if isinstance(layer, LinearAttentionCacheLayerMixin) and kind not in _NOT_MIXERS
    ]


def layers_with_keys(config: Any) -> list[int]:
    """Return the layers of a text config that keep keys and values."""
    layers = DynamicCache(config=config).layers
    return [index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]
