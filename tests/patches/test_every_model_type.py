"""Every causal-LM type of transformers generates what it generates without us, whatever its tier.

Greedy and seeded, alone and left-padded, past the window and past a block of keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import torch_paged
from torch_paged.generate.support import zoo
from torch_paged.generate.support.parity import (
    LEAST_COMPARED,
    NEW_TOKENS,
    prompts,
    steps_to_compare,
)
from torch_paged.patches.patched_step import PatchedStep
from torch_paged.patches.refusal import SpecRefusal

# For the module beside this one.
sys.path.insert(0, str(Path(__file__).parent))
import tiers  # noqa: E402

# Settings that change the arithmetic of a type, where the default leaves them out.
_MSCALE = {
    "rope_type": "yarn",
    "factor": 3.0,
    "beta_fast": 8.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}),
    "llama-yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 3.0, "beta_fast": 8.0}},
    ),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
        },
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "starcoder2-full": ("starcoder2", {"sliding_window": None}),
    "gemma2-capped": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3-capped": (
        "gemma3_text",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "deepseek-v2-direct": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek-v2-yarn": ("deepseek_v2", {"rope_parameters": _MSCALE}),
    "deepseek-v3-yarn": ("deepseek_v3", {"rope_parameters": _MSCALE}),
    "deepseek-v3-halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    "deepseek-v3-biases": ("deepseek_v3", {"attention_bias": True}),
    "deepseek-v3-dynamic": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}},
    ),
    "youtu-direct": ("youtu", {"q_lora_rank": None}),
    "gemma-bidirectional": ("gemma", {"use_bidirectional_attention": True}),
    "gemma3-bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.5}),
    "cohere-head-norms": ("cohere", {"use_qk_norm": True}),
    "phi-head-norms": ("phi", {"qk_layernorm": True}),
    "stablelm-head-norms": ("stablelm", {"qk_layernorm": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "glm4-whole-heads": (
        "glm4",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ),
    "gpt2-scaled-by-layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "n_inner": None}),
    "gpt_bigcode-all-heads": ("gpt_bigcode", {"multi_query": False}),
    "opt-norms-behind": ("opt", {"do_layer_norm_before": False}),
    "opt-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt-bare": (
        "opt",
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "_remove_final_layer_norm": True,
        },
    ),
    "bloom-normed-residual": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "bloom-six-heads": ("bloom", {"n_head": 6, "hidden_size": 48}),
    "mpt-six-heads": ("mpt", {"n_heads": 6, "d_model": 48}),
    "mpt-clipped": ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True}),
    "falcon-grouped-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "falcon",
        {"multi_query": False, "parallel_attn": False, "num_kv_heads": 4, "bias": True},
    ),
    "falcon-dynamic": (
        "falcon",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "falcon-alibi-six-heads": (
        "falcon",
        {"alibi": True, "num_attention_heads": 6, "hidden_size": 48, "multi_query": False}
        | {"num_kv_heads": 6, "parallel_attn": False, "bias": True},
    ),
}


class Runs(NamedTuple):
    """What a model generates for one prompt, a padded batch, and the batch with sampling."""

    single: Tensor
    single_logits: Tensor
    batch: Tensor
    batch_logits: Tensor | None
    sampled: Tensor
    generator: Tensor


def generate(model: PreTrainedModel, keep_batch_logits: bool) -> Runs:
    ids, mask = prompts()
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    logits = {"return_dict_in_generate": True, "output_logits": True}
    single = model.generate(ids[-1:], attention_mask=mask[-1:], **logits, **greedy)
    if keep_batch_logits:
        output = model.generate(ids, attention_mask=mask, **logits, **greedy)
        batch, batch_logits = output.sequences, torch.stack(output.logits)
    else:
        batch, batch_logits = model.generate(ids, attention_mask=mask, **greedy), None
    torch.manual_seed(5)
    sampled = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0
    )
    return Runs(
        single.sequences,
        torch.stack(single.logits),
        batch,
        batch_logits,
        sampled,
        torch.get_rng_state(),
    )


def assert_same_tokens(got: Tensor, expected: Tensor, logits: Tensor) -> None:
    for row, (steps, tokens) in enumerate(zip(steps_to_compare(logits), expected, strict=True)):
        assert steps >= LEAST_COMPARED, "a near tie decides this case: change the weights"
        end = tokens.shape[0] - NEW_TOKENS + steps
        assert torch.equal(got[row, :end], tokens[:end]), f"row {row}"


def assert_generates_the_same(model: PreTrainedModel) -> None:
    expected = generate(model, keep_batch_logits=True)
    torch_paged.accelerate(model)
    # Without logits, so that the batch takes the device loop.
    got = generate(model, keep_batch_logits=False)
    assert_same_tokens(got.single, expected.single, expected.single_logits)
    steps = steps_to_compare(expected.single_logits)[0]
    torch.testing.assert_close(
        got.single_logits[:steps], expected.single_logits[:steps], rtol=1e-4, atol=1e-4
    )
    assert expected.batch_logits is not None
    assert_same_tokens(got.batch, expected.batch, expected.batch_logits)
    assert torch.equal(got.sampled, expected.sampled)
    assert torch.equal(got.generator, expected.generator)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Default configs warn about their token ids by the page."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize("model_type", zoo.causal_lm_types())
def test_model_type(model_type: str) -> None:
    model = zoo.tiny_model(model_type)
    assert_generates_the_same(model)
    report = torch_paged.explain(model)
    assert report.tier == tiers.tier(model_type), str(report)
    assert report.last_call.path == report.tier, str(report.last_call)
    if report.tier == "eager":
        assert tiers.REASONS[model_type] in "; ".join(report.reasons)


# Settings that the row of a fused type has no form for.
UNFUSED = {
    "gemma-bidirectional",
    "gemma3-bidirectional",
    "olmo-clipped",
    "cohere-head-norms",
    "phi-head-norms",
    "stablelm-head-norms",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name: str) -> None:
    model_type, changes = SETTINGS[name]
    model = zoo.tiny_model(model_type, **changes)
    assert_generates_the_same(model)
    assert (torch_paged.explain(model).tier == "fused") is (name not in UNFUSED)


@pytest.mark.parametrize("model_type", sorted(tiers.FUSED_ONLY))
def test_fused_type_without_a_patched_form(model_type: str) -> None:
    with pytest.raises(SpecRefusal, match=tiers.FUSED_ONLY[model_type]):
        PatchedStep(zoo.tiny_model(model_type))


def test_most_types_are_accelerated() -> None:
    built = zoo.causal_lm_types()
    assert len(built) >= 130
    count = {tier: 0 for tier in ("fused", "patched", "eager")}
    for name in built:
        count[tiers.tier(name)] += 1
    print(transformers.__version__, count)
    assert count["fused"] >= 30
    assert count["fused"] + count["patched"] >= 100
