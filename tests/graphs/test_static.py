"""Static inputs: addresses stay, values arrive, padding is filled, in-flight copies are safe."""

from __future__ import annotations

import pytest
import torch

from torch_paged.graphs.static import StaticInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def inputs():
    inputs = StaticInputs(8, DEVICE)
    inputs.add("slots", torch.int32, fill=-1)
    inputs.add("ids", torch.int64, row_shape=(2,))
    inputs.add("scale", torch.float32, fill=float("nan"))
    return inputs


def test_new_input_holds_its_fill_value(inputs):
    assert inputs["slots"].tolist() == [-1] * 8
    assert inputs["ids"].tolist() == [[0, 0]] * 8
    assert inputs["scale"].isnan().all()


@pytest.mark.parametrize("values", [[3, 1], torch.tensor([3, 1]), (3, 1)])
def test_values_arrive_and_the_bucket_is_padded(inputs, values):
    inputs.copy_in("slots", [7] * 8)
    view = inputs.copy_in("slots", values, num_rows=4)
    assert view.tolist() == [3, 1, -1, -1]
    assert inputs["slots"].tolist() == [3, 1, -1, -1, 7, 7, 7, 7]


def test_without_a_bucket_only_the_values_are_written(inputs):
    assert inputs.copy_in("ids", [[1, 2], [3, 4], [5, 6]]).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert inputs["ids"][3:].tolist() == [[0, 0]] * 5


@pytest.mark.parametrize("name", ["slots", "ids"])
def test_empty_batch_is_all_padding(inputs, name):
    inputs["slots"].fill_(5)
    inputs["ids"].fill_(5)
    view = inputs.copy_in(name, [], num_rows=2)
    assert (view == (-1 if name == "slots" else 0)).all()
    assert (inputs[name][2:] == 5).all()


def test_full_capacity_is_usable(inputs):
    assert inputs.copy_in("slots", range(8)).tolist() == list(range(8))


def test_address_never_changes(inputs):
    before = inputs["slots"].data_ptr()
    for n in range(1, 9):
        assert inputs.copy_in("slots", range(n)).data_ptr() == before
    assert inputs["slots"].data_ptr() == before


def test_each_of_many_copies_carries_its_own_values(inputs):
    seen = [inputs.copy_in("slots", [n, -n]).clone() for n in range(50)]
    assert [rows.tolist() for rows in seen] == [[n, -n] for n in range(50)]


def test_host_tensor_may_be_changed_after_the_call(inputs):
    values = torch.arange(8, dtype=torch.int32)
    inputs.copy_in("slots", values)
    values.zero_()
    assert inputs["slots"].tolist() == list(range(8))


def test_inputs_made_under_inference_mode_are_writable_outside():
    with torch.inference_mode():
        inputs = StaticInputs(2, DEVICE)
        inputs.add("x", torch.int32)
    assert not inputs["x"].is_inference()
    assert inputs.copy_in("x", [1, 2]).tolist() == [1, 2]


def test_names_and_bytes_are_listed(inputs):
    assert list(inputs) == ["slots", "ids", "scale"]
    assert "ids" in inputs and "other" not in inputs
    assert inputs.nbytes == 8 * 4 + 16 * 8 + 8 * 4


@pytest.mark.parametrize(
    ("values", "num_rows", "message"),
    [
        ([0] * 9, None, "num_rows"),
        ([0] * 4, 3, "num_rows"),
        ([0], 9, "num_rows"),
        ([[1, 2]], None, "values must be"),
        (torch.tensor(3), None, "values must be"),
    ],
)
def test_rows_that_do_not_fit_are_refused(inputs, values, num_rows, message):
    with pytest.raises(ValueError, match=f"slots: {message}"):
        inputs.copy_in("slots", values, num_rows=num_rows)
    assert inputs["slots"].tolist() == [-1] * 8


def test_unknown_and_repeated_names_are_refused(inputs):
    with pytest.raises(KeyError):
        inputs.copy_in("other", [1])
    with pytest.raises(ValueError, match="already"):
        inputs.add("slots", torch.int32)


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity):
    with pytest.raises(ValueError, match="capacity"):
        StaticInputs(capacity, DEVICE)


@needs_cuda
def test_copies_queue_without_waiting_behind_a_busy_device(inputs):
    inputs.copy_in("slots", [9])
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in range(3):
            inputs.copy_in("slots", [n], num_rows=4)
        still_busy = not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert still_busy
    assert inputs["slots"].tolist() == [2, -1, -1, -1, -1, -1, -1, -1]


@needs_cuda
def test_more_copies_than_stages_never_overwrite_one_in_flight(inputs):
    results = []
    for n in range(20):
        torch.cuda._sleep(5_000_000)
        results.append(inputs.copy_in("slots", [n]).clone())
    assert [rows.item() for rows in results] == list(range(20))


@needs_cuda
def test_host_values_only(inputs):
    with pytest.raises(ValueError, match="on the host"):
        inputs.copy_in("slots", torch.zeros(2, dtype=torch.int32, device="cuda"))
