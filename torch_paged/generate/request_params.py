"""From GenerationConfig fields to the parameters of an engine's request, or to a clear refusal."""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from torch_paged.engine.job import OnOutput
from torch_paged.engine.params import SamplingParams, StopCheck
from torch_paged.errors import UnsupportedFeatureError
from torch_paged.generate.values import (
    count,
    fraction,
    integer,
    number,
    plain,
    seconds,
    token_ids,
)
from torch_paged.ops.top_logprobs import MAX_TOP_LOGPROBS
from torch_paged.patches import seams

_UNLIMITED = 1 << 40
_DEFAULT_NEW_TOKENS = 20  # what generate() does without any limit
_MASK = (1 << 64) - 1

# Fields that an engine cannot honour -> the values under which there is nothing to honour.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "use_mtp": (False,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "token_healing": (False,),
    "guidance_scale": (1, 1.0),
    "watermarking_config": (),
    "penalty_alpha": (0, 0.0),
    "dola_layers": (),
    "diversity_penalty": (0.0,),
    "constraints": (),
    "force_words_ids": (),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
}
OWN_NAMES = (
    "seed",
    "priority",
    "deadline",
    "logprobs",
    "prompt_logprobs",
    "prompt_logprobs_start",
    "stop_token_ids",
    "tokenizer",
    "on_output",
)

