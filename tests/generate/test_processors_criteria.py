"""Logits processors and stopping criteria, known and unknown, see and do what they did before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import (
    greedy,
    left_pad,
    padded_prompts,
    prompt,
    reference,
    seeded,
    tiny,
)
from transformers import LlamaConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria

import torch_paged

# Everything generate() turns into a processor; eos tokens so that some are made at all.
KNOWN = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [7, 9], [20, 21, 22]]},
    "sequence_bias": {"sequence_bias": [[[5], 3.0], [[6, 7], -4.0]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(3, 20))},
    "min_length": {"min_length": 30, "eos_token_id": list(range(3, 20))},
    "forced_bos": {"forced_bos_token_id": 9},
    "forced_eos": {"forced_eos_token_id": 9},
    "suppress": {"suppress_tokens": list(range(20, 40))},
    "begin_suppress": {"begin_suppress_tokens": list(range(3, 50))},
    "decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": [11, 12]},
    "remove_invalid": {"remove_invalid_values": True},
    "renormalize": {"renormalize_logits": True, "suppress_tokens": [4]},
    "prefix_allowed": {
        "prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1]) % 50 + 3, 60 + batch, 61]
    },
}
SAMPLED = {
    "typical_p": {"typical_p": 0.7},
    "epsilon": {"epsilon_cutoff": 0.01},
    "eta": {"eta_cutoff": 0.02},
    "top_h": {"top_h": 0.4},
    "penalty_and_filters": {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 3,
        "temperature": 1.4,
        "top_k": 20,
        "top_p": 0.9,
    },
}


class Recorder(LogitsProcessor):
    """Keeps copies of the ids and scores it is shown."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        self.ids.append(input_ids.clone())
        self.scores.append(scores.clone())
        return scores


class Noise(LogitsProcessor):
    """Draws random numbers of its own."""

    def __call__(self, input_ids, scores):
        return scores + 2 * torch.randn(scores.shape, device=scores.device)


class InPlace(LogitsProcessor):
    """Writes into what it is given and returns that."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -1]] -= 5.0
        scores[:, :100:2] = -torch.inf
        return scores


class SumCriterion(StoppingCriteria):
    """Ends a row at a multiple of seven; keeps the shapes it was shown."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.clone())
        return input_ids[:, -1] % 7 == 0


class RandomCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.rand(input_ids.shape[0], device=input_ids.device) < 0.05


@pytest.fixture
def small_model(device):
    return tiny(LlamaConfig, 8, device, vocab_size=64, initializer_range=0.2)


def batch(device, vocab: int = 64):
    ids, mask = left_pad([prompt(5, 2, vocab, device), prompt(40, 9, vocab, device)])
    return ids, {"attention_mask": mask}


@pytest.mark.parametrize("name", KNOWN)
def test_known_processors(name, small_model, device, accelerate) -> None:
    ids, options = batch(device)
    options |= KNOWN[name]
    copied = copy.deepcopy(small_model)
    expected = greedy(copied, ids, 24, **options)
    sampled = seeded(copied, 5, ids, max_new_tokens=24, temperature=1.5, **options)
    accelerate(small_model)
    assert torch.equal(greedy(small_model, ids, 24, **options), expected)
    got = seeded(small_model, 5, ids, max_new_tokens=24, temperature=1.5, **options)
    assert torch.equal(got.result, sampled.result)
    assert torch.equal(got.states[-1], sampled.states[-1])
    assert torch_paged.explain(small_model).last_call.path == "fused"


@pytest.mark.parametrize("name", SAMPLED)
def test_known_warpers(name, small_model, device, accelerate) -> None:
    ids, options = batch(device)
    options |= {"max_new_tokens": 24, **SAMPLED[name]}
    expected = seeded(copy.deepcopy(small_model), 5, ids, **options)
    accelerate(small_model)
    got = seeded(small_model, 5, ids, **options)
    assert torch.equal(got.result, expected.result)
    assert torch.equal(got.states[-1], expected.states[-1])
    assert torch_paged.explain(small_model).last_call.path == "fused"


def test_padding_is_not_penalised(small_model, device, accelerate) -> None:
    ids, options = batch(device)
    penalty = {"repetition_penalty": 1.8}
    rows = [prompt(5, 2, 64, device), prompt(40, 9, 64, device)]
    singles = [greedy(copy.deepcopy(small_model), row, **penalty) for row in rows]
    accelerate(small_model)
    got = greedy(small_model, ids, **options, **penalty)
    assert torch.equal(got[:, -24:], torch.cat([single[:, -24:] for single in singles]))


