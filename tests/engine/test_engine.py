"""The engine says to each of many requests what `generate()` says to it alone."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_paged
from torch_paged.errors import TorchPagedError

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    core_of,
    ids_of,
    make_engine,
    reference_model,
    run_checked,
    small_model,
    tape_model,
)

LENGTHS = (5, 9, 16, 17, 31, 40)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_each_request_gets_what_generate_says(answers: Answers, lag: int, budget: int) -> None:
    """A budget of 1 makes every chunk, and the last one, a single token."""
    with make_engine(small_model(), lag=lag, max_num_batched_tokens=budget) as engine:
        for n in LENGTHS:
            engine.add_request(ids_of(n, n), max_new_tokens=n % 7 + 1, request_id=n)
        outputs = run_checked(engine)
        for n in LENGTHS:
            assert outputs[n].token_ids == answers(ids_of(n, n), n % 7 + 1)
            assert outputs[n].finish_reason == "length" and outputs[n].error is None
            assert outputs[n].prompt_ids == ids_of(n, n) and outputs[n].logprobs is None
        assert_all_free(engine)


@pytest.mark.parametrize(
    "family", ["mistral", "gemma2", "qwen3", "gpt_neox", "gpt2", "opt", "bloom", "mpt", "falcon"]
)
def test_families_and_tiers_are_served(family: str) -> None:
    from models import tiny_family

    model = tiny_family(family)
    answers = Answers(copy.deepcopy(model))
    with make_engine(model, max_num_batched_tokens=24) as engine:
        for n in (5, 33):
            engine.add_request(ids_of(n, n), max_new_tokens=20, request_id=n)
        outputs = run_checked(engine)
    for n in (5, 33):
        assert outputs[n].token_ids == answers(ids_of(n, n), 20)


def test_requests_that_come_later_join_the_others(answers: Answers) -> None:
    with make_engine(small_model(), lag=2) as engine:
        outputs = {}
        for n in (9, 16, 31):
            engine.add_request(ids_of(n, n), max_new_tokens=12, request_id=n)
            for _ in range(3):
                outputs.update({out.request_id: out for out in engine.step() if out.finished})
        outputs.update(run_checked(engine))
        assert {n: list(out.token_ids) for n, out in outputs.items()} == {
            n: answers(ids_of(n, n), 12) for n in (9, 16, 31)
        }


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_nothing_is_delivered_past_an_end_token(lag: int) -> None:
    model = tape_model([10, 11, 12, 13], "cpu")
    with make_engine(model, lag=lag) as engine:
        engine.add_request([1, 10], max_new_tokens=30, request_id="eos")
        engine.add_request([1, 10], max_new_tokens=30, stop_token_ids=[12], request_id="stop")
        engine.add_request([1, 10], max_new_tokens=4, request_id="both")
        engine.add_request([1, 10], max_new_tokens=2, request_id="limit")
        engine.add_request([1, 10], max_new_tokens=6, eos_token_id=-1, request_id="none")
        outputs = run_checked(engine)
        assert_all_free(engine)
    expected = {
        "eos": ([11, 12, 13, 2], "stop"),
        "stop": ([11, 12], "stop"),
        "both": ([11, 12, 13, 2], "stop"),
        "limit": ([11, 12], "length"),
        "none": ([11, 12, 13, 2, 2, 2], "length"),
    }
    assert {k: (list(o.token_ids), o.finish_reason) for k, o in outputs.items()} == expected


def test_more_end_tokens_than_the_state_has_room_for(answers: Answers) -> None:
    expected = answers(ids_of(9, 9), 20)
    last = next(t for t in expected if expected.index(t) > 3)
    unused = [t for t in range(64) if t not in expected]
    with make_engine(small_model()) as engine:
        engine.add_request(ids_of(5, 5), max_new_tokens=20, request_id="before")
        engine.step()
        engine.add_request(
            ids_of(9, 9), max_new_tokens=20, eos_token_id=[*unused[:20], last], request_id="many"
        )
        outputs = run_checked(engine)
    assert outputs["many"].token_ids == expected[: expected.index(last) + 1]
    assert outputs["before"].token_ids == answers(ids_of(5, 5), 20)


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7},
    {"min_new_tokens": 9, "eos_token_id": list(range(30))},
    {"min_length": 20, "eos_token_id": list(range(30))},
    {"suppress_tokens": list(range(0, 64, 2))},
    {"bad_words_ids": [[t] for t in range(1, 64, 2)]},
    {"repetition_penalty": 1.5, "min_new_tokens": 5, "suppress_tokens": [4, 5], "eos_token_id": 7},
]


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "mixed"])
def test_edits_of_the_logits_are_those_of_generate(answers: Answers, alone: bool) -> None:
    groups = [[kwargs] for kwargs in EDITS] if alone else [[{}, *EDITS, {}]]
    for group in groups:
        with make_engine(small_model(), max_num_batched_tokens=20) as engine:
            for i, kwargs in enumerate(group):
                engine.add_request(ids_of(12, i), max_new_tokens=24, request_id=i, **kwargs)
            outputs = run_checked(engine)
        for i, kwargs in enumerate(group):
            plain = {"pad_token_id": 0, **kwargs}
            assert outputs[i].token_ids == answers(ids_of(12, i), 24, **plain), kwargs


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.4, "top_k": 0},
    {"min_p": 0.2, "top_k": 0},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3},
    {"min_new_tokens": 6, "eos_token_id": list(range(20))},
]


def sampled(engine: torch_paged.Engine, i: int, **more: Any) -> None:
    kwargs = {"do_sample": True, "max_new_tokens": 16, **SAMPLING[i], **more}
    engine.add_request(ids_of(7 + i, i), request_id=i, seed=100 + i, **kwargs)


def test_draws_of_a_request_do_not_depend_on_its_company() -> None:
    alone = {}
    for i in range(len(SAMPLING)):
        with make_engine(small_model()) as engine:
            sampled(engine, i)
            alone.update(run_checked(engine))
    with make_engine(small_model(), max_num_batched_tokens=9, lag=0) as engine:
        for i in reversed(range(len(SAMPLING))):
            engine.add_request(ids_of(11, i), max_new_tokens=2 * i + 1, request_id=f"other {i}")
            sampled(engine, i)
            engine.step()
        together = run_checked(engine)
    for i in range(len(SAMPLING)):
        assert together[i].token_ids == alone[i].token_ids, SAMPLING[i]
    assert len({tuple(out.token_ids) for out in alone.values()}) == len(SAMPLING)


def test_sampled_tokens_follow_the_distribution(answers: Answers) -> None:
    """1600 first tokens against the softmax of the model's own logits."""
    ids, count = ids_of(9, 3), 1600
    with torch.no_grad():
        probs = small_model()(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
    with make_engine(small_model(), seed=1) as engine:
        name = engine.add_request(
            ids, do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=count
        )
        outputs = engine.run()
    assert name in outputs and len(outputs) == count
    drawn = torch.tensor([out.token_ids[0] for out in outputs.values()])
    share = torch.bincount(drawn, minlength=64).double() / count
    deviation = (probs * (1 - probs) / count).sqrt()
    assert ((share - probs).abs() < 5 * deviation + 1e-3).all()


@pytest.mark.parametrize("kwargs", [{"temperature": 0.0}, {"temperature": 1e-6}, {"top_k": 1}])
def test_edges_of_sampling_are_greedy(answers: Answers, kwargs: dict[str, Any]) -> None:
    with make_engine(small_model()) as engine:
        engine.add_request(ids_of(9, 9), do_sample=True, max_new_tokens=8, request_id=0, **kwargs)
        engine.add_request(ids_of(9, 9), do_sample=True, max_new_tokens=8, temperature=2.0)
        assert run_checked(engine)[0].token_ids == answers(ids_of(9, 9), 8)


def test_an_engine_seed_repeats_and_no_seed_does_not() -> None:
    def run(**config: Any) -> list[tuple[int, ...]]:
        with make_engine(small_model(), **config) as engine:
            for _ in range(3):
                engine.add_request(ids_of(9, 9), do_sample=True, max_new_tokens=12)
            return [tuple(out.token_ids) for out in engine.run().values()]

    first = run(seed=7)
    assert first == run(seed=7) and len(set(first)) == 3
    assert run() != run()


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_of_one_prompt_share_its_blocks_and_differ(caching: bool) -> None:
    ids = ids_of(40, 1)
    runs = []
    with make_engine(small_model(), enable_prefix_caching=caching) as engine:
        for _ in range(2):
            name = engine.add_request(
                ids, do_sample=True, seed=7, max_new_tokens=20, num_return_sequences=4
            )
            names = [name, *(f"{name}__child#{i}" for i in range(3))]
            engine.step()
            # Two full blocks of the prompt once, and one or two of each sequence's own.
            assert core_of(engine).allocator.num_live <= 2 + 4 * 2
            outputs = run_checked(engine)
            assert list(outputs) == names or sorted(outputs) == sorted(names)
            tokens = [tuple(outputs[n].token_ids) for n in names]
            assert len(set(tokens)) == 4
            runs.append(tokens)
        assert runs[0] == runs[1]


def test_log_probabilities_are_the_models(answers: Answers) -> None:
    ids = ids_of(13, 2)
    with make_engine(small_model(), max_num_batched_tokens=6) as engine:
        engine.add_request(ids, max_new_tokens=18, logprobs=True, request_id="greedy")
        engine.add_request(ids_of(4, 4), max_new_tokens=9, request_id="without")
        engine.add_request(
            ids,
            max_new_tokens=18,
            do_sample=True,
            temperature=1.7,
            repetition_penalty=1.4,
            logprobs=True,
            seed=3,
            request_id="sampled",
        )
        outputs = run_checked(engine)
    assert outputs["without"].logprobs is None
    for name in ("greedy", "sampled"):
        out = outputs[name]
        with torch.no_grad():
            logits = small_model()(torch.tensor([ids + list(out.token_ids)])).logits[0]
        expected = logits.double().log_softmax(-1)[len(ids) - 1 : -1]
        expected = expected.gather(1, torch.tensor(list(out.token_ids))[:, None])[:, 0]
        assert out.logprobs is not None and len(out.logprobs) == 18
        torch.testing.assert_close(
            torch.tensor(out.logprobs[:]).double(), expected, atol=1e-4, rtol=0
        )


def test_stop_strings_end_a_request_behind_the_token_that_completes_them() -> None:
    from models import byte_tokenizer

    tokenizer = byte_tokenizer()
    chain = tokenizer("abcdefghij", add_special_tokens=False).input_ids
    model = tape_model(chain, "cpu")
    with make_engine(model, lag=3) as engine:
        ids = [1, chain[0]]
        engine.add_request(
            ids, max_new_tokens=20, stop_strings=["ef"], tokenizer=tokenizer, request_id="ef"
        )
        engine.add_request(
            ids, max_new_tokens=20, stop_strings="ab", tokenizer=tokenizer, request_id="ab"
        )
        engine.add_request(ids, max_new_tokens=20, request_id="free")
        outputs = run_checked(engine)
        assert_all_free(engine)
    text = {k: tokenizer.decode(list(o.token_ids)) for k, o in outputs.items()}
    assert text["ef"] == "bcdef" and outputs["ef"].finish_reason == "stop"
    assert text["ab"] == "b", "the prompt's end counts, as for generate()"
    assert list(outputs["free"].token_ids) == [*chain[1:], 2]


def test_max_time_stops_like_generate() -> None:
    with make_engine(small_model()) as engine:
        name = engine.add_request(ids_of(9, 9), max_new_tokens=100, max_time=0.0)
        out = engine.run()[name]
    assert out.finish_reason == "stop" and len(out.token_ids) == 1


def test_defaults_come_from_the_models_generation_config(answers: Answers) -> None:
    model = copy.deepcopy(small_model())
    model.generation_config.max_new_tokens = 3
    with make_engine(model) as engine:
        engine.add_request(ids_of(9, 9), request_id="model")
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = 5
        engine.add_request(ids_of(9, 9), config, request_id="given")
        engine.add_request(ids_of(9, 9), config, max_new_tokens=6, request_id="override")
        outputs = engine.run()
    for name, count in (("model", 3), ("given", 5), ("override", 6)):
        assert outputs[name].token_ids == answers(ids_of(9, 9), count)


def test_stream_reports_every_token_once(answers: Answers) -> None:
    with make_engine(small_model(), lag=3) as engine:
        for n in (9, 16):
            engine.add_request(ids_of(n, n), max_new_tokens=8, request_id=n)
        seen: dict[Any, list[int]] = {9: [], 16: []}
        kept = []
        for out in engine.stream():
            seen[out.request_id] += out.new_token_ids
            kept.append((out, list(out.token_ids)))
        assert seen == {n: answers(ids_of(n, n), 8) for n in (9, 16)}
        assert all(out.token_ids == tokens for out, tokens in kept), "outputs do not change later"
        assert list(engine.stream()) == []


def test_run_returns_what_ended_meanwhile(answers: Answers) -> None:
    with make_engine(small_model()) as engine:
        for n in (9, 16):
            engine.add_request(ids_of(n, n), max_new_tokens=40, request_id=n)
        outputs = engine.run()
        assert engine.run() == {}
    for n in (9, 16):
        assert outputs[n].new_token_ids == answers(ids_of(n, n), 40)
        assert outputs[n].finished


def test_more_steps_than_the_log_holds() -> None:
    model = reference_model(
        6,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    with make_engine(model, enable_prefix_caching=False) as engine:
        name = engine.add_request(ids_of(3, 3, 32), max_new_tokens=1300)
        tokens = list(engine.run()[name].token_ids)
        # The same tokens, delivered one by one.
        name = engine.add_request(ids_of(3, 3, 32), max_new_tokens=1300)
        streamed = [t for out in engine.stream() for t in out.new_token_ids]
    assert len(tokens) == 1300 and tokens == streamed


@pytest.mark.parametrize(("num_blocks", "ahead"), [(400, True), (60, False)])
def test_rows_get_blocks_ahead_only_where_there_are_plenty(
    answers: Answers, num_blocks: int, ahead: bool
) -> None:
    lengths = (5, 9, 16, 17, 20, 31)
    with make_engine(small_model(), num_blocks=num_blocks, block_size=8, lag=2) as engine:
        core = core_of(engine)
        core.make_room(num_blocks - core.num_blocks)
        # Busy before, so that the rows come in the middle of what is done every 48 steps.
        engine.add_request(ids_of(3, 3), max_new_tokens=40)
        engine.run()
        for n in lengths:
            engine.add_request(ids_of(n, n), max_new_tokens=60, request_id=n)
        most_spare, outputs = 0, {}
        while not engine.is_idle:
            for out in engine.step():
                outputs[out.request_id] = out
            needed = sum(-(-tokens // 8) for tokens in row_tokens(engine))
            most_spare = max(most_spare, core.allocator.num_live - needed)
            engine.check_integrity()
        assert_all_free(engine)
    assert (most_spare > 2 * len(lengths)) is ahead
    for n in lengths:
        assert outputs[n].token_ids == answers(ids_of(n, n), 60)


def row_tokens(engine: Any) -> list[int]:
    """Tokens in the cache of each running row, after all steps launched so far."""
    serving = engine._service.engine
    scheduler = serving._scheduler
    requests = [job.request for job in serving._ledger.jobs.values()]
    return [scheduler.num_computed_tokens(r) for r in requests if r.slot is not None]


def test_a_closed_engine_cancels_what_is_left_and_refuses_more() -> None:
    model = copy.deepcopy(small_model())
    called = []
    engine = torch_paged.Engine(model)
    engine.add_request(ids_of(9, 9), max_new_tokens=50, on_output=called.append)
    engine.step()
    engine.add_request(ids_of(9, 9), max_new_tokens=50, on_output=called.append)
    assert torch_paged.is_accelerated(model)
    engine.close()
    engine.close()
    assert [out.finish_reason for out in called if out.finished] == ["cancelled"] * 2
    assert not torch_paged.is_accelerated(model)
    for use in (engine.step, engine.run, lambda: engine.add_request([3])):
        with pytest.raises(TorchPagedError, match="closed"):
            use()


def test_a_model_that_cannot_be_served_is_refused() -> None:
    model = copy.deepcopy(small_model())
    model.config.is_encoder_decoder = True
    with pytest.raises(torch_paged.errors.UnsupportedModelError, match="encoder-decoder"):
        torch_paged.Engine(model)
    assert not torch_paged.is_accelerated(model)


def test_counters_count() -> None:
    with make_engine(small_model()) as engine:
        before = torch_paged.stats(engine._target)
        for n in (9, 16):
            engine.add_request(ids_of(n, n), max_new_tokens=8)
        engine.run()
        after = torch_paged.stats(engine._target)
    assert after.tokens - before.tokens == 16
    assert after.steps > before.steps and after.kv_blocks_used == 0
    assert after.ms_per_step is not None and math.isfinite(after.ms_per_step)
