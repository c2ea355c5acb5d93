"""Log-probabilities of sampled tokens, of their likeliest rivals and of prompts."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, PersimmonConfig

import torch_paged
from torch_paged.engine import engine as engine_module
from torch_paged.engine import scoring
from torch_paged.engine.job import Job
from torch_paged.engine.output import RequestOutput
from torch_paged.engine.params import SamplingParams
from torch_paged.engine.request import Request
from torch_paged.engine.scores import PromptScores, TopHistory, pack_scores
from torch_paged.engine.step import PrefillChunk

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    core_of,
    ids_of,
    make_engine,
    reference_model,
    run_checked,
    small_model,
    tiny,
)

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.7, "top_k": 9},
    "penalty": {"repetition_penalty": 1.6},
    "suppressed": {"suppress_tokens": list(range(0, 64, 2))},
}
TOLERANCE = 1e-4  # both sides compute in float32 and differ by a few 1e-6


def logprobs_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities [num_tokens, vocab_size] behind each token, in float64."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)


def check_top(found: Sequence[tuple[int, float]], expected: torch.Tensor, count: int) -> None:
    """Compare with the largest of expected [vocab_size]; near ties may change places."""
    best = expected.topk(count).values.tolist()
    assert [value for _, value in found] == pytest.approx(best, abs=TOLERANCE)
    assert [value for _, value in found] == sorted((v for _, v in found), reverse=True)
    assert len({token for token, _ in found}) == count
    for token, value in found:
        assert value == pytest.approx(expected[token].item(), abs=TOLERANCE)


def check_output(model: Any, out: RequestOutput, count: int) -> None:
    """Hold what an output says of its own tokens against the model."""
    assert out.prompt_ids is not None and out.logprobs is not None
    ids, start = [*out.prompt_ids, *out.token_ids], len(out.prompt_ids)
    expected = logprobs_of(model, ids)[start - 1 : -1]
    chosen = expected.gather(1, torch.tensor(list(out.token_ids))[:, None])[:, 0]
    assert out.logprobs[:] == pytest.approx(chosen.tolist(), abs=TOLERANCE)
    if not count:
        assert out.top_logprobs is None
        return
    assert out.top_logprobs is not None and len(out.top_logprobs) == len(out.token_ids)
    for found, row in zip(out.top_logprobs, expected, strict=True):
        check_top(found, row, count)


def check_prompt(model: Any, out: RequestOutput, count: int) -> None:
    """Hold what an output says of its prompt against the model."""
    assert out.prompt_ids is not None and out.prompt_logprobs is not None
    expected = logprobs_of(model, out.prompt_ids)[:-1]
    first, *others = out.prompt_logprobs
    chosen = expected.gather(1, torch.tensor(out.prompt_ids[1:], dtype=torch.long)[:, None])[:, 0]
    assert first is None and others == pytest.approx(chosen.tolist(), abs=TOLERANCE)
    if not count:
        assert out.prompt_top_logprobs is None
        return
    assert out.prompt_top_logprobs is not None
    assert out.prompt_top_logprobs[0] is None
    assert len(out.prompt_top_logprobs) == len(out.prompt_ids)
    for found, row in zip(out.prompt_top_logprobs[1:], expected, strict=True):
        assert found is not None
        check_top(found, row, count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lag", [0, 4])
def test_likeliest_tokens_are_the_models(kind: str, lag: int) -> None:
    counts = {"one": 1, "three": 3, "most": 20, "alone": 0}
    with make_engine(small_model(), max_num_batched_tokens=9, lag=lag) as engine:
        for i, (name, count) in enumerate(counts.items()):
            engine.add_request(
                ids_of(5 + 6 * i, i),
                max_new_tokens=12 + i,
                logprobs=count or True,
                request_id=name,
                seed=i,
                **KINDS[kind],
            )
        engine.add_request(ids_of(7, 7), max_new_tokens=20, request_id="none")
        outputs = run_checked(engine)
    assert outputs["none"].logprobs is None and outputs["none"].top_logprobs is None
    for name, count in counts.items():
        check_output(small_model(), outputs[name], count)


def test_numbers_do_not_depend_on_what_runs_beside() -> None:
    def run(others: Sequence[dict[str, Any]]) -> RequestOutput:
        with make_engine(small_model(), max_num_seqs=6) as engine:
            for i, other in enumerate(others):
                engine.add_request(ids_of(11 + i, i), max_new_tokens=9 + 4 * i, **other)
            engine.add_request(
                ids_of(9, 3), max_new_tokens=16, logprobs=2, prompt_logprobs=2, request_id="me"
            )
            return run_checked(engine)["me"]

    alone = run([])
    busy = run([{"logprobs": 20}, {"logprobs": True, "do_sample": True}, {"prompt_logprobs": 7}])
    assert alone.token_ids == busy.token_ids and len(alone.token_ids) == 16
    assert alone.logprobs is not None and busy.logprobs is not None
    assert alone.logprobs[:] == pytest.approx(busy.logprobs[:], abs=1e-5)
    for a, b in (
        (alone.top_logprobs, busy.top_logprobs),
        (alone.prompt_top_logprobs, busy.prompt_top_logprobs),
    ):
        assert a is not None and b is not None and len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            if one is not None and other is not None:
                assert [v for _, v in one] == pytest.approx([v for _, v in other], abs=1e-5)


PROCESSED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.6, "suppress_tokens": [3, 4, 5]},
    "top-k": {"do_sample": True, "temperature": 0.7, "top_k": 6},
    "top-p": {"do_sample": True, "temperature": 1.4, "top_k": 0, "top_p": 0.8},
    "min-p": {"do_sample": True, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.3},
    "all": {"do_sample": True, "temperature": 1.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def processed_of(model: Any, out: RequestOutput, kind: str) -> torch.Tensor:
    """Return the log-probabilities [num_tokens, vocab_size] by the scores of `generate()`."""
    assert out.prompt_ids is not None
    rows = []
    for place in range(len(out.token_ids)):
        ids = torch.tensor([[*out.prompt_ids, *out.token_ids[:place]]])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
            **{"do_sample": False, **PROCESSED[kind]},
        )
        rows.append(made.scores[0][0].double().log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize(("pool", "budget"), [(None, 9), (8, 64)])
def test_processed_numbers_are_those_that_tokens_are_drawn_by(
    pool: int | None, budget: int
) -> None:
    model = small_model()
    with make_engine(
        model, logprobs_mode="processed_logprobs", max_num_batched_tokens=budget, num_blocks=pool
    ) as engine:
        for i, kind in enumerate(PROCESSED):
            engine.add_request(
                ids_of(5 + 5 * i, i),
                max_new_tokens=40,
                request_id=kind,
                logprobs=8,
                prompt_logprobs=True,
                seed=i,
                **PROCESSED[kind],
            )
        engine.add_request(ids_of(9, 9), max_new_tokens=20, do_sample=True)
        outputs = run_checked(engine)
        assert (engine.num_preemptions > 0) == (pool is not None)
    for kind in PROCESSED:
        out = outputs[kind]
        check_prompt(model, out, 0)
        expected = processed_of(model, out, kind)
        chosen = expected.gather(1, torch.tensor(list(out.token_ids))[:, None])[:, 0]
        assert out.logprobs is not None and out.top_logprobs is not None
        assert chosen.isfinite().all(), "a token was drawn that generate() leaves out"
        assert out.logprobs[:] == pytest.approx(chosen.tolist(), abs=TOLERANCE)
        for found, row in zip(out.top_logprobs, expected, strict=True):
            check_top(found, row, min(8, int(row.isfinite().sum())))
    assert all(len(top) <= 6 for top in outputs["top-k"].top_logprobs or ())


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_nothing_is_lost_or_doubled_by_preemption_and_chunks(lag: int) -> None:
    lengths, num_tokens = (5, 9, 16, 17, 31, 40), 40
    model = reference_model(1, vocab_size=64, initializer_range=0.2)
    with make_engine(model, num_blocks=12, lag=lag, max_num_batched_tokens=24) as engine:
        for n in lengths:
            engine.add_request(
                ids_of(n, n),
                max_new_tokens=num_tokens,
                request_id=n,
                logprobs=n % 4 or True,
                prompt_logprobs=n % 3 or True,
            )
        outputs = run_checked(engine)
        assert engine.num_preemptions > 0
    for n in lengths:
        assert len(outputs[n].token_ids) == num_tokens
        check_output(model, outputs[n], n % 4)
        check_prompt(model, outputs[n], n % 3)


@pytest.mark.parametrize("budget", [5, 7, 64])
@pytest.mark.parametrize("rows", [1, 3, 1 << 20])
def test_a_prompt_is_scored_however_it_is_cut(
    budget: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_LOGITS_BYTES", rows * 64 * 4)
    with make_engine(small_model(), max_num_batched_tokens=budget) as engine:
        for n in (1, 2, 15, 16, 17, 33):
            engine.add_request(
                ids_of(n, n), max_new_tokens=1, request_id=n, prompt_logprobs=n % 5 or True
            )
            engine.add_request(ids_of(n, n + 1), max_new_tokens=3)
        outputs = run_checked(engine)
    for n in (1, 2, 15, 16, 17, 33):
        check_prompt(small_model(), outputs[n], n % 5)


def test_a_prompt_whose_blocks_are_cached_is_scored_all_the_same() -> None:
    with make_engine(small_model(), max_num_batched_tokens=20) as engine:
        for name, asked in (("before", {}), ("scored", {"prompt_logprobs": 3}), ("after", {})):
            engine.add_request(ids_of(40, 1), max_new_tokens=4, request_id=name, **asked)
            out = run_checked(engine)[name]
            assert (out.prompt_logprobs is None) == (not asked)
            if asked:
                check_prompt(small_model(), out, 3)


def test_sequences_of_one_prompt_share_its_scores() -> None:
    with make_engine(small_model(), max_num_batched_tokens=12) as engine:
        engine.add_request(
            ids_of(37, 1),
            max_new_tokens=5,
            request_id="a",
            num_return_sequences=3,
            do_sample=True,
            logprobs=2,
            prompt_logprobs=2,
            seed=1,
        )
        outputs = run_checked(engine)
    assert len(outputs) == 3 and len({tuple(out.token_ids) for out in outputs.values()}) == 3
    for out in outputs.values():
        check_output(small_model(), out, 2)
        check_prompt(small_model(), out, 2)


def test_a_model_that_runs_patched_scores_prompts_too() -> None:
    model = tiny(PersimmonConfig, 3, vocab_size=64)
    with make_engine(model, max_num_batched_tokens=10) as engine:
        assert torch_paged.explain(engine._target).tier == "patched"
        engine.add_request(
            ids_of(23, 1), max_new_tokens=6, request_id="a", logprobs=4, prompt_logprobs=4
        )
        out = run_checked(engine)["a"]
    check_output(model, out, 4)
    check_prompt(model, out, 4)


@pytest.mark.parametrize("num_steps", [12, 512])
def test_streamed_outputs_keep_what_they_showed(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of few steps comes round several times."""
    monkeypatch.setattr(engine_module, "_LOG_STEPS", num_steps)
    seen: list[tuple[RequestOutput, Any]] = []
    with make_engine(small_model(), lag=1) as engine:
        engine.add_request(ids_of(6, 1), max_new_tokens=60, logprobs=3, prompt_logprobs=1)
        engine.add_request(ids_of(9, 2), max_new_tokens=70, logprobs=1)
        for out in engine.stream():
            assert out.top_logprobs is not None
            assert len(out.top_logprobs) == len(out.token_ids) == len(out.logprobs or ())
            seen.append((out, out.top_logprobs[:]))
    for out, top in seen:
        assert out.top_logprobs == top
        copied = pickle.loads(pickle.dumps(out))
        assert type(copied) is RequestOutput and copied.top_logprobs == top
        assert copied.prompt_logprobs == out.prompt_logprobs
    last = [out for out, _ in seen if out.finished]
    check_output(small_model(), last[0], 3)
    check_prompt(small_model(), last[0], 1)
    check_output(small_model(), last[1], 1)