# (model, config, overrides) -> the config in force, and overrides that it does not know.
Merge = Callable[[Any, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]


class RememberedMerge:
    """A merge that keeps its newest results: requests are often asked for in the same way."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._known: deque[tuple[Any, tuple[Any, dict[str, Any]]]] = deque(maxlen=8)

    def __call__(self, model: Any, config: Any, overrides: dict[str, Any]) -> Any:
        given = None if config is None else vars(config)
        asked = (vars(model.generation_config), given, overrides)
        for question, answer in self._known:
            with contextlib.suppress(Exception):  # arrays are equal to nothing
                if question == asked:
                    return answer
        answer = self._merge(model, config, overrides)
        try:
            self._known.append((copy.deepcopy(asked), answer))
        except Exception:  # a value that cannot be copied cannot be recognised either
            pass
        return answer


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What one `add_request` asks for.

    Attributes:
        samples: parameters of each sequence to return.
        deadline: `time.monotonic()` seconds, or None.
    """

    samples: tuple[SamplingParams, ...]
    priority: int = 0
    deadline: float | None = None
    on_output: OnOutput | None = None


def resolve_params(
    model: Any,
    prompt_length: int,
    generation_config: Any,
    overrides: dict[str, Any],
    draw_seed: Callable[[], int],
    merge: Merge = seams.merge_generation_config,
) -> RequestParams:
    """Merge and check what was asked for, by the rules of `generate()` unless told otherwise.

    Raises:
        TypeError: a type is wrong, or a name is neither a field of GenerationConfig nor ours.
        ValueError: a value is out of its range.
        UnsupportedFeatureError: a field asks for something that an engine does not do.
    """
    check_config(generation_config)
    own = {name: overrides[name] for name in OWN_NAMES if name in overrides}
    fields = {name: plain(value, name) for name, value in overrides.items() if name not in own}
    max_new = fields.get("max_new_tokens")
    if max_new is not None and integer("max_new_tokens", max_new) >= 1:
        # Often another one in each request; without it, the merged config is one met before.
        del fields["max_new_tokens"]
    else:
        max_new = None
    config, unknown = merge(model, generation_config, fields)
    _refuse_unknown(unknown, config)
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            raise UnsupportedFeatureError(
                f"an engine does not support {name}={value!r}; leave it out, or call "
                "model.generate() for this request"
            )
    eos = token_ids("eos_token_id", config.eos_token_id) + token_ids(
        "stop_token_ids", own.get("stop_token_ids")
    )
    max_new = max_new or _max_new_tokens(config, prompt_length)
    if config.min_new_tokens is None:
        min_new = count("min_length", config.min_length or 0) - prompt_length
    else:
        min_new = count("min_new_tokens", config.min_new_tokens)
    temperature, top_k, top_p, min_p = _sampling(config)
    logprobs, num_tops = _logprobs("logprobs", own)
    prompt_logprobs, num_prompt_tops = _logprobs("prompt_logprobs", own)
    base = dict(
        max_new_tokens=max_new,
        min_new_tokens=max(min_new, 0),
        eos_ids=tuple(dict.fromkeys(eos)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=_penalty(config.repetition_penalty),
        suppressed=_suppressed(config, eos),
        logprobs=logprobs,
        top_logprobs=num_tops,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=_scored_from(own, prompt_logprobs, prompt_length),
        prompt_top_logprobs=num_prompt_tops,
    )
    num_sequences = integer("num_return_sequences", config.num_return_sequences or 1, 1)
    seed = own.get("seed")
    seed = draw_seed() if seed is None else integer("seed", seed)
    samples = tuple(
        SamplingParams(
            seed=sequence_seed(seed, i),
            stop_check=_stop_check(config, own.get("tokenizer")),
            **base,  # type: ignore[arg-type]
        )
        for i in range(num_sequences)
    )
    deadline, on_output = own.get("deadline"), own.get("on_output")
    if on_output is not None and not callable(on_output):
        raise TypeError(f"on_output must be callable, got {on_output!r}; pass a function")
    return RequestParams(
        samples,
        priority=integer("priority", own.get("priority", 0)),
        deadline=None if deadline is None else time.monotonic() + seconds("deadline", deadline),
        on_output=on_output,
    )


def check_config(config: Any) -> None:
    """Raise `TypeError` for what is neither None nor a GenerationConfig."""
    if config is not None and not isinstance(config, GenerationConfig):
        kind = type(config).__name__
        remedy = "pass its items by name" if isinstance(config, Mapping) else "leave it out"
        raise TypeError(f"generation_config must be a GenerationConfig, got a {kind}; {remedy}")


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of sequence `index` of a request, any 64 bits; index 0 keeps the seed."""
    # The odd constant of splitmix64 keeps seeds of neighbouring requests apart.
    return (seed + index * 0x9E3779B97F4A7C15) & _MASK


def _refuse_unknown(unknown: dict[str, Any], config: Any) -> None:
    for name in unknown:
        known = [*OWN_NAMES, *(field for field in vars(config) if not field.startswith("_"))]
        close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}?" if close else "leave it out"
        ours = ", ".join(OWN_NAMES)
        raise TypeError(
            f"{name!r} is neither a field of GenerationConfig nor one of {ours}; {hint}"
        )


def _logprobs(name: str, own: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether log-probabilities are asked for, and of how many most likely tokens."""
    value = plain(own.get(name), name)
    if value is None or isinstance(value, bool):
        return bool(value), 0
    num_tops = integer(name, value)
    if not 0 <= num_tops <= MAX_TOP_LOGPROBS:
        raise ValueError(
            f"{name} must be True, or 1 to {MAX_TOP_LOGPROBS} for that many of the most likely "
            f"tokens as well, got {num_tops}; pass e.g. {name}=5"
        )
    return num_tops > 0, num_tops


def _scored_from(own: Mapping[str, Any], is_scored: bool, prompt_length: int) -> int:
    """Return the first token of the prompt whose log-probability is asked for."""
    value = own.get("prompt_logprobs_start")
    if value is None:
        return 1
    start = integer("prompt_logprobs_start", value, 0)
    if not is_scored:
        raise ValueError(
            f"prompt_logprobs_start={start} needs prompt_logprobs; pass prompt_logprobs=True"
        )
    if start > prompt_length:
        raise ValueError(
            f"prompt_logprobs_start must be at most the {prompt_length} tokens of the prompt, got "
            f"{start}"
        )
    return max(start, 1)


def _max_new_tokens(config: Any, prompt_length: int) -> int:
    if config.max_new_tokens is not None:
        return integer("max_new_tokens", config.max_new_tokens, 1)
    if config.max_length is None:
        return _DEFAULT_NEW_TOKENS
    # As in generate(), a fraction of a token is one more.
    length = number("max_length", config.max_length, 128)
    if not length > prompt_length:
        raise ValueError(
            f"max_length must exceed the prompt's {prompt_length} tokens, got "
            f"{config.max_length}; pass max_new_tokens instead"
        )
    return math.ceil(min(length - prompt_length, _UNLIMITED))


def _sampling(config: Any) -> tuple[float, int, float, float]:
    """Return temperature, top_k, top_p and min_p, neutral where nothing is filtered."""
    if not config.do_sample:
        return 0.0, 0, 1.0, 0.0
    given = config.temperature
    temperature = 1.0 if given is None else number("temperature", given, 0.8)
    if not temperature >= 0 or math.isinf(temperature):
        raise ValueError(
            f"temperature must be a number of at least 0 (0 is greedy), got {temperature}; "
            "pass e.g. 0.8"
        )
    top_k = count("top_k", config.top_k or 0, 0)
    top_p = 1.0 if config.top_p is None else fraction("top_p", config.top_p, 0.9)
    min_p = 0.0 if config.min_p is None else fraction("min_p", config.min_p, 0.05)
    return temperature, top_k, top_p, min_p


def _penalty(value: Any) -> float:
    penalty = 1.0 if value is None else number("repetition_penalty", value, 1.1)
    if not penalty > 0:
        raise ValueError(
            f"repetition_penalty must be greater than 0, got {penalty}; 1.0 changes nothing"
        )
    return penalty


def _suppressed(config: Any, eos: Sequence[int]) -> tuple[int, ...]:
    found = list(token_ids("suppress_tokens", config.suppress_tokens))
    bad_words = config.bad_words_ids or ()
    if not isinstance(bad_words, Iterable) or not all(isinstance(w, Sized) for w in bad_words):
        raise TypeError(
            f"bad_words_ids must be a list of lists of token ids, got {bad_words!r}; pass e.g. "
            "bad_words_ids=[[2]]"
        )
    for words in bad_words:
        if len(words) != 1:
            raise UnsupportedFeatureError(
                f"an engine forbids single tokens only, got bad_words_ids with {words}; leave it "
                "out, or call model.generate() for this request"
            )
        # As transformers: an end token is no bad word.
        found += [word for word in token_ids("bad_words_ids", words) if word not in eos]
    return tuple(found)


def _stop_check(config: Any, tokenizer: Any) -> StopCheck | None:
    checks: list[StopCheck] = []
    if config.stop_strings:
        if tokenizer is None:
            raise ValueError(
                f"stop_strings={config.stop_strings!r} needs a tokenizer; pass tokenizer=..."
            )
        criterion = seams.StopStringCriteria(tokenizer, config.stop_strings)
        checks.append(_StopStrings(criterion))
    if config.max_time is not None:
        checks.append(_Time(seconds("max_time", config.max_time)))
    if not checks:
        return None
    return (
        checks[0] if len(checks) == 1 else lambda prompt, ids: any(c(prompt, ids) for c in checks)
    )


class _StopStrings:
    """Ask transformers' criterion, which reads at most as many tokens as its strings are long."""

    def __init__(self, criterion: Any) -> None:
        self._criterion = criterion
        self._window = int(criterion.maximum_token_len)

    def __call__(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        ids = list(output[-self._window :])
        if len(ids) < self._window:
            ids = [*prompt[-(self._window - len(ids)) :], *ids]
        return bool(self._criterion(torch.tensor([ids], device="cpu"), None))


class _Time:
    """Stop `seconds` after the request was made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        return time.monotonic() > self._end


__all__ = [
    "OWN_NAMES",
    "Merge",
    "RememberedMerge",
    "RequestParams",
    "check_config",
    "resolve_params",
    "sequence_seed",
]
