"""bf16 parity: our error against a float32 run stays within Hugging Face's own."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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


def make_pair(cls, config):
    """The model in float32 and in bf16 with the same (bf16-representable) weights, on the GPU."""
    torch.manual_seed(torch.seed() % 2**31)
    low = cls(config).to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        for name, p in low.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
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


@pytest.mark.parametrize("cls", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_float32_logits_equal_hugging_face(cls):
    dims = {**_DIMS, "hidden_size": 512, "num_attention_heads": 8}
    full, _ = make_pair(cls, cls.config_class(**dims, head_dim=64))
    ids = torch.randint(3, dims["vocab_size"], (3, 110), device="cuda")
    expected = hf_logits(full, ids, 40)
    torch_paged.accelerate(full, on_unsupported="raise")
    got = our_logits(full, ids, 40)
    assert (got - expected).abs().max() <= 1e-4 * expected.std()