def test_padding_counts_for_ngrams(device, accelerate) -> None:
    model = tiny(LlamaConfig, 4, device, vocab_size=24, initializer_range=0.25, pad_token_id=4)
    model.generation_config.pad_token_id = 4
    ids, mask = left_pad([prompt(3, 1, 24, device), prompt(17, 2, 24, device)], pad=4)
    options = {"attention_mask": mask, "no_repeat_ngram_size": 2}
    expected = greedy(copy.deepcopy(model), ids, 30, **options)
    single = greedy(copy.deepcopy(model), ids[:1, -3:], 30, no_repeat_ngram_size=2)
    assert not torch.equal(expected[0, 17:], single[0, 3:])
    accelerate(model)
    assert torch.equal(greedy(model, ids, 30, **options), expected)


@pytest.mark.parametrize("lag", [0, 4])
def test_unknown_processor_sees_the_padded_ids_and_raw_scores(lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids, mask = padded_prompts((5, 40), device)
    theirs, ours = Recorder(), Recorder()
    expected = reference(model, ids, 20, attention_mask=mask, logits_processor=[theirs])
    accelerate(model, lag=lag)
    got = greedy(model, ids, 20, attention_mask=mask, logits_processor=LogitsProcessorList([ours]))
    assert torch.equal(got, expected.sequences)
    assert [i.shape[1] for i in ours.ids] == list(range(40, 60))
    for mine, wanted in zip(ours.ids, theirs.ids, strict=True):
        assert torch.equal(mine, wanted)
    for mine, wanted in zip(ours.scores, theirs.scores, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-3)
    call = torch_paged.explain(model).last_call
    assert (call.path, call.loop) == ("fused", "stepped")


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("processor", [Noise, InPlace])
def test_processors_that_draw_or_write(processor, do_sample, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids, mask = padded_prompts((5, 20), device)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24}
    options |= {"do_sample": do_sample, "logits_processor": [processor()]}
    options["eos_token_id"] = list(range(3, 20))
    expected = seeded(copy.deepcopy(model), 6, ids, **options)
    accelerate(model)
    got = seeded(model, 6, ids, **options)
    assert torch.equal(got.result, expected.result)
    for state, wanted in zip(got.states, expected.states, strict=True):
        assert torch.equal(state, wanted)


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("criterion", [SumCriterion, RandomCriterion])
def test_unknown_criteria(criterion, lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device, initializer_range=0.2)
    ids, mask = padded_prompts((5, 20, 33), device)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "top_k": 0}
    theirs, ours = criterion(), criterion()
    expected = seeded(copy.deepcopy(model), 6, ids, stopping_criteria=[theirs], **options)
    accelerate(model, lag=lag)
    got = seeded(model, 6, ids, stopping_criteria=[ours], **options)
    assert torch.equal(got.result, expected.result)
    for state, wanted in zip(got.states, expected.states, strict=True):
        assert torch.equal(state, wanted)
    if criterion is SumCriterion:
        assert len(ours.seen) == len(theirs.seen) < 40
        assert all(torch.equal(a, b) for a, b in zip(ours.seen, theirs.seen, strict=True))


def test_processor_that_calls_the_model(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)

    class Contrast(LogitsProcessor):
        def __init__(self, owner) -> None:
            self.owner = owner

        def __call__(self, input_ids, scores):
            last = self.owner(input_ids[:, -4:], use_cache=False).logits[:, -1].float()
            again = self.owner.generate(
                input_ids[:, -6:], attention_mask=None, max_new_tokens=2, do_sample=False
            )
            scores = scores - 0.4 * last
            scores[:, again[0, -1]] += 2.0
            return scores

    copied = copy.deepcopy(model)
    expected = greedy(copied, ids, 16, logits_processor=[Contrast(copied)])
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 16, logits_processor=[Contrast(model)]), expected)


class FailingProcessor(LogitsProcessor):
    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise ZeroDivisionError("in a callback")
        return scores


class FailingCriterion(FailingProcessor, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        super().__call__(input_ids, scores)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("step", [1, 2, 9])
def test_exception_leaves_the_model_usable(step, where, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids).sequences
    accelerate(model)
    kind = {"logits_processor": FailingProcessor, "stopping_criteria": FailingCriterion}[where]
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        greedy(model, ids, **{where: [kind(step)]})
    assert torch.equal(greedy(model, ids), expected)
    assert torch_paged.stats(model).kv_blocks_used == 0


class Writer(StoppingCriteria):
    """Writes a token of its own into the ids, as a thinking budget does."""

    def __init__(self, every: int) -> None:
        self._every = every

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] % self._every == 0:
            input_ids[:, -1] = 13 + input_ids.shape[1] % 3
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}], ids=str)
def test_generation_goes_on_from_what_a_criterion_writes(
    options: dict[str, Any], every: int, device, accelerate
) -> None:
    model = tiny(LlamaConfig, 7).to(device)
    untouched = copy.deepcopy(model)
    accelerate(model)
    ids, mask = padded_prompts((5, 9), device)

    def run(target: Any) -> Any:
        torch.manual_seed(3)
        return target.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            stopping_criteria=[Writer(every)],
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )

    got, expected = run(model), run(untouched)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert str(torch_paged.explain(model).last_call).startswith("fused path, stepped loop")
