"""Parity over head_dim, group and kind of attention: captured at short contexts, run at long ones.

The kinds go round, so that every head_dim and every group meets each of them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

import torch_paged
from tests.gpu.teacher import hf_logits, our_logits
from torch_paged.generate.registry import find_session

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 7, 8)
KINDS = ("plain", "window", "softcap", "sinks")
GRID = [
    (head_dim, group, KINDS[(i + j) % len(KINDS)])
    for i, head_dim in enumerate(HEAD_DIMS)
    for j, group in enumerate(GROUPS)
]
ROWS, SHORT, LONG, VOCAB = 3, 17, 600, 1024
WINDOW = 100  # longer than a short prompt with its steps


def make_config(head_dim: int, group: int, kind: str) -> PretrainedConfig:
    """Return a config whose tier is fused."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 336,  # a multiple of each number of heads
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * group,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
    }
    if kind == "window":
        return MistralConfig(**fields, sliding_window=WINDOW)
    if kind == "softcap":
        capped = {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": head_dim}
        return Gemma2Config(**fields, **capped, sliding_window=WINDOW)
    if kind == "sinks":
        # One expert: a choice between two would turn on the last bit.
        experts = {"num_local_experts": 1, "num_experts_per_tok": 1}
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        fields |= {"sliding_window": WINDOW, "rope_parameters": rope, "intermediate_size": 64}
        return GptOssConfig(**fields, **experts)
    return LlamaConfig(**fields)


def make_model(head_dim: int, group: int, kind: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = make_config(head_dim, group, kind)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_().add_(1.0)
            elif "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    if kind == "sinks":
        # Grouped products read the sizes of their groups back in float32.
        model.set_experts_implementation("batched_mm")
    return model.eval().to(DEVICE, dtype)


def short_then_long(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return ids and logits of the long run, whose step was captured in the short one."""
    generator = torch.Generator().manual_seed(1)
    short = torch.randint(0, VOCAB, (ROWS, SHORT + 4), generator=generator).to(DEVICE)
    ids = torch.randint(0, VOCAB, (ROWS, LONG + 32), generator=generator).to(DEVICE)
    our_logits(model, short, SHORT)
    graphs = find_session(model).core.graphs
    steps = [] if graphs is None else [key for key in graphs.keys() if key[0] == "logits"]
    got = our_logits(model, ids, LONG)
    if DEVICE == "cuda":
        after = find_session(model).core.graphs.keys()
        assert steps and steps == [key for key in after if key[0] == "logits"]
        assert torch_paged.stats(model).recaptures == 0
    assert torch.isfinite(got).all()
    return ids, got


def accelerate(model: PreTrainedModel) -> None:
    torch_paged.accelerate(model, on_unsupported="raise")
    assert torch_paged.explain(model).tier == "fused"


@pytest.mark.parametrize(("head_dim", "group", "kind"), GRID)
def test_bf16_error_stays_within_that_of_hugging_face(
    head_dim: int, group: int, kind: str
) -> None:
    low = make_model(head_dim, group, kind, torch.bfloat16)
    full = copy.deepcopy(low).float()
    accelerate(low)
    ids, got = short_then_long(low)
    exact = hf_logits(full, ids, LONG)
    theirs, ours = hf_logits(low, ids, LONG) - exact, got - exact
    rms = ours.pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt()
    peak = ours.abs().max() / theirs.abs().max()
    assert rms <= 1.25, f"RMS error {rms:.3f}x of Hugging Face's"
    assert peak <= 2.0, f"largest error {peak:.3f}x of Hugging Face's"


@pytest.mark.parametrize(("head_dim", "group", "kind"), GRID[1::5])
def test_float32_logits_equal_hugging_face(head_dim: int, group: int, kind: str) -> None:
    model = make_model(head_dim, group, kind, torch.float32)
    accelerate(model)
    ids, got = short_then_long(model)
    expected = hf_logits(model, ids, LONG)
    assert (got - expected).abs().max() <= 1e-4 * expected.std()
