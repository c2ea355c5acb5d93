"""A tiny random model of every causal-LM type that transformers knows.

Sizes are set by the names of config fields, so a type that a new release adds comes by itself;
`zoo_fixes` has the few types whose fields do not fit together that way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from torch_paged.generate.support.zoo_fixes import (
    DROP,
    FIXES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NOT_BUILT,
    VOCAB,
    WINDOW,
    Fields,
)

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


def _value(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it differs from layer to layer
        return None


def _default(config_class: type[PretrainedConfig]) -> PretrainedConfig | None:
    try:
        return config_class()
    except Exception:
        return None


def tiny_model(model_type: str, *, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """Build the model under eager attention, its weights far from their trivial start."""
    config = tiny_config(model_type, **changes)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(0)
    try:
        model = cls._from_config(config, attn_implementation="eager")
    except ValueError:
        model = cls._from_config(config)
    model = model.float().eval()
    _stir(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.bos_token_id = 1
    return model


def _stir(model: nn.Module, seed: int) -> None:
    """Make every gain, bias and projection matter, and logits that are far apart."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {
        id(module.weight): -1 if isinstance(module, nn.Linear | nn.Embedding) else 0
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D) and module.weight is not None
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in matrices:
                num_inputs = parameter.shape[matrices[id(parameter)]]
                parameter.copy_(noise / num_inputs**0.5 * 1.5)
            elif "sink" in name:
                parameter.copy_(2 * noise + 1)
            elif parameter.dim() == 3 and "expert" in name:
                parameter.copy_(noise / 5)
            elif parameter.dim() == 1:
                parameter.add_(0.3 * noise)


__all__ = ["VOCAB", "WINDOW", "causal_lm_types", "tiny_config", "tiny_model"]
