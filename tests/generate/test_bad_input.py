"""Bad input is refused clearly or falls back, and the model stays usable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import DROP, greedy, prompt, reference, tiny
from torch import nn
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, T5Config
from transformers import T5ForConditionalGeneration as T5

import torch_paged
from torch_paged.errors import UnsupportedModelError


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device)


@pytest.mark.parametrize(
    "thing",
    [None, "gpt2", 7, object(), nn.Linear(2, 2), LlamaForCausalLM, nn.Module()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_model(thing) -> None:
    with pytest.raises((TypeError, NotImplementedError)) as caught:
        torch_paged.accelerate(thing, on_unsupported="raise")
    assert type(thing).__name__ in str(caught.value), "the message does not say what it got"


@pytest.mark.parametrize("on_unsupported", ["raise", "fallback"])
def test_model_without_a_head(on_unsupported, model) -> None:
    with pytest.raises((TypeError, NotImplementedError), match="LlamaModel"):
        torch_paged.accelerate(model.model, on_unsupported=on_unsupported)


@pytest.fixture
def encoder_decoder(device):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    return T5(config).to(device).eval()


def test_encoder_decoder_falls_back(encoder_decoder, device) -> None:
    ids = prompt(9, 9, 64, device)
    expected = copy.deepcopy(encoder_decoder).generate(ids, max_new_tokens=8, do_sample=False)
    assert torch_paged.accelerate(encoder_decoder) is encoder_decoder
    report = torch_paged.explain(encoder_decoder)
    assert report.tier == "eager" and any("encoder-decoder" in why for why in report.reasons)
    got = encoder_decoder.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(got, expected)
    torch_paged.restore(encoder_decoder)


def test_encoder_decoder_raises_when_asked(encoder_decoder) -> None:
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        torch_paged.accelerate(encoder_decoder, on_unsupported="raise")
    assert not torch_paged.is_accelerated(encoder_decoder)


def test_position_past_the_last_one_raises_as_before(device) -> None:
    model = tiny(
        GPT2Config,
        0,
        device,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=32,
        hidden_size=DROP,
        intermediate_size=DROP,
        num_hidden_layers=DROP,
        num_attention_heads=DROP,
        num_key_value_heads=DROP,
        max_position_embeddings=DROP,
    )
    ids = prompt(20, 3, device=device)
    expected = greedy(copy.deepcopy(model), ids, 8)
    torch_paged.accelerate(model)
    assert torch.equal(greedy(model, ids, 8), expected)
    if device.type == "cpu":
        # On a GPU the same indexing error would end the process's use of the device.
        with pytest.raises(IndexError):
            greedy(model, prompt(28, 3), 8)
        assert torch.equal(greedy(model, ids, 8), expected)
    torch_paged.restore(model)


def test_meta_device(model) -> None:
    with torch.device("meta"):
        empty = LlamaForCausalLM(model.config)
    with pytest.raises(UnsupportedModelError, match="meta"):
        torch_paged.accelerate(empty, on_unsupported="raise")
    torch_paged.accelerate(empty)
    report = torch_paged.explain(empty)
    assert report.tier == "eager" and any("meta" in why for why in report.reasons)
    torch_paged.restore(empty)


def test_meta_model_that_gets_its_weights_later(model, device) -> None:
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids).sequences
    with torch.device("meta"):
        empty = LlamaForCausalLM(model.config).eval()
    empty.generation_config = copy.deepcopy(model.generation_config)
    torch_paged.accelerate(empty)
    empty.to_empty(device=device)
    empty.load_state_dict(model.state_dict())
    empty.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    assert torch.equal(greedy(empty, ids), expected)
    torch_paged.restore(empty)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 12},
        {"block_size": "16"},
        {"max_num_seqs": 0},
        {"lag": -1},
        {"lag": 65},
        {"on_unsupported": "ignore"},
        {"kv_cache_dtype": "int3"},
        {"gpu_memory_utilization": 1.5},
        {"batch_buckets": (0, 2)},
        {"blocksize": 16},
    ],
    ids=str,
)
def test_wrong_settings_change_nothing(fields, model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 8).sequences
    name = next(iter(fields)).replace("blocksize", "block_size")
    with pytest.raises((TypeError, ValueError), match=name):
        torch_paged.accelerate(model, **fields)
    assert not torch_paged.is_accelerated(model)
    accelerate(model, block_size=8)
    with pytest.raises((TypeError, ValueError), match=name):
        torch_paged.accelerate(model, **fields)
    assert torch_paged.is_accelerated(model)
    assert torch.equal(greedy(model, ids, 8), expected)


ERRORS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError)
BAD_CALLS = {
    "no_ids": (lambda ids: ids[:, :0], {}),
    "no_rows": (lambda ids: ids[:0], {}),
    "no_room": (lambda ids: ids[:, :10], {"max_length": 10, "max_new_tokens": None}),
    "no_new_tokens": (lambda ids: ids, {"max_new_tokens": 0}),
    "one_dimension": (lambda ids: ids[0], {}),
    "float_ids": (lambda ids: ids.float(), {}),
    "unknown_argument": (lambda ids: ids, {"max_tokens": 5}),
    "negative_beams": (lambda ids: ids, {"num_beams": -1}),
    "sequences_from_greedy": (lambda ids: ids, {"num_return_sequences": 2}),
    "stop_strings_alone": (lambda ids: ids, {"stop_strings": ["a"]}),
    "wrong_processor": (lambda ids: ids, {"logits_processor": [None]}),
    "wrong_streamer": (lambda ids: ids, {"streamer": object()}),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_ends_as_before_and_leaves_the_model_usable(
    name, model, device, accelerate
) -> None:
    change, options = BAD_CALLS[name]
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 8).sequences
    untouched = copy.deepcopy(model)
    accelerate(model, on_unsupported="fallback")
    for _ in range(2):
        try:
            theirs = greedy(untouched, change(ids), 8, **options)
        except ERRORS:
            with pytest.raises(ERRORS):
                greedy(model, change(ids), 8, **options)
        else:
            assert torch.equal(greedy(model, change(ids), 8, **options), theirs)
        assert torch.equal(greedy(model, ids, 8), expected)
        assert torch_paged.stats(model).kv_blocks_used == 0


def test_mask_of_other_rows(model, device, accelerate) -> None:
    """Transformers' error comes from indexing, which on a GPU ends the use of the device."""
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 8).sequences
    accelerate(model, on_unsupported="fallback")
    for _ in range(2):
        # Newer releases refuse it themselves, before they come to us.
        with pytest.raises((ValueError, RuntimeError), match=r"row for each of 3|must match"):
            greedy(model, ids.repeat(3, 1), 8, attention_mask=ids.new_ones(2, 17))
        assert torch.equal(greedy(model, ids, 8), expected)
        assert torch_paged.stats(model).kv_blocks_used == 0


