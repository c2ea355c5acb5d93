"""What the tiny models of `zoo` share, and the types that need more than sizes."""

from __future__ import annotations

from typing import Any

VOCAB = 97
WINDOW = 8  # shorter than every prompt
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8

Fields = dict[str, Any]
# Stands for a field that a config is not given.
DROP = object()

# Types that fit no configuration this small, or cannot generate on their own.
NOT_BUILT = {
    "blt": "its sizes of hash tables are fixed, and generate reads a field it has not",
    "cohere_compass_text": "its default layer types name no rotary parameters",
    "dory": "its mask is longer than its keys, under Hugging Face's own generate",
    "dots3_note": "sizes vary by layer",
    "dots3_note_text": "sizes vary by layer",
    "emu3": "its config has no vocab_size",
    "gemma3n": "needs timm and pillow",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model",
    "inkling2_loop_text": "its embeddings are longer than any vocabulary this small",
    "inkling2_text": "its embeddings are longer than any vocabulary this small",
    "llama4": "its config has no vocab_size; the text alone is llama4_text",
    "musicgen": "decodes audio codes",
    "musicgen_melody": "decodes audio codes",
    "qwen3_5": "its config has no vocab_size; the text alone is qwen3_5_text",
    "qwen3_5_moe": "its config has no vocab_size; the text alone is qwen3_5_moe_text",
    "qwen4_exp": "its config has no vocab_size",
    "qwen4_exp_text": "its indexer has no default sizes",
    "reformer": "its axial sizes are tied to the length",
    "xlstm": "Hugging Face's own generate fails on states of this size",
    "zamba": "ties layers by their index in the full model",
}

_MULTIPLIERS: Fields = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
_MLA: Fields = {"num_key_value_heads": HEADS}
_MAMBA: Fields = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
FIXES: dict[str, Fields] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "kimi_linear",
            "longcat_flash",
            "minicpm3",
            "sarvam_mla",
            "youtu",
            "bailing_hybrid",
        ),
        _MLA,
    ),
    **dict.fromkeys(("codegen", "gptj"), {"rotary_dim": 4}),
    # Encoders by default: causal only when they say so.
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
            "big_bird",
        ),
        {"is_decoder": True},
    ),
    **dict.fromkeys(
        ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"),
        _MULTIPLIERS,
    ),
    "hyperclovax": _MULTIPLIERS,
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), {"logit_scale": 0.8}),
    "deepseek_v2": {**_MLA, "num_experts_per_tok": 2},
    "deepseek_v3": {**_MLA, "first_k_dense_replace": 1},
    "smollm3": {
        "no_rope_layers": [0, 1],
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, **_MULTIPLIERS, "layer_types": ["mamba", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 1},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "max_window_layers": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "global_head_dim": 2 * HEAD_DIM,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": {"global_head_dim": 2 * HEAD_DIM},
    "recurrent_gemma": {"layer_types": DROP, "num_hidden_layers": 3, "lru_width": HIDDEN},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_head_dim": HEAD_DIM,
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention"],
        "layer_types": DROP,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "mpt": {"use_cache": True},
    "jamba": {"layer_types": DROP, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16},
}