def test_unread_tokens_are_read_before_the_log_comes_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "_LOG_STEPS", 12)
    with make_engine(small_model(), lag=1) as engine:
        engine.add_request(ids_of(6, 1), max_new_tokens=90, logprobs=2, request_id="a")
        check_output(small_model(), engine.run()["a"], 2)


def test_a_small_vocabulary_gives_what_it_has() -> None:
    model = tiny(GPT2Config, 3, vocab_size=6, n_embd=32, n_layer=1, n_head=2)
    with make_engine(model) as engine:
        engine.add_request(
            ids_of(5, 1, 6), max_new_tokens=4, request_id="a", logprobs=20, prompt_logprobs=20
        )
        out = run_checked(engine)["a"]
    check_output(model, out, 6)
    check_prompt(model, out, 6)


def test_a_request_that_ends_before_its_prompt_is_computed_has_no_scores() -> None:
    with make_engine(small_model(), max_num_batched_tokens=8) as engine:
        engine.add_request(ids_of(40, 1), max_new_tokens=4, request_id="a", prompt_logprobs=2)
        engine.step()
        engine.cancel("a")
        out = run_checked(engine)["a"]
    assert out.finish_reason == "cancelled"
    assert out.prompt_logprobs is None and out.prompt_top_logprobs is None


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("value", "error"), [(21, ValueError), (-1, ValueError), (1.5, TypeError), ("5", TypeError)]
)
def test_what_is_no_number_of_tokens_is_refused(
    name: str, value: object, error: type[Exception]
) -> None:
    with make_engine(small_model()) as engine:
        with pytest.raises(error, match=name):
            engine.add_request([1, 2], **{name: value})
        engine.add_request([1, 2], max_new_tokens=1, request_id="a", **{name: torch.tensor(2)})
        assert len(run_checked(engine)["a"].token_ids) == 1


