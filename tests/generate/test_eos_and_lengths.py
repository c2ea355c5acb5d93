"""Where a sequence ends: end tokens, limits, padding behind the end, and long prompts."""

from __future__ import annotations

import copy

import pytest
import torch
from models import greedy, left_pad, padded_prompts, prompt, reference, seeded, tiny
from transformers import LlamaConfig
from transformers.generation import stopping_criteria

import torch_paged

LAGS = [0, 1, 4]


def last_path(model) -> str:
    return torch_paged.explain(model).last_call.path


@pytest.mark.parametrize("lag", LAGS)
def test_output_does_not_depend_on_the_limit(lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 1, device)
    ids, long = prompt(5, 3, device=device), prompt(400, 400, device=device)
    expected = reference(model, ids, 40).sequences
    expected_long = reference(model, long, 5).sequences
    accelerate(model, lag=lag)
    for num_tokens in (1, 2, 15, 16, 17, 31, 32, 33, 40):
        assert torch.equal(greedy(model, ids, num_tokens), expected[:, : 5 + num_tokens])
        if num_tokens == 17:
            assert torch.equal(greedy(model, long, 5), expected_long)


def test_order_of_rows_does_not_matter(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    rows = [prompt(n, n, device=device) for n in (5, 16, 17)]
    singles = [reference(model, row).sequences[0, -24:] for row in rows]
    accelerate(model)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        ids, mask = left_pad([rows[i] for i in order])
        got = greedy(model, ids, attention_mask=mask)
        for row, i in zip(got, order, strict=True):
            assert torch.equal(row[-24:], singles[i])


@pytest.fixture
def two_end_tokens(device):
    """B47's model, prompt and the fifth and tenth token of its free run."""
    model = tiny(LlamaConfig, 14, device)
    ids = prompt(17, 17, device=device)
    free = reference(model, ids).sequences[0, 17:]
    return model, ids, [int(free[4]), int(free[9])]


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("use", ["both", "first", "second", "reversed"])
def test_end_token_list(use, lag, two_end_tokens, accelerate) -> None:
    model, ids, ends = two_end_tokens
    eos = {"both": ends, "first": ends[0], "second": ends[1:], "reversed": ends[::-1]}[use]
    expected = reference(model, ids, eos_token_id=eos)
    assert expected.sequences.shape[1] == (27 if use == "second" else 22)
    accelerate(model, lag=lag)
    assert torch.equal(greedy(model, ids, eos_token_id=eos), expected.sequences)
    call = torch_paged.explain(model).last_call
    assert (call.path, call.loop) == ("fused", "device")


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("limit", ["min_new_tokens", "min_length"])
def test_minimum_length_holds_back_every_end_token(limit, lag, two_end_tokens, accelerate) -> None:
    model, ids, ends = two_end_tokens
    minimum = {"min_new_tokens": 12} if limit == "min_new_tokens" else {"min_length": 17 + 12}
    expected = reference(model, ids, eos_token_id=ends, **minimum)
    assert expected.sequences.shape[1] > 17 + 12
    accelerate(model, lag=lag)
    got = greedy(model, ids, eos_token_id=ends, **minimum)
    assert torch.equal(got, expected.sequences)
    assert last_path(model) == "fused"


@pytest.mark.parametrize("lag", LAGS)
def test_rows_end_at_different_steps(lag, two_end_tokens, device, accelerate) -> None:
    model, ids, ends = two_end_tokens
    batch, mask = left_pad([prompt(5, 5, device=device), ids, prompt(33, 33, device=device)])
    free = greedy(copy.deepcopy(model), batch, attention_mask=mask)[:, 33:]
    eos = [*ends, int(free[0, 7]), int(free[2, 1])]
    expected = reference(model, batch, attention_mask=mask, eos_token_id=eos)
    width = expected.sequences.shape[1]
    assert (expected.sequences[2, 35:] == 0).all() and width < 33 + 24
    accelerate(model, lag=lag)
    got = greedy(model, batch, attention_mask=mask, eos_token_id=eos)
    assert torch.equal(got, expected.sequences)
    assert last_path(model) == "fused"


def test_end_tokens_of_the_generation_config(two_end_tokens, accelerate) -> None:
    model, ids, ends = two_end_tokens
    model.generation_config.eos_token_id = ends
    expected = reference(model, ids)
    assert expected.sequences.shape[1] == 22
    accelerate(model)
    assert torch.equal(greedy(model, ids), expected.sequences)
    # Seen also when it changes after the model was accelerated.
    model.generation_config.eos_token_id = ends[1]
    later = reference(model, ids).sequences
    assert later.shape[1] == 27
    assert torch.equal(greedy(model, ids), later)


@pytest.mark.parametrize("pad", [None, "eos", 7])
def test_fill_behind_the_end(pad, two_end_tokens, device, accelerate) -> None:
    model, ids, ends = two_end_tokens
    model.generation_config.pad_token_id = None
    model.config.pad_token_id = None
    batch, mask = left_pad([prompt(9, 5, device=device), ids])
    kwargs = {"eos_token_id": ends, "attention_mask": mask}
    if pad is not None:
        kwargs["pad_token_id"] = ends[1] if pad == "eos" else pad
    expected = reference(model, batch, **kwargs)
    assert expected.sequences.shape[1] > 17 + 10
    assert len(set(expected.sequences[1, 22:].tolist())) == 1
    accelerate(model)
    assert torch.equal(greedy(model, batch, **kwargs), expected.sequences)


@pytest.mark.parametrize("rows", [1, 2])
def test_fill_that_is_no_token(rows, two_end_tokens, device, accelerate) -> None:
    """Hugging Face can emit it, but not go on from it."""
    model, ids, ends = two_end_tokens
    batch, mask = left_pad([ids, prompt(9, 5, device=device)][:rows])
    kwargs = {"eos_token_id": ends, "attention_mask": mask, "pad_token_id": -1}
    ended = reference(model, ids, eos_token_id=ends).sequences.shape[1] - ids.shape[1]
    expected = reference(model, batch, ended + 1, **kwargs).sequences
    assert (expected[0, -1] == -1) == (rows == 2)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, batch, ended + 1, **kwargs), expected)
    assert (last_path(model) == "fused") == (rows == 1)


