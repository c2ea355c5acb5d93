"""What we hold of how transformers treats images in prompts, on every supported release."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationMixin

from torch_paged.patches import image_seams, seams
from torch_paged.patches.families import TEXT_MODELS, is_multimodal, modules_beside, read_spec
from torch_paged.patches.multimodal import WRAPPERS, is_around
from torch_paged.patches.refusal import SpecRefusal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from multimodal import IMAGE, KINDS, VIDEO, Picture, inputs_for, tiny_multimodal  # noqa: E402


def test_arguments_of_the_prefill() -> None:
    features = image_seams.IMAGE_INPUTS
    assert {"pixel_values", "pixel_values_videos", "image_sizes"} <= features
    assert {"image_grid_thw", "video_grid_thw", "mm_token_type_ids"} <= features
    assert not features & {"input_ids", "attention_mask", "position_ids", *seams.CACHE_NAMES}
    names = list(inspect.signature(GenerationMixin._prefill).parameters)
    assert names[:4] == ["self", "input_ids", "generation_config", "model_kwargs"]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, False),
        ({"mm_encoder_outputs": {}}, False),
        ({"mm_token_type_ids": torch.ones(1, 2)}, False),
        ({"token_type_ids": torch.zeros(1, 2)}, False),
        ({"token_type_ids": torch.tensor([[0, 1]])}, True),
        ({"pixel_values": None}, False),
        ({"pixel_values": torch.zeros(1)}, True),
        ({"pixel_values_videos": torch.zeros(1)}, True),
    ],
)
def test_what_counts_as_images(kwargs: dict[str, Any], expected: bool) -> None:
    assert image_seams.has_images(kwargs) is expected


@pytest.mark.parametrize("name", KINDS)
def test_prefill_is_the_models_own(name: str) -> None:
    model = tiny_multimodal(name)
    inputs = inputs_for(name, [[5, Picture(seed=1), 15]])
    ids = inputs["input_ids"]
    with torch.no_grad():
        expected = model(**inputs).logits[:, -1]
        kwargs = {k: v for k, v in inputs.items() if k != "input_ids"}
        if KINDS[name].grids:
            rope = {k: v for k, v in kwargs.items() if "pixel" not in k}
            kwargs["position_ids"], _ = model.model.get_rope_index(ids, **rope)
        before = dict(kwargs)
        ran = image_seams.own_prefill(model, ids, model.generation_config, kwargs)
    torch.testing.assert_close(ran.logits, expected)
    assert kwargs.keys() == before.keys()
    # Full ones, whatever windows the layers have.
    assert all(layer.keys.shape[2] == ids.shape[1] for layer in ran.cache.layers)
    assert len(ran.cache.layers) == model.config.get_text_config().num_hidden_layers


def test_states_are_taken_and_appended() -> None:
    source, target = DynamicCache(), DynamicCache()
    states = [(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)) for _ in range(2)]
    for layer, pair in enumerate(states):
        source.update(*pair, layer)
    image_seams.append_states(target, source)
    image_seams.append_states(target, source)
    assert target.get_seq_length() == 6
    keys, values = image_seams.take_states(source, 1)
    assert torch.equal(keys, states[1][0]) and torch.equal(values, states[1][1])
    assert source.layers[1].keys is None and source.layers[0].keys is not None


@pytest.mark.parametrize("name", KINDS)
def test_spec_of_the_text_model(name: str) -> None:
    model = tiny_multimodal(name)
    spec = read_spec(model)
    assert is_multimodal(model)
    assert spec.head.ref.module is model.lm_head
    assert spec.embedding.module is model.get_input_embeddings()
    assert len(spec.layers) == model.config.get_text_config().num_hidden_layers
    beside = {id(module) for module in modules_beside(model)}
    text = {id(m) for m in model.get_submodule(_text(model)).modules()}
    assert beside and not beside & (text | {id(model), id(model.model), id(model.lm_head)})
    assert len(beside) + len(text) + 3 == len(list(model.modules()))


def _text(model: Any) -> str:
    return "model.language_model" if hasattr(model.model, "language_model") else "model.text_model"


def test_placeholders() -> None:
    for name in KINDS:
        found = image_seams.placeholder_ids(tiny_multimodal(name).config)
        assert found == ({IMAGE, VIDEO} if KINDS[name].grids else {IMAGE})


def test_names_around_the_text_model() -> None:
    text = "model.language_model"
    inside = ("", "model", text, f"{text}.layers.0", "lm_head")
    assert all(is_around(name, text) for name in inside)
    beside = ("model.visual", "model.language_model_2", "mod", "visual.model")
    assert not any(is_around(name, text) for name in beside)


def test_text_model_without_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_multimodal("llava-llama")
    monkeypatch.delitem(TEXT_MODELS, ("llama.modeling_llama", "LlamaModel"))
    with pytest.raises(SpecRefusal, match=r"no fused decoder for its text model .*LlamaModel"):
        read_spec(model)


def test_every_wrapper_exists() -> None:
    import importlib

    for module, name in WRAPPERS:
        cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        assert "pixel_values" in inspect.signature(cls.forward).parameters