def test_plain_requests_neither_compute_nor_copy_alternatives() -> None:
    with make_engine(small_model()) as engine:
        engine.add_request(ids_of(5, 1), max_new_tokens=9, logprobs=True)
        run_checked(engine)
        assert not core_of(engine).sampling.tops.words.any()
        engine.add_request(ids_of(5, 1), max_new_tokens=9, logprobs=2)
        run_checked(engine)
        words = core_of(engine).sampling.tops.words
        assert words[:5].any() and not words[5:].any()


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_context_is_computed_once_for_all_that_is_scored_behind_it(
    enable_prefix_caching: bool, budget: int
) -> None:
    context = ids_of(21, 1)
    endings = {i: ids_of(2 + 3 * i, 50 + i) for i in range(4)}
    with make_engine(
        small_model(),
        block_size=8,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    ) as engine:
        step = core_of(engine).step
        prefill, computed, scored = step.prefill, [0], [0]

        def counting(inputs: Any) -> torch.Tensor:
            decoding = 0 if inputs.decoding is None else len(inputs.decoding)
            rows = len(inputs.slots) - (decoding > 0)
            computed[0] += len(inputs.ids) - decoding
            scored[0] += len(inputs.last_index) - decoding - rows
            return prefill(inputs)

        step.prefill = counting
        for i, ending in endings.items():
            engine.add_request(
                context + ending,
                max_new_tokens=2,
                prompt_logprobs=3,
                prompt_logprobs_start=len(context),
                request_id=i,
            )
        outputs = run_checked(engine)
        # The logits of the last token of the context say how likely the first one behind is.
        num_tokens = sum(len(context) + len(ending) for ending in endings.values())
        shared = 3 * 16 if enable_prefix_caching else 0
        assert computed[0] == num_tokens - shared
        assert scored[0] == sum(map(len, endings.values()))
    for i, ending in endings.items():
        out, start = outputs[i], len(context)
        expected = logprobs_of(small_model(), context + ending)[start - 1 : -1]
        chosen = expected.gather(1, torch.tensor(ending)[:, None])[:, 0].tolist()
        assert out.prompt_logprobs is not None and out.prompt_top_logprobs is not None
        assert len(out.prompt_logprobs) == len(out.prompt_top_logprobs) == start + len(ending)
        assert out.prompt_logprobs[:start] == out.prompt_top_logprobs[:start] == [None] * start
        assert list(out.prompt_logprobs) == out.prompt_logprobs[:]
        assert out.prompt_logprobs[start:] == pytest.approx(chosen, abs=TOLERANCE)
        for found, row in zip(out.prompt_top_logprobs[start:], expected, strict=True):
            assert found is not None
            check_top(found, row, 3)


