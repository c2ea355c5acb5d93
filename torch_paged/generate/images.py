"""Prompts with images: the model's own forward computes them, our steps go on from its cache.

What an image does to a prompt differs from class to class: how it is encoded and merged, which
positions its tokens have, which tokens see one another. Behind the prompt there is only text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged.engine.batch import Keeps, PackedPrompts
from torch_paged.errors import UnsupportedFeatureError
from torch_paged.generate.call import Call
from torch_paged.generate.masks import real_columns
from torch_paged.generate.past import Columns, cached_kv, num_past_columns, text_positions
from torch_paged.generate.prompts import Prompts, pack
from torch_paged.generate.session import Session
from torch_paged.patches import image_seams, seams


def is_own_prefill(call: Call) -> bool:
    """Say whether the model has to compute the prompts of a call itself."""
    return image_seams.has_images(call.model_kwargs) or _components_differ(call, slice(None))


def _components_differ(call: Call, columns: slice) -> bool:
    """Say whether tokens have other positions in height or width than in time."""
    positions = call.model_kwargs.get("position_ids")
    if positions is None or positions.dim() != 3:
        return False
    # Before them there may be one by which masks are made.
    parts = positions[-3:, :, columns]
    return bool((parts != parts[-1:]).any())


def own_prefill_reasons(session: Session, call: Call) -> list[str]:
    """Say why our steps cannot go on behind a prompt that the model computes itself."""
    step = session.step
    assert step is not None
    if step.has_spans:
        return ["rotary frequencies follow the length, and the prompt has images"]
    if _components_differ(call, slice(-1, None)):
        return ["the prompt ends with an image, whose last token has a position of three parts"]
    return []


def refuse_images(model: Any, ids: Sequence[int], overrides: Mapping[str, Any]) -> None:
    """Raise `UnsupportedFeatureError` for a request to an engine that is not text alone."""
    given = sorted(image_seams.IMAGE_INPUTS & overrides.keys())
    if not given:
        placeholders = image_seams.placeholder_ids(model.config)
        found = placeholders.intersection(ids) if placeholders else ()
        given = [f"the id {token} of an image or video" for token in sorted(found)]
    if given:
        raise UnsupportedFeatureError(
            f"an engine takes prompts of text alone, got {', '.join(given)}; call "
            "model.generate() for prompts with images"
        )


def prompts_of(session: Session, call: Call, keeps: Keeps) -> Prompts:
    """Return the prompts of a call, packed; those with images are computed by then.

    Args:
        keeps: what of the keys and values the cache of the call is to have in the end.
    """
    assert session.step is not None
    device, kwargs = session.step.device, call.model_kwargs
    if not is_own_prefill(call):
        core = session.core
        assert core is not None
        return pack(session.step, core, call, call.input_ids)
    given = seams.call_cache(kwargs)
    past = given if num_past_columns(given) else None
    ids, config = call.input_ids, call.generation_config
    ran = image_seams.own_prefill(session.model, ids, config, kwargs, past)
    cache, width = ran.cache, seams.cache_length(ran.cache)
    if past is None and keeps != "nothing":
        image_seams.append_states(given, cache)
    rows = ran.logits.shape[0]
    real = real_columns(kwargs.get("attention_mask"), device)
    lengths = (width,) * rows if real is None else tuple(real.sum(-1).tolist())
    columns = Columns(width, 0, real)
    # Read once, a cache of our own is gone.
    states = seams.layer_states if past is not None else image_seams.take_states
    packed = PackedPrompts(
        lengths=lengths,
        ids=torch.empty(0, dtype=torch.long, device=device),
        embeddings=None,
        positions=torch.empty(0, dtype=torch.int32, device=device),
        last_positions=_last_positions(kwargs.get("position_ids"), rows, width, device),
        cached=lengths,
        cached_kv=cached_kv(cache, columns, states),
        logits=ran.logits,
    )
    return Prompts(packed, columns)


def _last_positions(
    positions: Tensor | None, rows: int, width: int, device: torch.device
) -> Tensor:
    """Return the rotary position [rows] of each row's last token; text has one component."""
    positions = text_positions(positions)
    if positions is None:
        return torch.full((rows,), width - 1, device=device)
    return positions[:, -1].to(device).expand(rows)


__all__ = ["is_own_prefill", "own_prefill_reasons", "prompts_of", "refuse_images"]
