"""What transformers' layers of a cache have and do, as far as lent layers must know of it."""

from __future__ import annotations

import copy
import inspect

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from torch_paged.patches import lease_seams
from torch_paged.patches.lease_seams import LentLayer

# Those that read or write tensors find them made; those that do not are looked through.
_KNOWN = {
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "get_mask_sizes",
    "get_max_length",
    "get_seq_length",
    "lazy_initialization",
    "offload",
    "prefetch",
    "reorder_cache",
    "reset",
    "update",
}


class Lender:
    """Lends ones and twos, once."""

    num_columns = 5

    def __init__(self) -> None:
        self.layers: list[LentLayer] = []
        self.is_over = False

    def register(self, layer: LentLayer) -> None:
        self.layers.append(layer)

    def materialise(self) -> None:
        for layer in self.layers:
            number, columns = lease_seams.lent_place(layer)
            ones = torch.ones(1, 2, columns, 4)
            lease_seams.settle(layer, ones * (number + 1), ones * -(number + 1))
        self.layers.clear()
        self.is_over = True


def lent_cache() -> tuple[DynamicCache, Lender]:
    cache, lender = DynamicCache(), Lender()
    assert lease_seams.add_layers(cache, range(3))
    lease_seams.lend(cache, range(3), lender, torch.empty(0))
    return cache, lender


def test_layers_do_nothing_that_we_do_not_know() -> None:
    names = {
        name
        for owner in (CacheLayerMixin, DynamicLayer)
        for name, value in vars(owner).items()
        if inspect.isfunction(value) and not name.startswith("__")
    }
    # A deprecated alias of the older release asks for nothing but the length.
    assert names - {"get_max_cache_shape"} == _KNOWN


def test_a_filled_layer_has_the_attributes_of_a_settled_one() -> None:
    layer = DynamicLayer()
    states = torch.ones(1, 2, 5, 4)
    layer.update(states, states)
    cache, _ = lent_cache()
    lent = vars(cache.layers[0]).copy()
    assert cache.layers[0].keys is not None
    assert sorted(vars(cache.layers[0])) == sorted(vars(layer))
    for name, value in vars(layer).items():
        if name not in ("keys", "values"):
            assert lent[name] == value


def test_a_layer_of_the_cache_gives_tensors_to_all() -> None:
    cache, lender = lent_cache()
    assert cache.get_seq_length() == 5 and len(cache) == 3
    assert lease_seams.lender_of(cache, range(3)) is lender
    assert lease_seams.lenders(cache) == [lender]
    assert torch.equal(cache.layers[1].values, torch.full((1, 2, 5, 4), -2.0))
    assert all(type(layer) is DynamicLayer for layer in cache.layers)
    assert lease_seams.lender_of(cache, range(3)) is None and not lease_seams.lenders(cache)


def test_a_class_of_layers_that_is_not_ours_to_make() -> None:
    class Other(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layer_class_to_replicate = Other
    assert not lease_seams.add_layers(cache, range(2))
    cache.layers = [DynamicLayer(), Other()]
    assert not lease_seams.add_layers(cache, range(2))


def test_layers_of_unequal_length_have_no_common_lender() -> None:
    cache, _ = lent_cache()
    assert copy.copy(cache).layers is cache.layers
    cache.layers[1].__class__ = DynamicLayer
    cache.layers[1].__class__ = LentLayer
    assert lease_seams.lender_of(cache, range(3)) is not None
    vars(cache.layers[1])["_lent_columns"] = 4
    assert lease_seams.lender_of(cache, range(3)) is None
    assert lease_seams.lender_of(cache, range(2)) is None
    cache.layers.reverse()
    assert lease_seams.lender_of(cache, range(3)) is None