def test_scores_may_begin_at_either_end_of_the_prompt() -> None:
    ids = ids_of(9, 3)
    with make_engine(small_model(), block_size=8) as engine:
        for start in (0, 1, 8, 9):
            engine.add_request(
                ids,
                max_new_tokens=1,
                prompt_logprobs=True,
                prompt_logprobs_start=start,
                request_id=start,
            )
        outputs = run_checked(engine)
        whole = outputs[0].prompt_logprobs
        assert whole is not None and outputs[1].prompt_logprobs == whole and whole[0] is None
        assert outputs[8].prompt_logprobs == [None] * 8 + [pytest.approx(whole[8], abs=TOLERANCE)]
        assert outputs[9].prompt_logprobs == [None] * 9
        with pytest.raises(ValueError, match="at most the 9 tokens"):
            engine.add_request(ids, prompt_logprobs=True, prompt_logprobs_start=10)
        with pytest.raises(ValueError, match="at least 0"):
            engine.add_request(ids, prompt_logprobs=True, prompt_logprobs_start=-1)
        with pytest.raises(ValueError, match="needs prompt_logprobs"):
            engine.add_request(ids, prompt_logprobs_start=3)
        with pytest.raises(TypeError, match="prompt_logprobs_start must be an integer"):
            engine.add_request(ids, prompt_logprobs=True, prompt_logprobs_start="3")


