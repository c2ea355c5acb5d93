"""Which path and which loop serve a call; decided before any token and any random draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from torch_paged.generate.call import Call
from torch_paged.generate.images import is_own_prefill, own_prefill_reasons
from torch_paged.generate.past import (
    full_width,
    num_past_columns,
    past_reasons,
    text_positions,
)
from torch_paged.generate.samplers import is_long, looks_back, unknown_processors
from torch_paged.generate.session import Session
from torch_paged.patches import image_seams, seams

Loop = Literal["device", "lagged", "stepped"]

# What `generate` hands to `_sample` beyond its named arguments and what we read ourselves.
_UNDERSTOOD_KWARGS = {
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "use_cache",
    "logits_to_keep",
    "cache_position",
    # For criteria that were built from it.
    "tokenizer",
    *seams.CACHE_NAMES,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """How a call runs: `loop` None means Hugging Face's own code, for `reasons`.

    Attributes:
        reasons: why not fused, or why not the device loop.
        max_new_tokens: from the length criterion; None without one.
        eos_ids: ids that end a row; None where no criterion knows end tokens.
    """

    loop: Loop | None
    reasons: list[str] = field(default_factory=list)
    max_new_tokens: int | None = None
    eos_ids: tuple[int, ...] | None = None


def decide(model: Any, session: Session, call: Call) -> Decision:
    """Choose the path of a call; reads the call's tensors only where it must."""
    reasons = fallback_reasons(model, session, call, "_sample") or _padding_reasons(call)
    if reasons:
        return Decision(None, reasons)
    loop, why = _choose_loop(session, call)
    max_new_tokens, eos_ids = call.limits
    if max_new_tokens is None and loop != "stepped":
        loop, why = "stepped", ["there is no length limit"]
    return Decision(loop, why, max_new_tokens, eos_ids)


def fallback_reasons(model: Any, session: Session, call: Call, method: str) -> list[str]:
    """Say why a call of this decoding method is Hugging Face's to serve, or return nothing."""
    reasons = (
        opted_out(call.generation_config)
        or _model_reasons(model, session, method)
        or _call_reasons(model, session, call)
    )
    if not reasons:
        reasons = _image_reasons(session, call, method) or _mask_reasons(session, call)
    if reasons:
        return reasons
    tested = session.step
    if reason := session.self_test_reason():
        return [reason]
    # A step that failed has given way to one that serves other calls.
    return [] if session.step is tested else fallback_reasons(model, session, call, method)


def _padding_reasons(call: Call) -> list[str]:
    """Hugging Face raises where it has to go on from such a token, unless it is the last one."""
    pad, eos = call.generation_config.pad_token_id, call.limits.eos_ids
    if eos is None or call.input_ids.shape[0] == 1 or not isinstance(pad, int) or pad >= 0:
        return []
    return [f"rows that have ended emit pad_token_id={pad}"]


OPTED_OUT = "opted out: generation_config.torch_paged is False"


def opted_out(config: Any) -> list[str]:
    """Return the reason if this call asked for Hugging Face's own code."""
    return [OPTED_OUT] if getattr(config, "torch_paged", None) is False else []


def _model_reasons(model: Any, session: Session, method: str) -> list[str]:
    if seams.overrides_method(model, method):
        return [f"{type(model).__name__} has a decoding loop of its own"]
    session.reread_if_changed()
    if session.decide_tier() == "eager":
        return list(session.reasons)
    if not model.training:
        return []
    if session.dropout:
        return [session.dropout]
    if seams.checkpoints_activations(model):
        return ["gradient checkpointing in training mode drops the cache"]
    return []