def test_end_token_inside_the_prompt_is_no_end(two_end_tokens, device, accelerate) -> None:
    model, ids, ends = two_end_tokens
    ids = torch.cat([ids.new_tensor([ends]), prompt(9, 9, device=device)], 1)
    expected = reference(model, ids, eos_token_id=ends)
    assert expected.sequences.shape[1] == 11 + 24
    accelerate(model)
    assert torch.equal(greedy(model, ids, eos_token_id=ends), expected.sequences)


@pytest.mark.parametrize("lag", LAGS)
def test_first_token_ends_every_row(lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 14, device)
    ids, mask = padded_prompts((5, 17), device)
    eos = reference(model, ids, 1, attention_mask=mask).sequences[:, -1].tolist()
    accelerate(model, lag=lag)
    got = greedy(model, ids, attention_mask=mask, eos_token_id=eos)
    assert got.shape == (2, 18) and got[:, -1].tolist() == eos


def test_unbounded_limit_ends_with_the_end_token(two_end_tokens, accelerate) -> None:
    model, ids, ends = two_end_tokens
    expected = reference(model, ids, eos_token_id=ends).sequences
    accelerate(model)
    assert torch.equal(greedy(model, ids, 10**9, eos_token_id=ends), expected)
    assert torch_paged.stats(model).kv_bytes < 2**24
    assert last_path(model) == "fused"


