"""Requests check what they are made of."""

from __future__ import annotations

from array import array

import pytest

from torch_paged.engine.request import Request, RequestStatus


@pytest.mark.parametrize("ids", [[4, 5, 6], (4, 5, 6), range(4, 7), array("q", [4, 5, 6])])
def test_prompt_may_be_any_sequence(ids: list[int]) -> None:
    request = Request("a", ids, 2)
    assert request.num_prompt_tokens == 3
    assert request.prompt_ids is ids
    assert request.status is RequestStatus.WAITING and not request.is_finished


def test_prompt_may_be_known_by_its_length_alone() -> None:
    request = Request("a", None, 2, num_prompt_tokens=7)
    assert request.num_prompt_tokens == request.num_tokens == 7


def test_last_token_needs_no_room_in_the_cache() -> None:
    assert Request("a", [1, 2, 3], 1).max_kv_tokens == 3
    assert Request("a", [1, 2, 3], 5).max_kv_tokens == 7


@pytest.mark.parametrize(
    "ids, length, max_new_tokens, message",
    [
        ([], -1, 4, "at least 1 token, got 0"),
        (None, -1, 4, "at least 1 token, got 0"),
        (None, 0, 4, "at least 1 token, got 0"),
        ([1, 2], 3, 4, "must be len"),
        ([1, 2], -1, 0, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_request_refuses(
    ids: list[int] | None, length: int, max_new_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Request("a", ids, max_new_tokens, num_prompt_tokens=length)


def test_requests_are_equal_only_to_themselves() -> None:
    first, second = Request("a", [1], 1), Request("a", [1], 1)
    assert first == first and first != second and len({first, second}) == 2


def test_long_prompt_stays_out_of_the_representation() -> None:
    assert len(repr(Request("a", list(range(100_000)), 1))) < 1000
