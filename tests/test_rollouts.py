"""The training example at a tiny size: rollouts follow the optimizer, and the policy learns."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A tokenizer of lower-case letters, ids from 3 on."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return "".join(LETTERS[i - 3] for i in ids.tolist() if i >= 3)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("rollouts")


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3 + len(LETTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def tiny_prompts() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def test_rollout_and_trainer_agree_while_the_policy_learns(script) -> None:
    model = torch_paged.accelerate(tiny_model(), on_unsupported="raise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    means = []
    torch.manual_seed(1)
    for _ in range(30):
        rollout = script.roll_out(model, tiny_prompts(), 8, 12)
        scores = script.rewards(Letters(), rollout, "e")
        trained = script.train(model, optimizer, rollout, script.advantages(scores, 8))
        apart = (rollout.logprobs - trained)[rollout.kept].abs()
        assert float(apart.max()) < 1e-4
        means.append(float(scores.mean()))
    assert torch_paged.explain(model).last_call.path == "fused"
    assert sum(means[-5:]) > 2 * sum(means[:5]) + 0.5
    torch_paged.restore(model)


def test_log_probabilities_are_those_of_a_model_that_is_not_accelerated(script) -> None:
    model = tiny_model()
    torch.manual_seed(2)
    expected = script.roll_out(model, tiny_prompts(), 4, 12)
    torch_paged.accelerate(model, on_unsupported="raise")
    torch.manual_seed(2)
    got = script.roll_out(model, tiny_prompts(), 4, 12)
    assert torch.equal(got.sequences, expected.sequences)
    assert torch.equal(got.kept, expected.kept)
    torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)
    torch_paged.restore(model)


def test_tokens_behind_the_end_do_not_count(script) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    torch_paged.accelerate(model)
    torch.manual_seed(3)
    rollout = script.roll_out(model, tiny_prompts(), 8, 40)
    for row, kept in zip(rollout.answers.tolist(), rollout.kept.tolist(), strict=True):
        length = row.index(2) + 1 if 2 in row else len(row)
        assert kept == [i < length for i in range(len(row))]
    torch_paged.restore(model)


def test_script_trains_the_packaged_model() -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    sizes = ["--steps", "2", "--prompts", "1", "--group", "2", "--max-new-tokens", "6"]
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "rollouts.py"), "--device", "cpu", *sizes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(r"^step \d: reward 0\.\d+", result.stdout, re.M)) == 2
    assert "Last call: fused path" in result.stdout
