"""An engine whose reports come as late as those of a GPU, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from torch_paged.engine.output import RequestOutput

sys.path.append(str(Path(__file__).parent))

from late_reports import late_reports  # noqa: E402
from replaying_graphs import ReplayingGraphs, capture  # noqa: E402
from serving_case import (  # noqa: E402
    assert_all_free,
    byte_tokenizer,
    core_of,
    ids_of,
    make_engine,
    run_checked,
    small_model,
    tiny,
)

VOCAB, SIZE, MOST = 32, 8, 30
_MOST_LAG = 6
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
}
_WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "head_dim": 16,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS = {
    "full": tiny(LlamaConfig, 4, **_SMALL, num_hidden_layers=1),
    "hybrid": tiny(Gemma3TextConfig, 3, **_SMALL, **_WINDOWS),
}
TABLES = {"full": 1, "hybrid": 2}
KINDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7, "eos_token_id": [5, 9], "min_new_tokens": 6},
    {"stop_strings": ["+", "*(", "0"], "tokenizer": byte_tokenizer()},
    {"do_sample": True, "seed": 5, "temperature": 1.5, "num_return_sequences": 2},
    # More end tokens than a state has room for at first.
    {"do_sample": True, "seed": 6, "top_k": 9, "eos_token_id": [*range(3, 15)]},
]
REPORTED = ("logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs")
ALONE: dict[Any, list[RequestOutput]] = {}


class Asked(NamedTuple):
    """A sequence that somebody asked for."""

    model: str
    ids: Sequence[int]
    num_tokens: int
    kind: int
    sample: int
    tops: int


def alone(asked: Asked) -> RequestOutput:
    """Return what a sequence is without a limit, in an engine for itself."""
    key = (asked.model, tuple(asked.ids), asked.kind)
    if key not in ALONE:
        with make_engine(MODELS[asked.model], block_size=SIZE, lag=0, max_num_seqs=1) as engine:
            engine.add_request(
                asked.ids,
                max_new_tokens=MOST,
                logprobs=20,
                prompt_logprobs=20,
                **KINDS[asked.kind],
            )
            ALONE[key] = list(run_checked(engine).values())
    return ALONE[key][asked.sample]


def assert_as_alone(asked: Asked, out: RequestOutput) -> None:
    """Check tokens, end and scores of an output, which may have been broken off."""
    wanted = alone(asked)
    expected, tokens = wanted.token_ids[: asked.num_tokens], list(out.token_ids)
    if out.finish_reason in ("stop", "length"):
        stops = wanted.finish_reason == "stop" and len(wanted.token_ids) <= asked.num_tokens
        assert (tokens, out.finish_reason) == (expected, "stop" if stops else "length"), asked
    assert tokens == expected[: len(tokens)], asked
    for name in REPORTED if asked.tops and tokens else ():
        values, others = getattr(out, name), getattr(wanted, name)
        assert len(values) == (len(asked.ids) if "prompt" in name else len(tokens))
        for value, other in zip(values, others, strict=False):
            if "top" in name and value is not None:
                assert len(value) == asked.tops
                value, other = [v for _, v in value], [v for _, v in other[: asked.tops]]
            assert value == (None if value is None else pytest.approx(other, abs=2e-4)), asked


class Crowd:
    """Requests that come, are cancelled and raise by chance; what came of them is checked."""

    def __init__(self, model: str, engine: Any, draw: random.Random) -> None:
        self.model, self.engine, self.draw = model, engine, draw
        self.asked: dict[Any, Asked] = {}
        self.excused: dict[Any, set[str]] = {}  # how else a sequence may end
        self.tokens: dict[Any, list[int]] = {}
        self.ended: dict[Any, RequestOutput] = {}

    def add(self, name: int) -> None:
        """Add a request of one or more sequences."""
        draw, kind = self.draw, self.draw.randrange(len(KINDS))
        ids, tops = ids_of(draw.choice([1, 8, 9, 25]), 1, VOCAB), draw.choice([0, 0, 0, 1, 5])
        num_tokens, deadline = draw.choice([1, 3, 17, 30]), draw.choice([None] * 20 + [0.0])
        num_sequences = KINDS[kind].get("num_return_sequences", 1)
        names = [name, *(f"{name}__child#{i}" for i in range(num_sequences - 1))]
        for i, sequence in enumerate(names):
            self.asked[sequence] = Asked(self.model, ids, num_tokens, kind, i, tops)
            self.excused[sequence] = set() if deadline is None else {"cancelled"}
            self.tokens[sequence] = []
        self.engine.add_request(
            ids,
            max_new_tokens=num_tokens,
            request_id=name,
            priority=draw.randint(-1, 1),
            logprobs=tops,
            prompt_logprobs=tops,
            deadline=deadline,
            on_output=draw.choice([None, None, self._hear]),
            **KINDS[kind],
        )

    def cancel(self) -> None:
        """Cancel one of the sequences, or its request."""
        name = self.draw.choice([*self.asked])
        for other in self.asked:
            if str(other).startswith(f"{name}__"):
                self.excused[other].add("cancelled")
        self.excused[name].add("cancelled")
        with contextlib.suppress(KeyError):  # it has ended
            self.engine.cancel(name)

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in what a step returned."""
        for out in outputs:
            name = out.request_id
            assert name not in self.ended, "a request must end once, and be silent afterwards"
            self.tokens[name] += out.new_token_ids
            assert out.token_ids == self.tokens[name]
            if out.finished:
                self.ended[name] = out

    def _hear(self, out: RequestOutput) -> None:
        if self.draw.random() < 0.05:
            self.cancel()
        if self.draw.random() < 0.05:
            self.excused[out.request_id].add("error")
            raise ValueError("by chance")


