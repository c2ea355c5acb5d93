"""Learned positions and ALiBi: padding, holes, positions of the caller, and the last position."""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    cache_of,
    greedy,
    left_pad,
    padded_prompts,
    prompt,
    reference,
    seeded,
    tiny_family,
)

import torch_paged

FAMILIES = ["gpt2", "opt", "bloom", "mpt", "falcon", "gptj"]
LEARNED = ["gpt2", "opt"]
# Families that end at some position, and the field that says it.
ENDING = {
    "gpt2": "max_position_embeddings",
    "opt": "max_position_embeddings",
    "gptj": "max_position_embeddings",
    "mpt": "max_seq_len",
}


def last_call(model):
    return torch_paged.explain(model).last_call


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_equal_their_single_runs(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    rows = [prompt(n, n, device=device) for n in (5, 16, 33)]
    singles = [copy.deepcopy(model).generate(r, max_new_tokens=12) for r in rows]
    ids, mask = left_pad(rows)
    reference(model, ids, 12, attention_mask=mask)
    accelerate(model)
    got = greedy(model, ids, 12, attention_mask=mask)
    for row, single in zip(got, singles, strict=True):
        assert torch.equal(row[-12:], single[0, -12:])


@pytest.mark.parametrize("family", FAMILIES)
def test_row_of_padding_alone_spoils_no_other_row(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((5, 16, 33), device)
    expected = reference(model, ids, 12, attention_mask=mask).sequences
    mask[0] = 0
    accelerate(model)
    assert torch.equal(greedy(model, ids, 12, attention_mask=mask)[1:], expected[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_hole_inside_a_prompt(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((24, 30), device)
    unmasked = greedy(copy.deepcopy(model), ids, 12, attention_mask=mask)
    mask[1, 10:21] = 0
    expected = greedy(copy.deepcopy(model), ids, 12, attention_mask=mask)
    assert not torch.equal(unmasked, expected)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 12, attention_mask=mask), expected)
    # MPT counts the tokens between two others whether or not the mask shows them.
    assert last_call(model).path == ("eager" if family == "mpt" else "fused")


@pytest.mark.parametrize("family", LEARNED)
def test_positions_of_the_caller_are_those_that_are_learned(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids = prompt(17, 17, device=device)
    positions = torch.arange(5, 22, device=device)[None]
    plain = greedy(copy.deepcopy(model), ids, 12)
    expected = greedy(copy.deepcopy(model), ids, 12, position_ids=positions)
    assert not torch.equal(expected, plain)
    accelerate(model)
    assert torch.equal(greedy(model, ids, 12, position_ids=positions), expected)
    assert last_call(model).path == "fused"


@pytest.mark.parametrize("family", ENDING)
def test_the_last_position_is_reached_and_not_passed(family, device, accelerate) -> None:
    model = tiny_family(family, device, **{ENDING[family]: 40})
    ids, mask = padded_prompts((9, 33), device)
    # The last token of 41 is not put in any more.
    expected = greedy(copy.deepcopy(model), ids, 8, attention_mask=mask)
    plain = copy.deepcopy(model)
    accelerate(model, on_unsupported="fallback", lag=4)
    assert torch.equal(greedy(model, ids, 8, attention_mask=mask), expected)
    assert last_call(model).path == "fused"
    if device.type == "cpu":  # on a GPU Hugging Face's own failure is the device's
        with pytest.raises((IndexError, RuntimeError)):
            greedy(plain, ids, 9, attention_mask=mask)
        with pytest.raises((IndexError, RuntimeError)):
            greedy(model, ids, 9, attention_mask=mask)
        assert "40 positions" in "; ".join(last_call(model).reasons)
    assert torch.equal(greedy(model, ids, 8, attention_mask=mask), expected)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {"num_beams": 3}) for family in ENDING),
        # MPT's own lookup puts in one token more than its biases have room for.
        *((family, {"prompt_lookup_num_tokens": 5}) for family in ENDING if family != "mpt"),
    ],
    ids=str,
)
def test_other_methods_reach_the_last_position(family, options, device, accelerate) -> None:
    model = tiny_family(family, device, **{ENDING[family]: 40})
    ids = prompt(11, 11, device=device).repeat(1, 3)
    expected = greedy(copy.deepcopy(model), ids, 8, **options)
    accelerate(model)
    assert torch.equal(greedy(model, ids, 8, **options), expected)
    assert last_call(model).path == "fused"


