"""Random traces of arrivals, cancels and ends in tiny pools; every output is generate()'s."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_paged

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    core_of,
    ids_of,
    make_engine,
    reference_model,
)

# Some requests ask for a longer minimum than their limit; transformers warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
TRACE = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
VOCAB = 32
MODEL = reference_model(
    4,
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=96,
)
ANSWERS = Answers(MODEL)
# How a request may be asked for; of few kinds, so that answers are remembered.
KINDS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [3, 7, 11, 12]},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 1.7, "eos_token_id": [5, 9], "min_new_tokens": 6},
    {"do_sample": True, "seed": 5, "temperature": 1.5},
]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    # Lengths around block edges, few seeds: prefixes meet.
    length = draw(st.sampled_from([1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 33]))
    return {
        "at": draw(st.integers(0, 20)),
        "ids": ids_of(length, draw(st.integers(0, 1)), VOCAB),
        "num_tokens": draw(st.sampled_from([1, 2, 8, 17, 30])),
        "kind": draw(st.integers(0, len(KINDS) - 1)),
        "cancel_at": draw(st.sampled_from([None] * 5 + [3, 9, 15])),
        "priority": draw(st.integers(-1, 1)),
        "logprobs": draw(st.booleans()),
    }


def drawn_alone(request: dict[str, Any], memory: dict[Any, list[int]]) -> list[int]:
    """Return what a sampling request says in a roomy engine for itself."""
    key = (tuple(request["ids"]), request["num_tokens"])
    if key not in memory:
        with make_engine(MODEL, block_size=8) as engine:
            name = engine.add_request(
                request["ids"], max_new_tokens=request["num_tokens"], **KINDS[request["kind"]]
            )
            memory[key] = list(engine.run()[name].token_ids)
    return memory[key]


DRAWN: dict[Any, list[int]] = {}


def expected_of(request: dict[str, Any]) -> list[int]:
    kind = KINDS[request["kind"]]
    if kind.get("do_sample"):
        return drawn_alone(request, DRAWN)
    return ANSWERS(request["ids"], request["num_tokens"], pad_token_id=0, **kind)


@TRACE
@given(
    trace=st.lists(requests(), min_size=1, max_size=10),
    config=st.fixed_dictionaries(
        {
            "lag": st.sampled_from([0, 1, 4]),
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.sampled_from([1, 5, 17, 64]),
            "enable_prefix_caching": st.booleans(),
            # None, of 5 blocks, of all that are needed.
            "cpu_offload_space": st.sampled_from([0.0, 1e-5, 1e-3]),
        }
    ),
    num_blocks=st.integers(8, 14),
)
def test_any_trace_gives_what_generate_gives(
    trace: list[dict[str, Any]], config: dict[str, Any], num_blocks: int
) -> None:
    with make_engine(MODEL, block_size=8, num_blocks=num_blocks, **config) as engine:
        last: dict[int, torch_paged.RequestOutput] = {}
        cancelled: set[int] = set()
        step = 0
        while step <= 24 or not engine.is_idle:
            for i, request in enumerate(trace):
                if request["at"] == step:
                    engine.add_request(
                        request["ids"],
                        max_new_tokens=request["num_tokens"],
                        request_id=i,
                        priority=request["priority"],
                        logprobs=request["logprobs"],
                        **KINDS[request["kind"]],
                    )
                elif request["cancel_at"] is not None and step > request["at"]:
                    if step - request["at"] == request["cancel_at"] and i not in last:
                        engine.cancel(i)
                        cancelled.add(i)
            for out in engine.step():
                if out.finished:
                    assert out.request_id not in last
                    last[out.request_id] = out
            engine.check_integrity()
            step += 1
        assert_all_free(engine)
        core = core_of(engine)
        assert core.num_blocks <= num_blocks
        assert not core.is_prepared or core.host_blocks.num_used == 0
    assert sorted(last) == list(range(len(trace)))
    for i, request in enumerate(trace):
        tokens, expected = list(last[i].token_ids), expected_of(request)
        if last[i].finish_reason == "cancelled":
            assert i in cancelled and tokens == expected[: len(tokens)]
        else:
            assert tokens == expected, (request, last[i].error)
            ended = tokens[-1] in KINDS[request["kind"]].get("eos_token_id", ())
            assert last[i].finish_reason == ("stop" if ended else "length")
        if request["logprobs"]:
            assert len(last[i].logprobs or ()) == len(tokens)


def soak(num_requests: int, seed: int) -> dict[str, int]:
    """Run short requests with random cancels and failures; count their ends."""
    draw = random.Random(seed)
    ends: dict[str, int] = {}
    with make_engine(MODEL, block_size=8, num_blocks=24, max_num_seqs=8, lag=2) as engine:
        core = core_of(engine)
        prefill = core.step.prefill

        def sometimes_failing(inputs: Any) -> torch.Tensor:
            if draw.random() < 0.02:
                raise torch.OutOfMemoryError("by chance")
            logits = prefill(inputs)
            if draw.random() < 0.02:
                logits[0] = float("nan")
            return logits

        def raising(out: torch_paged.RequestOutput) -> None:
            if draw.random() < 0.1:
                raise ValueError("by chance")

        core.step.prefill = sometimes_failing
        asked: dict[int, list[int]] = {}
        done: set[int] = set()
        added = 0
        while added < num_requests or not engine.is_idle:
            while added < num_requests and len(asked) < 16:
                request = {
                    "ids": ids_of(draw.choice([1, 5, 8, 9, 17]), draw.randrange(2), VOCAB),
                    "num_tokens": draw.choice([1, 2, 5]),
                    "kind": draw.randrange(len(KINDS)),
                }
                engine.add_request(
                    request["ids"],
                    max_new_tokens=request["num_tokens"],
                    request_id=added,
                    on_output=raising if draw.random() < 0.1 else None,
                    deadline=0.0 if draw.random() < 0.02 else None,
                    **KINDS[request["kind"]],
                )
                asked[added] = expected_of(request)
                added += 1
            if draw.random() < 0.1 and asked:
                engine.cancel(draw.choice(list(asked)))
            for out in engine.step():
                if not out.finished:
                    continue
                assert out.request_id not in done, "ended twice"
                done.add(out.request_id)
                expected, tokens = asked.pop(out.request_id), list(out.token_ids)
                complete = out.finish_reason in ("stop", "length")
                assert tokens == (expected if complete else expected[: len(tokens)])
                ends[str(out.finish_reason)] = ends.get(str(out.finish_reason), 0) + 1
        engine.check_integrity()
        assert_all_free(engine)
        assert done == set(range(num_requests)), "a request was lost"
        assert not engine._service._live and not engine._service._inbox
    return ends


def test_soak_loses_and_doubles_nothing() -> None:
    ends = soak(300, seed=1)
    assert sum(ends.values()) == 300
    assert all(ends.get(reason, 0) > 3 for reason in ("stop", "length", "cancelled", "error"))