def run_crowd(
    model: str, seed: int, captured: Callable[[Any], None] | None = None
) -> Counter[str]:
    """Serve a crowd in a tiny pool whose reports are late by chance; count what happened."""
    draw = random.Random(seed)
    config: dict[str, Any] = {
        "lag": draw.choice([0, 1, 3, _MOST_LAG]),
        "max_num_seqs": draw.randint(3, 6),
        "max_num_batched_tokens": draw.choice([5, 17, 64]),
        "enable_prefix_caching": draw.random() < 0.7,
        "num_blocks": draw.randint(8, 11) * TABLES[model],
    }
    chance, added = draw.choice([0.0, 0.2, 0.7]), 0
    with (
        late_reports(lambda: draw.random() < chance) as device,
        make_engine(MODELS[model], block_size=SIZE, **config) as engine,
    ):
        if captured is not None:
            captured(core_of(engine))
        crowd = Crowd(model, engine, draw)
        while added < 18 or not engine.is_idle:
            if added < 18 and engine.num_waiting < 6:
                crowd.add(added)
                added += 1
            if draw.random() < 0.04:
                crowd.cancel()
            crowd.take(engine._service.advance(tokens=draw.random() < 0.7))
            engine.check_integrity()
        assert_all_free(engine)
        counts = Counter(late=device.num_late, preemptions=engine.num_preemptions)
    assert crowd.ended.keys() == crowd.asked.keys()
    for name, out in crowd.ended.items():
        assert out.finish_reason in {"stop", "length"} | crowd.excused[name], out.error
        assert_as_alone(crowd.asked[name], out)
        counts[str(out.finish_reason)] += 1
    return counts


def test_late_reports_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # The log of tokens comes round as often as it may.
    monkeypatch.setattr("torch_paged.engine.engine._LOG_STEPS", 4 * (_MOST_LAG + 2))
    monkeypatch.setattr("torch_paged.engine.top_log._LOG_BYTES", 0)
    counts = sum((run_crowd("full", seed) for seed in range(4)), Counter())
    assert all(counts[name] > 3 for name in ("late", "stop", "length", "cancelled", "error"))
    assert counts["preemptions"] > 0


def test_captured_steps_with_late_reports_change_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs_of = "torch_paged.engine.prompt_graphs."
    large = "torch_paged.engine.large_prompts."
    monkeypatch.setattr(graphs_of + "_TOKEN_BUCKETS", (4, 9, 16))
    monkeypatch.setattr(large + "LARGE_TOKEN_BUCKETS", (32, 64))
    monkeypatch.setattr(graphs_of + "_CHUNKS", ((9, 2), (16, 3), (64, 6)))
    monkeypatch.setattr(graphs_of + "_DECODING_BUCKETS", (1, 2, 4))
    monkeypatch.setattr(graphs_of + "_LARGE_DECODING", 4)
    sizes: set[tuple[int, int]] = set()
    for seed in range(1, 4):
        graphs = ReplayingGraphs()
        counts = run_crowd("hybrid", seed, partial(capture, graphs=graphs, buckets=(1, 4)))
        assert counts["length"] and graphs.num_replays > 20
        sizes |= {key[2:4] for key in graphs.code if key[0] == "serve prefill"}
    assert {tokens for tokens, _ in sizes} >= {4, 9, 16, 32}
    assert {decoding > 0 for _, decoding in sizes} == {False, True}


def test_samples_that_score_their_prompt_again_meanwhile_do_not_change_its_scores() -> None:
    """The second sample starts before it is known that the first has scored the whole prompt."""

    def scores(lag: int) -> list[list[float | None]]:
        with make_engine(
            small_model(), block_size=8, lag=lag, max_num_batched_tokens=20
        ) as engine:
            engine.add_request(
                ids_of(20, 3),
                max_new_tokens=8,
                request_id="a",
                do_sample=True,
                num_return_sequences=2,
                prompt_logprobs=True,
            )
            outputs = run_checked(engine).values()
        return [list(out.prompt_logprobs or ()) for out in outputs]

    with late_reports(lambda: False) as device:
        late = scores(lag=4)
    assert device.num_late and len(late[0]) == 20
    assert late == scores(lag=0)
