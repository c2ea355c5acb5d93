"""What goes wrong goes wrong for one request alone, and the engine goes on."""

from __future__ import annotations

import contextlib
import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_paged
from torch_paged.errors import TorchPagedError
from torch_paged.generate import request_params

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

LENGTHS = (5, 9, 16, 17, 31)


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


def add_all(engine: torch_paged.Engine, num_tokens: int = 12) -> None:
    for n in LENGTHS:
        engine.add_request(ids_of(n, n), max_new_tokens=num_tokens, request_id=n)


def assert_others(
    outputs: dict[Any, Any], answers: Answers, bad: Any = None, num_tokens: int = 12
) -> None:
    for n in LENGTHS:
        if n != bad:
            assert outputs[n].token_ids == answers(ids_of(n, n), num_tokens), n
            assert outputs[n].finish_reason == "length"


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("token", [0, 5])
def test_a_row_with_nan_logits_ends_alone(answers: Answers, lag: int, token: int) -> None:
    """The NaN sits in the row's own cache, as a fault of the device would leave it."""
    with make_engine(small_model(), lag=lag) as engine:
        add_all(engine)
        core = core_of(engine)
        decode, prefill, calls = core.step.decode, core.step.prefill, [0]

        def poisoned(slots: torch.Tensor) -> torch.Tensor:
            logits = decode(slots)
            rows = (core.state.num_generated[slots.long()] == token) & (slots == 2)
            logits[rows, 7] = float("nan")
            return logits

        def poisoned_prefill(inputs: Any) -> torch.Tensor:
            logits = prefill(inputs)
            calls[0] += 1
            if token == 0:
                logits[inputs.slots == 2] = float("nan")
            return logits

        core.step.decode, core.step.prefill = poisoned, poisoned_prefill
        outputs = run_checked(engine)
        assert_all_free(engine)
        bad = outputs[16]  # the third request has slot 2
        assert bad.finish_reason == "error" and bad.error == f"the logits of token {token} are NaN"
        assert bad.token_ids == answers(ids_of(16, 16), 12)[:token]
        assert_others(outputs, answers, bad=16)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_failing_prefill_fails_its_request_alone(
    answers: Answers, together: bool, error: type[Exception]
) -> None:
    with make_engine(small_model(), max_num_batched_tokens=256 if together else 20) as engine:
        core = core_of(engine)
        prefill = core.step.prefill
        marker = ids_of(17, 17)

        def failing(inputs: Any) -> torch.Tensor:
            ids = inputs.ids.tolist()
            if any(ids[i : i + 9] == marker[8:17] for i in range(len(ids))):
                raise error("no memory for this one")
            return prefill(inputs)

        core.step.prefill = failing
        add_all(engine)
        # It shares its first block with the one that fails, which never wrote that block.
        sibling = marker[:16] + ids_of(6, 99)
        engine.add_request(sibling, max_new_tokens=12, request_id="sibling")
        outputs = run_checked(engine)
        assert_all_free(engine)
        assert outputs[17].finish_reason == "error"
        assert outputs[17].error == f"{error.__name__}: no memory for this one"
        assert_others(outputs, answers, bad=17)
        assert outputs["sibling"].token_ids == answers(sibling, 12)
        # Later requests must not find what was never computed.
        core.step.prefill = prefill
        engine.add_request(marker, max_new_tokens=12, request_id="again")
        assert run_checked(engine)["again"].token_ids == answers(marker, 12)


