"""Models that read images: their text model is read like the causal LM of its class.

Encoding images, merging their features into the prompt and all that differs between the classes
stays Hugging Face's own; only the text model decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch_paged.decoder.spec import DecoderSpec
from torch_paged.patches.llama_like import read_llama_like
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.traits import ExpertsNames, Traits

Key = tuple[str, str]

_LANGUAGE, _TEXT = "model.language_model", "model.text_model"

# (module under transformers.models, class) -> name of the text model. In each class tokens behind
# the prompt meet nothing but the text model and then `lm_head`.
WRAPPERS: dict[Key, str] = {
    ("gemma3.modeling_gemma3", "Gemma3ForConditionalGeneration"): _LANGUAGE,
    ("idefics3.modeling_idefics3", "Idefics3ForConditionalGeneration"): _TEXT,
    ("internvl.modeling_internvl", "InternVLForConditionalGeneration"): _LANGUAGE,
    ("llava.modeling_llava", "LlavaForConditionalGeneration"): _LANGUAGE,
    ("llava_next.modeling_llava_next", "LlavaNextForConditionalGeneration"): _LANGUAGE,
    ("mistral3.modeling_mistral3", "Mistral3ForConditionalGeneration"): _LANGUAGE,
    ("qwen2_vl.modeling_qwen2_vl", "Qwen2VLForConditionalGeneration"): _LANGUAGE,
    ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"): _LANGUAGE,
    ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLForConditionalGeneration"): _LANGUAGE,
    ("qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"): _LANGUAGE,
    ("smolvlm.modeling_smolvlm", "SmolVLMForConditionalGeneration"): _TEXT,
}

# Text models that no causal LM has. Their rotary embedding takes positions of three components. Of
# text these are equal, and it is the ordinary one then, in sections or interleaved.
_OWN_TEXT_MODELS: dict[Key, Traits] = {
    ("qwen2_vl.modeling_qwen2_vl", "Qwen2VLTextModel"): Traits(window="module"),
    ("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLTextModel"): Traits(window="module"),
    ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLTextModel"): Traits(head_norms=("q_norm", "k_norm")),
    ("qwen3_vl_moe.modeling_qwen3_vl_moe", "Qwen3VLMoeTextModel"): Traits(
        head_norms=("q_norm", "k_norm"), experts=ExpertsNames(normalise=True)
    ),
}
_TEXT_NAMES = {"Gemma3ForCausalLM": "Gemma3TextModel"}


def text_models(causal: Mapping[Key, Traits]) -> dict[Key, Traits]:
    """Return how text models depart from Llama: as the causal LMs over them do, and more."""
    rows = {
        (module, _TEXT_NAMES.get(name, name.replace("ForCausalLM", "Model"))): traits
        for (module, name), traits in causal.items()
    }
    return rows | _OWN_TEXT_MODELS


def read_multimodal(model: Any, text: str, traits: Mapping[Key, Traits]) -> DecoderSpec:
    """Read the text model of `model` at the dotted name `text`, and the head over it."""
    module = model.get_submodule(text)
    cls = type(module)
    row = traits.get((cls.__module__.removeprefix("transformers.models."), cls.__name__))
    if row is None or not cls.__module__.startswith("transformers.models."):
        raise SpecRefusal(
            f"no fused decoder for its text model {cls.__module__}.{cls.__qualname__}"
        )
    family = type(model).__module__.split(".")[2]
    spec = read_llama_like(model, family, row, text, module.config)
    # What a causal LM does beyond its text model is not done here.
    return replace(spec, logit_scale=1.0, logit_softcap=0.0, recompute_length=0)


def is_around(name: str, text: str) -> bool:
    """Say whether a module is the text model at the dotted name `text`, or in it, or around it.

    The others encode images, and are called in any case.
    """
    if name == "lm_head":
        return True
    return f"{name}.".startswith(f"{text}.") or f"{text}.".startswith(f"{name}." if name else "")


__all__ = ["WRAPPERS", "is_around", "read_multimodal", "text_models"]
