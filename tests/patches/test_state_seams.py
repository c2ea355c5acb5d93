"""Caches with states: transformers' own layers keep what a forward leaves, and take it back."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from torch_paged.generate.support.zoo import tiny_config
from torch_paged.patches.state_seams import (
    StateCache,
    layers_with_keys,
    layers_with_state,
    put_state,
)


@pytest.mark.parametrize(
    ("model_type", "states", "keys"),
    [("lfm2", 1, 1), ("falcon_h1", 2, 2), ("mamba2", 2, 0), ("llama", 0, 2)],
)
def test_layers_are_told_by_what_they_keep(model_type: str, states: int, keys: int) -> None:
    config = tiny_config(model_type).get_text_config()
    assert len(layers_with_state(config)) == states
    assert len(layers_with_keys(config)) == keys


def test_a_state_that_is_put_is_found_and_goes_on() -> None:
    config = tiny_config("lfm2").get_text_config()
    (layer,) = layers_with_state(config)
    caches = [StateCache(config), DynamicCache(config=config)]
    states = torch.randn(2, 6, 3)
    for cache in caches:
        assert not cache.has_previous_state(layer)
        put_state(cache, layer, "conv", 0, states.clone())
        assert cache.has_previous_state(layer)
        new = torch.ones(2, 6, 1)
        cache.layers[layer].update_conv_state(new)
        assert torch.equal(
            cache.layers[layer].conv_states[0], torch.cat([states, new], -1)[..., 1:]
        )
    ((where, kind, number, kept),) = caches[0].states()
    assert (where, kind, number) == (layer, "conv", 0) and kept.shape == states.shape


def test_a_model_without_states_has_none() -> None:
    assert list(StateCache(LlamaConfig(num_hidden_layers=2)).states()) == []
