"""Preempted requests keep their keys and values on the host, and nobody can tell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_paged
from torch_paged.engine import host_blocks
from torch_paged.engine.engine import ServingEngine
from torch_paged.engine.host_blocks import HostBlocks
from torch_paged.engine.launch import StepLauncher
from torch_paged.engine.step import ScheduledStep
from torch_paged.generate.support.zoo import tiny_model

sys.path.append(str(Path(__file__).parent))

from replaying_graphs import ReplayingGraphs, capture  # noqa: E402
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
POOL = 10
SPACE = 1e-3  # GiB: 89 blocks


def model() -> Any:
    return reference_model(1, vocab_size=64, initializer_range=0.2)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(model())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[ScheduledStep]:
    """All steps that are launched."""
    launched: list[ScheduledStep] = []
    update = StepLauncher.update

    def noting(self: StepLauncher, scheduled: ScheduledStep) -> None:
        launched.append(scheduled)
        update(self, scheduled)

    monkeypatch.setattr(StepLauncher, "update", noting)
    return launched


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every free block NaN, and unfindable, once a step has made its copies.

    That is as early as anybody could write there: a callback may generate.
    """
    note_ends = ServingEngine._note_ends

    def poisoning(self: ServingEngine, requests: Any) -> None:
        core = self.core
        for block in range(core.allocator.num_blocks):
            if core.allocator.refcount(block) == 0:
                core.allocator.set_findable(block, False)
                for cache in (*core.pool.keys, *core.pool.values):
                    cache[block] = float("nan")
        note_ends(self, requests)

    monkeypatch.setattr(ServingEngine, "_note_ends", poisoning)


def engine_of(**options: Any) -> torch_paged.Engine:
    defaults: dict[str, Any] = {"num_blocks": POOL, "max_num_batched_tokens": 48}
    return make_engine(model(), **{**defaults, "cpu_offload_space": SPACE, **options})


def add_all(engine: torch_paged.Engine, num_tokens: int = NUM_TOKENS, **options: Any) -> None:
    for n in LENGTHS:
        engine.add_request(ids_of(n, n), max_new_tokens=num_tokens, request_id=n, **options)


def assert_answers(outputs: dict[Any, Any], answers: Answers, but: Any = None) -> None:
    for n in LENGTHS:
        if n != but:
            assert outputs[n].token_ids == answers(ids_of(n, n), NUM_TOKENS), n


def swapped_requests(engine: torch_paged.Engine) -> list[Any]:
    jobs = engine._service.engine._ledger.jobs
    return [name for name, job in jobs.items() if job.request.host_block_ids]


def step_until_swapped(engine: torch_paged.Engine) -> tuple[Any, dict[Any, Any]]:
    """Step until a request is on the host; return its name, and what has ended meanwhile."""
    ended: dict[Any, Any] = {}
    while not swapped_requests(engine):
        assert not engine.is_idle, "nothing was swapped"
        ended.update({out.request_id: out for out in engine.step() if out.finished})
    return swapped_requests(engine)[0], ended


def assert_host_is_free(engine: torch_paged.Engine) -> None:
    assert_all_free(engine)
    assert core_of(engine).host_blocks.num_used == 0


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.usefixtures("poisoned")
def test_a_swapped_request_goes_on_from_the_blocks_that_were_copied(
    answers: Answers, steps: list[ScheduledStep], lag: int, caching: bool
) -> None:
    with engine_of(lag=lag, enable_prefix_caching=caching) as engine:
        add_all(engine)
        outputs = run_checked(engine)
        assert_host_is_free(engine)
    assert_answers(outputs, answers)
    copied = [copy for step in steps for copy in step.swap_ins]
    assert copied and sum(len(copy.host_blocks) for copy in copied) > len(copied)


def test_only_the_newest_token_of_a_swapped_request_is_computed_again(
    answers: Answers, steps: list[ScheduledStep]
) -> None:
    computed = {}
    for space in (0.0, SPACE):
        steps.clear()
        with engine_of(cpu_offload_space=space) as engine:
            add_all(engine)
            assert_answers(run_checked(engine), answers)
            assert engine.num_preemptions > 0
            stats = torch_paged.stats(engine._target)
            assert stats.preemptions == engine.num_preemptions
            assert stats.swaps == (stats.preemptions if space else 0)
            assert (stats.host_bytes > 0) == (space > 0)
        computed[space] = sum(chunk.length for step in steps for chunk in step.prefills)
    assert computed[SPACE] == sum(LENGTHS) + stats.swaps < computed[0.0]
    assert f"{stats.swaps} swapped to 1.0 MiB of host memory" in str(stats)


