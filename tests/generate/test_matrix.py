"""Combinations of all that generate() takes, drawn by hypothesis, equal to Hugging Face's.

TORCH_PAGED_MATRIX sets how many (default 60; more is a longer look, e.g. 500), and
TORCH_PAGED_MATRIX_SEED draws others than the default ones.
"""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from models import CACHE_NAME, FAMILIES, generator_states, left_pad, prompt, tiny_family
from transformers import DynamicCache, LogitsProcessor

import torch_paged

NUM_EXAMPLES = int(os.environ.get("TORCH_PAGED_MATRIX", "60"))
SEED = os.environ.get("TORCH_PAGED_MATRIX_SEED")
LEAST_FAST = 0.8
NEW = 14
EOS = {"eos_token_id": list(range(3, 30))}


class OddIds(LogitsProcessor):
    """A processor that nobody knows, with random numbers of its own."""

    def __call__(self, input_ids, scores):
        scores = scores + 0.5 * torch.randn(scores.shape, device=scores.device)
        scores[:, int(input_ids.sum()) % 5 :: 5] -= 4.0
        return scores


METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 1.3},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 0},
    "beams": {"do_sample": False, "num_beams": 3, "length_penalty": 0.6},
    "several beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 2, "early_stopping": True},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [7, 9], [30, 31, 32]]},
    "bias": {"sequence_bias": [[[33], 2.0], [[40, 41], -5.0]]},
    "least new": {"min_new_tokens": 6},
    "least": {"min_length": 20},
    "suppress": {"suppress_tokens": list(range(60, 120))},
    "begin suppress": {"begin_suppress_tokens": list(range(3, 150))},
    "forced end": {"forced_eos_token_id": 11},
    "renormalize": {"renormalize_logits": True},
    "invalid": {"remove_invalid_values": True},
    "decay": {"exponential_decay_length_penalty": (3, 1.3), **EOS},
    "unknown": {"logits_processor": OddIds},
    "top p": {"top_p": 0.8},
    "min p": {"min_p": 0.02},
    "typical": {"typical_p": 0.8},
    "epsilon": {"epsilon_cutoff": 0.005},
    "eta": {"eta_cutoff": 0.01},
    "top h": {"top_h": 0.6},
}
OUTPUTS: dict[str, dict[str, Any]] = {
    "sequences": {},
    "dictionary": {"return_dict_in_generate": True},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}
INPUTS = [
    "one prompt",
    "one token",
    "padded",
    "equal rows",
    "holes",
    "embeddings",
    "prefix in a cache",
    "new ids and a cache",
    "padded with a cache",
]
# What Hugging Face's own loop serves is drawn too, but seldom.
FALLBACKS: dict[str, dict[str, Any]] = {
    "lookup": {"prompt_lookup_num_tokens": 2},
    "hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "no cache": {"use_cache": False},
}


@dataclass(frozen=True)
class Combination:
    """One call."""

    family: str
    method: str
    processors: tuple[str, ...]
    output: str
    form: str
    ends: bool
    fallback: str | None
    seed: int

    def options(self) -> dict[str, Any]:
        made: dict[str, Any] = {"max_new_tokens": NEW}
        for name in self.processors:
            made |= PROCESSORS[name]
        if "logits_processor" in made:
            made["logits_processor"] = [made["logits_processor"]()]
        made |= METHODS[self.method] | OUTPUTS[self.output] | (EOS if self.ends else {})
        return made | (FALLBACKS[self.fallback] if self.fallback else {})


def combinations() -> st.SearchStrategy[Combination]:
    names = st.lists(st.sampled_from(sorted(PROCESSORS)), max_size=4, unique=True).map(tuple)
    seldom = st.sampled_from([None] * 20 + list(FALLBACKS))
    return st.builds(
        Combination,
        family=st.sampled_from(list(FAMILIES)),
        method=st.sampled_from(list(METHODS)),
        processors=names,
        output=st.sampled_from(list(OUTPUTS)),
        form=st.sampled_from(INPUTS),
        ends=st.booleans(),
        fallback=seldom,
        seed=st.integers(0, 999),
    ).filter(_is_a_call)


def _is_a_call(drawn: Combination) -> bool:
    """Leave out what generate() refuses, and what asks for a cache and for none."""
    if drawn.fallback == "lookup":
        return drawn.method in ("greedy", "sample") and drawn.form == "one prompt"
    with_cache = "cache" in drawn.form
    expands = drawn.method not in ("greedy", "sample")
    return not (with_cache and (expands or drawn.fallback == "no cache"))


