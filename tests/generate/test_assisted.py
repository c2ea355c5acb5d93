"""Assisted decoding on the paged cache: outputs, draws and schedules equal Hugging Face's."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from models import (
    CACHE_NAME,
    byte_tokenizer,
    cache_of,
    generator_states,
    greedy,
    left_pad,
    prompt,
    tiny,
    tiny_family,
)
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, StoppingCriteria

import torch_paged

ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
SAMPLED = {"do_sample": True, "top_k": 0}
LAGS = [0, 4]


class Pair(NamedTuple):
    """A model and an assistant that agrees with it often."""

    model: Any
    assistant: Any


def similar(model: Any, noise: float = 0.01, **settings: Any) -> Any:
    """Return a copy whose weights are a little off, to draft for the model."""
    assistant = copy.deepcopy(model)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=random).to(parameter))
    for name, value in settings.items():
        setattr(assistant.generation_config, name, value)
    return assistant


@pytest.fixture
def pair(device) -> Pair:
    model = tiny(LlamaConfig, 8, device)
    # Otherwise generate() looks for padding among the sampled tokens, too.
    model.generation_config.pad_token_id = None
    settings = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}
    return Pair(model, similar(model, **settings))


@pytest.fixture
def ids(device) -> torch.Tensor:
    return prompt(17, 17, device=device).repeat(1, 2)


class Result(NamedTuple):
    output: Any
    states: Any


def run(model: Any, ids: torch.Tensor, num_tokens: int = 24, seed: int = 3, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    output = greedy(model, ids, num_tokens, **{**ALL, **kwargs})
    return Result(output, generator_states())


def assert_same(got: Result, expected: Result) -> None:
    ours, theirs = got.output, expected.output
    assert type(ours) is type(theirs) and list(ours.keys()) == list(theirs.keys())
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        for step, wanted in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(step, wanted, rtol=1e-4, atol=1e-3)
    for state, wanted in zip(got.states, expected.states, strict=True):
        assert torch.equal(state, wanted)


def assert_same_cache(got: Any, expected: Any) -> None:
    assert got.get_seq_length() == expected.get_seq_length()
    for ours, theirs in zip(got.layers, expected.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def assert_fast(model: Any, loop: str = "stepped") -> None:
    call = torch_paged.explain(model).last_call
    assert (call.path, call.loop) == ("fused", loop), call
    assert torch_paged.stats(model).kv_blocks_used == 0


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_prompt_lookup(block_size, options, pair, ids, accelerate) -> None:
    model = pair.model
    options = {"prompt_lookup_num_tokens": 3, **options}
    expected = run(copy.deepcopy(model), ids, **options)
    accelerate(model, block_size=block_size)
    got = run(model, ids, **options)
    assert_same(got, expected)
    assert_same_cache(cache_of(got.output), cache_of(expected.output))
    assert_fast(model)


@pytest.mark.parametrize(
    "family", ["qwen3", "mistral", "gemma2", "gpt_neox", "gemma3", "opt", "mpt"]
)
def test_families(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids = prompt(9, 9, device=device).repeat(1, 3)
    options = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}
    expected = run(copy.deepcopy(model), ids, 40, **options)
    accelerate(model)
    got = run(model, ids, 40, **options)
    assert_same(got, expected)
    assert_same_cache(cache_of(got.output), cache_of(expected.output))
    assert_fast(model)


class Unknown(LlamaForCausalLM):
    """In no table of families, like any subclass."""


def test_patched_tier(pair, ids, accelerate) -> None:
    pair.model.__class__ = Unknown
    expected = run(copy.deepcopy(pair.model), ids, assistant_model=copy.deepcopy(pair.assistant))
    pair.assistant.__class__ = Unknown
    accelerate(pair.model), accelerate(pair.assistant)
    assert_same(run(pair.model, ids, assistant_model=pair.assistant), expected)
    for model, loop in ((pair.model, "stepped"), (pair.assistant, "device")):
        call = torch_paged.explain(model).last_call
        assert (call.path, call.loop) == ("patched", loop)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_assistant_that_is_not_accelerated(options, pair, ids, accelerate) -> None:
    model, assistant = pair
    expected = run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant), **options)
    accelerate(model)
    assert_same(run(model, ids, assistant_model=assistant, **options), expected)
    assert_fast(model)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalty": {**SAMPLED, "repetition_penalty": 1.3, "no_repeat_ngram_size": 4},
    "minimum": {**SAMPLED, "min_new_tokens": 12, "eos_token_id": list(range(3, 60))},
    "ends": {**SAMPLED, "eos_token_id": list(range(3, 23))},
    "greedy_ends": {"eos_token_id": list(range(3, 60))},
    "ensemble": {**SAMPLED, "assistant_ensemble_weight": 0.6},
    "greedy_ensemble": {"assistant_ensemble_weight": 0.6},
}


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_accelerated_assistant(options, lag, pair, ids, accelerate) -> None:
    model, assistant = pair
    expected = run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant), **options)
    accelerate(model), accelerate(assistant, lag=lag)
    for _ in range(2):
        assert_same(run(model, ids, assistant_model=assistant, **options), expected)
        assert_fast(model), assert_fast(assistant, "device")


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("schedule", "threshold"),
    [
        ("constant", 0.4),
        ("heuristic", None),
        ("heuristic", 0.05),
        ("heuristic", 0.9),
        ("heuristic_transient", 0.4),
    ],
)
def test_schedule_and_what_it_leaves(schedule, threshold, options, pair, ids, accelerate) -> None:
    model, assistant = pair
    config = assistant.generation_config
    config.num_assistant_tokens_schedule = schedule
    config.assistant_confidence_threshold = threshold
    untouched = copy.deepcopy(pair)
    accelerate(model), accelerate(assistant)
    for seed in (5, 6):
        # The second call begins with what the first one left.
        expected = run(
            untouched.model, ids, 30, seed, assistant_model=untouched.assistant, **options
        )
        got = run(model, ids, 30, seed, assistant_model=assistant, **options)
        assert_same(got, expected)
        assert config.to_dict() == untouched.assistant.generation_config.to_dict()
    assert_fast(assistant, "device")


def test_confidences_are_those_of_hugging_face(pair, ids, accelerate, monkeypatch) -> None:
    """Where scikit-learn is there, a generator learns its threshold from them."""
    from torch_paged.patches import draft_seams

    seen: list[list[float]] = []
    hand_on = draft_seams.note_confidences

    def note(generator, values) -> None:
        seen.append(list(values))
        hand_on(generator, values)

    monkeypatch.setattr(draft_seams, "note_confidences", note)
    model, assistant = pair
    assistant.generation_config.assistant_confidence_threshold = 0.3
    scores: list[torch.Tensor] = []
    original = draft_seams.AssistedCandidateGenerator._generate_candidates

    def spy(self, arguments):
        drafted, logits = original(self, arguments)
        chosen = drafted[0, -logits.shape[1] :]
        scores.append(logits[0].softmax(-1)[range(len(chosen)), chosen])
        return drafted, logits

    with monkeypatch.context() as patch:
        patch.setattr(draft_seams.AssistedCandidateGenerator, "_generate_candidates", spy)
        run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant))
    accelerate(model), accelerate(assistant)
    run(model, ids, assistant_model=assistant)
    assert [len(values) for values in seen] == [len(values) for values in scores]
    for values, wanted in zip(seen, scores, strict=True):
        torch.testing.assert_close(torch.tensor(values), wanted.cpu(), rtol=1e-4, atol=1e-5)


class Nudge(LogitsProcessor):
    """A processor that nobody knows, and that counts its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, input_ids, scores):
        self.seen.append((input_ids.shape[1], int(input_ids[0, -1])))
        return scores + 0.5 * (torch.arange(scores.shape[1], device=scores.device) % 7 == 0)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_unknown_processor_sees_what_it_saw(options, pair, ids, accelerate) -> None:
    model, assistant = pair
    nudges = Nudge(), Nudge()
    expected = run(
        copy.deepcopy(model),
        ids,
        assistant_model=copy.deepcopy(assistant),
        logits_processor=[nudges[0]],
        **options,
    )
    accelerate(model), accelerate(assistant)
    got = run(model, ids, assistant_model=assistant, logits_processor=[nudges[1]], **options)
    assert_same(got, expected)
    assert nudges[0].seen == nudges[1].seen
    assert_fast(assistant, "stepped")


