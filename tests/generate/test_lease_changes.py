"""What is done to a leased cache has the result that it has on tensors."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    CACHE_NAME,
    cache_of,
    greedy,
    padded_prompts,
    prompt,
    reference,
    tiny,
)
from transformers import DynamicCache, LlamaConfig

from torch_paged.patches.lease_seams import LentLayer

sys.path.append(str(Path(__file__).parent))

from lease_case import (  # noqa: E402
    assert_equal,
    assert_nothing_held,
    immediate,
    lent,
    tensors,
    turn,
)


@pytest.fixture
def case(device, accelerate):
    model = tiny(LlamaConfig, 5, device)
    return accelerate(copy.deepcopy(model)), model, prompt(13, 3, device=device)


# What is done to a cache, from its tensors' shapes to new ones.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "crop by one": lambda c: c.crop(-1),
    "crop into a block": lambda c: c.crop(-6),
    "crop nothing": lambda c: c.crop(0),
    "crop all": lambda c: c.crop(-c.get_seq_length()),
    "crop twice": lambda c: (c.crop(-2), c.crop(-3)),
    "reorder": lambda c: c.reorder_cache(torch.tensor([2, 0, 0], device=c.layers[0].device)),
    "select": lambda c: c.batch_select_indices(torch.tensor([1], device=c.layers[0].device)),
    "repeat": lambda c: c.batch_repeat_interleave(2),
    "one layer": lambda c: c.layers[1].crop(-4),
    "write": lambda c: c.layers[1].keys.mul_(2),
    "replace": lambda c: setattr(c.layers[0], "values", torch.ones(2)),
    "offload": lambda c: c.layers[1].offload(),
    "update": lambda c: c.update(*(torch.ones(3, 2, 4, 16, device=c.layers[0].device),) * 2, 1),
    "reset": lambda c: c.reset(),
}


@pytest.mark.parametrize("first", ["lent", "seen"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes(change, first, device, accelerate, monkeypatch) -> None:
    model = accelerate(tiny(LlamaConfig, 5, device))
    ids, mask = padded_prompts((5, 16, 17), device)
    caches = []
    with immediate(monkeypatch):
        caches.append(cache_of(turn(model, ids, attention_mask=mask)))
    caches.append(cache_of(turn(model, ids, attention_mask=mask)))
    if first == "seen":
        assert caches[1].layers[0].keys is not None
    for cache in caches:
        CHANGES[change](cache)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for expected, got in zip(tensors(caches[0]), tensors(caches[1]), strict=True):
        assert (got is expected is None) or torch.equal(got, expected)
    assert_nothing_held(model)


def test_positive_crop_is_transformers_affair(case) -> None:
    model, untouched, ids = case
    results = []
    for cache in (cache_of(turn(model, ids)), cache_of(turn(untouched, ids))):
        try:
            cache.crop(5)
        except ValueError as error:
            results.append(str(error))
        results.append(cache.get_seq_length())
    half = len(results) // 2
    assert results[:half] == results[half:]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "of layers": lambda c: copy.deepcopy([c, c.layers[0]])[0],
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies(kind, case, monkeypatch) -> None:
    model, _, ids = case
    with immediate(monkeypatch):
        expected = cache_of(turn(model, ids))
    cache = cache_of(turn(model, ids))
    copied = COPIES[kind](cache)
    assert type(copied) is DynamicCache
    assert_equal(copied, expected)
    copied.layers[0].keys.zero_()
    if kind != "copy":
        assert_equal(cache, expected)
    assert_nothing_held(model)


def test_torch_save(case, monkeypatch) -> None:
    model, _, ids = case
    with immediate(monkeypatch):
        expected = cache_of(turn(model, ids))
    buffer = io.BytesIO()
    torch.save(cache_of(turn(model, ids)), buffer)
    buffer.seek(0)
    assert_equal(torch.load(buffer, weights_only=False), expected)


def test_forward_of_the_model_goes_on_from_a_lease(case, device) -> None:
    model, untouched, ids = case
    more = prompt(4, 4, device=device)
    logits = []
    for m in (model, untouched):
        cache = cache_of(turn(m, ids))
        with torch.no_grad():
            logits.append(m(more, **{CACHE_NAME: cache}).logits)
        assert cache.get_seq_length() == 25
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_beams_and_candidates_go_on_from_a_lease(options, case, device, accelerate) -> None:
    model, untouched, ids = case
    accelerate(model, on_unsupported="fallback")
    results = []
    for m in (model, untouched):
        out = turn(m, ids)
        cache = cache_of(out)
        following = torch.cat([out.sequences, prompt(6, 11, device=device)], 1)
        if "num_beams" in options:
            cache.batch_repeat_interleave(2)
        results.append(greedy(m, following, 9, **options, **{CACHE_NAME: cache}))
    assert torch.equal(*results)


def test_another_models_lease(case, device, accelerate) -> None:
    model, untouched, ids = case
    other = accelerate(copy.deepcopy(untouched))
    out = turn(model, ids)
    following = torch.cat([out.sequences, prompt(6, 11, device=device)], 1)
    got = greedy(other, following, 9, **{CACHE_NAME: cache_of(out)})
    assert torch.equal(got, reference(untouched, following, 9).sequences)
    assert_nothing_held(model)


@pytest.mark.parametrize("where", ["inference", "grad", "another default"])
def test_looked_at_anywhere(where, case, monkeypatch) -> None:
    model, _, ids = case
    with immediate(monkeypatch):
        expected = cache_of(turn(model, ids))
    cache = cache_of(turn(model, ids))
    contexts = {
        "inference": torch.inference_mode(),
        "grad": torch.enable_grad(),
        "another default": torch.device("meta"),
    }
    with contexts[where]:
        keys = cache.layers[0].keys
    assert not keys.is_inference() and not keys.requires_grad
    assert_equal(cache, expected)


def test_generated_in_inference_mode(device, accelerate, monkeypatch) -> None:
    model = accelerate(tiny(LlamaConfig, 5, device))
    ids, mask = padded_prompts((5, 16, 17), device)
    more = torch.cat([mask, mask.new_ones(3, 9)], 1)
    caches = []
    for form in (immediate(monkeypatch), contextlib.nullcontext()):
        with form, torch.inference_mode():
            out = turn(model, ids, attention_mask=mask)
            out = turn(model, out.sequences, attention_mask=more, **{CACHE_NAME: cache_of(out)})
        caches.append(cache_of(out))
    assert lent(caches[1])
    assert_equal(caches[1], caches[0])


def test_a_lent_layer_has_no_attributes_of_its_own_making(case) -> None:
    model, _, ids = case
    layer = cache_of(turn(model, ids)).layers[0]
    with pytest.raises(AttributeError, match="cumulative_length"):
        layer.cumulative_length  # noqa: B018
    assert isinstance(layer, LentLayer) and layer.is_initialized
