"""The tier of every causal-LM type, and why a type stays with Hugging Face's own code.

What is in neither table runs in the patched tier.
"""

from __future__ import annotations

import transformers
from packaging.version import Version

FUSED = {
    "arcee",
    "cohere",
    "cohere2",
    "cwm",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "mellum",
    "ministral",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
}

# Layers that keep more than keys and values.
_STATE = (
    "axk2",
    "bailing_hybrid",
    "bamba",
    "deepseek_v32",
    "deepseek_v4",
    "falcon_h1",
    "glm_moe_dsa",
    "granitemoehybrid",
    "hy_v4",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama4_text",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "zamba2",
    "zaya",
    "minimax_m3_vl_text",
)

# Positions follow from the length of the cache.
_POSITIONS = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "bloom",
    "cpmant",
    "falcon_mamba",
    "mamba",
    "mamba2",
    "marian",
    "mbart",
    "moss_transcribe_diarize",
    "mpt",
    "mvp",
    "pegasus",
    "plbart",
    "prophetnet",
    "roformer",
    "rwkv",
    "trocr",
    "whisper",
    "xlnet",
)

# Attention is computed in the layer.
_INTERFACE = (
    "big_bird",
    "git",
    "gpt_neo",
    "gpt_neox_japanese",
    "megatron-bert",
    "rembert",
    "xglm",
    "xlm",
)

# type -> what its reasons say
REASONS: dict[str, str] = {
    **dict.fromkeys(_STATE, "a state of their own"),
    **dict.fromkeys(_POSITIONS, "its forward takes no position_ids"),
    **dict.fromkeys(_INTERFACE, "go through the attention interface"),
    "doge": "a mask of the model's own making",
    "falcon": "does not run with switched attention",
    "gemma4_unified": "does not run with switched attention",
    "gemma3n_text": "share keys and values",
    "moshi": "its cache remembers",
    "openai-gpt": "takes no cache",
}
if Version(transformers.__version__) < Version("5.24"):
    REASONS |= dict.fromkeys(("codegen", "gptj"), "go through the attention interface")


def tier(model_type: str) -> str:
    """Return the tier in which a type must run."""
    if model_type in FUSED:
        return "fused"
    return "eager" if model_type in REASONS else "patched"
