"""Too few blocks: requests are evicted and resume, and nobody can tell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from torch_paged.engine.output import RequestOutput

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    core_of,
    ids_of,
    make_engine,
    reference_model,
    run_checked,
)

LENGTHS = (5, 9, 16, 17, 31, 40)
NUM_TOKENS = 40
POOL = int(2.5 * (40 + NUM_TOKENS) / 16)


def model() -> Any:
    return reference_model(1, vocab_size=64, initializer_range=0.2)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(model())


KINDS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.8},
    "minimum": {"min_new_tokens": NUM_TOKENS, "eos_token_id": list(range(3, 40))},
    "sampled": {"do_sample": True, "temperature": 1.3, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_evicted_request_neither_loses_nor_doubles_tokens(
    answers: Answers, kind: str, lag: int
) -> None:
    runs = []
    for num_blocks in (POOL, None):
        engine = make_engine(
            model(), num_blocks=num_blocks, lag=lag, max_num_batched_tokens=48, seed=1
        )
        with engine:
            for n in LENGTHS:
                engine.add_request(
                    ids_of(n, n + 50),
                    max_new_tokens=NUM_TOKENS,
                    request_id=n,
                    seed=n,
                    logprobs=True,
                    **KINDS[kind],
                )
            runs.append(run_checked(engine))
            assert engine.num_preemptions > 0 if num_blocks else engine.num_preemptions == 0
            assert_all_free(engine)
    tight, roomy = runs
    for n in LENGTHS:
        assert len(tight[n].token_ids) == len(tight[n].logprobs) == NUM_TOKENS
        assert tight[n].token_ids == roomy[n].token_ids
        assert tight[n].logprobs[:] == pytest.approx(roomy[n].logprobs[:], abs=1e-4)
        assert tight[n].prompt_ids == ids_of(n, n + 50)
        if kind != "sampled":
            expected = answers(ids_of(n, n + 50), NUM_TOKENS, pad_token_id=0, **KINDS[kind])
            assert tight[n].token_ids == expected


@pytest.mark.parametrize("caching", [True, False])
def test_an_end_found_after_eviction_still_counts(answers: Answers, caching: bool) -> None:
    """Rows that see their end token while they are evicted with tokens in flight."""
    with make_engine(model(), num_blocks=6, lag=4, enable_prefix_caching=caching) as engine:
        expected = {}
        for seed in range(24):
            n = LENGTHS[seed % 6]
            full = answers(ids_of(n, seed), NUM_TOKENS)
            end = full[10 + seed % 25]
            expected[seed] = full[: full.index(end) + 1]
            engine.add_request(
                ids_of(n, seed), max_new_tokens=NUM_TOKENS, eos_token_id=end, request_id=seed
            )
        outputs = run_checked(engine)
        assert engine.num_preemptions > 0
        assert_all_free(engine)
    assert {k: list(o.token_ids) for k, o in outputs.items()} == expected


@pytest.mark.parametrize("n", [15, 16, 17, 32, 33, 48])
@pytest.mark.parametrize("num_new", [1, 16, 17])
def test_lengths_at_the_edges_of_blocks(answers: Answers, n: int, num_new: int) -> None:
    """Each prompt twice, with prefix reuse, in a pool of exactly as many blocks as one needs."""
    for num_blocks in (None, -(-(n + num_new) // 16)):
        with make_engine(model(), num_blocks=num_blocks) as engine:
            for i in range(2):
                engine.add_request(ids_of(n, n), max_new_tokens=num_new, request_id=i)
                out = run_checked(engine)[i]
                assert out.token_ids == answers(ids_of(n, n), num_new) and out.error is None
            for i in "ab":
                engine.add_request(ids_of(n, n), max_new_tokens=num_new, request_id=i)
            outputs = run_checked(engine)
            assert outputs["a"].token_ids == outputs["b"].token_ids == out.token_ids


def test_a_row_grows_from_one_block_to_twenty() -> None:
    large = reference_model(16)
    with make_engine(large) as engine:
        name = engine.add_request(ids_of(3, 3, 257), max_new_tokens=300)
        tokens = list(engine.run()[name].token_ids)
        assert core_of(engine).num_blocks >= 19
    assert tokens == Answers(large)(ids_of(3, 3, 257), 300)


def test_a_second_send_reuses_the_blocks_of_the_first(answers: Answers) -> None:
    with make_engine(model()) as engine:
        computed: list[int] = []
        core = core_of(engine)
        prefill = core.step.prefill

        def counting(inputs: Any) -> Any:
            computed.append(inputs.ids.shape[0])
            return prefill(inputs)

        core.step.prefill = counting
        for _ in range(2):
            engine.add_request(ids_of(40, 1), max_new_tokens=30, request_id="a")
            first = list(run_checked(engine)["a"].token_ids)
        assert computed == [40, 40 - 32]
        # The answer is part of the next turn's prompt.
        computed.clear()
        turn = ids_of(40, 1) + first + ids_of(5, 5)
        engine.add_request(turn, max_new_tokens=8, request_id="b")
        assert run_checked(engine)["b"].token_ids == answers(turn, 8)
        assert computed == [75 - 64]


class _Heard:
    """Keeps what a callback is told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, output: RequestOutput) -> None:
        self.tokens += output.new_token_ids


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_a_callback_hears_no_token_twice_when_its_request_is_evicted(
    answers: Answers, lag: int
) -> None:
    heard = {n: _Heard() for n in LENGTHS}
    with make_engine(model(), num_blocks=POOL, lag=lag) as engine:
        for n in LENGTHS:
            engine.add_request(
                ids_of(n, n), max_new_tokens=NUM_TOKENS, request_id=n, on_output=heard[n]
            )
        outputs = run_checked(engine)
        assert engine.num_preemptions > 0
    for n in LENGTHS:
        expected = answers(ids_of(n, n), NUM_TOKENS)
        assert outputs[n].token_ids == expected and heard[n].tokens == expected, n


@pytest.mark.parametrize("num_steps", range(8, 14))
def test_an_eviction_in_a_step_that_empties_the_log_doubles_nothing(
    answers: Answers, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_paged.engine.engine._LOG_STEPS", num_steps)
    with make_engine(model(), num_blocks=POOL, lag=1) as engine:
        for n in LENGTHS:
            engine.add_request(ids_of(n, n), max_new_tokens=NUM_TOKENS, request_id=n)
        # Nobody asks for tokens before a request has ended.
        outputs = engine.run()
        assert engine.num_preemptions > 0
    for n in LENGTHS:
        assert outputs[n].token_ids == answers(ids_of(n, n), NUM_TOKENS), n
