"""Windows are read out of mask functions, and anything else is refused."""

from unittest import mock

import pytest
import torch

import torch_paged
from torch_paged.generate.support import zoo
from torch_paged.patches.patched_step import PatchedStep
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.visibility import window_of


def causal(row, head, query, key):
    return key <= query


@pytest.mark.parametrize("window", [1, 2, 8, 4096, 4097, 100_000])
def test_window_is_found(window):
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - window)) == window


def test_causal_has_no_window():
    assert window_of(causal) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool),
        lambda b, h, q, k: k <= q + 1,
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: (k <= q) & (k // 512 == q // 512),
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 4)),
        lambda b, h, q, k: (k <= q) & (k != 2),
    ],
    ids=["all", "one_ahead", "not_itself", "chunks", "first_tokens", "a_hole"],
)
def test_other_masks_are_refused(function):
    with pytest.raises(SpecRefusal, match="neither causal nor a window"):
        window_of(function)


def test_a_window_that_only_the_mask_knows_is_used():
    step = PatchedStep(zoo.tiny_model("phimoe"))
    assert [call.window for call in step.calls] == [zoo.WINDOW, zoo.WINDOW]


def test_a_cache_that_forgets_more_than_the_masks_hide_is_refused():
    with pytest.raises(SpecRefusal, match="cache remembers 8"):
        PatchedStep(zoo.tiny_model("moshi"))


def test_latents_in_the_cache_are_returned_as_the_model_keeps_them(monkeypatch):
    model = zoo.tiny_model("deepseek_v3")
    ids = torch.arange(3, 24)[None]
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(ids, **options)
    refusal = SpecRefusal("the fused tier is switched off")
    monkeypatch.setattr("torch_paged.generate.session.read_spec", mock.Mock(side_effect=refusal))
    torch_paged.accelerate(model)
    got = model.generate(ids, **options)
    name = "cache" if "cache" in got else "past_key_values"
    for ours, theirs in zip(got[name].layers, expected[name].layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
    assert "something else than keys and values" in str(torch_paged.explain(model).last_call)
    model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch_paged.explain(model).last_call.path == "patched"


def test_rates_that_modules_keep_count_as_dropout():
    model = zoo.tiny_model("starcoder2").train()
    model.model.layers[0].mlp.residual_dropout = 0.1
    torch_paged.accelerate(model)
    model.generate(torch.arange(3, 9)[None], max_new_tokens=2, do_sample=False)
    call = torch_paged.explain(model).last_call
    assert call.path == "eager"
    assert "residual_dropout in training mode" in str(call.reasons)