def _call_reasons(model: Any, session: Session, call: Call) -> list[str]:
    config, kwargs = call.generation_config, call.model_kwargs
    reasons = []
    reasons += _shape_reasons(session, call)
    embeds = kwargs.get("inputs_embeds")
    if not call.input_ids.shape[0]:
        reasons.append("a batch without rows")
    elif not (call.input_ids if embeds is None else embeds).shape[1]:
        reasons.append("prompts without tokens")
    if call.synced_gpus:
        reasons.append("synced_gpus")
    if not kwargs.get("use_cache", True):
        reasons.append("use_cache=False")
    if config.is_assistant:
        reasons.append("the model drafts for another one")
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            reasons.append(name)
    cache = seams.call_cache(kwargs)
    assert session.step is not None
    shown = config.return_dict_in_generate or seams.cache_is_user_defined(cache)
    if shown and not session.step.fills_caches:
        reasons.append("the model's own cache holds something else than keys and values")
    if cache is not None and not seams.is_plain_dynamic_cache(cache):
        given = seams.cache_is_user_defined(cache)
        what = f"cache_implementation={config.cache_implementation!r}"
        reasons.append(f"a {type(cache).__name__} was passed in" if given else what)
    if config.compile_config is not None:
        reasons.append("compile_config")
    if torch.is_grad_enabled():
        reasons.append("gradients are enabled")
    if torch.is_autocast_enabled(session.step.device.type):
        reasons.append("autocast is on")
    if seams.has_own_input_preparation(model):
        reasons.append("prepare_inputs_for_generation is replaced on the instance")
    if seams.is_compiled(model):
        reasons.append("model.compile() was called")
    if _recomputes(session, call):
        reasons.append("longrope computes the whole sequence anew on its way past its limit")
    understood = _UNDERSTOOD_KWARGS
    if session.reads_images:
        understood = understood | image_seams.IMAGE_INPUTS
    extra = sorted(
        name
        for name, value in kwargs.items()
        # `generate` hands an empty dictionary of encoded images to models that could take them.
        if name not in understood and value is not None and not _is_empty(value)
    )
    return reasons + [f"model argument {name!r}" for name in extra]


def _shape_reasons(session: Session, call: Call) -> list[str]:
    """Leave to Hugging Face's own errors what its model cannot compute."""
    ids, reasons = call.input_ids, []
    embeds = call.model_kwargs.get("inputs_embeds")
    positions = call.model_kwargs.get("position_ids")
    if ids.dim() != 2:
        reasons.append(f"input_ids of {ids.dim()} dimensions")
    if ids.is_floating_point():
        reasons.append(f"input_ids of {ids.dtype}")
    if embeds is not None:
        size = getattr(session.model.get_input_embeddings(), "embedding_dim", embeds.shape[-1])
        if embeds.dim() != 3:
            reasons.append(f"inputs_embeds of {embeds.dim()} dimensions")
        elif embeds.shape[-1] != size:
            reasons.append(f"inputs_embeds of {embeds.shape[-1]} values, not {size}")
        assert session.step is not None
        if embeds.dtype != session.step.dtype:
            dtype = str(session.step.dtype).removeprefix("torch.")
            reasons.append(f"inputs_embeds of {embeds.dtype} for a model in {dtype}")
    if positions is not None and not isinstance(positions, torch.Tensor):
        reasons.append(f"position_ids of type {type(positions).__name__}")
    elif positions is not None and positions.dtype is torch.bool:
        reasons.append("position_ids of torch.bool")
    return reasons


def _image_reasons(session: Session, call: Call, method: str) -> list[str]:
    if not is_own_prefill(call):
        return []
    if not session.reads_images:
        return ["position_ids whose parts differ"]
    if method == "_assisted_decoding":
        return ["assisted decoding of a prompt with images"]
    return own_prefill_reasons(session, call)


def _recomputes(session: Session, call: Call) -> bool:
    """Say whether a sequence is computed anew between the first cached token and the last."""
    assert session.step is not None
    width, max_new = call.input_ids.shape[1], call.limits.max_new_tokens
    first = num_past_columns(seams.call_cache(call.model_kwargs)) or width
    return session.step.recomputes(
        first, width - first + (1 << 62 if max_new is None else max_new)
    )


def _is_empty(value: object) -> bool:
    return isinstance(value, dict) and not value


