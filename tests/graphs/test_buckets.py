"""Batch buckets: coverage, minimality and splitting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_paged.graphs.buckets import check_buckets, default_buckets, pick_bucket, split_batch

bucket_lists = st.sets(st.integers(1, 300), min_size=1).map(lambda sizes: tuple(sorted(sizes)))


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (256, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)),
    ],
)
def test_default_buckets_end_with_the_full_batch(max_num_seqs, expected):
    assert default_buckets(max_num_seqs) == expected


def test_default_buckets_past_256_rise_in_steps_of_64():
    assert default_buckets(512)[-5:] == (256, 320, 384, 448, 512)
    assert default_buckets(330)[-3:] == (256, 320, 330)


@settings(deadline=None)
@given(st.integers(1, 2000))
def test_default_buckets_ascend_and_cover_every_batch(max_num_seqs):
    buckets = default_buckets(max_num_seqs)
    assert buckets == check_buckets(buckets)
    assert buckets[-1] == max_num_seqs
    # Padding stays below the batch itself, so a step never works on more than twice its rows.
    assert all(low * 2 >= high for low, high in zip(buckets, buckets[1:], strict=False))


@settings(deadline=None)
@given(st.integers(1, 400), bucket_lists)
def test_picked_bucket_is_the_smallest_that_fits(n, buckets):
    fitting = [size for size in buckets if size >= n]
    assert pick_bucket(n, buckets) == (min(fitting) if fitting else None)


@settings(deadline=None)
@given(st.integers(0, 1000), bucket_lists)
def test_split_batch_loses_no_row_and_fits_everywhere(n, buckets):
    chunks = split_batch(n, buckets)
    assert sum(chunks) == n
    assert all(pick_bucket(chunk, buckets) is not None for chunk in chunks)
    assert len(chunks) == -(-n // buckets[-1])


def test_given_buckets_are_sorted_and_made_unique():
    assert check_buckets([8, 1, 4, 4]) == (1, 4, 8)


@pytest.mark.parametrize("buckets", [[], [0, 1], [-1]])
def test_impossible_buckets_are_refused(buckets):
    with pytest.raises(ValueError, match="buckets"):
        check_buckets(buckets)


def test_impossible_sizes_are_refused():
    for call in (
        lambda: default_buckets(0),
        lambda: pick_bucket(0, (1,)),
        lambda: split_batch(-1, (1,)),
        lambda: split_batch(1, ()),
    ):
        with pytest.raises(ValueError):
            call()
