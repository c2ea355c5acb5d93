"""The tier of every causal-LM type, and why a type stays with Hugging Face's own code.

What is in neither table runs in the patched tier.
"""

from __future__ import annotations

import transformers
from packaging.version import Version

FUSED = {
    "arcee",
    "bloom",
    "codegen",
    "axk1",
    "cohere",
    "cohere2",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "falcon",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "glm4_moe_lite",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "mellum",
    "minicpm3",
    "ministral",
    "mistral",
    "mixtral",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "sarvam_mla",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
}

# Layers that keep what neither the paged cache nor the states by slot hold.
_STATE = (
    "axk2",
    "deepseek_v32",
    "deepseek_v4",
    "glm_moe_dsa",
    "hy_v4",
    "llama4_text",
    "minimax_m3_vl_text",
)

# Positions follow from the length of the cache.
_POSITIONS = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "cpmant",
    "marian",
    "mbart",
    "moss_transcribe_diarize",
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
    "inkling_text": "attention takes 'position_bias'",
    "minimax": "does not run with switched attention",
    "recurrent_gemma": "keeps its state outside the cache",
    "doge": "a mask of the model's own making",
    "gemma4_unified": "does not run with switched attention",
    "gemma3n_text": "share keys and values",
    "moshi": "its cache remembers",
    "openai-gpt": "takes no cache",
}
# Fused types whose own forward could not run over the paged cache -> what its reason says.
FUSED_ONLY = {
    "bloom": "its forward takes no position_ids",
    "falcon": "does not run with switched attention",
    "mpt": "its forward takes no position_ids",
}
if Version(transformers.__version__) < Version("5.24"):
    FUSED_ONLY |= dict.fromkeys(("codegen", "gptj"), "go through the attention interface")
    REASONS["recurrent_gemma"] = "a state of their own"


def tier(model_type: str) -> str:
    """Return the tier in which a type must run."""
    if model_type in FUSED:
        return "fused"
    return "eager" if model_type in REASONS else "patched"
