"""The form of the decode step for few rows on a CPU: where there is none, the log says why."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged
from torch_paged import log


def test_a_step_without_the_host_form_says_why_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_seen", set())
    caplog.set_level(logging.DEBUG, "torch_paged")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to("cpu", torch.bfloat16).eval()
    with torch_paged.accelerated(model, verify=False):
        for rows in (1, 2, 1):
            model.generate(torch.ones(rows, 3, dtype=torch.long), max_new_tokens=4)
        assert torch_paged.explain(model).last_call.loop == "device"
    told = [record for record in caplog.records if "no host form" in record.message]
    assert [record.message for record in told] == [
        "the decode step has no host form: the cache is not float32"
    ]
    assert told[0].levelno == logging.DEBUG
