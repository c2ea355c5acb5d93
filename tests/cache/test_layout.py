"""Layers of a kind share tables, tables share tensors, and every layer has a place of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_paged.cache.layout import ONE_KIND, LayerKind, make_layout

SHAPE = (2, 16, 16)


def test_layers_of_one_kind_have_one_table_and_a_tensor_each() -> None:
    layout = make_layout([SHAPE, (1, 8, 8), SHAPE], [0, 0, 0], 100)
    assert layout.kinds == ONE_KIND and layout.num_tables == 1
    assert layout.places == ((0, 0), (0, 1), (0, 2)) and layout.representatives == (0, 1, 2)
    layout = make_layout([SHAPE] * 2, [9, 9], 100)
    assert layout.kinds == (LayerKind(9),) and layout.places == ((0, 0), (0, 1))


def test_alternating_layers_have_two_tables_over_half_the_tensors() -> None:
    layout = make_layout([SHAPE] * 6, [9, 0] * 3, 100)
    assert layout.kinds == (LayerKind(0, 0, 1), LayerKind(9, 1, 1))
    assert layout.places == ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2))
    assert len(layout.representatives) == 3


def test_many_layers_of_a_kind_have_several_tables() -> None:
    windows = [0 if layer % 6 == 5 else 512 for layer in range(26)]  # 4 and 22
    layout = make_layout([SHAPE] * 26, windows, 1 << 15)
    assert [(kind.window, kind.num_tables) for kind in layout.kinds] == [(0, 1), (512, 6)]
    assert len(layout.representatives) == 4


def test_one_layer_among_many_does_not_make_as_many_tables() -> None:
    layout = make_layout([SHAPE] * 40, [0] + [64] * 39, 1000)
    assert max(kind.num_tables for kind in layout.kinds) <= 8


def test_window_that_no_sequence_fills_is_none() -> None:
    assert make_layout([SHAPE] * 4, [100, 0, 100, 0], 100).kinds == ONE_KIND
    assert make_layout([SHAPE] * 4, [99, 0, 99, 0], 100).num_tables == 2


@pytest.mark.parametrize(("windows", "kept"), [([5, 0], 0), ([5, 9], 9)])
def test_layers_of_unequal_shapes_keep_what_the_widest_window_needs(
    windows: list[int], kept: int
) -> None:
    layout = make_layout([SHAPE, (1, 32, 32)], windows, 100)
    assert layout.kinds == (LayerKind(kept),) and layout.places == ((0, 0), (0, 1))


def test_wrong_number_of_windows_is_named() -> None:
    with pytest.raises(ValueError, match="3 layer shapes for 2 windows"):
        make_layout([SHAPE] * 3, [0, 0], 10)


@given(st.lists(st.sampled_from([0, 5, 9]), min_size=1, max_size=70))
def test_no_two_layers_share_a_place_and_kinds_match(windows: list[int]) -> None:
    layout = make_layout([SHAPE] * len(windows), windows, 100)
    assert len(set(layout.places)) == len(windows)
    tables = [kind for kind in layout.kinds for _ in range(kind.num_tables)]
    assert [tables.index(kind) for kind in layout.kinds] == [k.first_table for k in layout.kinds]
    for window, (table, tensor) in zip(windows, layout.places, strict=True):
        assert tables[table].window == window and tensor < len(layout.representatives)


@given(st.integers(0, 200), st.integers(1, 40), st.sampled_from([1, 4, 16]))
def test_first_column_is_the_first_that_any_later_query_sees(
    query: int, window: int, size: int
) -> None:
    first = LayerKind(window).first_column(query, size)
    visible = range(max(0, query - window + 1), query + 1)
    assert first == visible[0] // size
    assert LayerKind().first_column(query, size) == 0
