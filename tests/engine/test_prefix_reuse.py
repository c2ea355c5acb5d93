"""Requests share the blocks of a common prefix, and never more than that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torch_paged.engine import prefix_reuse
from torch_paged.engine.request import Request

sys.path.append(str(Path(__file__).parent))

from simulated_engine import assert_all_as_alone, make_engine, prompt  # noqa: E402


def test_group_that_arrives_together_computes_its_prompt_once() -> None:
    engine = make_engine(32, max_num_seqs=4, prefix_caching=True)
    for i in range(4):
        engine.add(Request(i, prompt(10), 6))
    step = engine.step()
    assert [(c.start, c.length) for c in step.prefills] == [(0, 10), (8, 2), (8, 2), (8, 2)]
    # Two shared blocks, and one of their own each.
    assert engine.scheduler.kv_blocks_used == 2 + 4
    engine.run()
    assert_all_as_alone(engine)


def test_prompt_found_in_full_leaves_its_last_block_to_run() -> None:
    engine = make_engine(32, prefix_caching=True)
    for name in "ab":
        engine.add(Request(name, prompt(8), 3))
        engine.run()
    assert engine.requests["b"].num_cached_tokens == 4
    assert_all_as_alone(engine)


def test_next_turn_finds_the_answer_of_the_last() -> None:
    engine = make_engine(32, prefix_caching=True)
    first = engine.add(Request("first", prompt(6), 12))
    engine.run()
    turn = [*prompt(6), *first.output_ids, 5, 5, 5]
    second = engine.add(Request("second", turn, 4))
    engine.run()
    # 17 of the 18 tokens were fed, so 4 blocks were full.
    assert second.num_cached_tokens == 16
    assert_all_as_alone(engine)


@pytest.mark.parametrize(
    "salt, prompt_ids, length",
    [(b"adapter", prompt(9), -1), (b"", [9, *prompt(9)[1:]], -1), (b"", None, 9)],
    ids=["other salt", "other first token", "ids unknown"],
)
def test_nothing_is_shared_with(salt: bytes, prompt_ids: list[int] | None, length: int) -> None:
    engine = make_engine(32, prefix_caching=True)
    engine.add(Request("a", prompt(9), 2))
    engine.run()
    request = Request("b", prompt_ids, 2, num_prompt_tokens=length, cache_salt=salt)
    engine.add(request)
    engine.run()
    assert request.num_cached_tokens == 0
    assert_all_as_alone(engine)


def test_blocks_of_a_failed_request_are_not_found_again() -> None:
    engine = make_engine(32, prefix_caching=True)
    engine.add(Request("a", prompt(9), 20))
    for _ in range(3):
        engine.step()
    engine.scheduler.finish("a", "error", "the logits are NaN")
    request = engine.add(Request("b", prompt(9), 2))
    engine.run()
    assert request.num_cached_tokens == 0


def test_only_computed_blocks_of_a_cancelled_prefill_are_found() -> None:
    engine = make_engine(32, prefix_caching=True, max_num_batched_tokens=9)
    engine.add(Request("a", prompt(30), 2))
    engine.step()
    engine.cancel("a")
    request = engine.add(Request("b", prompt(30), 2))
    engine.run()
    assert request.num_cached_tokens == 8
    assert request.output_ids == engine.expected(request)


def test_preempted_request_finds_its_own_blocks_again() -> None:
    engine = make_engine(7, prefix_caching=True, reserve=0)
    engine.add(Request("a", prompt(7, 1), 14))
    engine.add(Request("b", prompt(7, 2), 14))
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert engine.requests["b"].num_cached_tokens > 0
    assert_all_as_alone(engine)


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    original = prefix_reuse.block_keys

    def counting(*args: object, known: list[bytes], **options: object) -> list[bytes]:
        keys = original(*args, known=known, **options)
        hashed.extend(keys[len(known) :])
        return keys

    monkeypatch.setattr(prefix_reuse, "block_keys", counting)
    engine = make_engine(64, prefix_caching=True, max_num_batched_tokens=5)
    engine.add(Request("a", prompt(30), 30))
    engine.run()
    assert len(hashed) == len(set(hashed)) == (30 + 30) // 4