def test_maximum_length(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids, mask = padded_prompts((5, 10), device)
    expected = reference(model, ids, 12, attention_mask=mask).sequences
    accelerate(model)
    limits = {"attention_mask": mask, "do_sample": False}
    assert torch.equal(model.generate(ids, max_length=22, **limits), expected)
    assert torch.equal(model.generate(ids, max_length=11, **limits), expected[:, :11])
    # max_new_tokens wins over max_length.
    both = model.generate(ids, max_length=12, max_new_tokens=4, **limits)
    assert torch.equal(both, expected[:, :14])
    # Without a limit Hugging Face's default of 20 new tokens or of length 20 holds.
    assert torch.equal(model.generate(ids, **limits), copy.deepcopy(model).generate(ids, **limits))


def test_embeddings_as_input(device, accelerate) -> None:
    model = tiny(LlamaConfig, 9, device)
    ids = prompt(10, 3, device=device)
    new = reference(model, ids, 12).sequences
    embeds = model.get_input_embeddings()(ids).detach()
    accelerate(model, on_unsupported="fallback")
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    for limit in ({"max_new_tokens": 12}, {"max_length": 22}):
        got = model.generate(inputs_embeds=embeds, **limit, **options)
        assert torch.equal(got, new[:, 10:])
    got = model.generate(ids, inputs_embeds=embeds, max_length=22, **options)
    assert torch.equal(got, new)


def test_padded_embeddings_as_input(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids, mask = padded_prompts((5, 17), device)
    embeds = model.get_input_embeddings()(ids).detach()
    new = reference(model, ids, 12, attention_mask=mask).sequences[:, 17:]
    accelerate(model, on_unsupported="fallback")
    got = model.generate(
        inputs_embeds=embeds, attention_mask=mask, max_new_tokens=12, do_sample=False
    )
    assert torch.equal(got, new)
    # Other embeddings than those of any ids are what is used.
    torch.manual_seed(0)
    noise = torch.randn_like(embeds)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = copy.deepcopy(model).generate(inputs_embeds=noise, **options)
    assert torch.equal(model.generate(inputs_embeds=noise, **options), expected)


@pytest.mark.parametrize("length", [60, 63, 64, 65, 100])
def test_prompts_at_and_over_the_position_limit(length, device, accelerate) -> None:
    model = tiny(LlamaConfig, 4, device, max_position_embeddings=64)
    ids = prompt(length, length, device=device)
    expected = reference(model, ids, 12)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 12), expected.sequences)


@pytest.mark.parametrize("length, limit", [(60, 3), (60, 5), (60, 6), (60, 9), (64, 2), (70, 1)])
def test_reminder_of_the_position_limit(length, limit, device, accelerate, monkeypatch) -> None:
    model = tiny(LlamaConfig, 4, device, max_position_embeddings=64)
    ids, said = prompt(length, length, device=device), []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", said.append)
    greedy(copy.deepcopy(model), ids, limit)
    theirs = set(said)
    said.clear()
    accelerate(model)
    for options in ({}, {"output_scores": True, "return_dict_in_generate": True}):
        greedy(model, ids, limit, **options)
        assert set(said) == theirs
        said.clear()
    assert bool(theirs) == (length + limit - 1 > 64 and limit > 1)


@pytest.mark.parametrize("limit", [2.5, 7.0, 16.2])
def test_limit_that_is_no_whole_number(limit, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(9, 9, device=device)
    expected = greedy(copy.deepcopy(model), ids, limit)
    accelerate(model)
    assert torch.equal(greedy(model, ids, limit), expected)


def test_sampled_rows_end_on_an_end_token_list(two_end_tokens, device, accelerate) -> None:
    model, _, _ = two_end_tokens
    ids, mask = padded_prompts((5, 17), device)
    options = {"attention_mask": mask, "max_new_tokens": 60, "temperature": 2.0, "top_k": 0}
    options["eos_token_id"] = list(range(3, 40))
    expected = seeded(copy.deepcopy(model), 1, ids, **options)
    assert expected.result.shape[1] < 77
    accelerate(model)
    got = seeded(model, 1, ids, **options)
    assert torch.equal(got.result, expected.result)
    assert torch.equal(got.states[-1], expected.states[-1])
