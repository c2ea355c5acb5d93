"""A tiny random model of every causal-LM type that transformers knows.

Sizes are set by the names of config fields, so a type that a new release adds comes by itself;
`FIXES` has the few types whose fields do not fit together that way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

VOCAB = 97
WINDOW = 8  # shorter than every prompt
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim"), HIDDEN),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
        ),
        HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), KV_HEADS),
    "head_dim": HEAD_DIM,
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "d_inner",
            "dff",
            "feed_forward_size",
        ),
        48,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_encoder_layers",
            "num_decoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
        ),
        16,
    ),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), WINDOW),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

Fields = dict[str, Any]


def causal_lm_types() -> list[str]:
    """Return the model types of the causal-LM mapping, in its order, but for `NOT_BUILT`."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NOT_BUILT]


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Build the smallest config of a type that still has each kind of its layers."""
    config_class = CONFIG_MAPPING[model_type]
    fields = _shrunk(config_class) | FIXES.get(model_type, {}) | changes
    return config_class(**{k: v for k, v in fields.items() if v is not DROP})


def _shrunk(config_class: type[PretrainedConfig]) -> Fields:
    default = _default(config_class)
    if default is None:
        return dict(_SIZES)
    fields: Fields = {}
    known = set(default.to_dict()) | set(vars(default)) | set(default.attribute_map)
    for name, size in _SIZES.items():
        if name in known:
            value = _value(default, name)
            if isinstance(value, int) and not isinstance(value, bool) or name in _ALWAYS:
                fields[name] = size
    for name, token in _TOKENS.items():
        fields[name] = token
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1:
        fields["layer_types"] = kinds[:2]
    for name in default.sub_configs:
        sub = getattr(default, name, None)
        if isinstance(sub, PretrainedConfig):
            fixes = FIXES.get(sub.model_type, {})
            fields[name] = {"model_type": sub.model_type, **_shrunk(type(sub)), **fixes}
    return fields


# Set even where the default is None: it would be derived from something large.
_ALWAYS = {"vocab_size", "head_dim", "num_key_value_heads", "sliding_window"}
DROP = object()


def _value(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it differs from layer to layer
        return None


@functools.cache
def _default(config_class: type[PretrainedConfig]) -> PretrainedConfig | None:
    try:
        return config_class()
    except Exception:
        return None


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
    },
    "jamba": {"layer_types": DROP, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16},
}


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Build the model under eager attention, its weights far from their trivial start."""
    config = tiny_config(model_type, **changes)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(0)
    try:
        model = cls._from_config(config, attn_implementation="eager")
    except ValueError:
        model = cls._from_config(config)
    model = model.float().eval()
    _stir(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.bos_token_id = 1
    return model


def _stir(model: nn.Module) -> None:
    """Make every gain, bias and projection matter, and logits that are far apart."""
    generator = torch.Generator().manual_seed(1)
    matrices = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding) and module.weight is not None
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in matrices:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5 * 1.5)
            elif "sink" in name:
                parameter.copy_(2 * noise + 1)
            elif parameter.dim() == 3 and "expert" in name:
                parameter.copy_(noise / 5)
            elif parameter.dim() == 1:
                parameter.add_(0.3 * noise)