def test_positions_before_the_first_scored_one_are_skipped() -> None:
    scores = PromptScores(9, 0, first=5)
    spans = [
        scores.span(*span) for span in ((0, 9), (0, 4), (0, 5), (3, 3), (4, 2), (7, 2), (8, 1))
    ]
    assert spans == [(4, 4), (0, 0), (4, 1), (1, 2), (0, 2), (0, 1), (0, 0)]
    request = Request("a", list(range(9)), 3)
    params = SamplingParams(3, prompt_logprobs=True, prompt_logprobs_start=5)
    request.payload = Job(request, params, prompt_scores=PromptScores.of(9, params))
    parts = list(scoring.cut_scored([PrefillChunk(request, 2, 7, True)], 10, 30))
    assert [[(c.start, c.length, c.is_last) for c in part] for part in parts] == [
        [(2, 5, False)],
        [(7, 2, True)],
    ]


def test_parts_of_a_prompt_may_come_twice_and_in_pieces() -> None:
    scores = PromptScores(6, 1)
    assert [scores.num_scored(*span) for span in ((0, 6), (0, 3), (4, 9), (5, 1), (7, 2))] == [
        5,
        3,
        1,
        0,
        0,
    ]

    def words(*values: float) -> torch.Tensor:
        logprobs = torch.tensor(values)
        top = (torch.arange(len(values) * 2).view(-1, 2).int(), logprobs[:, None] + torch.ones(2))
        return pack_scores(logprobs, top)

    scores.add(0, words(-1.0, -2.0))
    scores.settle()
    assert scores.logprobs() is None and scores.tops() is None
    scores.add(3, words(-4.0, -5.0))
    scores.settle()
    assert not scores.is_settled, "position 2 is missing"
    scores = PromptScores(6, 1)
    for start, piece in ((0, (-1.0, -2.0)), (1, (-2.5, -3.0)), (3, (-4.0, -5.0))):
        scores.add(start, words(*piece))
    scores.settle()
    assert scores.logprobs() == [None, -1.0, -2.5, -3.0, -4.0, -5.0]
    tops = scores.tops()
    assert tops is not None and tops[1:3] == [[(0, 0.0)], [(0, -1.5)]] and tops[0] is None


def test_history_grows_without_changing_what_was_shown() -> None:
    history = TopHistory(2)
    views = []
    for step in range(40):
        values = torch.tensor([[-float(step), -99.0]])
        ids = torch.tensor([[step, -1]], dtype=torch.int32)
        words = torch.stack([ids, values.view(torch.int32)], dim=2)
        history.extend(words.numpy())
        views.append(history.view())
    for step, view in enumerate(views):
        assert view == [[(i, -float(i))] for i in range(step + 1)]
        assert view[-1] == [(step, -float(step))] and history.view(step) == views[39][:step]
    with pytest.raises(IndexError, match="out of range"):
        views[3][4]


def chunk(start: int, length: int, prompt: int, *, scored: bool = True) -> PrefillChunk:
    request = Request(start, list(range(prompt)), 3)
    params = SamplingParams(3, prompt_logprobs=scored)
    request.payload = Job(request, params, prompt_scores=PromptScores.of(prompt, params))
    return PrefillChunk(request, start, length, start + length >= prompt)


def test_chunks_are_cut_where_their_logits_would_not_fit() -> None:
    chunks = [chunk(0, 3, 9), chunk(2, 5, 7), chunk(0, 9, 9, scored=False), chunk(0, 11, 11)]
    parts = list(scoring.cut_scored(chunks, 10, 40))
    spans = [[(c.start, c.length, c.is_last) for c in part] for part in parts]
    assert spans == [
        [(0, 3, False)],
        [(2, 5, True), (0, 9, True)],
        [(0, 4, False)],
        [(4, 4, False)],
        [(8, 3, True)],
    ]
    assert list(scoring.cut_scored(chunks, 10, 10_000)) == [chunks]
