"""bf16 parity: our error against a float32 run stays within Hugging Face's own."""

import copy

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import torch_paged
from tests.gpu.teacher import hf_logits, our_logits

_DIMS = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "initializer_range": 0.04,
}
_SMALL = {**_DIMS, "hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 8}
_SMALL |= {"num_key_value_heads": 4, "num_hidden_layers": 4, "head_dim": 64}
# (class, config class, fields, number of experts, its name)
MIXTURES = [
    pytest.param(MixtralForCausalLM, MixtralConfig, {}, 8, "num_local_experts", id="mixtral"),
    pytest.param(
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": 64},
        8,
        "num_local_experts",
        id="gpt_oss",
    ),
    pytest.param(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"moe_intermediate_size": 192},
        16,
        "num_experts",
        id="qwen3_moe",
    ),
]


def make_pair(cls, config):
    """The model in float32 and in bf16 with the same (bf16-representable) weights, on the GPU."""
    torch.manual_seed(torch.seed() % 2**31)
    low = cls(config).to("cuda", torch.bfloat16).eval()
    low.set_attn_implementation("eager")
    with torch.no_grad():
        for name, p in low.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
            elif "sinks" in name:
                p.normal_().add_(1.0)
    return copy.deepcopy(low).float(), low


@pytest.mark.parametrize("batch", [1, 5, 32, 128])
@pytest.mark.parametrize(
    ("cls", "config"),
    [
        pytest.param(LlamaForCausalLM, LlamaConfig(**_DIMS, head_dim=64), id="llama-d64"),
        pytest.param(Qwen3ForCausalLM, Qwen3Config(**_DIMS, head_dim=128), id="qwen3-d128"),
    ],
)
def test_bf16_error_stays_within_that_of_hugging_face(cls, config, batch):
    full, low = make_pair(cls, config)
    prompt, positions = 33, max(24, 512 // batch)
    ids = torch.randint(0, config.vocab_size, (batch, prompt + positions), device="cuda")
    exact = hf_logits(full, ids, prompt)
    theirs = hf_logits(low, ids, prompt) - exact
    torch_paged.accelerate(low, on_unsupported="raise", max_num_seqs=128)
    got = our_logits(low, ids, prompt)
    assert torch.isfinite(got).all()
    ours = got - exact
    rms = ours.pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt()
    peak = ours.abs().max() / theirs.abs().max()
    assert rms <= 1.25, f"RMS error {rms:.3f}x of Hugging Face's"
    assert peak <= 2.0, f"largest error {peak:.3f}x of Hugging Face's"
    best, chosen = exact.max(-1).values, exact.gather(-1, got.argmax(-1, keepdim=True))[..., 0]
    assert (best - chosen).max() <= 2 * theirs.abs().max()


@pytest.mark.parametrize("context", [700, 3500])
def test_long_context_matches_float32(context):
    config = LlamaConfig(**_DIMS, head_dim=64)
    full, low = make_pair(LlamaForCausalLM, config)
    ids = torch.randint(0, config.vocab_size, (2, context + 24), device="cuda")
    exact = hf_logits(full, ids, context)
    theirs = hf_logits(low, ids, context) - exact
    torch_paged.accelerate(low, on_unsupported="raise")
    ours = our_logits(low, ids, context) - exact
    assert ours.pow(2).mean().sqrt() <= 1.25 * theirs.pow(2).mean().sqrt()
    assert ours.abs().max() <= 2 * theirs.abs().max()


@pytest.mark.parametrize("batch", [1, 2, 32])
@pytest.mark.parametrize(("cls", "config_class", "fields", "experts", "name"), MIXTURES)
def test_bf16_error_of_experts_stays_within_that_of_hugging_face(
    cls, config_class, fields, experts, name, batch
):
    """Every token takes all experts: a choice between two would turn on the last bit."""
    counts = {name: experts, "num_experts_per_tok": experts}
    full, low = make_pair(cls, config_class(**{**_SMALL, **fields, **counts}))
    prompt, positions = 33, max(96, 256 // batch)
    ids = torch.randint(0, _SMALL["vocab_size"], (batch, prompt + positions), device="cuda")
    exact = hf_logits(full, ids, prompt)
    theirs = hf_logits(low, ids, prompt) - exact
    torch_paged.accelerate(low, on_unsupported="raise", max_num_seqs=32)
    got = our_logits(low, ids, prompt)
    assert torch_paged.explain(low).tier == "fused"
    ours = got - exact
    rms = ours.pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt()
    peak = ours.abs().max() / theirs.abs().max()
    assert rms <= 1.25, f"RMS error {rms:.3f}x of Hugging Face's"
    assert peak <= 2.0, f"largest error {peak:.3f}x of Hugging Face's"


@pytest.mark.parametrize("batch", [1, 3, 32])
@pytest.mark.parametrize(("cls", "config_class", "fields", "experts", "name"), MIXTURES)
def test_experts_replayed_give_what_they_give_launched(
    cls, config_class, fields, experts, name, batch
):
    counts = {name: experts, "num_experts_per_tok": 2}
    _, low = make_pair(cls, config_class(**{**_SMALL, **fields, **counts}))
    ids = torch.randint(0, _SMALL["vocab_size"], (batch, 33 + 40), device="cuda")
    torch_paged.accelerate(low, on_unsupported="raise", max_num_seqs=32, batch_buckets=(1, 3, 32))
    launched = our_logits(low, ids, 33, captured=False)
    for _ in range(2):
        assert torch.equal(our_logits(low, ids, 33), launched)
    assert torch_paged.explain(low).tier == "fused"


def test_a_block_that_is_called_is_captured_with_the_rest():
    counts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    _, low = make_pair(MixtralForCausalLM, MixtralConfig(**{**_SMALL, **counts}))
    experts = low.model.layers[1].mlp.experts
    experts.forward = experts.forward
    ids = torch.randint(0, _SMALL["vocab_size"], (3, 33 + 40), device="cuda")
    torch_paged.accelerate(low, on_unsupported="raise", batch_buckets=(3,))
    launched = our_logits(low, ids, 33, captured=False)
    assert torch.equal(our_logits(low, ids, 33), launched)
    assert "model.layers.1.mlp" in {
        row.module for row in torch_paged.explain(low).slots if row.kind == "opaque"
    }
    assert torch_paged.stats(low).graphs > 0


@pytest.mark.parametrize(("cls", "config_class", "fields", "experts", "name"), MIXTURES)
def test_float32_logits_of_experts_equal_hugging_face(cls, config_class, fields, experts, name):
    counts = {name: experts, "num_experts_per_tok": 2}
    full, _ = make_pair(cls, config_class(**{**_SMALL, **fields, **counts}))
    full.set_experts_implementation("eager")
    ids = torch.randint(3, _SMALL["vocab_size"], (3, 130), device="cuda")
    expected = hf_logits(full, ids, 40)
    torch_paged.accelerate(full, on_unsupported="raise")
    got = our_logits(full, ids, 40)
    assert (got - expected).abs().max() <= 1e-4 * expected.std()


@pytest.mark.parametrize("cls", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_float32_logits_equal_hugging_face(cls):
    dims = {**_DIMS, "hidden_size": 512, "num_attention_heads": 8}
    full, _ = make_pair(cls, cls.config_class(**dims, head_dim=64))
    ids = torch.randint(3, dims["vocab_size"], (3, 110), device="cuda")
    expected = hf_logits(full, ids, 40)
    torch_paged.accelerate(full, on_unsupported="raise")
    got = our_logits(full, ids, 40)
    assert (got - expected).abs().max() <= 1e-4 * expected.std()