def test_a_failing_decode_fails_the_rows_in_it(answers: Answers) -> None:
    with make_engine(small_model(), lag=2) as engine:
        core = core_of(engine)
        decode = core.step.decode
        calls = [0]

        def failing(slots: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 4:
                raise torch.OutOfMemoryError("no memory")
            return decode(slots)

        core.step.decode = failing
        add_all(engine)
        outputs = run_checked(engine)
        assert {out.finish_reason for out in outputs.values()} == {"error"}
        for n in LENGTHS:
            tokens = list(outputs[n].token_ids)
            assert tokens == answers(ids_of(n, n), 12)[: len(tokens)]
        add_all(engine)
        assert_others(run_checked(engine), answers)
        assert_all_free(engine)


@pytest.mark.parametrize("at", ["first", "later", "last"])
def test_a_callback_that_raises_fails_its_request_alone(answers: Answers, at: str) -> None:
    with make_engine(small_model(), lag=1) as engine:
        heard = []

        def callback(out: torch_paged.RequestOutput) -> None:
            heard.append(out)
            count = len(out.token_ids)
            if {"first": count == 1, "later": count == 5, "last": out.finished}[at]:
                raise ValueError("not with me")

        add_all(engine)
        engine.add_request(ids_of(9, 1), max_new_tokens=12, on_output=callback, request_id="bad")
        outputs = run_checked(engine)
        assert_all_free(engine)
    assert outputs["bad"].finish_reason == "error"
    assert outputs["bad"].error == "ValueError: not with me"
    tokens = list(outputs["bad"].token_ids)
    assert tokens == answers(ids_of(9, 1), 12)[: len(tokens)]
    assert_others(outputs, answers)


def test_a_callback_hears_every_token_and_the_end(answers: Answers) -> None:
    with make_engine(small_model(), lag=3) as engine:
        heard: list[torch_paged.RequestOutput] = []
        engine.add_request(ids_of(9, 1), max_new_tokens=12, on_output=heard.append)
        add_all(engine)
        engine.run()
    assert [t for out in heard for t in out.new_token_ids] == answers(ids_of(9, 1), 12)
    assert [out.finished for out in heard] == [False] * (len(heard) - 1) + [True]


def test_a_callback_may_add_and_cancel_but_not_step(answers: Answers) -> None:
    with make_engine(small_model()) as engine:
        problems = []

        def callback(out: torch_paged.RequestOutput) -> None:
            if len(out.token_ids) == 3 and not out.finished:
                engine.add_request(ids_of(17, 17), max_new_tokens=4, request_id="added")
                engine.cancel(31)
                try:
                    engine.step()
                except TorchPagedError as error:
                    problems.append(str(error))

        add_all(engine)
        engine.add_request(ids_of(9, 1), max_new_tokens=12, on_output=callback, request_id="x")
        outputs = run_checked(engine)
    assert outputs["added"].token_ids == answers(ids_of(17, 17), 4)
    assert outputs[31].finish_reason == "cancelled"
    assert problems == ["step, stream and run must not be called from a callback"]
    assert_others(outputs, answers, bad=31)


def test_an_interrupted_step_starts_the_running_again(answers: Answers) -> None:
    with make_engine(small_model(), lag=4) as engine:
        core = core_of(engine)
        decode = core.step.decode
        calls = [0]

        def interrupted(slots: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] in (4, 6):
                raise KeyboardInterrupt
            return decode(slots)

        core.step.decode = interrupted
        add_all(engine)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                engine.run()
        outputs = run_checked(engine)
        assert_others(outputs, answers)
        assert_all_free(engine)


def generate(model: Any, rows: int, num_tokens: int) -> list[list[int]]:
    ids = torch.tensor([ids_of(11, 100 + i) for i in range(rows)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return out[:, 11:].tolist()


@pytest.mark.parametrize("max_num_seqs", [5, 8, 256], ids=lambda n: f"slots{n}")
@pytest.mark.parametrize("lag", [0, 4])
def test_generate_between_steps_disturbs_nothing(
    answers: Answers, max_num_seqs: int, lag: int
) -> None:
    """With 5 slots, all taken, the state must grow under the rows that run."""
    expected = [answers(ids_of(11, 100 + i), 20) for i in range(4)]
    with make_engine(small_model(), lag=lag, max_num_seqs=max_num_seqs) as engine:
        model = engine._target
        assert generate(model, 4, 20) == expected
        engine.add_request(
            ids_of(9, 1), max_new_tokens=20, repetition_penalty=1.5, request_id="penalty"
        )
        engine.add_request(
            ids_of(9, 1), max_new_tokens=20, do_sample=True, seed=4, request_id="seed"
        )
        add_all(engine, 20)
        outputs = {}
        for step in range(12):
            outputs.update({out.request_id: out for out in engine.step() if out.finished})
            if step % 3 == 0:
                assert generate(model, step % 4 + 1, 20) == expected[: step % 4 + 1]
            engine.check_integrity()
        outputs.update(run_checked(engine))
        assert generate(model, 4, 20) == expected
        assert torch_paged.explain(model).last_call.path == "fused"
        assert_all_free(engine)
        engine.add_request(
            ids_of(9, 1), max_new_tokens=20, do_sample=True, seed=4, request_id="seed"
        )
        assert run_checked(engine)["seed"].token_ids == outputs["seed"].token_ids
    assert_others(outputs, answers, num_tokens=20)
    expected_penalty = answers(ids_of(9, 1), 20, repetition_penalty=1.5)
    assert outputs["penalty"].token_ids == expected_penalty


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("how", ["release", "accelerate"])
def test_memory_taken_away_between_steps_is_taken_again(
    answers: Answers, how: str, lag: int
) -> None:
    with make_engine(small_model(), lag=lag) as engine:
        add_all(engine)
        for round in range(3):
            for _ in range(2):
                engine.step()
            if how == "release":
                torch_paged.release(engine._target)
            else:
                torch_paged.accelerate(engine._target, lag=lag, max_num_seqs=7 + round)
            engine.check_integrity()
        outputs = run_checked(engine)
        assert_others(outputs, answers)
        assert_all_free(engine)


def test_restoring_the_model_ends_the_engine_clearly() -> None:
    engine = make_engine(small_model())
    add_all(engine)
    engine.step()
    torch_paged.restore(engine._target)
    with pytest.raises(TorchPagedError, match="not accelerated any more"):
        engine.step()
    engine.close()


WRITES = {
    "add_": lambda p: p.add_(0.05),
    "data": lambda p: p.data.add_(0.05),
    "flip": lambda p: p.data.copy_(p.data.flip(0).clone()),
    "exchange": lambda p: p.data.copy_(p.data.flip(1).clone()),
    "one value": lambda p: p.data[1, 1].mul_(40.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_prefixes_of_other_weights_are_not_reused(write: str) -> None:
    with make_engine(small_model()) as engine:
        model = engine._target
        ids = ids_of(40, 3)
        for _ in range(2):
            engine.add_request(ids, max_new_tokens=12, request_id=0)
            engine.run()
        assert core_of(engine).has_prefixes
        with torch.no_grad():
            WRITES[write](model.model.layers[0].self_attn.v_proj.weight)
        expected = Answers(copy.deepcopy(model))(ids, 12)
        engine.add_request(ids, max_new_tokens=12, request_id=0)
        assert engine.run()[0].token_ids == expected
        # And those of the present weights are.
        engine.add_request(ids, max_new_tokens=12, request_id=0)
        assert engine.run()[0].token_ids == expected


@pytest.mark.parametrize("verb", ["engine", "model"])
def test_weights_changed_while_busy_drops_prefixes(verb: str) -> None:
    with make_engine(small_model()) as engine:
        model = engine._target
        ids = ids_of(40, 3)
        engine.add_request(ids, max_new_tokens=4, request_id=0)
        engine.run()
        engine.add_request(ids_of(5, 5), max_new_tokens=60, request_id="long")
        engine.step()
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.data.add_(0.05)
        if verb == "engine":
            engine.weights_changed()
        else:
            torch_paged.weights_changed(model)
        expected = Answers(copy.deepcopy(model))(ids, 12)
        engine.add_request(ids, max_new_tokens=12, request_id=0)
        assert engine.run()[0].token_ids == expected


def test_other_requests_salt_keeps_prefixes_apart() -> None:
    with make_engine(small_model(), enable_prefix_caching=False) as engine:
        core = core_of(engine)
        lengths: list[int] = []
        prefill = core.step.prefill

        def counting(inputs: Any) -> torch.Tensor:
            lengths.append(inputs.ids.shape[0])
            return prefill(inputs)

        core.step.prefill = counting
        for _ in range(2):
            engine.add_request(ids_of(40, 3), max_new_tokens=4)
            engine.run()
        assert lengths == [40, 40]


@pytest.mark.parametrize("lag", [0, 4])
def test_an_interrupt_in_a_callback_hides_no_end_of_others(answers: Answers, lag: int) -> None:
    ids = ids_of(9, 3)
    eos = [answers(ids, 20)[5]]
    expected = answers(ids, 20, eos_token_id=eos, pad_token_id=0)

    def interrupt(output: torch_paged.RequestOutput) -> None:
        if output.finished:
            raise KeyboardInterrupt

    with make_engine(small_model(), lag=lag) as engine:
        for i in range(3):
            callback = interrupt if i == 0 else None
            engine.add_request(
                ids, max_new_tokens=20, eos_token_id=eos, request_id=i, on_output=callback
            )
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        outputs = run_checked(engine)
    assert [outputs[i].finish_reason for i in range(3)] == ["stop"] * 3
    assert [outputs[i].token_ids for i in range(3)] == [expected] * 3


def test_an_interrupt_in_a_callback_loses_no_token_of_an_evicted_request(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reports arrive late, as from a GPU.
    monkeypatch.setattr("torch_paged.engine.token_log.TokenLog.is_here", lambda log, step: False)
    prompts = [ids_of(9 + i, i) for i in range(3)]

    def interrupt(output: torch_paged.RequestOutput) -> None:
        raise KeyboardInterrupt

    with make_engine(small_model(), num_blocks=6, block_size=8, lag=4) as engine:
        for i, ids in enumerate(prompts):
            callback = interrupt if i == 0 else None
            engine.add_request(ids, max_new_tokens=20, request_id=i, on_output=callback)
        outputs: dict[Any, torch_paged.RequestOutput] = {}
        while not engine.is_idle:
            with contextlib.suppress(KeyboardInterrupt):
                outputs.update(run_checked(engine))
        assert engine.num_preemptions > 0
    for i, ids in enumerate(prompts):
        assert outputs[i].token_ids == answers(ids, 20)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_callback_may_close_the_engine(answers: Answers, at: int) -> None:
    ids = ids_of(9, 3)
    heard: list[torch_paged.RequestOutput] = []
    engine = make_engine(small_model(), lag=1)

    def close(output: torch_paged.RequestOutput) -> None:
        heard.append(output)
        if len(output.token_ids) == at:
            engine.close()

    for i in range(3):
        callback = close if i == 0 else None
        engine.add_request(ids, max_new_tokens=6 + i, request_id=i, on_output=callback)
    outputs = engine.run()
    assert sorted(outputs) == [0, 1, 2] and engine.is_idle
    assert heard[-1].finish_reason == ("length" if at == 6 else "cancelled")
    for i, output in outputs.items():
        assert output.token_ids == answers(ids, 6 + i)[: len(output.token_ids)]


@pytest.mark.parametrize("lag", [0, 4])
def test_a_check_that_an_interrupt_breaks_off_is_made_again(
    lag: int, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(9, 9)
    expected = answers(ids, 12)
    stops_at = expected[4]
    broken = []

    def stops(prompt: Any, output: Any) -> bool:
        if output[-1] == stops_at and not broken:
            broken.append(len(output))
            raise KeyboardInterrupt
        return bool(output[-1] == stops_at)

    monkeypatch.setattr(request_params, "_stop_check", lambda *_: stops)
    with make_engine(small_model(), lag=lag) as engine:
        engine.add_request(ids, max_new_tokens=12, request_id="a")
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        out = run_checked(engine)["a"]
        assert_all_free(engine)
    count = expected.index(stops_at) + 1
    assert broken == [count] and out.finish_reason == "stop"
    assert out.token_ids == expected[:count]
