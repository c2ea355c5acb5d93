"""The training example at a tiny size: rollouts follow the optimizer, and the policy learns."""

from __future__ import annotations

import argparse
import importlib
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


def asked(group: int, max_new_tokens: int, **options: float) -> argparse.Namespace:
    named = {"temperature": 1.0, "top_p": 1.0, **options}
    return argparse.Namespace(group=group, max_new_tokens=max_new_tokens, **named)


@pytest.mark.parametrize(
    ("steps", "options"),
    [(30, {}), (4, {"temperature": 0.8, "top_p": 0.9})],
    ids=["as it is", "filtered"],
)
def test_rollout_and_trainer_agree_while_the_policy_learns(steps, options, script) -> None:
    model = torch_paged.accelerate(tiny_model(), on_unsupported="raise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    means = []
    torch.manual_seed(1)
    for _ in range(steps):
        settings = asked(8, 12, **options)
        rollout = script.roll_out(model, tiny_prompts(), settings)
        scores = script.rewards(Letters(), rollout, "e")
        advantage = script.advantages(scores, 8)
        trained = script.train(model, optimizer, rollout, advantage, settings.temperature)
        for ours, trainers in ((rollout.raw, trained.raw), (rollout.tempered, trained.tempered)):
            assert float((ours - trainers)[rollout.kept].abs().max()) < 1e-4
        left = rollout.left[rollout.kept]
        assert (left < 0.999).any() == bool(options) and 0.5 < float(left.min()) <= 1.001
        means.append(float(scores.mean()))
    call = torch_paged.explain(model).last_call
    assert (call.path, call.loop) == ("fused", "device")
    assert steps < 30 or sum(means[-5:]) > 2 * sum(means[:5]) + 0.5
    torch_paged.restore(model)


def test_log_probabilities_are_those_of_a_model_that_is_not_accelerated(script) -> None:
    model, prompts = tiny_model(), tiny_prompts()
    torch.manual_seed(2)
    expected = model.generate(
        **prompts,
        max_new_tokens=12,
        num_return_sequences=4,
        do_sample=True,
        top_k=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    torch_paged.accelerate(model, on_unsupported="raise")
    torch.manual_seed(2)
    got = script.roll_out(model, prompts, asked(4, 12))
    assert torch.equal(got.sequences, expected.sequences)
    logprobs = script.chosen_logprobs(torch.stack(expected.logits, 1), got.answers)
    for ours in (got.raw, got.tempered):
        torch.testing.assert_close(ours[got.kept], logprobs[got.kept], rtol=1e-4, atol=1e-4)
    torch_paged.restore(model)


def test_tokens_behind_the_end_do_not_count(script) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    torch_paged.accelerate(model)
    torch.manual_seed(3)
    rollout = script.roll_out(model, tiny_prompts(), asked(8, 40))
    for row, kept in zip(rollout.answers.tolist(), rollout.kept.tolist(), strict=True):
        length = row.index(2) + 1 if 2 in row else len(row)
        assert kept == [i < length for i in range(len(row))]
    torch_paged.restore(model)