@pytest.mark.parametrize("family", LEARNED)
def test_embeddings_of_the_caller_get_positions_as_well(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((9, 17), device)
    embeddings = model.get_input_embeddings()(ids).detach()
    arguments = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = copy.deepcopy(model).generate(inputs_embeds=embeddings, **arguments)
    accelerate(model)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **arguments), expected)


@pytest.mark.parametrize("family", LEARNED)
def test_a_row_that_ends_in_time_may_be_allowed_more(family, device, accelerate) -> None:
    model = tiny_family(family, device, max_position_embeddings=40)
    ids = prompt(20, 20, device=device)
    eos = int(greedy(copy.deepcopy(model), ids, 6)[0, -1])
    expected = greedy(copy.deepcopy(model), ids, 60, eos_token_id=eos)
    assert expected.shape[1] <= 26
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 60, eos_token_id=eos), expected)
    assert last_call(model).path == "eager"


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("family", ENDING)
def test_an_engine_serves_sequences_up_to_the_last_position(family, lag, device) -> None:
    model = tiny_family(family, device, **{ENDING[family]: 48})
    prompts = [prompt(n, n, device=device) for n in (9, 30, 40)]
    counts = [30, 18, 8]  # the last two end with the last position, one after the other
    expected = [
        copy.deepcopy(model).generate(ids, max_new_tokens=n)[0, ids.shape[1] :].tolist()
        for ids, n in zip(prompts, counts, strict=True)
    ]
    with torch_paged.Engine(model, lag=lag) as engine:
        for number, ids in enumerate(prompts):
            engine.add_request(ids[0].tolist(), max_new_tokens=60, request_id=number)
        outputs = engine.run()
    for number, tokens in enumerate(expected):
        assert list(outputs[number].token_ids)[: len(tokens)] == tokens
        total = len(outputs[number].prompt_ids) + len(outputs[number].token_ids)
        assert total == 48 and outputs[number].finish_reason == "length"


@pytest.mark.parametrize("family", ENDING)
def test_an_engine_refuses_lengths_past_the_last_position(family, device) -> None:
    model = tiny_family(family, device, **{ENDING[family]: 48})
    with pytest.raises(ValueError, match="max_model_len must be at most 48"):
        torch_paged.Engine(model, max_model_len=64)
    with torch_paged.Engine(model, max_model_len=32) as engine:
        request = engine.add_request(prompt(9, 9)[0].tolist(), max_new_tokens=60)
        assert len(engine.run()[request].token_ids) == 23


def test_alibi_of_falcon_is_that_of_its_attention(device, accelerate) -> None:
    """Long enough for positions that no bfloat16 holds."""
    changes = {"alibi": True, "bias": False, "new_decoder_architecture": False}
    ids, mask = padded_prompts((9, 290), device)
    options = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    found = []
    for attention in ("eager", "sdpa"):
        model = tiny_family("falcon", device, **changes, num_kv_heads=4, multi_query=False)
        model.config._attn_implementation = attention
        expected = reference(model, ids, 12, attention_mask=mask)
        accelerate(model)
        output = greedy(model, ids, 12, **options)
        assert torch.equal(output.sequences, expected.sequences)
        got, want = torch.stack(output.logits), torch.stack(expected.logits)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert last_call(model).path == "fused"
        found.append(got)
    # Hugging Face's eager attention adds the biases twice.
    assert not torch.allclose(*found, atol=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_seeded_batch_and_the_cache_that_is_returned(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((5, 16, 33), device)
    options = {"attention_mask": mask, "max_new_tokens": 10, "return_dict_in_generate": True}
    expected = seeded(copy.deepcopy(model), 3, ids, **options).result
    accelerate(model, on_unsupported="fallback")
    got = seeded(model, 3, ids, **options).result
    assert torch.equal(got.sequences, expected.sequences)
    assert last_call(model).path == "fused"
    # Falcon's own cache repeats what ours holds once.
    for ours, theirs in zip(cache_of(got).layers, cache_of(expected).layers, strict=True):
        real = mask.new_ones(3, theirs.keys.shape[2])
        real[:, :33] = mask
        shown = real[:, None, :, None] != 0
        for name in ("keys", "values"):
            a, b = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(a.where(shown, 0), b.where(shown, 0), atol=1e-4, rtol=1e-4)
