"""The clock tells which row needs what, and when, from the number of steps alone."""

from __future__ import annotations

from torch_paged.engine.decode_clock import DecodeClock
from torch_paged.engine.request import Request


def prefilled(name: str, num_tokens: int, max_new_tokens: int, num_blocks: int) -> Request:
    """A request behind its prefill, which sampled the first token."""
    request = Request(name, None, max_new_tokens, num_prompt_tokens=num_tokens)
    request.num_computed_tokens, request.num_output_tokens = num_tokens, 1
    request.blocks[0].ids = list(range(num_blocks))
    return request


def test_rows_end_when_their_last_token_is_scheduled() -> None:
    clock = DecodeClock(block_size=4)
    rows = [prefilled(str(n), 3, n, 8) for n in (3, 1, 2)]
    for row in rows:
        clock.start(row)
    ended = []
    for _ in range(3):
        ended.append([row.request_id for row in clock.ended_rows()])
        clock.step += 1
    assert ended == [["1"], ["2"], ["3"]]


def test_row_grows_before_the_step_that_needs_the_block() -> None:
    clock = DecodeClock(block_size=4)
    row = prefilled("a", 6, 20, 2)
    clock.start(row)
    assert list(clock.rows_to_grow(2)) == []  # tokens 6 and 7 have room
    assert list(clock.rows_to_grow(3)) == [row]
    row.blocks[0].ids.append(2)
    clock.watch_blocks(row)
    clock.step += 5
    assert list(clock.rows_to_grow(1)) == []
    clock.step += 1
    assert list(clock.rows_to_grow(1)) == [row]


def test_row_with_room_up_to_its_limit_never_grows() -> None:
    clock = DecodeClock(block_size=4)
    clock.start(prefilled("a", 6, 3, 2))  # 8 tokens are fed, the ninth is only sampled
    assert list(clock.rows_to_grow(1000)) == []


def test_stopped_row_is_brought_up_to_date_and_forgotten() -> None:
    clock = DecodeClock(block_size=4)
    row = prefilled("a", 6, 20, 2)
    clock.step = 7
    clock.start(row)
    clock.step += 5
    assert clock.num_decoded(row) == 5
    clock.stop(row)
    assert (row.num_computed_tokens, row.num_output_tokens) == (11, 6)
    assert clock.num_decoded(row) == 0 and not clock.rows
    clock.step += 100
    assert list(clock.ended_rows()) == list(clock.rows_to_grow(1)) == []


def test_row_counts_no_tokens_past_its_limit() -> None:
    clock = DecodeClock(block_size=4)
    row = prefilled("a", 6, 4, 3)
    clock.start(row)
    clock.step += 50
    assert clock.num_decoded(row) == 3


def test_row_that_starts_again_is_due_by_its_new_start() -> None:
    clock = DecodeClock(block_size=4)
    row = prefilled("a", 6, 10, 8)
    clock.start(row)
    clock.step += 2
    clock.stop(row)
    clock.step += 5
    row.num_computed_tokens, row.num_output_tokens = 8, 4
    clock.start(row)
    clock.step = 9  # the end that was planned at first
    assert list(clock.ended_rows()) == []
    clock.step = 13
    assert list(clock.ended_rows()) == [row]
