"""What the accelerated path leaves to Hugging Face gives exactly Hugging Face's result."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from models import (
    CACHE_NAME,
    cache_of,
    generator_states,
    greedy,
    padded_prompts,
    prompt,
    reference,
    seeded,
    tiny,
)
from transformers import DynamicCache, GenerationConfig, LlamaConfig

import torch_paged
from torch_paged.errors import UnsupportedFeatureError

OPTED_OUT = "eager path; opted out: generation_config.torch_paged is False"


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device)


@pytest.fixture
def relaxed(accelerate):
    """Acceleration that may fall back."""
    return lambda model, **fields: accelerate(model, on_unsupported="fallback", **fields)


def assert_fell_back(model) -> None:
    call = torch_paged.explain(model).last_call
    assert call.path == "eager" and call.loop is None
    assert call.reasons and all(call.reasons)
    assert sum(torch_paged.stats(model).fallbacks.values()) >= 1


@pytest.mark.parametrize("kind", ["output_attentions", "output_hidden_states"])
def test_inner_values_are_returned(kind, model, device, relaxed) -> None:
    ids, mask = padded_prompts((5, 16), device)
    options = {"attention_mask": mask, "return_dict_in_generate": True, kind: True}
    expected = greedy(copy.deepcopy(model), ids, 6, **options)
    relaxed(model)
    got = greedy(model, ids, 6, **options)
    assert torch.equal(got.sequences, expected.sequences)
    name = kind.removeprefix("output_")
    for step, wanted in zip(got[name], expected[name], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step, wanted, strict=True))
    assert_fell_back(model)


def equal_options(ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    def own_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **_):
        for _step in range(5):
            logits = model(input_ids).logits[:, -1]
            input_ids = torch.cat([input_ids, logits.argmin(-1, keepdim=True)], 1)
        return input_ids

    return {
        "no_cache": {"use_cache": False},
        "static_cache": {"cache_implementation": "static"},
        "chunked_prefill": {"prefill_chunk_size": 5},
        "guidance": {"guidance_scale": 1.7},
        "negative_prompt": {"guidance_scale": 1.7, "negative_prompt_ids": ids[:, :4]},
        "custom_generate": {"custom_generate": own_loop},
    }


@pytest.mark.parametrize(
    "name",
    [
        "no_cache",
        "static_cache",
        "chunked_prefill",
        "guidance",
        "negative_prompt",
        "custom_generate",
    ],
)
@pytest.mark.parametrize("do_sample", [False, True])
def test_result_is_hugging_faces(name, do_sample, model, device, relaxed) -> None:
    ids = prompt(17, 17, device=device)
    options = {"max_new_tokens": 16, "do_sample": do_sample, **equal_options(ids)[name]}
    expected = seeded(copy.deepcopy(model), 3, ids, **options)
    relaxed(model)
    got = seeded(model, 3, ids, **options)
    assert torch.equal(got.result, expected.result)
    for state, wanted in zip(got.states, expected.states, strict=True):
        assert torch.equal(state, wanted)
    call = torch_paged.explain(model).last_call
    assert name == "custom_generate" or call.path != "eager" or call.reasons


class TestCachePassedIn:
    """The four ways of handing a cache to generate()."""

    @pytest.fixture
    def case(self, device):
        model = tiny(LlamaConfig, 5, device)
        return model, copy.deepcopy(model), prompt(13, 3, device=device)

    def test_next_turn(self, case, device, relaxed) -> None:
        model, untouched, ids = case
        relaxed(model)
        first = greedy(model, ids, 9, return_dict_in_generate=True)
        following = torch.cat([first.sequences, prompt(6, 11, device=device)], 1)
        got = greedy(model, following, **{CACHE_NAME: cache_of(first)})
        assert torch.equal(got, reference(untouched, following).sequences)

    def test_prefilled_prefix(self, case, relaxed) -> None:
        model, untouched, ids = case
        relaxed(model)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :10], **{CACHE_NAME: cache})
        got = greedy(model, ids, **{CACHE_NAME: cache})
        assert torch.equal(got, reference(untouched, ids).sequences)

    def test_one_prefix_for_three_questions(self, case, device, relaxed) -> None:
        model, untouched, ids = case
        relaxed(model)
        prefix = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, **{CACHE_NAME: prefix})
        for seed in (11, 13, 14):
            question = torch.cat([ids, prompt(6, seed, device=device)], 1)
            got = greedy(model, question, **{CACHE_NAME: copy.deepcopy(prefix)})
            assert torch.equal(got, greedy(untouched, question))
        assert prefix.get_seq_length() == 13

    def test_last_id_alone(self, case, relaxed) -> None:
        model, untouched, ids = case
        relaxed(model)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], **{CACHE_NAME: cache})
        got = greedy(
            model, ids[:, -1:], attention_mask=torch.ones_like(ids), **{CACHE_NAME: cache}
        )
        assert torch.equal(got[:, 1:], reference(untouched, ids).sequences[:, 13:])

    def test_the_callers_cache_grows_as_before(self, case, relaxed) -> None:
        model, untouched, ids = case
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        expected = greedy(untouched, ids, 9, **{CACHE_NAME: caches[0]})
        relaxed(model)
        assert torch.equal(greedy(model, ids, 9, **{CACHE_NAME: caches[1]}), expected)
        assert caches[1].get_seq_length() == caches[0].get_seq_length() == 21


def test_opt_out_for_a_call(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids).sequences
    accelerate(model)
    config = GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=0)
    config.torch_paged = False
    got = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert torch.equal(got, expected)
    assert str(torch_paged.explain(model).last_call) == OPTED_OUT
    assert torch.equal(greedy(model, ids), expected)
    assert torch_paged.explain(model).last_call.path == "fused"
    model.generation_config.torch_paged = False
    assert torch.equal(greedy(model, ids), expected)
    assert str(torch_paged.explain(model).last_call) == OPTED_OUT


@pytest.mark.parametrize("on_unsupported", ["fallback", "raise"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"use_cache": False}],
    ids=["sample", "beams", "assisted", "also_unsupported"],
)
def test_opt_out_is_no_fallback(
    options, on_unsupported, model, device, accelerate, caplog
) -> None:
    ids = prompt(17, 17, device=device)
    expected = greedy(copy.deepcopy(model), ids, 4, **options)
    accelerate(model, on_unsupported=on_unsupported)
    model.generation_config.torch_paged = False
    with caplog.at_level(logging.DEBUG, logger="torch_paged"):
        assert torch.equal(greedy(model, ids, 4, **options), expected)
    assert str(torch_paged.explain(model).last_call) == OPTED_OUT
    assert not torch_paged.stats(model).fallbacks
    assert not caplog.records


@pytest.mark.parametrize(
    "unsupported",
    [
        {"output_attentions": True, "return_dict_in_generate": True},
        {"assistant_early_exit": 1},
    ],
    ids=["attentions", "early_exit"],
)
def test_raise_comes_before_tokens_and_random_numbers(
    unsupported, model, device, accelerate
) -> None:
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids).sequences
    puts: list[torch.Tensor] = []
    streamer = type("S", (), {"put": lambda self, v: puts.append(v), "end": lambda self: None})()
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 8, **unsupported}
    if "assistant_early_exit" not in unsupported:
        options["streamer"] = streamer
    accelerate(model)
    torch.manual_seed(3)
    before = generator_states()
    with pytest.raises(UnsupportedFeatureError):
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert all(torch.equal(a, b) for a, b in zip(before, generator_states(), strict=True))
    assert len(puts) <= 1, "more than the prompt was streamed"
    assert torch.equal(greedy(model, ids), expected)


def test_fallbacks_are_counted_and_named(model, device, relaxed) -> None:
    ids = prompt(17, 17, device=device)
    relaxed(model)
    for _ in range(3):
        greedy(model, ids, 2, output_attentions=True, return_dict_in_generate=True)
    reasons = torch_paged.explain(model).last_call.reasons
    assert torch_paged.stats(model).fallbacks[reasons[0]] == 3


def test_autocast(model, device, relaxed) -> None:
    ids, mask = padded_prompts((5, 16), device)
    with torch.autocast(device.type, torch.bfloat16):
        expected = greedy(copy.deepcopy(model), ids, attention_mask=mask)
    relaxed(model)
    with torch.autocast(device.type, torch.bfloat16):
        got = greedy(model, ids, attention_mask=mask)
    assert torch.equal(got, expected)
    plain = greedy(model, ids, attention_mask=mask)
    assert torch.equal(plain, greedy(copy.deepcopy(model), ids, attention_mask=mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_embeddings_of_another_dtype_than_the_model(dtype, model, device, relaxed) -> None:
    ids = prompt(9, 4, device=device)
    embeds = model.get_input_embeddings()(ids).detach().to(dtype)
    options = {"inputs_embeds": embeds, "max_new_tokens": 6, "do_sample": False}
    expected = copy.deepcopy(model).generate(**options)
    relaxed(model)
    assert torch.equal(model.generate(**options), expected)
    assert "inputs_embeds of torch" in str(torch_paged.explain(model).last_call)
