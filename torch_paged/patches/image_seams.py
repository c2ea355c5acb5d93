"""What transformers does with images in prompts: its arguments, its forward of the prompt.

tests/patches/test_image_seams.py holds these on the oldest and the newest supported release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers import DynamicCache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from torch_paged.patches.seams import CACHE_NAMES, cache_name, forward_arguments

# Images, videos and what else only the forward of a prompt is given.
_FEATURES = frozenset(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
# What goes with them, and has no part in the forwards of later tokens.
_BESIDE = frozenset(
    {
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
        "mm_token_type_ids",
        "token_type_ids",
        "vision_feature_layer",
        "vision_feature_select_strategy",
    }
)
IMAGE_INPUTS = _FEATURES | _BESIDE
# Fields of a config with the id that stands in a prompt where features are merged.
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


class OwnPrefill(NamedTuple):
    """What a model's own forward of prompts leaves.

    Attributes:
        logits: [num_rows, vocab_size] of the last column.
        cache: full keys and values of all columns, in each layer.
    """

    logits: Tensor
    cache: Any


def has_images(kwargs: Mapping[str, Any]) -> bool:
    """Say whether the forward of a prompt is given more than its text and its mask."""
    for name in _FEATURES:
        value = kwargs.get(name)
        # Without images, `generate` hands over an empty dictionary of encoded ones.
        if value is not None and not (isinstance(value, dict) and not value):
            return True
    # Tokens of an image see one another; those of a text alone are all of one type.
    types = kwargs.get("token_type_ids")
    return types is not None and bool(types.any())


def placeholder_ids(config: Any) -> frozenset[int]:
    """Return the ids that images and videos have in prompts."""
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return frozenset(token for token in found if isinstance(token, int))


def own_prefill(
    model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], cache: Any = None
) -> OwnPrefill:
    """Run the prompts of a call as `generate` does.

    Args:
        kwargs: what a decoding method is given; stays as it is.
        cache: has the first columns and takes the others; None: a new one.
    """
    # One without a config keeps what is behind a window, too.
    cache = DynamicCache() if cache is None else cache
    name = cache_name(kwargs) or next(n for n in CACHE_NAMES if n in forward_arguments(model))
    output = model._prefill(input_ids, config, {**kwargs, name: cache})
    return OwnPrefill(output.logits[:, -1].contiguous(), cache)


def take_states(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [num_rows, num_kv_heads, num_columns, head_dim], and drop them."""
    kept = cache.layers[layer]
    states = kept.keys, kept.values
    kept.keys = kept.values = None
    return states


def append_states(cache: Any, more: Any) -> None:
    """Append all columns of `more` to a cache."""
    for number, layer in enumerate(more.layers):
        cache.update(layer.keys, layer.values, number)


__all__ = [
    "IMAGE_INPUTS",
    "OwnPrefill",
    "append_states",
    "has_images",
    "own_prefill",
    "placeholder_ids",
    "take_states",
]
