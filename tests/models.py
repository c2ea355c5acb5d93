"""Tiny deterministic models, prompts and Hugging Face reference runs for the tests."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HeliumConfig,
    Jais2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
)

DROP = object()  # for a field of BASE that a config class does not take
BASE = dict(
    vocab_size=257,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.35,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
# Tokens are compared where the two best logits are further apart than this.
NEAR_TIE = 0.01
# What a model's forward and generate() call their cache: renamed in transformers 5.24.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


class Family(NamedTuple):
    """A kind of model: its config class, a weight seed without near ties, and config fields."""

    config_class: type[PretrainedConfig]
    seed: int
    fields: dict[str, Any]


_TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LATENT_EXPERTS = {
    **_LATENT,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FAMILIES = {
    "llama": Family(LlamaConfig, 8, {}),
    "qwen3": Family(Qwen3Config, 3, {"head_dim": 16}),
    "mistral": Family(MistralConfig, 4, {"sliding_window": 17}),
    "qwen2": Family(Qwen2Config, 1, {}),
    "gemma2": Family(
        Gemma2Config,
        23,
        {
            "head_dim": 16,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "phi3": Family(Phi3Config, 5, {"partial_rotary_factor": 0.5}),
    "gpt_neox": Family(GPTNeoXConfig, 10, {"num_key_value_heads": DROP, "rotary_pct": 0.25}),
    "gemma": Family(GemmaConfig, 1, {"head_dim": 16}),
    "gemma3": Family(
        Gemma3TextConfig,
        13,
        {
            "head_dim": 16,
            "sliding_window": 17,
            "query_pre_attn_scalar": 8,
            "layer_types": _TWO_KINDS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            },
        },
    ),
    "vaultgemma": Family(
        VaultGemmaConfig,
        19,
        {
            "head_dim": 16,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "layer_types": _TWO_KINDS,
        },
    ),
    "granite": Family(
        GraniteConfig,
        16,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
            "mlp_bias": True,
        },
    ),
    "olmo": Family(OlmoConfig, 23, {}),
    "olmo2": Family(Olmo2Config, 0, {}),
    "olmo3": Family(Olmo3Config, 27, {"sliding_window": 17, "layer_types": _TWO_KINDS}),
    "starcoder2": Family(Starcoder2Config, 23, {"sliding_window": 17}),
    "smollm3": Family(
        SmolLM3Config,
        12,
        {
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": _TWO_KINDS,
        },
    ),
    "ministral": Family(
        MinistralConfig,
        3,
        {"head_dim": 16, "sliding_window": 17, "layer_types": _TWO_KINDS},
    ),
    "cwm": Family(
        CwmConfig,
        5,
        {
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": _TWO_KINDS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "seed_oss": Family(
        SeedOssConfig, 9, {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True}
    ),
    "ernie4_5": Family(Ernie4_5Config, 26, {"head_dim": 16, "use_bias": True}),
    "helium": Family(HeliumConfig, 7, {"head_dim": 16, "attention_bias": True}),
    "glm": Family(GlmConfig, 0, {"head_dim": 16, "rope_parameters": _PARTIAL}),
    "glm4": Family(Glm4Config, 16, {"head_dim": 16, "rope_parameters": _PARTIAL}),
    "cohere": Family(CohereConfig, 48, {"logit_scale": 0.8}),
    "cohere2": Family(
        Cohere2Config, 22, {"logit_scale": 0.5, "sliding_window": 17, "layer_types": _TWO_KINDS}
    ),
    "phi": Family(PhiConfig, 7, {"rope_parameters": _PARTIAL}),
    "stablelm": Family(StableLmConfig, 6, {"rope_parameters": _PARTIAL, "use_qkv_bias": True}),
    "arcee": Family(ArceeConfig, 12, {"mlp_bias": True}),
    "jais2": Family(Jais2Config, 2, {"head_dim": 16}),
    "nemotron": Family(NemotronConfig, 2, {"head_dim": 16, "mlp_bias": True}),
    "gpt2": Family(GPT2Config, 26, {}),
    "opt": Family(OPTConfig, 62, {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": Family(BloomConfig, 8, {}),
    "mpt": Family(MptConfig, 30, {"max_seq_len": 512, "use_cache": True}),
    "falcon": Family(
        FalconConfig, 54, {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    ),
    "gptj": Family(GPTJConfig, 15, {"rotary_dim": 8}),
    "mixtral": Family(MixtralConfig, 10, {"num_local_experts": 6, "sliding_window": 17}),
    "qwen3_moe": Family(
        Qwen3MoeConfig,
        33,
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": Family(
        DeepseekV2Config,
        44,
        {
            **_LATENT_EXPERTS,
            "q_lora_rank": None,
            "head_dim": 8,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v3": Family(
        DeepseekV3Config,
        51,
        {
            **_LATENT_EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "minicpm3": Family(MiniCPM3Config, 7, {**_LATENT, "scale_emb": 3.0, "scale_depth": 1.4}),
    "olmoe": Family(OlmoeConfig, 84, {"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt_oss": Family(
        GptOssConfig,
        0,
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 17,
            "layer_types": _TWO_KINDS,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


class Built(NamedTuple):
    """A model as it was built, for copies, and the state of the generator behind that."""

    model: PreTrainedModel
    generator: Tensor


_built: dict[str, Built] = {}


def tiny(
    config_class: type[PretrainedConfig],
    weight_seed: int = 0,
    device: torch.device | str = "cpu",
    **fields: Any,
) -> PreTrainedModel:
    """Return a random float32 eager-attention model whose gains, biases and sinks all matter."""
    merged = {k: v for k, v in {**BASE, **fields}.items() if v is not DROP}
    torch.manual_seed(weight_seed)
    # Building takes several times as long as copying.
    key = f"{config_class.__name__} {weight_seed} {merged}"
    if key not in _built:
        _built[key] = Built(_build(config_class(**merged), weight_seed), torch.get_rng_state())
    torch.set_rng_state(_built[key].generator)
    return copy.deepcopy(_built[key].model).to(device)


def _build(config: PretrainedConfig, weight_seed: int) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    noise = torch.Generator().manual_seed(1000 + weight_seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() != 1 and "sinks" not in name:
                continue
            values = torch.randn(parameter.shape, generator=noise)
            if "sinks" in name:
                parameter.copy_(2 * values + 1)
            elif "norm" in name or "ln_" in name:
                parameter.add_(0.3 * values)
            else:
                parameter.add_(0.2 * values)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def tiny_family(
    name: str, device: torch.device | str = "cpu", seed: int | None = None, **fields: Any
) -> PreTrainedModel:
    """Build the tiny model of a row of FAMILIES, with `fields` changed."""
    family = FAMILIES[name]
    weight_seed = family.seed if seed is None else seed
    return tiny(family.config_class, weight_seed, device, **family.fields | fields)


def without_choice(name: str) -> dict[str, Any]:
    """Return the fields of a row of FAMILIES with which every token takes all experts.

    In low precision tokens change experts at near ties, and their values with them.
    """
    fields = FAMILIES[name].fields
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    counts = [fields[key] for key in keys if key in fields]
    groups = {"n_group": 1, "topk_group": 1} if "n_group" in fields else {}
    return {"num_experts_per_tok": counts[0], **groups} if counts else {}


def tape_model(chain: Sequence[int], device: torch.device | str, vocab: int = 263) -> nn.Module:
    """Build a Llama whose greedy next token depends on the last token alone.

    `chain[i]` is followed by `chain[i + 1]`, its last token by 2, the end token; the tokens of
    `chain` must be distinct.
    """
    width = -(-vocab // 16) * 16
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=width // 16,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.set_attn_implementation("eager")
    following = dict(zip(chain, [*chain[1:], 2], strict=True))
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        for token in range(vocab):
            model.model.embed_tokens.weight[token, token] = 1.0
            model.lm_head.weight[following.get(token, 2), token] = 1.0
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    return model.to(device)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 259 bytes and special tokens, and four merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    merges = [("D", "E"), ("DE", "F"), ("\u0120", "b"), ("H", "I")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    raw = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def prompt(length: int, seed: int, vocab: int = 257, device: torch.device | str = "cpu") -> Tensor:
    """Return random ids [1, length], none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (1, length), generator=generator).to(device)


