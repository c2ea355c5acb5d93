"""An engine over a model with latent attention: shared steps, preemption, prefixes, chunks."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config

import torch_paged
from torch_paged.decoder.inputs import StepInputs
from torch_paged.decoder.step import DecoderStep

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    ids_of,
    make_engine,
    run_checked,
    tiny,
)

LENGTHS = (5, 9, 16, 17, 31, 40)
NEW = 24
POOL = 6
_FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}


@functools.cache
def model_of(name: str) -> nn.Module:
    """Return a model that is never accelerated."""
    if name == "v2":
        return tiny(DeepseekV2Config, 5, **_FIELDS, q_lora_rank=None, head_dim=8)
    return tiny(DeepseekV3Config, 5, **_FIELDS, q_lora_rank=20)


@functools.cache
def answers_of(name: str) -> Answers:
    return Answers(model_of(name))


@pytest.mark.parametrize(
    ("num_blocks", "space"),
    [(POOL, 0.0), (POOL, 1e-3), (None, 0.0)],
    ids=["tight", "swapped", "roomy"],
)
@pytest.mark.parametrize("name", ["v2", "v3"])
def test_requests_answer_as_alone(name: str, num_blocks: int | None, space: float) -> None:
    answers = answers_of(name)
    # Chunks of prompts share their forwards with rows that decode.
    engine = make_engine(
        model_of(name),
        num_blocks=num_blocks,
        max_num_batched_tokens=24,
        cpu_offload_space=space,
    )
    with engine:
        for n in LENGTHS:
            engine.add_request(ids_of(n, n + 50), max_new_tokens=NEW, request_id=n)
        outputs = run_checked(engine)
        assert engine.num_preemptions > 0 if num_blocks else engine.num_preemptions == 0
        stats = torch_paged.stats(engine._target)
        assert stats.swaps == (stats.preemptions if space else 0)
        assert_all_free(engine)
    for n in LENGTHS:
        assert list(outputs[n].token_ids) == answers(ids_of(n, n + 50), NEW)


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_a_cached_prefix_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = answers_of(name)
    common = ids_of(37, 3)
    prompts: dict[Any, list[int]] = {i: common + ids_of(4 + i, 60 + i) for i in range(3)}
    counts: list[int] = []
    prefill = DecoderStep.prefill

    def counted(step: DecoderStep, inputs: StepInputs) -> Tensor:
        assert inputs.ids is not None
        counts.append(inputs.ids.shape[0])
        return prefill(step, inputs)

    with make_engine(model_of(name), enable_prefix_caching=True) as engine:
        monkeypatch.setattr(DecoderStep, "prefill", counted)
        for i, ids in prompts.items():
            engine.add_request(ids, max_new_tokens=NEW, request_id=i)
            outputs = run_checked(engine)
            assert list(outputs[i].token_ids) == answers(ids, NEW)
    # Two full blocks of the 37 common tokens are found.
    assert counts == [41, 42 - 32, 43 - 32]