def test_unknown_criterion_of_drafts(pair, ids, accelerate) -> None:
    model, assistant = pair
    options = {**SAMPLED, "max_time": 1000.0}
    expected = run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant), **options)
    accelerate(model), accelerate(assistant)
    assert_same(run(model, ids, assistant_model=assistant, **options), expected)
    assert_fast(assistant, "stepped")


class Recorder:
    """Keeps what a streamer is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        done = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), done, device=input_ids.device)


@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
def test_streamer_and_own_criterion(kind, pair, ids, accelerate) -> None:
    model, assistant = pair

    def options(assistant):
        if kind == "prompt_lookup":
            return {"prompt_lookup_num_tokens": 3}
        return {"assistant_model": assistant}

    streams = Recorder(), Recorder()
    criterion = {"stopping_criteria": [StopAt(47)]}
    expected = run(
        copy.deepcopy(model),
        ids,
        streamer=streams[0],
        **options(copy.deepcopy(assistant)),
        **criterion,
    )
    accelerate(model), accelerate(assistant)
    got = run(model, ids, streamer=streams[1], **options(assistant), **criterion)
    assert_same(got, expected)
    assert streams[1].puts == streams[0].puts and streams[1].ends == 1


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_padded_prompt(options, pair, device, accelerate) -> None:
    model, assistant = pair
    ids, mask = left_pad([prompt(23, 4, device=device), prompt(11, 5, device=device)])
    ids, mask = ids[1:], mask[1:]
    options = {"attention_mask": mask, **options}
    expected = run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant), **options)
    accelerate(model), accelerate(assistant)
    assert_same(run(model, ids, assistant_model=assistant, **options), expected)
    assert_fast(model), assert_fast(assistant, "device")


def test_prompt_of_one_token(pair, device, accelerate) -> None:
    model, assistant = pair
    ids = prompt(1, 1, device=device)
    expected = run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant))
    accelerate(model), accelerate(assistant)
    assert_same(run(model, ids, assistant_model=assistant), expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_few_new_tokens(num_tokens, pair, ids, accelerate) -> None:
    model, assistant = pair
    expected = run(copy.deepcopy(model), ids, num_tokens, assistant_model=copy.deepcopy(assistant))
    accelerate(model), accelerate(assistant)
    assert_same(run(model, ids, num_tokens, assistant_model=assistant), expected)


def test_model_that_assists_itself(pair, ids, accelerate) -> None:
    model = pair.model
    model.generation_config.assistant_confidence_threshold = 0.0
    untouched = copy.deepcopy(model)
    expected = run(untouched, ids, assistant_model=untouched, **SAMPLED)
    accelerate(model)
    assert_same(run(model, ids, assistant_model=model, **SAMPLED), expected)
    assert torch_paged.stats(model).kv_blocks_used == 0


def test_long_drafts(pair, ids, accelerate) -> None:
    model, assistant = pair
    assistant = similar(model, 0.0, num_assistant_tokens=80, assistant_confidence_threshold=0.0)
    expected = run(copy.deepcopy(model), ids, 130, assistant_model=copy.deepcopy(assistant))
    accelerate(model, block_size=8), accelerate(assistant, block_size=8)
    got = run(model, ids, 130, assistant_model=assistant)
    assert_same(got, expected)
    # The first round drafts 80 tokens and keeps one more.
    assert torch_paged.stats(model).steps < 8


def test_windows_stay_while_tokens_are_taken_back(device, accelerate) -> None:
    model = tiny_family("mistral", device)
    model.generation_config.pad_token_id = None
    settings = {"num_assistant_tokens": 7, "assistant_confidence_threshold": 0.0}
    assistant = similar(model, 0.02, **settings)
    ids = prompt(40, 40, device=device)
    # Not with an assistant: transformers 5.17 cannot crop the cache of one that has windows.
    expected = run(copy.deepcopy(model), ids, 60)
    accelerate(model, block_size=8), accelerate(assistant, block_size=8)
    for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 7}):
        got = run(model, ids, 60, **options)
        assert_same(got, expected)
        assert_fast(model)
    assert_fast(assistant, "device")
    first = run(model, ids, 60, assistant_model=assistant, **SAMPLED)
    torch_paged.restore(model), torch_paged.restore(assistant)
    accelerate(model, block_size=16), accelerate(assistant, block_size=32)
    assert_same(run(model, ids, 60, assistant_model=assistant, **SAMPLED), first)


def test_no_forward_of_hugging_face_runs(pair, ids, accelerate, monkeypatch) -> None:
    model, assistant = pair
    expected = run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant))
    accelerate(model), accelerate(assistant)
    run(model, ids, 2, assistant_model=assistant)

    def forward(self, *args, **kwargs):
        raise AssertionError(f"{type(self).__name__}.forward ran")

    for module in (model, model.model, model.model.layers[0], model.model.layers[0].self_attn):
        monkeypatch.setattr(type(module), "forward", forward)
    assert_same(run(model, ids, assistant_model=assistant), expected)


def test_drafts_are_accepted(pair, ids, accelerate) -> None:
    model = pair.model
    settings = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}
    assistant = similar(model, 0.002, **settings)
    accelerate(model), accelerate(assistant)
    run(model, ids, 2, assistant_model=assistant)
    before = torch_paged.stats(model).steps
    run(model, ids, 40, assistant_model=assistant)
    assert torch_paged.stats(model).steps - before < 25


def test_padding_token_among_the_new_ones(pair, ids, accelerate) -> None:
    """generate() of the assistant hides it from then on; ours leaves the drafts to it."""
    model, assistant = pair
    options = {"do_sample": True, "temperature": 1.5, "top_k": 3}
    with torch.no_grad():
        for each in pair:
            each.lm_head.weight[0] *= 2.0
    for each in pair:
        each.generation_config.pad_token_id = 0
    untouched = copy.deepcopy(pair)
    accelerate(model), accelerate(assistant)
    left = 0
    for seed in range(4):
        helper = {"assistant_model": untouched.assistant}
        expected = run(untouched.model, ids, 40, seed, **helper, **options)
        got = run(model, ids, 40, seed, assistant_model=assistant, **options)
        assert_same(got, expected)
        left += torch_paged.explain(assistant).last_call.path == "eager"
    assert (left > 0) == drops_masks(model, ids)
    assert_fast(model)


def drops_masks(model: Any, ids: torch.Tensor) -> bool:
    """Say whether generate() of this release leaves out a mask of ones."""
    seen = []

    def own_loop(self, input_ids, logits_processor, stopping_criteria, generation_config, **kw):
        seen.append(kw["attention_mask"])
        return input_ids

    greedy(model, ids, 2, custom_generate=own_loop)
    return seen[0] is None


def test_other_tokenizer(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device, vocab_size=280)
    assistant = similar(tiny(LlamaConfig, 8, device, vocab_size=270), 0.0)
    words = byte_tokenizer()
    options = {"tokenizer": words, "assistant_tokenizer": byte_tokenizer()}
    text = words("DEF b DEF", return_tensors="pt").input_ids.to(device)
    expected = run(copy.deepcopy(model), text, assistant_model=assistant, **options)
    accelerate(model)
    assert_same(run(model, text, assistant_model=assistant, **options), expected)
    assert_fast(model)


def test_error_in_a_processor_leaves_both_usable(pair, ids, accelerate) -> None:
    model, assistant = pair
    expected = run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant))
    accelerate(model), accelerate(assistant)

    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 40:
                raise ArithmeticError("no more")
            return scores

    with pytest.raises(ArithmeticError, match="no more"):
        run(model, ids, assistant_model=assistant, logits_processor=[Broken()])
    for each in pair:
        assert torch_paged.stats(each).kv_blocks_used == 0
    assert_same(run(model, ids, assistant_model=assistant), expected)


def test_inference_mode_and_back(pair, ids, accelerate) -> None:
    model, assistant = pair
    expected = run(copy.deepcopy(model), ids, assistant_model=copy.deepcopy(assistant), **SAMPLED)
    accelerate(model), accelerate(assistant)
    with torch.inference_mode():
        inside = run(model, ids, assistant_model=assistant, **SAMPLED)
    assert torch.equal(inside.output.sequences, expected.output.sequences)
    assert_same(run(model, ids, assistant_model=assistant, **SAMPLED), expected)


def test_sequences_alone(pair, ids, accelerate) -> None:
    model, assistant = pair
    expected = greedy(copy.deepcopy(model), ids, prompt_lookup_num_tokens=3)
    accelerate(model), accelerate(assistant)
    assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(greedy(model, ids, assistant_model=assistant), expected)


def test_two_rows_are_refused_as_before(pair, ids, accelerate) -> None:
    model, assistant = pair
    accelerate(model)
    with pytest.raises(ValueError, match="batch_size = 1"):
        greedy(model, ids.repeat(2, 1), assistant_model=assistant)


@pytest.mark.parametrize("kind", ["early_exit", "embeddings", "cache"])
def test_left_to_hugging_face(kind, pair, ids, accelerate) -> None:
    model = pair.model
    cache = cache_of(run(copy.deepcopy(model), ids[:, :20], 5).output)
    options: dict[str, dict[str, Any]] = {
        "early_exit": {"assistant_early_exit": 1},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(ids).detach()},
        "cache": {CACHE_NAME: cache},
    }
    reasons = {
        "early_exit": "assistant_early_exit changes the model between its steps",
        "embeddings": "assisted decoding of inputs_embeds",
        "cache": "assisted decoding behind a cache that was passed in",
    }
    chosen = {**SAMPLED, **options[kind]}
    if kind != "early_exit":
        chosen["prompt_lookup_num_tokens"] = 3
    expected = run(copy.deepcopy(model), ids, **copy.deepcopy(chosen))
    accelerate(model, on_unsupported="fallback")
    got = run(model, ids, **chosen)
    assert torch.equal(got.output.sequences, expected.output.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.states, expected.states, strict=True))
    assert torch_paged.stats(model).fallbacks[reasons[kind]] == 1
