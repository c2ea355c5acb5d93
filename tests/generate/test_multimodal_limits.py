"""Calls with images that are left to Hugging Face, and what engines do on models with images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import CACHE_NAME, cache_of, greedy, prompt
from multimodal import IMAGE, KINDS, Picture, inputs_for, tiny_multimodal
from multimodal_case import ROWS, WITH_WINDOW, Case, split, text_of

import torch_paged
from torch_paged.patches.families import TEXT_MODELS


@pytest.fixture(params=KINDS)
def case(request, device, accelerate) -> Case:
    case = Case(request.param, device)
    accelerate(case.model)
    return case


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_next_turn_with_a_window_falls_back(name, device) -> None:
    case = Case(name, device)
    torch_paged.accelerate(case.model)
    turns = []
    for model in (case.model, case.untouched):
        first = greedy(model, return_dict_in_generate=True, **split(case.inputs))
        ids = torch.cat([first.sequences, first.sequences[:, -4:]], 1)
        mask = case.inputs["attention_mask"]
        mask = torch.cat([mask, mask.new_ones(3, 28)], 1)
        turns.append(greedy(model, ids, attention_mask=mask, **{CACHE_NAME: cache_of(first)}))
    assert torch.equal(*turns)
    last = torch_paged.explain(case.model).last_call
    assert last.reasons == ("a cache was passed in, and a layer has a sliding window",)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": 2}, "assisted decoding of a prompt with images"),
    ],
    ids=["attentions", "no cache", "lookup"],
)
@pytest.mark.parametrize("name", ["llava-llama", "qwen2_5_vl"])
def test_what_is_not_served_falls_back(name, options, why, device) -> None:
    case = Case(name, device)
    torch_paged.accelerate(case.model)
    inputs = inputs_for(name, ROWS[:1], device)
    got, expected = (
        greedy(model, **split(inputs), **options) for model in (case.model, case.untouched)
    )
    if "return_dict_in_generate" in options:
        got, expected = got.sequences, expected.sequences
    assert torch.equal(got, expected)
    assert torch_paged.explain(case.model).last_call.reasons[0] == why


def test_prompt_that_ends_with_an_image_falls_back(device) -> None:
    case = Case("qwen2_vl", device)
    torch_paged.accelerate(case.model)
    inputs = inputs_for("qwen2_vl", [[5, Picture((1, 4, 8), 1)]], device)
    # Without the mark of the image's end.
    inputs = {
        k: v[:, :-1] if v.shape[0] == 1 and "grid" not in k else v for k, v in inputs.items()
    }
    got, expected = (greedy(m, **split(inputs)) for m in (case.model, case.untouched))
    assert torch.equal(got, expected)
    (why,) = torch_paged.explain(case.model).last_call.reasons
    assert why.startswith("the prompt ends with an image")


@pytest.mark.parametrize("name", ["llava-llama", "qwen3_vl"])
def test_failed_self_test_leaves_images_to_hugging_face(name, device, monkeypatch) -> None:
    case = Case(name, device)
    key = next(k for k in TEXT_MODELS if k[1] == type(text_of(case.model)).__name__)
    monkeypatch.setitem(TEXT_MODELS, key, replace(TEXT_MODELS[key], interleaved=True))
    torch_paged.accelerate(case.model)
    assert torch_paged.explain(case.model).tier == "fused"
    assert torch.equal(greedy(case.model, **split(case.inputs)), case.expected(24))
    report = torch_paged.explain(case.model)
    assert report.tier == "patched" and report.last_call.path == "eager"
    assert any(reason.startswith("self-test: logits differ") for reason in report.reasons)
    text = prompt(9, 1, IMAGE, device)
    assert torch.equal(greedy(case.model, text), greedy(case.untouched, text))
    assert torch_paged.explain(case.model).last_call.path == "patched"


def test_assistant_that_sees_the_images_drafts_with_its_own_code(device) -> None:
    case, name = Case("llava-llama", device), "llava-llama"
    inputs = inputs_for(name, ROWS[:1], device)
    expected = greedy(case.untouched, **split(inputs))
    assistants = [tiny_multimodal(name, device, seed=3) for _ in range(2)]
    for model in (case.model, assistants[0]):
        torch_paged.accelerate(model)
    drafted = [
        greedy(model, assistant_model=assistant, **split(inputs))
        for model, assistant in zip((case.model, case.untouched), assistants, strict=True)
    ]
    assert torch.equal(*drafted) and torch.equal(drafted[0], expected)
    for model in (case.model, assistants[0]):
        last = torch_paged.explain(model).last_call
        assert last is not None and last.path == "eager"


class TestEngines:
    def test_text_alone_is_served(self, case) -> None:
        prompts = [prompt(n, n, IMAGE)[0].tolist() for n in (5, 16, 21)]
        expected = [
            greedy(case.untouched, torch.tensor([ids], device=case.device))[0, len(ids) :]
            for ids in prompts
        ]
        results = case.model.generate_batch(prompts, max_new_tokens=24, do_sample=False)
        assert [r.generated_tokens for r in results.values()] == [e.tolist() for e in expected]
        with torch_paged.Engine(case.model) as engine:
            for ids in prompts:
                engine.add_request(ids, max_new_tokens=24)
            outputs = engine.run()
        assert [list(o.token_ids) for o in outputs.values()] == [e.tolist() for e in expected]

    def test_images_are_refused(self, case) -> None:
        ids = case.inputs["input_ids"][1].tolist()
        refused = torch_paged.errors.UnsupportedFeatureError
        with torch_paged.Engine(case.model) as engine:
            with pytest.raises(refused, match=f"got the id {IMAGE} of an image"):
                engine.add_request(ids)
            with pytest.raises(refused, match=r"got pixel_values; call model\.generate"):
                engine.add_request(ids[:2], pixel_values=case.inputs["pixel_values"])
            assert engine.run() == {}
        with pytest.raises(refused, match=f"got the id {IMAGE} of an image"):
            case.model.generate_batch([ids], max_new_tokens=2)
        with pytest.raises(refused, match="got pixel_values"):
            case.model.generate_batch([ids[:2]], pixel_values=case.inputs["pixel_values"])