def inputs(model: Any, drawn: Combination) -> dict[str, Any]:
    """Build the prompt in its form; a cache is filled by the model's own forward."""
    device, seed = model.device, drawn.seed
    rows = [prompt(9, seed, device=device)]
    if "padded" in drawn.form or drawn.form == "equal rows":
        rows += [prompt(5, seed + 1, device=device), prompt(17, seed + 2, device=device)]
    if drawn.form == "equal rows":
        rows = [rows[0], rows[1], rows[0], rows[1]]
    if drawn.form == "one token":
        rows = [rows[0][:, :1]]
    ids, mask = left_pad(rows)
    if drawn.form == "holes":
        mask[:, [2, 4]] = 0
    if drawn.form == "embeddings":
        embeds = model.get_input_embeddings()(ids).detach()
        return {"inputs_embeds": embeds, "attention_mask": mask}
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if "cache" in drawn.form:
        kept = ids.shape[1] - 2
        cache = DynamicCache(config=model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, :kept]
        with torch.no_grad():
            model(
                ids[:, :kept],
                attention_mask=mask[:, :kept],
                position_ids=positions,
                **{CACHE_NAME: cache},
            )
        given[CACHE_NAME] = cache
        if drawn.form == "new ids and a cache":
            given["input_ids"] = ids[:, kept:]
    return given


@functools.cache
def pair(family: str) -> tuple[Any, Any]:
    """Return a model as Hugging Face has it and an accelerated one."""
    model = tiny_family(family, "cuda" if torch.cuda.is_available() else "cpu")
    accelerated = copy.deepcopy(model)
    torch_paged.accelerate(accelerated, lag=3)
    return model, accelerated


def call(model: Any, prepared: dict[str, Any], drawn: Combination) -> tuple[Any, Any]:
    """Return what came out, or the type of what was raised, and the generators' states."""
    torch.manual_seed(drawn.seed)
    try:
        result = model.generate(**prepared, **drawn.options())
    except (RuntimeError, ValueError) as error:
        return type(error), None
    return result, generator_states()


def assert_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, (type, torch.Tensor)):
        assert expected is got or torch.equal(got, expected)
        return
    assert list(got.keys()) == list(expected.keys())
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for ours, theirs in zip(got.get(name) or (), expected.get(name) or (), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-3)
    if expected.get("beam_indices") is not None:
        assert torch.equal(got.beam_indices, expected.beam_indices)
    if expected.get(CACHE_NAME) is not None:
        assert got[CACHE_NAME].get_seq_length() == expected[CACHE_NAME].get_seq_length()


def compare(drawn: Combination) -> str:
    """Run a combination on both sides; return the path and the loop that served it."""
    model, accelerated = pair(drawn.family)
    prepared = inputs(model, drawn)
    caches = [copy.deepcopy(prepared.get(CACHE_NAME)) for _ in range(2)]
    results = []
    for side, cache in zip((model, accelerated), caches, strict=True):
        given = prepared | ({CACHE_NAME: cache} if cache is not None else {})
        results.append(call(side, given, drawn))
    (expected, states), (got, our_states) = results
    assert_equal(got, expected)
    if states is not None:
        assert all(torch.equal(a, b) for a, b in zip(our_states, states, strict=True))
        if caches[0] is not None:
            assert caches[1].get_seq_length() == caches[0].get_seq_length()
    assert torch_paged.stats(accelerated).kv_blocks_used == 0
    last = torch_paged.explain(accelerated).last_call
    return f"{last.path}, {last.loop} loop" if last.loop else "Hugging Face's own loop"


def test_matrix(capsys) -> None:
    served: Counter[str] = Counter()
    reasons: Counter[str] = Counter()

    @hypothesis.settings(
        max_examples=NUM_EXAMPLES,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(combinations())
    def check(drawn: Combination) -> None:
        how = compare(drawn)
        served[how] += 1
        if how.startswith("Hugging"):
            reasons[torch_paged.explain(pair(drawn.family)[1]).last_call.reasons[0]] += 1

    if SEED is not None:
        check = hypothesis.seed(int(SEED))(check)
    check()
    total = sum(served.values())
    fast = 1 - served["Hugging Face's own loop"] / total
    with capsys.disabled():
        print(f"\nmatrix: {total} combinations, {fast:.0%} on the fast path; {dict(served)}")
        print(f"matrix: fallbacks {dict(reasons)}")
    assert total >= NUM_EXAMPLES
    assert fast >= LEAST_FAST
