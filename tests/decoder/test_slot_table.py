"""Rows of a table of slots, and the words they travel in."""

import numpy as np
import pytest
import torch

from torch_paged.decoder.slot_table import Field, SlotTable
from torch_paged.decoder.transfer import aligned_starts, cut_words, put_words

CPU = torch.device("cpu")
FIELDS = {
    "length": Field(torch.int32, 3),
    "ids": Field(torch.int64, -1, (5,)),
    "weight": Field(torch.float64, 0.5),
    "last": Field(torch.int32),
}


@pytest.mark.parametrize("num_slots", [1, 3, 4, 17])
def test_rows_are_written_where_they_belong_and_nowhere_else(num_slots: int) -> None:
    table = SlotTable(num_slots, FIELDS, CPU)
    expected = {name: table[name].clone() for name in FIELDS}
    assert expected["ids"].shape == (num_slots, 5) and (expected["ids"] == -1).all()
    assert (expected["length"] == 3).all() and (expected["weight"] == 0.5).all()
    draw = np.random.default_rng(num_slots)
    for _ in range(20):
        slots = draw.permutation(num_slots)[: draw.integers(1, num_slots + 1)].tolist()
        rows = [
            (
                int(draw.integers(-(2**31), 2**31)),
                tuple(draw.integers(-(2**63), 2**63 - 1, 5).tolist()),
                float(draw.normal()),
                int(draw.integers(0, 9)),
            )
            for _ in slots
        ]
        assert table.write(slots, rows).tolist() == slots
        for slot, row in zip(slots, rows, strict=True):
            for name, value in zip(FIELDS, row, strict=True):
                expected[name][slot] = torch.tensor(value, dtype=FIELDS[name].dtype)
        for name, tensor in expected.items():
            assert torch.equal(table[name], tensor), name


def test_tensors_begin_where_kernels_may_read_16_bytes_at_a_time() -> None:
    for num_slots in range(1, 20):
        table = SlotTable(num_slots, FIELDS, CPU)
        start = min(table[name].data_ptr() for name in FIELDS)
        assert all((table[name].data_ptr() - start) % 16 == 0 for name in FIELDS)


def test_a_table_made_under_inference_mode_is_written_outside() -> None:
    with torch.inference_mode():
        table = SlotTable(2, FIELDS, CPU)
    table.write([1], [(7, (1, 2, 3, 4, 5), 2.0, 1)])
    table["last"].fill_(4)
    assert table["length"].tolist() == [3, 7]


def test_arrays_travel_together_and_come_apart_as_they_were() -> None:
    parts = [
        np.array([1, -2, 3], dtype=np.int32),
        np.array([], dtype=np.int64),
        np.array([[2**40, -5], [6, 7]], dtype=np.int64),
        np.arange(8, dtype=np.int64)[::2],
        np.array([0.1, -1e300]),
        np.array([9], dtype=np.int32),
    ]
    starts = aligned_starts([part.nbytes // 4 for part in parts])
    words = torch.full((starts[-1],), -1, dtype=torch.int32)
    put_words(words.numpy(), parts, starts)
    assert all(start % 16 == 0 for start in starts)
    for tensor, part in zip(cut_words(words, parts, starts), parts, strict=True):
        assert tensor.numpy().dtype == part.dtype and tensor.shape == part.shape
        assert (tensor.numpy() == part).all()
