"""Masks: padding on either side, holes, rows that are all padding, masks left out."""

from __future__ import annotations

import copy

import pytest
import torch
from models import FAMILIES, greedy, left_pad, padded_prompts, prompt, reference, tiny, tiny_family
from transformers import LlamaConfig

import torch_paged
from torch_paged.errors import UnsupportedFeatureError


def hf_greedy(model, ids, num_tokens, **kwargs):
    """The untouched model's tokens, without a look at ties; None as the mask leaves it out."""
    return copy.deepcopy(model).generate(ids, max_new_tokens=num_tokens, do_sample=False, **kwargs)


def own_greedy(model, ids, num_tokens, **kwargs):
    return model.generate(ids, max_new_tokens=num_tokens, do_sample=False, **kwargs)


def test_padded_rows_equal_their_single_runs(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    lengths = (1, 3, 17, 33)
    singles = [reference(model, prompt(n, n, device=device)).sequences for n in lengths]
    ids, mask = padded_prompts(lengths, device)
    accelerate(model)
    got = greedy(model, ids, attention_mask=mask)
    for row, single in zip(got, singles, strict=True):
        assert torch.equal(row[-24:], single[0, -24:])
    assert torch.equal(got[:, :33], ids)


def test_pad_id_inside_a_prompt_is_a_token(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    ids[0, 4] = ids[0, 9] = 0
    options = {"pad_token_id": 0, "eos_token_id": 0}
    expected = reference(model, ids, 24, **options).sequences
    accelerate(model)
    assert torch.equal(greedy(model, ids, **options), expected)
    # With pad equal to eos the mask is inferred to be ones.
    assert torch.equal(hf_greedy(model, ids, 24, **options), expected)
    assert torch.equal(own_greedy(model, ids, 24, **options), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_mask_is_inferred_from_the_pad_id(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((3, 9, 17), device)
    expected = reference(model, ids, 12, attention_mask=mask).sequences
    inferred = hf_greedy(model, ids, 12)
    assert torch.equal(inferred, expected)
    accelerate(model)
    assert torch.equal(own_greedy(model, ids, 12), inferred)


def test_no_pad_token_means_no_mask(device, accelerate) -> None:
    model = tiny(LlamaConfig, 9, device)
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    ids, _ = padded_prompts((3, 9, 17), device)
    expected = reference(model, ids, 24).sequences
    accelerate(model)
    assert torch.equal(own_greedy(model, ids, 24), expected)


def test_row_of_padding_alone_spoils_no_other_row(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids, mask = padded_prompts((1, 3, 17, 33), device)
    expected = reference(model, ids, attention_mask=mask).sequences[1:]
    mask[0] = 0
    accelerate(model, on_unsupported="fallback")
    got = greedy(model, ids, attention_mask=mask)
    assert torch.equal(got[1:], expected)
    assert ((got[0] >= 0) & (got[0] < 257)).all()
    output = greedy(
        model, ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True
    )
    assert all(torch.isfinite(step).all() for step in output.logits)


def test_right_padding_means_what_it_means_to_hugging_face(device, accelerate) -> None:
    model = tiny(LlamaConfig, 4, device)
    rows = [prompt(9, 5, device=device), prompt(4, 6, device=device)]
    ids = torch.zeros(2, 9, dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : row.shape[1]], mask[i, : row.shape[1]] = row[0], 1
    expected = reference(model, ids, 16, attention_mask=mask).sequences
    single = reference(model, rows[1], 16).sequences
    assert not torch.equal(expected[1, 9:], single[0, 4:])
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 16, attention_mask=mask), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("hole", [(1, 4), (7, 8), (10, 21)], ids=str)
def test_hole_inside_a_prompt(hole, family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids, mask = padded_prompts((24, 30), device)
    mask[1, hole[0] : hole[1]] = 0
    expected = hf_greedy(model, ids, 30, attention_mask=mask)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 30, attention_mask=mask), expected)


def test_holes_run_on_the_fast_path_under_full_attention(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids, mask = padded_prompts((24, 30), device)
    mask[:, 12:17] = 0
    expected = reference(model, ids, attention_mask=mask).sequences
    unmasked = greedy(copy.deepcopy(model), ids)
    assert not torch.equal(unmasked, expected)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, attention_mask=mask), expected)
    call = torch_paged.explain(model).last_call
    assert call.path == "fused" or call.reasons


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_mask_dtypes(dtype, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids, mask = padded_prompts((3, 17), device)
    mask = mask.to(dtype)
    expected = hf_greedy(model, ids, 24, attention_mask=mask)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(own_greedy(model, ids, 24, attention_mask=mask), expected)


def test_mask_with_four_dimensions_is_refused_as_before(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(9, 9, device=device)
    expected = reference(model, ids, 12).sequences
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool, device=device).tril()
    with pytest.raises(ValueError):
        hf_greedy(model, ids, 12, attention_mask=mask)
    accelerate(model)
    with pytest.raises(ValueError):
        own_greedy(model, ids, 12, attention_mask=mask)
    assert torch.equal(greedy(model, ids, 12), expected)


@pytest.mark.parametrize("kind", ["usual", "shifted", "reversed"])
def test_positions_of_the_caller(kind, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    positions = torch.arange(17, device=device)[None]
    positions = {"usual": positions, "shifted": positions + 5, "reversed": positions.flip(1)}[kind]
    options = {"attention_mask": torch.ones_like(ids), "position_ids": positions}
    expected = hf_greedy(model, ids, 24, **options)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(own_greedy(model, ids, 24, **options), expected)


def test_mask_of_another_width_fails_or_means_the_same(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 12).sequences
    accelerate(model, on_unsupported="fallback")
    for width in (9, 25):
        mask = torch.ones(1, width, dtype=torch.long, device=device)
        try:
            theirs = hf_greedy(model, ids, 12, attention_mask=mask)
        except Exception as error:
            with pytest.raises(type(error)):
                own_greedy(model, ids, 12, attention_mask=mask)
        else:
            assert torch.equal(own_greedy(model, ids, 12, attention_mask=mask), theirs)
    assert torch.equal(greedy(model, ids, 12), expected)


def test_mask_and_ids_of_the_caller_are_not_written_to(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids, mask = left_pad([prompt(3, 3, device=device), prompt(17, 17, device=device)])
    kept_ids, kept_mask = ids.clone(), mask.clone()
    accelerate(model)
    first = greedy(model, ids, attention_mask=mask)
    kept = first.clone()
    greedy(model, *left_pad([prompt(9, 9, device=device)])[:1])
    assert torch.equal(ids, kept_ids) and torch.equal(mask, kept_mask)
    assert torch.equal(first, kept), "a later call wrote into an earlier result"


@pytest.mark.parametrize(("columns", "word"), [(15, "shorter"), (19, "longer")])
def test_a_mask_of_another_length_is_the_reason_given(columns, word, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    mask = torch.ones((1, columns), dtype=torch.long, device=device)
    accelerate(model)
    with pytest.raises(UnsupportedFeatureError, match=f"the attention mask is {word} than the"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch_paged.stats(model).kv_blocks_used == 0