def test_mask_of_one_row_for_all() -> None:
    """On the CPU, see above: some releases of transformers spread it over the prompts."""
    model = tiny(LlamaConfig, 8)
    ids = prompt(17, 17).repeat(3, 1)
    arguments = {"attention_mask": torch.ones(1, 17, dtype=torch.long)}
    try:
        expected = greedy(copy.deepcopy(model), ids, 8, **arguments)
    except ERRORS as error:
        expected = type(error)
    torch_paged.accelerate(model)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(greedy(model, ids, 8, **arguments), expected)
    else:
        with pytest.raises(expected):
            greedy(model, ids, 8, **arguments)
    torch_paged.restore(model)


@pytest.mark.parametrize("token", [257, 100_000, -1])
def test_ids_outside_the_vocabulary(token, accelerate) -> None:
    """On the CPU: on a GPU Hugging Face's own indexing would end the use of the device."""
    model = tiny(LlamaConfig, 8)
    ids = prompt(17, 17)
    expected = reference(model, ids, 8).sequences
    wrong = ids.clone()
    wrong[0, 5] = token
    with pytest.raises(IndexError):
        greedy(copy.deepcopy(model), wrong, 8)
    accelerate(model)
    for _ in range(2):
        with pytest.raises(IndexError):
            greedy(model, wrong, 8)
        assert torch.equal(greedy(model, ids, 8), expected)


# What a call is given, made from ids [1, num_tokens] and their embeddings.
NO_PROMPTS: dict[str, Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]] = {
    "ids": lambda ids, embeds: {"input_ids": ids[:, :0]},
    "ids of three dimensions": lambda ids, embeds: {"input_ids": ids[None]},
    "embeddings": lambda ids, embeds: {"inputs_embeds": embeds[:, :0]},
    "flat embeddings": lambda ids, embeds: {"inputs_embeds": embeds[0]},
    "narrow embeddings": lambda ids, embeds: {"inputs_embeds": embeds[..., :-1]},
    "whole numbers for embeddings": lambda ids, embeds: {"inputs_embeds": embeds.long()},
    "positions of other rows": lambda ids, embeds: {
        "input_ids": ids.repeat(2, 1),
        "position_ids": torch.arange(17, device=ids.device).expand(3, -1),
    },
    "a list of positions": lambda ids, embeds: {
        "input_ids": ids,
        "position_ids": [list(range(17))],
    },
    "yes and no for positions": lambda ids, embeds: {
        "input_ids": ids,
        "position_ids": ids > 0,
    },
}


@pytest.mark.parametrize("name", NO_PROMPTS)
def test_what_is_no_prompt_raises_what_it_raised(name, model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    given = NO_PROMPTS[name](ids, model.get_input_embeddings()(ids).detach())
    with pytest.raises(ERRORS) as theirs:
        copy.deepcopy(model).generate(**given, max_new_tokens=3)
    accelerate(model, on_unsupported="fallback")
    with pytest.raises(ERRORS) as ours:
        model.generate(**given, max_new_tokens=3)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))


@pytest.mark.parametrize("limit", [float("inf"), float("nan")], ids=str)
def test_length_that_is_never_reached(limit, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    model.generation_config.eos_token_id = int(reference(model, ids, 8).sequences[0, -1])
    expected = greedy(copy.deepcopy(model), ids, limit)
    assert expected.shape[1] <= 25
    accelerate(model)
    assert torch.equal(greedy(model, ids, limit), expected)
    assert "there is no length limit" in torch_paged.explain(model).last_call.reasons


def test_forced_token_that_is_none(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    expected = greedy(copy.deepcopy(model), ids, 8, forced_bos_token_id="x")
    accelerate(model)
    assert torch.equal(greedy(model, ids, 8, forced_bos_token_id="x"), expected)


def test_a_batch_without_rows_ends_as_before(model, device) -> None:
    torch_paged.accelerate(model)
    with pytest.raises(RuntimeError, match="0 elements"):
        greedy(model, torch.zeros(0, 4, dtype=torch.long, device=device), 3)
    assert torch_paged.explain(model).last_call.reasons == ("a batch without rows",)
    assert greedy(model, prompt(5, 1, device=device), 3).shape == (1, 8)
    torch_paged.restore(model)


def test_restored_model_has_no_report_of_an_accelerated_one(model) -> None:
    torch_paged.accelerate(model)
    torch_paged.restore(model)
    torch_paged.restore(model)
    assert not torch_paged.is_accelerated(model)
