"""Random traces in tiny pools for models with sliding windows; every output is generate()'s."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, MistralConfig

sys.path.append(str(Path(__file__).parent))

from serving_case import (  # noqa: E402
    Answers,
    assert_all_free,
    core_of,
    ids_of,
    make_engine,
    tiny,
)

TRACE = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
VOCAB, WINDOW, SIZE = 32, 11, 8
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "sliding_window": WINDOW,
}
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
SLIDING = tiny(MistralConfig, 4, **_SMALL, num_hidden_layers=1)
HYBRID = tiny(Gemma3TextConfig, 3, **_SMALL, num_hidden_layers=3, layer_types=_TYPES)
ANSWERS = {"sliding": Answers(SLIDING), "hybrid": Answers(HYBRID)}
MODELS = {"sliding": SLIDING, "hybrid": HYBRID}
TABLES = {"sliding": 1, "hybrid": 3}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    # Around the edges of blocks and windows, few seeds: prefixes meet.
    length = draw(st.sampled_from([1, 7, 8, 10, 11, 16, 19, 33, 48]))
    return {
        "at": draw(st.integers(0, 20)),
        "ids": ids_of(length, draw(st.integers(0, 1)), VOCAB),
        "num_tokens": draw(st.sampled_from([1, 8, 17, 40])),
        "eos": draw(st.sampled_from([None, None, [3, 7, 11, 12]])),
        "cancel_at": draw(st.sampled_from([None] * 5 + [3, 9, 15])),
        "priority": draw(st.integers(-1, 1)),
    }


@pytest.mark.parametrize("name", MODELS)
@TRACE
@given(
    trace=st.lists(requests(), min_size=1, max_size=8),
    config=st.fixed_dictionaries(
        {
            "lag": st.sampled_from([0, 1, 4]),
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.sampled_from([1, 5, 17, 64]),
            "enable_prefix_caching": st.booleans(),
            "cpu_offload_space": st.sampled_from([0.0, 1e-5, 1e-3]),
        }
    ),
    spare=st.integers(0, 8),
)
def test_any_trace_gives_what_generate_gives(
    name: str, trace: list[dict[str, Any]], config: dict[str, Any], spare: int
) -> None:
    asked = []
    for request in trace:
        kwargs = {"pad_token_id": 0, "eos_token_id": request["eos"]}
        kwargs = kwargs if request["eos"] else {"pad_token_id": 0}
        assume(ANSWERS[name].is_clear(request["ids"], request["num_tokens"], **kwargs))
        asked.append(ANSWERS[name](request["ids"], request["num_tokens"], **kwargs))
    # The longest has 88 tokens, in 11 columns: room for it, and for little else.
    num_blocks = 11 * TABLES[name] + spare
    with make_engine(MODELS[name], block_size=SIZE, num_blocks=num_blocks, **config) as engine:
        last: dict[int, Any] = {}
        step = 0
        while step <= 24 or not engine.is_idle:
            for i, request in enumerate(trace):
                if request["at"] == step:
                    engine.add_request(
                        request["ids"],
                        max_new_tokens=request["num_tokens"],
                        request_id=i,
                        priority=request["priority"],
                        eos_token_id=request["eos"],
                    )
                elif request["cancel_at"] is not None and i not in last:
                    if step - request["at"] == request["cancel_at"]:
                        engine.cancel(i)
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
    for out, expected in zip((last[i] for i in range(len(trace))), asked, strict=True):
        tokens = list(out.token_ids)
        if out.finish_reason == "cancelled":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected, out.error


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_crowd_each_other_out_come_back(name: str) -> None:
    with make_engine(
        MODELS[name],
        block_size=SIZE,
        num_blocks=11 * TABLES[name],
        max_num_batched_tokens=16,
        lag=2,
    ) as engine:
        asked = {}
        for seed in range(8):
            ids = ids_of(5 + seed, seed, VOCAB)
            asked[engine.add_request(ids, max_new_tokens=40)] = (ids, seed)
        last = {}
        while not engine.is_idle:
            for out in engine.step():
                last[out.request_id] = list(out.token_ids)
            engine.check_integrity()
        preemptions = engine.num_preemptions
    assert preemptions > 0
    for request_id, (ids, _) in asked.items():
        if ANSWERS[name].is_clear(ids, 40, pad_token_id=0):
            assert last[request_id] == ANSWERS[name](ids, 40, pad_token_id=0)


@pytest.mark.parametrize("name", MODELS)
def test_prefix_is_found_after_its_request_gave_blocks_back(name: str) -> None:
    ids = ids_of(48, 1, VOCAB)
    config = {"block_size": SIZE, "max_num_batched_tokens": 16}
    with make_engine(MODELS[name], num_blocks=200, **config) as engine:
        # Room for all that was ever computed: nothing is evicted.
        assert core_of(engine).make_room(150)
        for _ in range(2):
            request_id = engine.add_request(ids, max_new_tokens=30)
            tokens = list(engine.run()[request_id].token_ids)
            assert tokens == ANSWERS[name](ids, 30, pad_token_id=0)
        step = core_of(engine).step
        seen = []
        prefill = step.prefill

        def counting(inputs: Any) -> Any:
            seen.append(inputs.ids.shape[0])
            return prefill(inputs)

        step.prefill = counting
        longer = [*ids, *tokens[:3]]
        request_id = engine.add_request(longer, max_new_tokens=20)
        assert list(engine.run()[request_id].token_ids) == tokens[3:23]
        assert sum(seen) == 3, "of 51 tokens 48 are found"


@pytest.mark.parametrize("num_blocks", [100, 106, 112])
def test_blocks_of_many_steps_are_given_ahead_only_where_all_tables_get_theirs(
    num_blocks: int,
) -> None:
    with make_engine(HYBRID, block_size=SIZE, num_blocks=num_blocks, max_num_seqs=4) as engine:
        core = core_of(engine)
        core.pool.grow(num_blocks)
        core.allocator.grow(num_blocks)
        for seed in range(4):
            engine.add_request(ids_of(9, seed, VOCAB), max_new_tokens=140, request_id=seed)
        ends = {out.finish_reason for out in engine.run().values()}
        assert ends == {"length"} and engine.num_preemptions == 0
        assert_all_free(engine)