def test_blocks_travel_in_batches_and_pieces(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of() as engine:
        size = core_of(engine).pool.block_bytes
        monkeypatch.setattr(host_blocks, "_PIECE_BYTES", 2 * size)
        add_all(engine)
        assert_answers(run_checked(engine), answers)
        assert torch_paged.stats(engine._target).host_bytes % (2 * size) == 0
        assert_host_is_free(engine)


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_what_does_not_fit_in_the_space_is_computed_again(
    answers: Answers, num_blocks: int
) -> None:
    with engine_of() as engine:
        space = num_blocks * core_of(engine).pool.block_bytes / (1 << 30)
    with engine_of(cpu_offload_space=space) as engine:
        add_all(engine)
        assert_answers(run_checked(engine), answers)
        stats = torch_paged.stats(engine._target)
        assert stats.swaps < stats.preemptions and stats.host_bytes <= space * (1 << 30)
        assert_host_is_free(engine)


def test_without_memory_on_the_host_requests_are_computed_again(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_blocks, "available_bytes", lambda: 1000)
    with engine_of() as engine:
        add_all(engine)
        assert_answers(run_checked(engine), answers)
        stats = torch_paged.stats(engine._target)
        assert stats.preemptions > 0 and stats.swaps == stats.host_bytes == 0
    assert caplog.text.count("1000 bytes of memory are left") == 1


def test_a_request_that_is_cancelled_on_the_host_leaves_nothing_there(answers: Answers) -> None:
    with engine_of() as engine:
        add_all(engine)
        name, outputs = step_until_swapped(engine)
        engine.cancel(name)
        outputs.update(run_checked(engine))
        assert outputs[name].finish_reason == "cancelled"
        tokens = list(outputs[name].token_ids)
        assert tokens and tokens == answers(ids_of(name, name), NUM_TOKENS)[: len(tokens)]
        assert_answers(outputs, answers, but=name)
        assert_host_is_free(engine)


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_a_step_that_is_broken_off_lets_swapped_requests_start_again(
    answers: Answers, what: str
) -> None:
    with engine_of() as engine:
        core = core_of(engine)
        add_all(engine)
        _, outputs = step_until_swapped(engine)
        whole = getattr(core.step, what)

        def interrupted(*args: Any) -> torch.Tensor:
            raise KeyboardInterrupt

        setattr(core.step, what, interrupted)
        with pytest.raises(KeyboardInterrupt):
            while True:
                outputs.update({out.request_id: out for out in engine.step() if out.finished})
        engine.check_integrity()
        setattr(core.step, what, whole)
        outputs.update(run_checked(engine))
        assert_answers(outputs, answers)
        assert_host_is_free(engine)


def test_an_interrupt_while_host_blocks_are_taken_is_no_inconsistency(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with engine_of() as engine, monkeypatch.context() as patch:
        add_all(engine)
        patch.setattr(HostBlocks, "take", interrupted)
        outputs: dict[Any, Any] = {}
        with pytest.raises(KeyboardInterrupt):
            while True:
                outputs.update({out.request_id: out for out in engine.step() if out.finished})
        engine.check_integrity()
        patch.undo()
        outputs.update(run_checked(engine))
        assert_answers(outputs, answers)
        assert_host_is_free(engine)


@pytest.mark.parametrize("way", ["copy_out", "copy_in"])
def test_a_copy_that_fails_costs_nobody_a_token(
    answers: Answers, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, calls = getattr(HostBlocks, way), [0]

    def failing(self: HostBlocks, pool: Any, pairs: Any) -> None:
        calls[0] += bool(pairs)
        if pairs and calls[0] == 1:
            raise torch.OutOfMemoryError("no memory for the indices")
        copy(self, pool, pairs)

    monkeypatch.setattr(HostBlocks, way, failing)
    with engine_of() as engine:
        add_all(engine)
        with pytest.raises(torch.OutOfMemoryError):
            engine.run()
        outputs = run_checked(engine)
        assert_host_is_free(engine)
    for n, out in outputs.items():
        assert out.token_ids == answers(ids_of(n, n), NUM_TOKENS)
    assert len(outputs) > 2


def test_release_gives_the_memory_of_the_host_back(answers: Answers) -> None:
    with engine_of() as engine:
        add_all(engine)
        _, outputs = step_until_swapped(engine)
        core = core_of(engine)
        old, before = core.host_blocks, core.pool.max_bytes
        torch_paged.release(engine._target)
        assert old.nbytes == 0 and torch_paged.stats(engine._target).host_bytes == 0
        engine.cancel(16)
        # Another pool, of another size.
        core.prepare(1, 1, 1)
        core.pool.max_bytes = before * 3 // 2
        outputs.update(run_checked(engine))
        assert_answers(outputs, answers, but=16)
        assert core.host_blocks is not old
        assert_host_is_free(engine)


def test_two_engines_of_a_model_share_the_space(answers: Answers) -> None:
    with engine_of(num_blocks=12, lag=1) as first:
        second = torch_paged.Engine(first._target)
        outputs: list[dict[Any, Any]] = [{}, {}]
        add_all(first)
        add_all(second)
        while not (first.is_idle and second.is_idle):
            for engine, last in zip((first, second), outputs, strict=True):
                last.update({out.request_id: out for out in engine.step() if out.finished})
        for last in outputs:
            assert_answers(last, answers)
        assert first.num_preemptions and second.num_preemptions
        assert_host_is_free(first)
        stats = torch_paged.stats(first._target)
        assert stats.swaps == stats.preemptions
        second.close()


def test_samples_of_a_prompt_share_its_blocks_again(
    answers: Answers, steps: list[ScheduledStep]
) -> None:
    """Each would find no room for a prompt of its own."""
    sampling = {"do_sample": True, "temperature": 1.3, "num_return_sequences": 3, "seed": 3}
    found = []
    for num_blocks in (10, None):
        steps.clear()
        with engine_of(num_blocks=num_blocks, lag=1) as engine:
            engine.add_request(ids_of(64, 8), max_new_tokens=48, request_id=0, **sampling)
            outputs = run_checked(engine)
            found.append({name: list(out.token_ids) for name, out in outputs.items()})
            swaps = torch_paged.stats(engine._target).swaps
            assert (swaps > 0) == (num_blocks is not None)
            if num_blocks is not None:
                outs = [len(copy.host_blocks) for step in steps for copy in step.swap_outs]
                ins = [len(copy.host_blocks) for step in steps for copy in step.swap_ins]
                assert sum(outs) - sum(ins) >= 4 * len(outs)
            assert_host_is_free(engine)
    assert found[0] == found[1] and len(found[0]) == 3


def test_a_prompt_that_is_swapped_is_scored_to_its_end(steps: list[ScheduledStep]) -> None:
    found = []
    for num_blocks in (8, None):
        steps.clear()
        with engine_of(num_blocks=num_blocks, max_num_batched_tokens=3, lag=1) as engine:
            engine.add_request(ids_of(30, 1), max_new_tokens=70, request_id=0)
            for _ in range(20):
                engine.step()
            engine.add_request(ids_of(60, 2), max_new_tokens=2, request_id=1, prompt_logprobs=True)
            out = run_checked(engine)[1]
            found.append([list(out.token_ids), list(out.prompt_logprobs or ())])
            swapped = [c.request.request_id for step in steps for c in step.swap_outs]
            assert swapped == ([1] if num_blocks else [])
    (tokens, scores), (expected_tokens, expected_scores) = found
    assert tokens == expected_tokens and len(scores) == 60
    assert scores[1:] == pytest.approx(expected_scores[1:], abs=1e-4)


def test_captured_steps_read_what_was_copied(answers: Answers) -> None:
    graphs = ReplayingGraphs()
    with engine_of(lag=2) as engine:
        capture(core_of(engine), graphs, (1, 2, 4, 8))
        add_all(engine)
        assert_answers(run_checked(engine), answers)
        assert torch_paged.stats(engine._target).swaps > 0
    assert graphs.num_replays > 20


def test_requests_of_models_that_keep_a_state_are_never_swapped() -> None:
    lfm2 = tiny_model("lfm2")
    vocab = lfm2.get_input_embeddings().weight.shape[0]
    with make_engine(lfm2, num_blocks=9, max_num_seqs=4, cpu_offload_space=SPACE) as engine:
        for i in range(4):
            engine.add_request(ids_of(14 + i, 40 + i, vocab), max_new_tokens=30, request_id=i)
        outputs = run_checked(engine)
        stats = torch_paged.stats(engine._target)
        assert stats.preemptions > 0 and stats.swaps == stats.host_bytes == 0
    for i in range(4):
        assert outputs[i].token_ids == Answers(lfm2)(ids_of(14 + i, 40 + i, vocab), 30)
