"""Random traces of requests that crowd each other out, with host memory of any size."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig

import torch_paged

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
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
VOCAB, SIZE, NUM_TOKENS = 32, 8, 38
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 96,
}
_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
MODELS = {
    "one kind": tiny(LlamaConfig, 4, **_SMALL, num_hidden_layers=1),
    "windows": tiny(
        Gemma3TextConfig, 3, **_SMALL, num_hidden_layers=3, layer_types=_TYPES, sliding_window=11
    ),
}
ANSWERS = {name: Answers(model) for name, model in MODELS.items()}
TABLES = {"one kind": 1, "windows": 3}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    # Short prompts that are soon admitted, and outputs that then lack blocks; prefixes meet.
    return {
        "at": draw(st.integers(0, 6)),
        "ids": ids_of(draw(st.sampled_from([1, 7, 8, 9, 16])), draw(st.integers(0, 2)), VOCAB),
        "eos": draw(st.sampled_from([None, None, None, [3, 7]])),
        "cancel_at": draw(st.sampled_from([None] * 4 + [12, 24, 36])),
    }


CONFIGS = st.fixed_dictionaries(
    {
        "lag": st.sampled_from([0, 1, 4]),
        "max_num_batched_tokens": st.sampled_from([7, 64]),
        "enable_prefix_caching": st.booleans(),
    }
)


@pytest.mark.parametrize("name", MODELS)
def test_any_trace_gives_what_generate_gives(name: str) -> None:
    num_swaps = 0

    @TRACE
    @given(
        trace=st.lists(requests(), min_size=3, max_size=7),
        config=CONFIGS,
        spare=st.integers(0, 4),
        # Of all blocks that there can be, of a few, and of none.
        num_host_blocks=st.sampled_from([200, 200, 200, 9, 0]),
    )
    def check(
        trace: list[dict[str, Any]], config: dict[str, Any], spare: int, num_host_blocks: int
    ) -> None:
        nonlocal num_swaps
        expected = [expected_of(name, request) for request in trace]
        # The longest has 54 tokens, in 7 columns.
        num_blocks = 7 * TABLES[name] + spare
        block_bytes = block_bytes_of(name)
        space = num_host_blocks * block_bytes / (1 << 30)
        config = {**config, "num_blocks": num_blocks, "cpu_offload_space": space}
        with make_engine(MODELS[name], block_size=SIZE, **config) as engine:
            last = run(engine, trace)
            stats = torch_paged.stats(engine._target)
            assert_all_free(engine)
            assert core_of(engine).host_blocks.num_used == 0
        assert stats.host_bytes <= num_host_blocks * block_bytes
        assert stats.swaps <= stats.preemptions
        if num_host_blocks == 200:
            assert stats.swaps == stats.preemptions
        num_swaps += stats.swaps
        for i, tokens in enumerate(expected):
            found = list(last[i].token_ids)
            if last[i].finish_reason == "cancelled":
                assert found == tokens[: len(found)]
            else:
                assert found == tokens, last[i].error

    check()
    assert num_swaps > 5


def expected_of(name: str, request: dict[str, Any]) -> list[int]:
    kwargs = {"eos_token_id": request["eos"], "pad_token_id": 0} if request["eos"] else {}
    assume(ANSWERS[name].is_clear(request["ids"], NUM_TOKENS, **kwargs))
    return ANSWERS[name](request["ids"], NUM_TOKENS, **kwargs)


@functools.cache
def block_bytes_of(name: str) -> int:
    with make_engine(MODELS[name], block_size=SIZE, num_blocks=1) as engine:
        return int(core_of(engine).pool.block_bytes)


def run(engine: torch_paged.Engine, trace: list[dict[str, Any]]) -> dict[int, Any]:
    last: dict[int, Any] = {}
    step = 0
    while step <= 6 or not engine.is_idle:
        for i, request in enumerate(trace):
            if request["at"] == step:
                engine.add_request(
                    request["ids"],
                    max_new_tokens=NUM_TOKENS,
                    request_id=i,
                    eos_token_id=request["eos"],
                )
            elif request["cancel_at"] == step and i not in last:
                engine.cancel(i)
        last.update({out.request_id: out for out in engine.step() if out.finished})
        engine.check_integrity()
        step += 1
    return last
