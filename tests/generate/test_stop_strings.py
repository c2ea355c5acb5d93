"""Stop strings and time limits end a run where Hugging Face ends it."""

from __future__ import annotations

import copy

import pytest
import torch
from models import byte_tokenizer, greedy, prompt, reference, tape_model, tiny
from transformers import LlamaConfig
from transformers.generation import MaxTimeCriteria

import torch_paged


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        ("DE", "DEF"),
        ("EFG", "DEFG"),
        ("GH", "DEFGHI"),
        ("DEFGHIJ", "DEFGHIJ"),
        ("J", "DEFGHIJ"),
        ("ZZ", "DEFGHIJKLMN</s>"),
        (["MN", "FG"], "DEFG"),
    ],
    ids=str,
)
def test_stop_strings(stops, text, device, accelerate) -> None:
    tokenizer = byte_tokenizer()
    model = tape_model(tokenizer.encode("CDEFGHIJKLMN", add_special_tokens=False), device)
    ids = tokenizer("alphabet: ABC", return_tensors="pt").input_ids.to(device)
    options = {"tokenizer": tokenizer, "stop_strings": stops}
    expected = greedy(copy.deepcopy(model), ids, 20, **options)
    accelerate(model)
    got = greedy(model, ids, 20, **options)
    assert torch.equal(got, expected)
    assert tokenizer.decode(got[0, ids.shape[1] :]) == text
    assert torch_paged.explain(model).last_call.path == "fused"


def test_max_time(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids).sequences
    accelerate(model)
    assert torch.equal(greedy(model, ids, max_time=600.0), expected)
    # Over before it began: one token, as Hugging Face gives.
    over = [MaxTimeCriteria(max_time=1.0, initial_timestamp=0.0)]
    assert torch.equal(greedy(model, ids, stopping_criteria=over), expected[:, :18])
    assert torch_paged.explain(model).last_call.path == "fused"