def _mask_reasons(session: Session, call: Call) -> list[str]:
    mask = call.model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return [f"a {mask.dim()}-D attention mask"]
    assert session.step is not None
    embeds = call.model_kwargs.get("inputs_embeds")
    rows, width = (call.input_ids if embeds is None else embeds).shape[:2]
    if mask is not None and mask.shape[0] != rows:
        if mask.shape[0] != 1:
            # Indexed by transformers, it would end the use of a GPU.
            raise ValueError(
                f"attention_mask must have a row for each of {rows} prompts, got "
                f"{list(mask.shape)}; pass the mask that belongs to input_ids"
            )
        return [f"one row of an attention mask for {rows} prompts"]
    positions = text_positions(call.model_kwargs.get("position_ids"))
    cache = seams.call_cache(call.model_kwargs)
    past = num_past_columns(cache)
    if past:
        if embeds is not None:
            return ["a cache was passed in with inputs_embeds"]
        total = full_width(mask, call.generation_config, positions)
        shapes, has_window = session.step.layer_shapes, session.step.has_window
        if why := past_reasons(cache, shapes, rows, width, total, has_window):
            return why
        width = past + width if total == past + width else width
    # First: generate() makes the positions from the mask, and they are wrong as well then.
    given = seams.dropped_mask_width(call.generation_config) if mask is None else mask.shape[1]
    if given not in (None, width):
        longer = given > width
        return [f"the attention mask is {'longer' if longer else 'shorter'} than the prompt"]
    if positions is not None:
        too_short = positions.dim() != 2 or positions.shape[1] < width - past
        too_short |= positions.shape[0] not in (1, rows)
        if too_short or (not past and positions.shape[1] != width):
            return ["position_ids are not those of the prompt"]
    if why := _position_reasons(session, call, positions, width):
        return why
    if mask is None:
        return []
    facts, step = call.mask_facts, session.step
    assert facts is not None
    if step.keeps_state and ((mask != 0) & (mask != 1)).any():
        # What enters a state is multiplied by the mask.
        return ["a mask of other numbers than 0 and 1, and layers with a state"]
    if facts.right_padded:
        return ["right padding"]
    counts_places = step.has_window or step.keeps_state or step.counts_columns
    if not (facts.holed and counts_places):
        return []
    what = "a sliding window" if step.has_window else "layers with a state"
    if step.counts_columns:
        what = "distances that count them"
    return [f"a mask with holes and {what}"]


def _position_reasons(
    session: Session, call: Call, positions: torch.Tensor | None, width: int
) -> list[str]:
    """Say whether the call may go past the last position of a model that has one.

    Hugging Face raises there, once it is reached; before that, a row may end.
    """
    assert session.step is not None
    limit, max_new = session.step.max_positions, call.limits.max_new_tokens
    if not limit:
        return []
    first = width if positions is None or not positions.numel() else int(positions.max()) + 1
    needed = first + (1 if max_new is None else max_new) - 1
    if needed <= limit:
        return []
    return [f"the model has {limit} positions, and the call may need {needed}"]


def _choose_loop(session: Session, call: Call) -> tuple[Loop, list[str]]:
    """Device where all that chooses and stops is known; stepped where anything is not."""
    config = call.generation_config
    assert session.step is not None
    unknown = unknown_processors(call.logits_processor, session.step.vocab_size)
    why = [f"{name} runs between the steps" for name in unknown]
    rows, width = call.input_ids.shape
    max_new_tokens = call.limits.max_new_tokens
    if max_new_tokens is not None and is_long(rows, width + max_new_tokens):
        if looks_back(call.logits_processor):
            why.append("a processor looks back at more ids than fit beside the step")
    for criterion in call.stopping_criteria:
        if type(criterion) not in (seams.MaxLengthCriteria, seams.EosTokenCriteria):
            why.append(f"{type(criterion).__name__} runs between the steps")
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        why.append("scores or logits are returned")
    given = seams.cache_is_user_defined(seams.call_cache(call.model_kwargs))
    if session.step.keeps_state and (config.return_dict_in_generate or given):
        why.append("states are returned, which no step may run ahead of")
    if call.input_ids.device != session.step.device:
        why.append(f"input_ids are on {call.input_ids.device}")
    if why:
        return "stepped", why
    return ("lagged", ["a streamer"]) if call.streamer is not None else ("device", [])
