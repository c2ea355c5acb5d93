"""Log-probabilities recorded in the step equal those of Hugging Face's logits and scores."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import generator_states, padded_prompts, prompt, tiny
from transformers import LlamaConfig, LogitsProcessor

import torch_paged
from torch_paged.errors import TorchPagedError

ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
END = list(range(3, 40))


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device)


def call(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(4)
    options = {"max_new_tokens": 12, "top_k": 0, **options}
    return model.generate(ids, attention_mask=mask, **options)


def chosen(values: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return log_softmax of logits or scores [steps] x [rows, vocab] at tokens [rows, steps]."""
    stacked = torch.stack(list(values), 1).float().log_softmax(-1)
    return stacked.gather(-1, tokens[..., None]).squeeze(-1)


def is_live(tokens: torch.Tensor, eos: list[int]) -> torch.Tensor:
    ends = torch.isin(tokens, torch.tensor(eos, device=tokens.device))
    return ends.cumsum(1) - ends.long() == 0


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "plain": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 0.6},
    "filters": {"do_sample": True, "temperature": 1.4, "top_k": 40, "top_p": 0.8},
    "min_p": {"do_sample": True, "min_p": 0.05},
    "penalty": {"do_sample": True, "repetition_penalty": 1.4, "top_p": 0.7, "temperature": 0.8},
    "suppressed": {"do_sample": True, "suppress_tokens": list(range(60, 200)), "top_k": 9},
    "renormalised": {"do_sample": True, "top_p": 0.6, "renormalize_logits": True},
    "greedy_penalty": {"do_sample": False, "repetition_penalty": 1.4},
    "eta": {"do_sample": True, "eta_cutoff": 0.02, "temperature": 1.3},
}