def left_pad(rows: Sequence[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids and mask [len(rows), longest]."""
    width = max(row.shape[1] for row in rows)
    ids = rows[0].new_full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row[0]
        mask[i, width - row.shape[1] :] = 1
    return ids, mask


def padded_prompts(
    lengths: Sequence[int], device: torch.device | str, vocab: int = 257
) -> tuple[Tensor, Tensor]:
    """Return ids and mask of one random prompt per length, left-padded."""
    return left_pad([prompt(length, length, vocab, device) for length in lengths])


class Reference(NamedTuple):
    """What Hugging Face generates: sequences, raw logits [B, V] by step, smallest gap."""

    sequences: Tensor
    logits: tuple[Tensor, ...]
    gap: float


def smallest_gap(logits: Sequence[Tensor]) -> float:
    """Return the smallest distance between the two best logits of a row and step."""
    best = torch.stack(list(logits)).float().topk(2, -1).values
    return float((best[..., 0] - best[..., 1]).min())


def reference(model: nn.Module, ids: Tensor, num_tokens: int = 24, **kwargs: Any) -> Reference:
    """Generate greedily on a copy of a model that is not accelerated; fail on a near tie."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    kwargs = {"max_new_tokens": num_tokens, "do_sample": False, **kwargs}
    output = copy.deepcopy(model).generate(
        ids, return_dict_in_generate=True, output_logits=True, **kwargs
    )
    gap = smallest_gap(output.logits)
    assert gap > NEAR_TIE, f"a near tie of {gap:.4f} decides this case: take another seed"
    return Reference(output.sequences, output.logits, gap)


@functools.cache
def ragged_reference(family: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and mask of a ragged batch, and 40 tokens of the tiny model of a family for it.

    Shorter runs are its beginnings.
    """
    ids, mask = padded_prompts((5, 16, 33), device)
    model = tiny_family(family, device)
    return ids, mask, reference(model, ids, 40, attention_mask=mask).sequences


def greedy(model: nn.Module, ids: Tensor, num_tokens: int = 24, **kwargs: Any) -> Any:
    """Generate greedily with the same arguments as `reference`, asking for sequences alone."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **{"max_new_tokens": num_tokens, "do_sample": False, **kwargs})


class Seeded(NamedTuple):
    """A seeded run: its result and the states of the generators after it."""

    result: Any
    states: tuple[Tensor, ...]


def generator_states() -> tuple[Tensor, ...]:
    """Return the states of the CPU's and the GPU's default generators."""
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state()) if torch.cuda.is_available() else states


def seeded(model: nn.Module, seed: int, ids: Tensor, **kwargs: Any) -> Seeded:
    """Seed torch, generate with sampling unless told otherwise, keep the generators' states."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    torch.manual_seed(seed)
    result = model.generate(ids, **{"do_sample": True, **kwargs})
    return Seeded(result, generator_states())


def cache_of(output: Any) -> Any:
    """Return the cache of a generate() or forward output, whatever this version calls it."""
    return output[CACHE_NAME]
