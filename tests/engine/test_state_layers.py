"""An engine over a model whose layers keep a state: whole prompts, nothing shared, any slot."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_paged.generate.support.zoo import tiny_model

sys.path.append(str(Path(__file__).parent))

from replaying_graphs import ReplayingGraphs, capture  # noqa: E402
from serving_case import Answers, core_of, ids_of, make_engine, run_checked  # noqa: E402


@functools.cache
def model_of(model_type: str) -> nn.Module:
    return tiny_model(model_type)


@functools.cache
def answers_of(model_type: str) -> Answers:
    return Answers(model_of(model_type))


def prompt_of(model_type: str, length: int, seed: int) -> list[int]:
    return ids_of(length, seed, model_of(model_type).get_input_embeddings().weight.shape[0])


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next"])
@pytest.mark.parametrize("budget", [6, 64])
def test_every_answer_is_that_of_the_prompt_alone(model_type: str, budget: int) -> None:
    answers = answers_of(model_type)
    with make_engine(
        model_of(model_type), max_num_seqs=3, max_num_batched_tokens=budget, lag=2
    ) as engine:
        for wave in range(2):
            for i in range(6):
                ids = prompt_of(model_type, 3 + 5 * i, i)
                engine.add_request(ids, max_new_tokens=4 + 3 * i, request_id=(wave, i))
                if i % 2:
                    engine.step()
            outputs = run_checked(engine)
            for (_, i), output in outputs.items():
                ids = prompt_of(model_type, 3 + 5 * i, i)
                if answers.is_clear(ids, 4 + 3 * i):
                    assert output.token_ids == answers(ids, 4 + 3 * i), (wave, i)


def test_a_preempted_row_gets_its_state_back() -> None:
    answers = answers_of("lfm2")
    prompts = [prompt_of("lfm2", 14 + i, 40 + i) for i in range(4)]
    with make_engine(model_of("lfm2"), num_blocks=9, max_num_seqs=4) as engine:
        names = [engine.add_request(ids, max_new_tokens=30) for ids in prompts]
        outputs = run_checked(engine)
        assert engine.num_preemptions > 0
    for name, ids in zip(names, prompts, strict=True):
        assert outputs[name].token_ids == answers(ids, 30)


def test_samples_of_a_prompt_share_no_blocks() -> None:
    ids = prompt_of("lfm2", 40, 3)
    with make_engine(model_of("lfm2")) as engine:
        sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
        engine.add_request(ids, max_new_tokens=8, **sampling)
        outputs = run_checked(engine)
        assert len(outputs) == 3
        assert core_of(engine).has_prefixes is False
    assert all(out.token_ids == answers_of("lfm2")(ids, 8) for out in outputs.values())


def test_prompts_are_scored() -> None:
    ids = prompt_of("lfm2", 30, 9)
    model = copy.deepcopy(model_of("lfm2"))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    with make_engine(model, max_num_batched_tokens=7) as engine:
        name = engine.add_request(ids, max_new_tokens=3, prompt_logprobs=True)
        output = run_checked(engine)[name]
    assert output.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("asked", [(1, 8), (8,)], ids=str)
def test_no_step_is_captured_for_more_rows_than_the_state_has_slots(
    asked: tuple[int, ...],
) -> None:
    """The state has as many slots as rows have run at a time, the config allows more."""
    graphs = ReplayingGraphs()
    ids = torch.tensor([prompt_of("lfm2", 12, seed) for seed in (1, 2)])
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    with make_engine(model_of("lfm2"), max_num_seqs=8, batch_buckets=asked) as engine:
        capture(core_of(engine), graphs)
        out = engine._target.generate(ids, **kwargs)
        assert core_of(engine).state.max_num_seqs == 2
        for i in range(6):
            engine.add_request(prompt_of("lfm2", 12, i), max_new_tokens=6, request_id=i)
        outputs = run_checked(engine)
        assert core_of(engine).batch_buckets == asked
    assert graphs.num_replays > 6
    assert torch.equal(out, model_of("lfm2").generate(ids, **kwargs))
    for i in range(6):
        assert outputs[i].token_ids == answers_of("lfm2")(prompt_of("lfm2", 12, i), 6)
