"""What happens to every field of GenerationConfig, transformers 5.17 to 5.24, in `generate()`.

tests/generate/test_fields.py fails where an installed release has a field that is not here, and
holds docs/generate.md to this table.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Handling = Literal["step", "between", "resolved", "loop", "falls back", "none"]

# What each handling means, as the documentation says it.
MEANINGS: dict[Handling, str] = {
    "step": "computed in the step itself; the host runs ahead",
    "between": "Hugging Face's own object runs on the logits between two of our steps",
    "resolved": "Hugging Face turns it into arguments before decoding begins",
    "loop": "our loops do it",
    "falls back": "Hugging Face's own loop serves the call",
    "none": "changes nothing in what these releases generate, here and there",
}


class Field(NamedTuple):
    """One field: its handling, and what else there is to say (of a fallback: why)."""

    handling: Handling
    note: str = ""


_LOOKUP = Field("loop", "of prompt lookups: candidates are verified in one step of a few tokens")
_ASSISTED = Field("loop", "of assisted decoding, which is read from the assistant's own config")
_UNIVERSAL = Field(
    "loop", "of an assistant with another tokenizer, which drafts with its own code"
)
_HIDDEN = Field(
    "falls back", "candidates are drafted from hidden states, which the step does not keep"
)
_GONE = Field("falls back", "its decoding method left transformers: it loads code from the Hub")

FIELDS: dict[str, Field] = {
    # Length and end.
    "max_length": Field("step", "also with max_new_tokens; without any limit between the steps"),
    "max_new_tokens": Field("step", "becomes max_length"),
    "min_length": Field("step"),
    "min_new_tokens": Field("step"),
    "eos_token_id": Field("step", "one id or a list"),
    "pad_token_id": Field("step", "what finished rows emit"),
    "max_time": Field("between"),
    "stop_strings": Field("between"),
    "early_stopping": Field("loop", "of beam search"),
    # Choice of the method.
    "do_sample": Field("step", "random numbers are drawn as Hugging Face draws them"),
    "num_beams": Field("loop", "beam search: its scores between the steps, blocks forked"),
    "length_penalty": Field("loop", "of beam search"),
    "num_return_sequences": Field("loop", "a prompt is prefilled once and its blocks are shared"),
    "num_beam_groups": _GONE,
    "diversity_penalty": _GONE,
    "penalty_alpha": _GONE,
    "dola_layers": _GONE,
    "constraints": _GONE,
    "force_words_ids": _GONE,
    "low_memory": Field("resolved", "beam search refuses it"),
    # Scores.
    "temperature": Field("step"),
    "top_k": Field("step"),
    "top_p": Field("step"),
    "min_p": Field("step"),
    "typical_p": Field("step"),
    "epsilon_cutoff": Field("step"),
    "top_h": Field("between", "its distribution checks its arguments on the host"),
    "eta_cutoff": Field("between", "its distribution checks its arguments on the host"),
    "repetition_penalty": Field("step"),
    "no_repeat_ngram_size": Field("step"),
    "bad_words_ids": Field("step"),
    "sequence_bias": Field("step"),
    "suppress_tokens": Field("step"),
    "begin_suppress_tokens": Field("step"),
    "forced_bos_token_id": Field("step"),
    "forced_eos_token_id": Field("step"),
    "renormalize_logits": Field("step"),
    "remove_invalid_values": Field("step"),
    "exponential_decay_length_penalty": Field("between"),
    "watermarking_config": Field("between"),
    "guidance_scale": Field("between", "the processor runs the model's own forward"),
    "encoder_repetition_penalty": Field("between"),
    "encoder_no_repeat_ngram_size": Field("between"),
    # Outputs.
    "return_dict_in_generate": Field("loop"),
    "output_scores": Field("between", "the steps wait for one another"),
    "output_logits": Field("between", "the steps wait for one another"),
    "output_attentions": Field("falls back", "paged attention has no matrix of weights"),
    "output_hidden_states": Field("falls back", "the step keeps none"),
    # Cache and compilation.
    "use_cache": Field("falls back", "if it is False"),
    "cache_implementation": Field("falls back", "if it is anything but None or dynamic"),
    "cache_config": Field("falls back", "comes with a cache_implementation"),
    "max_cache_len": Field("falls back", "comes with a cache_implementation"),
    "prefill_chunk_size": Field("none", "prompts are cut by Config.max_num_batched_tokens"),
    "compile_config": Field("falls back", "it asks for a compiled forward"),
    "disable_compile": Field("none", "nothing of ours is compiled"),
    "continuous_batching_config": Field("none", "read by generate_batch alone"),
    # Special tokens and the prompt.
    "bos_token_id": Field("resolved", "the prompt where none is given"),
    "decoder_start_token_id": Field("resolved", "of encoder-decoders"),
    "token_healing": Field("resolved", "changes the prompt"),
    # Assisted decoding.
    "is_assistant": Field("loop", "an accelerated assistant drafts in its step"),
    "prompt_lookup_num_tokens": _LOOKUP,
    "max_matching_ngram_size": _LOOKUP,
    "num_assistant_tokens": _ASSISTED,
    "num_assistant_tokens_schedule": _ASSISTED,
    "assistant_confidence_threshold": _ASSISTED,
    "assistant_early_exit": Field("falls back", "it changes the model between its steps"),
    "assistant_ensemble_weight": Field("loop", "of assisted decoding"),
    "assistant_lookbehind": _UNIVERSAL,
    "target_lookbehind": _UNIVERSAL,
    "speculation_type": _HIDDEN,
    "use_mtp": _HIDDEN,
    # Of the file.
    "transformers_version": Field("none"),
}


def markdown_table() -> str:
    """Return the table as the documentation has it."""
    lines = ["| Field | What happens | Note |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {field.handling} | {field.note} |" for name, field in FIELDS.items()]
    return "\n".join(lines)


__all__ = ["FIELDS", "MEANINGS", "Field", "markdown_table"]
