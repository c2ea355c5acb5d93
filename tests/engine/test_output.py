"""Outputs are snapshots that copy nothing."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from itertools import product

import pytest

from torch_paged.engine.output import PrefixView, RequestOutput, RunningOutput
from torch_paged.engine.request import Request


def test_output_does_not_change_when_tokens_follow() -> None:
    request = Request("a", [1, 2], 9)
    request.output_ids += [10, 11]
    logprobs = [-0.1, -0.2]
    early = RequestOutput.of(request, since=1, logprobs=logprobs)
    request.output_ids += [12]
    logprobs.append(-0.3)
    late = RequestOutput.of(request, since=2, finish_reason="stop", logprobs=logprobs)
    assert early.token_ids == [10, 11] and early.new_token_ids == [11]
    assert early.logprobs == [-0.1, -0.2]
    assert not early.finished and early.finish_reason is None
    assert late.token_ids == [10, 11, 12] and late.new_token_ids == [12]
    assert late.finished and late.finish_reason == "stop"
    assert (late.request_id, late.prompt_ids, late.logprobs) == ("a", [1, 2], [-0.1, -0.2, -0.3])


def test_reason_of_a_failure_is_told_at_the_end_only() -> None:
    request = Request("a", None, 9, num_prompt_tokens=4)
    request.error = "the logits are NaN"
    assert RequestOutput.of(request, since=0).error is None
    last = RequestOutput.of(request, since=0, finish_reason="error")
    assert last.error == "the logits are NaN" and last.prompt_ids is None
    assert last.logprobs is None


class CountingList(list[int]):
    """Counts the items that are copied out of it."""

    copied = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]
        item = super().__getitem__(index)  # type: ignore[index]
        self.copied += len(item) if isinstance(item, list) else 1
        return item


def test_streaming_copies_each_token_once() -> None:
    request = Request("a", [1], 1000)
    request.output_ids = ids = CountingList()
    for token in range(1000):
        ids.append(token)
        output = RequestOutput.of(request, since=token)
        assert len(output.token_ids) == token + 1 and output.token_ids[-1] == token
    assert ids.copied == 2 * 1000


@pytest.mark.parametrize("length", [0, 1, 4, 5])
def test_view_indexes_and_slices_like_the_list_it_shows(length: int) -> None:
    items = [10, 11, 12, 13, 14]
    view, shown = PrefixView(items, length), items[:length]
    ends = [None, *range(-6, 7)]
    for start, stop, stride in product(ends, ends, [None, 1, 2, -1, -2]):
        assert view[start:stop:stride] == shown[start:stop:stride]
    for index in range(-6, 7):
        if -length <= index < length:
            assert view[index] == shown[index]
        else:
            with pytest.raises(IndexError, match="out of range"):
                view[index]
    assert list(view) == shown and list(reversed(view)) == shown[::-1]
    assert len(view) == length and repr(view) == repr(shown)
    assert (13 in view) == (13 in shown)


def test_view_equals_sequences_of_the_same_items() -> None:
    view = PrefixView([1, 2, 3], 2)
    assert view == [1, 2] and view == (1, 2) and view == PrefixView([1, 2])
    assert view != [1, 2, 3] and view != [2, 1] and view != "12"
    with pytest.raises(TypeError, match="unhashable"):
        hash(view)


def test_output_can_be_pickled() -> None:
    request = Request("a", [1, 2], 9)
    request.output_ids += [10, 11]
    output = RequestOutput.of(request, since=0)
    assert pickle.loads(pickle.dumps(output)) == output


def running(**fields: object) -> RequestOutput:
    values = {"name": "a", "prompt": [1, 2], "items": [10, 11, 12], "since": 1, "count": 2}
    return RunningOutput(**{**values, "logprobs": [-0.1, -0.2, -0.3], **fields})  # type: ignore[arg-type]


def test_the_output_of_a_running_request_is_a_record_like_any_other() -> None:
    output = running()
    plain = RequestOutput("a", [1, 2], [10, 11], [11], False, None, [-0.1, -0.2], None)
    assert isinstance(output, RequestOutput)
    assert dataclasses.asdict(output) == dataclasses.asdict(plain)
    assert repr(output) == repr(plain)
    assert output == running() and output != running(count=3)
    for copied in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert type(copied) is RequestOutput and copied == plain
    assert running(logprobs=None).logprobs is None


def test_the_output_of_a_running_request_cannot_be_changed() -> None:
    output = running()
    for field in dataclasses.fields(RequestOutput):
        with pytest.raises(AttributeError):
            setattr(output, field.name, None)
        with pytest.raises(AttributeError):
            delattr(output, field.name)
