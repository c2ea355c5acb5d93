"""Every symbol of transformers around candidate generators that is private; see seams.py.

tests/patches/test_draft_seams.py holds these on the oldest and the newest supported release.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.generation import candidate_generator as candidates
from transformers.generation import stopping_criteria

from torch_paged.patches.seams import special_token_tensors

AssistedCandidateGenerator = candidates.AssistedCandidateGenerator
PromptLookupCandidateGenerator = candidates.PromptLookupCandidateGenerator
ConfidenceCriteria = stopping_criteria.ConfidenceCriteria


class ResolvedCall(NamedTuple):
    """What `generate()` hands to its decoding method."""

    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]


def drafts_from_hidden_states(config: Any, assistant: Any) -> bool:
    """Say whether candidates come from what the layers of the main model put out."""
    kinds = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
    return (
        bool(getattr(config, "use_mtp", False))
        or getattr(config, "speculation_type", None) is not None
        or type(assistant).__name__.startswith(kinds)
    )


def record_past(cache: Any) -> None:
    """Let a cache keep what its windows hide until it is cropped, as assisted decoding does."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


def forget_past(cache: Any) -> None:
    """Drop what `record_past` kept, as the last crop of assisted decoding does."""
    cache.crop(0)


def replace_drafting(generator: Any, draft: Any) -> None:
    """Let `draft` stand in for the call of `assistant.generate()` of a candidate generator."""
    generator._generate_candidates = draft


def look_up_on_host(generator: Any) -> None:
    """Let a prompt lookup compare ids on the host: on a GPU it waits for every comparison.

    With processors it stays, for they run over the whole vocabulary.
    """
    if generator.logits_processor:
        return
    # Without processors nothing is forbidden, however often it is asked for.
    generator.logits_processor = None
    if generator.eos_token_id is not None:
        generator.eos_token_id = generator.eos_token_id.cpu()
    look_up = generator.get_candidates

    def get_candidates(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return look_up(input_ids.cpu(), **kwargs)

    generator.get_candidates = get_candidates


def opt_out(generator: Any) -> None:
    """Leave all further drafts of a candidate generator to transformers."""
    generator.generation_config.torch_paged = False


def restore_drafting(generator: Any, arguments: dict[str, Any]) -> Any:
    """Undo `replace_drafting`, and draft as transformers does."""
    del generator._generate_candidates
    return generator._generate_candidates(arguments)


def resolve_draft(generator: Any, arguments: dict[str, Any], *, is_first: bool) -> ResolvedCall:
    """Let `assistant.generate()` resolve its arguments, without decoding.

    Args:
        arguments: of a candidate generator's call of it.
        is_first: nothing was drafted before. Later on the mask and the positions have to grow, as
            they do where a cache is kept.
    """
    kwargs, width = generator.assistant_kwargs, arguments["input_ids"].shape[1]
    if not is_first:
        kwargs = candidates._prepare_attention_mask(kwargs, width, False)
        kwargs = candidates._prepare_position_ids(kwargs, width, False)
        kwargs = candidates._prepare_token_type_ids(kwargs, width)
        generator.assistant_kwargs = kwargs
    found = []

    def note(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        found.append(
            ResolvedCall(
                input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
        )
        return input_ids

    generator.assistant_model.generate(**arguments, **kwargs, custom_generate=note)
    (call,) = found
    return call


def inferred_padding(generator: Any, config: Any) -> int | None:
    """Return the token that the assistant's `generate()` takes for padding, if any."""
    pad, eos = special_token_tensors(config)
    if generator.assistant_kwargs.get("attention_mask") is not None or pad is None:
        return None
    if eos is not None and bool(torch.isin(eos, pad).any()):
        return None
    return int(pad)


def confidence_threshold(generator: Any) -> float:
    """Return below which probability a token is the last of its draft, 0 for none."""
    return float(generator.generation_config.assistant_confidence_threshold or 0.0)


def note_confidences(generator: Any, confidences: list[float]) -> None:
    """Hand on the probabilities of drafted tokens, if the generator learns from them."""
    learns = generator.assistant_generation_config.assistant_confidence_threshold
    if learns and hasattr(generator, "probs"):
        generator.probs.extend(confidences)


__all__ = [
    "AssistedCandidateGenerator",
    "ConfidenceCriteria",
    "PromptLookupCandidateGenerator",
    "ResolvedCall",
    "confidence_threshold",
    "drafts_from_hidden_states",
    "forget_past",
    "inferred_padding",
    "look_up_on_host",
    "note_confidences",
    "opt_out",
    "record_past",
    "replace_drafting",
    "resolve_draft",
    "restore_drafting",
]
