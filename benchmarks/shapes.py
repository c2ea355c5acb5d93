"""True shapes of the models that the goals are stated for; weights are random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def config(name: str) -> PretrainedConfig:
    """Return the config of "0.6b" (Qwen3), "1b" (Llama-3.2), "8b" (Llama-3.1) or "tiny".

    Other families: "gemma-3-4b", "qwen3-8b", "phi-4-mini". Mixtures of experts: "8x1b" (Mixtral's
    form over Llama-3.2-1B) and "gpt-oss-20b".
    """
    if name in FAMILIES:
        return _family(name)
    if name == "0.6b":
        return Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
            rope_parameters=_rope(1e6),
        )
    common: dict[str, Any] = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(5e5),
    }
    if name == "1b":
        return LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            head_dim=64,
            tie_word_embeddings=True,
            **common,
        )
    if name in MIXTURES:
        return _mixture(name, common)
    if name == "8b":
        return LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, **common
        )
    if name == TINY:
        return LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            tie_word_embeddings=True,
            **common
            | {
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 512,
                "max_position_embeddings": 4096,
                "initializer_range": 0.3,
            },
        )
    raise ValueError(f"name must be one of {', '.join((*ALL, TINY))}, got {name!r}")


def _family(name: str) -> PretrainedConfig:
    if name == "gemma-3-4b":
        return Gemma3TextConfig(
            hidden_size=2560,
            intermediate_size=10240,
            num_hidden_layers=34,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            vocab_size=262208,
            max_position_embeddings=131072,
            sliding_window=1024,
            rope_parameters={
                "sliding_attention": _rope(1e4),
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        )
    if name == "qwen3-8b":
        return Qwen3Config(
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
            rope_parameters=_rope(1e6),
        )
    # The true factors of its rotary embedding differ in value alone.
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    return Phi3Config(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=24,
        num_key_value_heads=8,
        vocab_size=200064,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters=rotary | factors | {"original_max_position_embeddings": 4096},
    )


def _mixture(name: str, common: dict[str, Any]) -> PretrainedConfig:
    if name == "gpt-oss-20b":
        return GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    return MixtralConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        **common,
    )


NAMES = ("0.6b", "1b", "8b")
FAMILIES = ("gemma-3-4b", "qwen3-8b", "phi-4-mini")
MIXTURES = ("8x1b", "gpt-oss-20b")
ALL = (*NAMES, *FAMILIES, *MIXTURES)
# No model that anyone runs: the same code on a CPU, in seconds.
TINY = "tiny"


def build(
    name: str,
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    fields: Mapping[str, Any] | None = None,
) -> Any:
    """Build the model on `device` with random weights of a fixed seed.

    Args:
        fields: of its config, where they differ from the true ones.
    """
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            shape = config(name)
            shape.update(dict(fields or {}))
            attention = "eager" if name == "gpt-oss-20b" else "sdpa"  # which has no sinks
            model = AutoModelForCausalLM.from_config(shape, attn_implementation=attention)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def weight_bytes(model: Any, num_rows: int = 1) -> int:
    """Bytes that one decode step must read: all weights, the embedding only where it is tied.

    Of experts, those that `num_rows` tokens take on average if all are equally likely.
    """
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    total = sum(p.nbytes for p in model.parameters()) - experts
    if not model.config.tie_word_embeddings:
        total -= model.get_input_embeddings().weight.nbytes
    if experts:
        taken = model.config.num_experts_per_tok / model.config.num_local_experts
        total += round(experts * (1 - (1 - taken) ** num_rows))
    return total


def kv_bytes(model: Any, num_rows: int, num_tokens: int) -> int:
    """Bytes of keys and values that one decode step reads at this context."""
    c = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * head_dim * model.dtype.itemsize
    return num_rows * num_tokens * per_token