class Unknown(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Silent:
    def put(self, value) -> None: ...

    def end(self) -> None: ...


LOOPS: dict[str, dict[str, Any]] = {
    "device": {},
    "lagged": {"streamer": Silent()},
    "stepped": ALL,
    "unknown": {"logits_processor": [Unknown()]},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", SAMPLED)
def test_same_as_from_hugging_faces_outputs(name, loop, model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 16, 17), device)
    if loop == "lagged":
        ids, mask = ids[2:], mask[2:]
    options = {**SAMPLED[name], "eos_token_id": END}
    expected = call(copy.deepcopy(model), ids, mask, **options, **ALL)
    states = generator_states()
    accelerate(model)
    for _ in range(2):
        with torch_paged.recorded_logprobs(model) as record:
            got = call(model, ids, mask, **options, **LOOPS[loop])
        sequences = got.sequences if loop == "stepped" else got
        assert torch.equal(sequences, expected.sequences)
        assert all(torch.equal(a, b) for a, b in zip(states, generator_states(), strict=True))
        tokens = sequences[:, ids.shape[1] :]
        live = is_live(tokens, END)
        for values in (record.raw, record.processed, record.kept):
            assert values.shape == tokens.shape and values.dtype == torch.float32
            assert not values[~live].any()
        raw, processed = chosen(expected.logits, tokens), chosen(expected.scores, tokens)
        torch.testing.assert_close(record.raw[live], raw[live], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(record.processed[live], processed[live], rtol=1e-4, atol=1e-4)
    if loop in ("device", "lagged") and name != "eta":
        assert torch_paged.explain(model).last_call.loop == loop


def test_what_the_filters_keep(model, device, accelerate) -> None:
    """Without filters the same seed has another distribution: processed and kept undo them."""
    ids, mask = padded_prompts((5, 16, 17), device)
    options = {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.8}
    expected = call(copy.deepcopy(model), ids, mask, **options, **ALL)
    accelerate(model)
    for loop in ("device", "stepped"):
        with torch_paged.recorded_logprobs(model) as record:
            call(model, ids, mask, **options, **LOOPS[loop])
        tokens = expected.sequences[:, ids.shape[1] :]
        tempered = [logits / 1.3 for logits in expected.logits]
        for step, (whole, cut) in enumerate(zip(tempered, expected.scores, strict=True)):
            mass = whole.softmax(-1).masked_fill(cut == -torch.inf, 0).sum(-1)
            assert float(mass.max()) < 0.9
            torch.testing.assert_close(record.kept[:, step], mass, rtol=1e-4, atol=1e-5)
        unfiltered = record.processed + record.kept.log()
        torch.testing.assert_close(unfiltered, chosen(tempered, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_lengths_and_calls_after_one_another(num_tokens, model, device, accelerate) -> None:
    ids = prompt(9, 9, device=device)
    mask = torch.ones_like(ids)
    accelerate(model)
    with torch_paged.recorded_logprobs(model) as record:
        first = call(model, ids, mask, do_sample=True, max_new_tokens=5)
        kept_before = record.raw.clone()
        call(model, ids, mask, do_sample=True, max_new_tokens=num_tokens)
        assert record.raw.shape == (1, num_tokens)
        again = call(model, ids, mask, do_sample=True, max_new_tokens=5)
        assert torch.equal(first, again) and torch.equal(record.raw, kept_before)
    assert torch.equal(record.raw, kept_before)
    call(model, ids, mask, do_sample=True, max_new_tokens=3)
    assert record.raw.shape == (1, 5), "outside the block nothing is recorded"


def test_it_follows_the_weights(model, device, accelerate) -> None:
    ids = prompt(9, 9, device=device)
    accelerate(model)
    raws = []
    with torch_paged.recorded_logprobs(model) as record:
        for scale in (1.0, 0.5):
            with torch.no_grad():
                model.lm_head.weight.mul_(scale)
            tokens = call(model, ids, torch.ones_like(ids), do_sample=False)[:, 9:]
            raws.append(record.raw)
            with torch.no_grad():
                whole = torch.cat([ids, tokens], 1)
                logits = model(whole).logits[:, 8:-1]
            wanted = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
            torch.testing.assert_close(record.raw, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.equal(raws[0], raws[1])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_beams": 2}, "beam search reports its own scores"),
        ({"prompt_lookup_num_tokens": 2}, "assisted decoding does not record them"),
        ({"use_cache": False}, "Hugging Face's own code: use_cache=False"),
    ],
    ids=["beams", "assisted", "fallback"],
)
def test_a_call_without_any_says_so(options, why, model, device, accelerate) -> None:
    ids = prompt(9, 9, device=device)
    accelerate(model, on_unsupported="fallback")
    with torch_paged.recorded_logprobs(model) as record:
        with pytest.raises(TorchPagedError, match=r"generate\(\) was not called"):
            _ = record.raw
        call(model, ids, torch.ones_like(ids))
        assert record.raw.shape == (1, 12)
        call(model, ids, torch.ones_like(ids), **options)
        for name in ("raw", "processed", "kept"):
            with pytest.raises(TorchPagedError, match=why.replace("(", r"\(")):
                getattr(record, name)


def test_one_record_at_a_time(model, accelerate) -> None:
    with pytest.raises(ValueError, match="recorded_logprobs"):
        with torch_paged.recorded_logprobs(model):
            pass
    accelerate(model)
    with torch_paged.recorded_logprobs(model) as record:
        with pytest.raises(ValueError, match="already"):
            with torch_paged.recorded_logprobs(model):
                pass
        torch_paged.accelerate(model, lag=1)  # reconfigured: still recorded
        ids = torch.arange(3, 9, device=model.device)[None]
        call(model, ids, torch.ones_like(ids))
        assert record.raw.shape == (1, 12)
    with torch_paged.recorded_logprobs(model) as second:
        assert second is not record


def test_an_error_in_the_block_ends_it(model, accelerate) -> None:
    accelerate(model)
    with pytest.raises(ArithmeticError):
        with torch_paged.recorded_logprobs(model):
            raise ArithmeticError
    with torch_paged.recorded_logprobs(model):
        pass
    with torch_paged.recorded_logprobs(model):
        torch_paged.restore(model)
