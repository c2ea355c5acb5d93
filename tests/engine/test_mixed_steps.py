"""Rows that decode in the forward of other requests' prompts say what they say alone."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Gemma3TextConfig, LlamaForCausalLM

import torch_paged

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
    tiny,
)
from test_captured_serving import ReplayingGraphs, capture  # noqa: E402

TRACE = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
VOCAB = 32
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 160,
}


class Llama(LlamaForCausalLM):
    """In no table of families, like any subclass, hence in the patched tier."""


@functools.cache
def model_of(name: str) -> nn.Module:
    """Return a model that is never accelerated."""
    if name == "windows":
        types = ["sliding_attention", "full_attention"]
        return tiny(
            Gemma3TextConfig,
            3,
            **FIELDS,
            num_hidden_layers=2,
            sliding_window=11,
            layer_types=types,
        )
    fused = reference_model(4, **{**FIELDS, "num_hidden_layers": 1})
    if name == "fused":
        return fused
    model = Llama(copy.deepcopy(fused.config)).eval()
    model.load_state_dict(fused.state_dict())
    model.generation_config = copy.deepcopy(fused.generation_config)
    return model


KINDS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [3, 7, 11, 12]},
    {"repetition_penalty": 1.7, "logprobs": 3},
    {"do_sample": True, "seed": 5, "temperature": 1.5, "logprobs": True},
]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    length = draw(st.sampled_from([1, 2, 7, 8, 9, 16, 17, 31, 33, 48]))
    return {
        "at": draw(st.integers(0, 15)),
        "ids": ids_of(length, draw(st.integers(0, 1)), VOCAB),
        "num_tokens": draw(st.sampled_from([1, 2, 8, 17, 30])),
        "kind": draw(st.integers(0, len(KINDS) - 1)),
        "cancel_at": draw(st.sampled_from([None] * 5 + [3, 9, 12])),
        "prompt_logprobs": draw(st.sampled_from([False, False, False, True])),
    }


class Mixing:
    """Counts the forwards of chunks, and those with decoding rows beside them."""

    def __init__(self, step: Any) -> None:
        self.num_chunked = self.num_mixed = 0
        self._prefill = step.prefill
        step.prefill = self.prefill

    def prefill(self, inputs: Any) -> torch.Tensor:
        self.num_chunked += 1
        self.num_mixed += inputs.decoding is not None
        return self._prefill(inputs)


def run_trace(
    model: nn.Module,
    trace: list[dict[str, Any]],
    config: dict[str, Any],
    num_blocks: int,
    *,
    mixes: bool,
    graphs: ReplayingGraphs | None,
) -> tuple[dict[int, Any], Mixing]:
    """Run requests that come and go by the step; return their last outputs."""
    outputs: dict[int, Any] = {}
    with make_engine(model, block_size=8, num_blocks=num_blocks, **config) as engine:
        engine._service.engine.mixes = mixes
        core = core_of(engine)
        mixing = Mixing(core.step)
        if graphs is not None:
            capture(core, graphs, (1, 2, 4, 8))
        step = 0
        while step <= 24 or not engine.is_idle:
            for i, request in enumerate(trace):
                if request["at"] == step:
                    engine.add_request(
                        request["ids"],
                        max_new_tokens=request["num_tokens"],
                        request_id=i,
                        prompt_logprobs=request["prompt_logprobs"],
                        **KINDS[request["kind"]],
                    )
                elif request["cancel_at"] is not None and i not in outputs:
                    if step - request["at"] == request["cancel_at"]:
                        engine.cancel(i)
            for out in engine.step():
                if out.finished:
                    assert out.request_id not in outputs
                    outputs[out.request_id] = out
            engine.check_integrity()
            step += 1
        assert_all_free(engine)
    return outputs, mixing


@pytest.mark.parametrize("captured", [False, True], ids=["op by op", "captured"])
@pytest.mark.parametrize("model", ["fused", "patched", "windows"])
def test_any_trace_is_the_same_with_rows_and_prompts_apart(model: str, captured: bool) -> None:
    mixed = 0

    @TRACE
    @given(
        trace=st.lists(requests(), min_size=2, max_size=8),
        config=st.fixed_dictionaries(
            {
                "lag": st.sampled_from([0, 1, 4]),
                "max_num_seqs": st.integers(2, 6),
                # Among these some whose last chunk of a prompt holds one token.
                "max_num_batched_tokens": st.sampled_from([1, 3, 9, 17, 64]),
                "enable_prefix_caching": st.booleans(),
            }
        ),
        num_blocks=st.integers(20, 40),
    )
    def check(trace: list[dict[str, Any]], config: dict[str, Any], num_blocks: int) -> None:
        nonlocal mixed

        def run(mixes: bool) -> tuple[dict[int, Any], Mixing]:
            graphs = ReplayingGraphs() if captured else None
            return run_trace(
                model_of(model), trace, config, num_blocks, mixes=mixes, graphs=graphs
            )

        (together, mixing), (apart, none) = run(True), run(False)
        assert none.num_mixed == 0
        mixed += mixing.num_mixed
        assert sorted(together) == sorted(apart) == list(range(len(trace)))
        for i, out in together.items():
            other = apart[i]
            assert (out.finish_reason, out.error) == (other.finish_reason, other.error)
            assert out.token_ids == other.token_ids, trace[i]
            for name in ("logprobs", "prompt_logprobs"):
                ours, theirs = getattr(out, name), getattr(other, name)
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    skip = name == "prompt_logprobs"
                    assert ours[skip:] == pytest.approx(theirs[skip:], abs=2e-4)

    check()
    assert mixed > 5


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


def run_staggered(engine: torch_paged.Engine) -> dict[Any, Any]:
    """Add requests one a step, so that those there decode beside the prompts of others."""
    ended: dict[Any, Any] = {}
    for n in (5, 9, 17, 31):
        engine.add_request(ids_of(n, n), max_new_tokens=12, request_id=n)
        ended |= {out.request_id: out for out in engine.step() if out.finished}
    return ended | run_checked(engine)


def assert_answered(outputs: dict[Any, Any], answers: Answers, but: Any = None) -> None:
    for n in (5, 9, 17, 31):
        if n != but:
            assert outputs[n].token_ids == answers(ids_of(n, n), 12), n


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_what_fails_together_runs_apart(answers: Answers, error: type[Exception]) -> None:
    with make_engine(small_model(), lag=2) as engine:
        step = core_of(engine).step
        prefill, failures = step.prefill, [0]

        def failing(inputs: Any) -> torch.Tensor:
            logits = prefill(inputs)
            if inputs.decoding is not None:
                failures[0] += 1
                raise error("no memory for all of it")
            return logits

        step.prefill = failing
        outputs = run_staggered(engine)
        assert failures[0] == 3
        assert_answered(outputs, answers)
        assert_all_free(engine)


@pytest.mark.parametrize("lag", [0, 4])
def test_a_decoding_row_with_nan_logits_beside_a_prompt_ends_alone(
    answers: Answers, lag: int
) -> None:
    with make_engine(small_model(), lag=lag) as engine:
        step = core_of(engine).step
        prefill, hit = step.prefill, []

        def poisoned(inputs: Any) -> torch.Tensor:
            logits = prefill(inputs)
            if inputs.decoding is not None and len(inputs.decoding) == 2 and not hit:
                # The rows of 9 and 5 are in slots 1 and 0, the prompt of 17 behind them.
                hit.append(inputs.decoding.tolist())
                logits[0, 3] = float("nan")
            return logits

        step.prefill = poisoned
        outputs = run_staggered(engine)
        assert hit == [[1, 0]]
        assert outputs[9].finish_reason == "error" and "are NaN" in outputs[9].error
        known = list(outputs[9].token_ids)
        assert known == answers(ids_of(9, 9), 12)[: len(known)] and len(known) == 1
        assert_answered(outputs, answers, but=9)


def test_a_scored_prompt_and_an_engine_that_does_not_mix_run_apart(answers: Answers) -> None:
    for mixes, scored in ((True, True), (False, False)):
        with make_engine(small_model()) as engine:
            engine._service.engine.mixes = mixes
            mixing = Mixing(core_of(engine).step)
            engine.add_request(ids_of(5, 5), max_new_tokens=12, request_id=5)
            engine.step()
            engine.step()
            engine.add_request(
                ids_of(9, 9), max_new_tokens=12, request_id=9, prompt_logprobs=scored
            )
            outputs = run_checked(engine)
            assert (mixing.num_chunked, mixing.num_mixed) == (2, 0)
            assert all(outputs[n].token_ids == answers(ids_of(n, n), 12) for n in (5, 9))


def test_a_graph_is_used_where_its_padding_costs_less_than_launches(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replays(layer_flops: float) -> int:
        graphs = ReplayingGraphs()
        with make_engine(small_model(), lag=1, max_num_seqs=4) as engine:
            core = core_of(engine)
            monkeypatch.setattr(type(core.step), "layer_flops", layer_flops)
            capture(core, graphs, (1, 2, 4))
            for _ in range(3):
                assert_answered(run_staggered(engine), answers)
        return sum(key[0] == "serve prefill" for key in graphs.code)

    # Buckets of 16 and 32 tokens and of 4 rows: the padding is of 1 to 14 tokens.
    assert replays(1.0) > replays(5e9) > replays(1e12) == 0
