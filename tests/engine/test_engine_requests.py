"""What an engine refuses of requests, and how they are told apart, cancelled and put in order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_paged.errors import UnsupportedFeatureError

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    core_of,
    ids_of,
    make_engine,
    run_checked,
    small_model,
)

META = torch.tensor(3, device="meta")


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"num_beams": 4}, UnsupportedFeatureError, "does not support num_beams=4"),
        ({"no_repeat_ngram_size": 2}, UnsupportedFeatureError, "no_repeat_ngram_size=2; leave"),
        ({"bad_words_ids": [[3, 4]]}, UnsupportedFeatureError, "single tokens only"),
        ({"max_new_token": 4}, TypeError, "did you mean max_new_tokens"),
        ({"logits_processor": []}, TypeError, "neither a field"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens. must be greater than 0"),
        ({"max_new_tokens": 2.5}, (TypeError, ValueError), "max_new_tokens"),
        ({"max_length": 4}, ValueError, "must exceed the prompt's 9 tokens"),
        ({"do_sample": True, "temperature": -1.0}, ValueError, "temperature"),
        ({"do_sample": True, "top_k": -1}, ValueError, "top_k"),
        ({"do_sample": True, "top_p": 1.5}, ValueError, "top_p"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty"),
        ({"stop_strings": ["x"]}, ValueError, "needs a tokenizer"),
        ({"eos_token_id": "x"}, (TypeError, ValueError), "eos_token_id"),
        ({"max_new_tokens": "8"}, TypeError, "max_new_tokens must be an integer, got '8'"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens must be an integer, got True"),
        ({"generation_config": {}}, TypeError, "must be a GenerationConfig, got a dict; pass its"),
        ({"generation_config": 7}, TypeError, "must be a GenerationConfig, got a int"),
        ({"seed": "x"}, TypeError, "seed must be an integer, got 'x'"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, got 1.5"),
        ({"priority": "low"}, TypeError, "priority must be an integer, got 'low'"),
        ({"deadline": "soon"}, TypeError, "deadline must be a number of seconds, got 'soon'"),
        ({"deadline": float("nan")}, ValueError, "deadline must be a number of seconds, got nan"),
        ({"on_output": 3}, TypeError, "on_output must be callable, got 3"),
        ({"stop_token_ids": 1.5}, TypeError, "stop_token_ids must be a token id or several"),
        ({"request_id": []}, TypeError, r"request_id must be hashable, got \[\]"),
        ({"max_length": "x"}, TypeError, "max_length must be a number, got 'x'"),
        ({"max_length": float("nan")}, ValueError, "max_length must exceed .* got nan"),
        ({"min_length": "x"}, TypeError, "min_length must be an integer, got 'x'"),
        ({"do_sample": True, "temperature": []}, TypeError, r"temperature must .* got \[\]; pass"),
        ({"do_sample": True, "top_p": []}, TypeError, r"top_p must be a number, got \[\]; pass"),
        ({"repetition_penalty": []}, TypeError, r"repetition_penalty must .* got \[\]; pass"),
        ({"max_time": "x"}, TypeError, "max_time must be a number of seconds, got 'x'"),
        ({"deadline": True}, TypeError, "deadline must be a number of seconds, got True"),
        ({"deadline": "1"}, TypeError, "deadline must be a number of seconds, got '1'"),
        ({"do_sample": True, "temperature": True}, TypeError, "temperature must .* got True"),
        (
            {"do_sample": True, "min_p": -1},
            ValueError,
            "min_p must .* got -1; pass e.g. min_p=0.0",
        ),
        ({"repetition_penalty": "1.5"}, TypeError, "repetition_penalty must .* got '1.5'"),
        ({"bad_words_ids": 5}, TypeError, "bad_words_ids must be a list of lists.* got 5; pass"),
        ({"bad_words_ids": ["a"]}, TypeError, "bad_words_ids must be a token id .* got 'a'"),
        ({"max_new_tokens": META}, TypeError, "max_new_tokens must have values, got a Tensor"),
        ({"logprobs": META}, TypeError, "logprobs must have values, got a Tensor"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with make_engine(small_model()) as engine:
        with pytest.raises(error, match=match):
            engine.add_request(ids_of(9, 9), **kwargs)
        assert engine.is_idle and engine.run() == {}


@pytest.mark.parametrize(
    ("prompt_ids", "error", "match"),
    [
        (
            [],
            ValueError,
            "at least 1 token, got 0; begin an empty text with tokenizer.bos_token_id",
        ),
        (None, TypeError, "must be token ids, got None; pass tokenizer"),
        (7, TypeError, r"must be token ids, got 7 of type int; pass a list, e.g. \[7\]"),
        ({"input_ids": [3]}, TypeError, "got a dict; pass its input_ids"),
        ([[3, 4]], TypeError, r"must be integers, got \[\[3, 4\]\]; .*a call of its own"),
        (["a"], TypeError, r"must be integers, got \['a'\]; pass tokenizer"),
        (np.ones(3), TypeError, "must be integers, got"),
        ("text", TypeError, "got a string"),
        ([3, 64], ValueError, r"must be in \[0, 64\)"),
        ([-1], ValueError, "must be in"),
        (torch.ones(2, 3, dtype=torch.long), ValueError, r"one prompt.*\[2, 3\]"),
        ([1.5], TypeError, "must be integers"),
        ([3, True], TypeError, r"must be integers, got \[3, True\]"),
        ({3, 4}, TypeError, "got a set, which has no order; pass a list"),
        (META[None], TypeError, "prompt_ids must have values, got a Tensor"),
    ],
)
def test_prompts_that_are_none_are_refused(
    prompt_ids: Any, error: type[Exception], match: str
) -> None:
    with make_engine(small_model()) as engine, pytest.raises(error, match=match):
        engine.add_request(prompt_ids)


def test_prompts_may_be_tensors(answers: Answers) -> None:
    with make_engine(small_model()) as engine:
        ids = torch.tensor(ids_of(9, 9))
        engine.add_request(ids, max_new_tokens=4, request_id=0)
        engine.add_request(ids[None], max_new_tokens=4, request_id=1)
        outputs = engine.run()
    assert outputs[0].token_ids == outputs[1].token_ids == answers(ids_of(9, 9), 4)


def test_numbers_of_numpy_and_torch_are_numbers(answers: Answers) -> None:
    ids = ids_of(9, 9)
    expected = answers(ids, 4)
    kinds: list[Any] = [
        [np.int64(i) for i in ids],
        [np.int32(i) for i in ids],
        np.array(ids, dtype=np.int32),
        [torch.tensor(i) for i in ids],
        tuple(ids),
        iter(ids),
    ]
    with make_engine(small_model()) as engine:
        for n, kind in enumerate(kinds):
            engine.add_request(kind, max_new_tokens=np.int64(4), request_id=n)
        engine.add_request(
            ids,
            max_new_tokens=torch.tensor(4),
            min_new_tokens=np.int64(2),
            eos_token_id=np.int64(expected[-1]),
            stop_token_ids=np.array([expected[-1]]),
            do_sample=True,
            top_k=np.int64(1),
            temperature=np.float32(1.0),
            seed=np.int64(3),
            priority=np.int64(0),
            deadline=np.float32(600),
            num_return_sequences=np.int64(2),
            request_id="fields",
        )
        outputs = engine.run()
    for n in range(len(kinds)):
        assert outputs[n].token_ids == expected
        assert all(type(i) is int for i in outputs[n].prompt_ids)
    assert outputs["fields"].token_ids == expected
    assert outputs["fields__child#0"].token_ids == expected


@pytest.mark.parametrize("name", ["min_new_tokens", "min_length", "eos_token_id", "top_k"])
def test_numbers_that_no_sequence_reaches_change_nothing(name: str) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 4, "do_sample": name == "top_k", "seed": 3}
    with make_engine(small_model()) as engine:
        engine.add_request(ids_of(9, 9), request_id="without", **fields, **{name: 0})
        for number in (2**32 + 1, 10**30):
            engine.add_request(ids_of(9, 9), request_id=number, **fields, **{name: number})
        outputs = engine.run()
    assert {out.finish_reason for out in outputs.values()} == {"length"}
    assert len({tuple(out.token_ids) for out in outputs.values()}) == 1


def test_ids_are_unique_among_the_living() -> None:
    with make_engine(small_model()) as engine:
        engine.add_request(ids_of(5, 5), max_new_tokens=2, request_id="a")
        with pytest.raises(ValueError, match="'a' is in use"):
            engine.add_request(ids_of(5, 5), request_id="a")
        engine.run()
        engine.add_request(ids_of(5, 5), max_new_tokens=2, request_id="a")
        assert set(engine.run()) == {"a"}


def test_too_long_a_prompt_and_a_full_model_end_alone() -> None:
    with make_engine(small_model(), max_model_len=32) as engine:
        engine.add_request(ids_of(32, 1), max_new_tokens=4, request_id="no room")
        engine.add_request(ids_of(30, 1), max_new_tokens=9, request_id="cut")
        outputs = run_checked(engine)
    assert outputs["no room"].finish_reason == "error"
    assert "max_model_len=32" in (outputs["no room"].error or "")
    assert outputs["cut"].finish_reason == "length" and len(outputs["cut"].token_ids) == 2


def test_a_request_that_never_fits_ends_alone(answers: Answers) -> None:
    with make_engine(small_model(), num_blocks=3) as engine:
        engine.add_request(ids_of(60, 1), max_new_tokens=4, request_id="large")
        engine.add_request(ids_of(9, 9), max_new_tokens=4, request_id="small")
        outputs = run_checked(engine)
    assert outputs["large"].finish_reason == "error"
    assert "needs 4 KV blocks" in (outputs["large"].error or "")
    assert outputs["small"].token_ids == answers(ids_of(9, 9), 4)


def test_a_request_that_fits_a_pool_of_its_full_size_waits_for_it(answers: Answers) -> None:
    with make_engine(small_model(), num_blocks=5) as engine:
        engine.add_request(ids_of(9, 9), max_new_tokens=8, request_id="small")
        engine.step()
        assert core_of(engine).num_blocks < 5
        engine.add_request(ids_of(76, 1), max_new_tokens=4, request_id="large")
        engine.add_request(ids_of(90, 2), max_new_tokens=4, request_id="too large")
        outputs = run_checked(engine)
    assert outputs["small"].token_ids == answers(ids_of(9, 9), 8)
    assert outputs["large"].token_ids == answers(ids_of(76, 1), 4)
    assert "needs 6 KV blocks and the pool has 5" in (outputs["too large"].error or "")


@pytest.mark.parametrize("lag", [0, 3])
def test_cancelled_requests_keep_their_tokens_and_free_their_blocks(
    answers: Answers, lag: int
) -> None:
    with make_engine(small_model(), lag=lag, max_num_seqs=2) as engine:
        for n in (9, 16, 17):
            engine.add_request(ids_of(n, n), max_new_tokens=20, request_id=n)
        for _ in range(7):
            engine.step()
        engine.cancel(9)
        engine.cancel(17)  # never had a slot
        with pytest.raises(KeyError):
            engine.cancel("unknown")
        outputs = run_checked(engine)
        with pytest.raises(KeyError):
            engine.cancel(9)
        assert_all_free(engine)
    assert outputs[9].finish_reason == outputs[17].finish_reason == "cancelled"
    count = len(outputs[9].token_ids)
    assert 0 < count < 20 and outputs[9].token_ids == answers(ids_of(9, 9), 20)[:count]
    assert len(outputs[17].token_ids) == 0
    assert outputs[16].token_ids == answers(ids_of(16, 16), 20)


def test_cancelling_a_request_cancels_its_sequences() -> None:
    with make_engine(small_model()) as engine:
        name = engine.add_request(
            ids_of(9, 9), max_new_tokens=50, do_sample=True, num_return_sequences=3
        )
        engine.step()
        engine.cancel(f"{name}__child#0")
        outputs = {out.request_id: out for out in engine.step() if out.finished}
        assert list(outputs) == [f"{name}__child#0"]
        engine.cancel(name)
        outputs = run_checked(engine)
        assert {out.finish_reason for out in outputs.values()} == {"cancelled"}
        assert len(outputs) == 2


def test_a_deadline_cancels(answers: Answers) -> None:
    with make_engine(small_model()) as engine:
        engine.add_request(ids_of(9, 9), max_new_tokens=90, deadline=0.0, request_id="late")
        engine.add_request(ids_of(9, 9), max_new_tokens=4, deadline=600.0, request_id="fine")
        outputs = run_checked(engine)
    assert outputs["late"].finish_reason == "cancelled"
    assert outputs["late"].error == "its deadline has passed"
    assert outputs["fine"].token_ids == answers(ids_of(9, 9), 4)


def test_smaller_priority_goes_first() -> None:
    with make_engine(small_model(), max_num_seqs=1) as engine:
        for name, priority in (("a", 5), ("b", 0), ("c", -5)):
            engine.add_request(ids_of(5, 5), max_new_tokens=3, priority=priority, request_id=name)
        assert list(run_checked(engine)) == ["c", "b", "a"]
