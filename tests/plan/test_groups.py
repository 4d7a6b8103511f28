"""``Groups``: the ragged array that carries every plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlength.plan import Groups

LISTS = st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=8)
VALUES = np.arange(51) ** 2 + 1


@given(LISTS)
def test_lists_come_back_as_they_went_in(lists):
    groups = Groups.from_lists(lists)
    assert groups.tolist() == lists
    assert len(groups) == len(lists)
    assert groups.sizes.tolist() == [len(row) for row in lists]


@given(LISTS)
def test_sums_and_maxima_are_those_of_each_group_and_zero_where_it_is_empty(lists):
    groups = Groups.from_lists(lists)
    rows = [[int(VALUES[i]) for i in row] for row in lists]
    assert groups.sums(VALUES).tolist() == [sum(row) for row in rows]
    assert groups.maxima(VALUES).tolist() == [max(row, default=0) for row in rows]


@given(LISTS.filter(len), st.data())
def test_take_gives_the_groups_in_the_asked_order_with_repeats(lists, data):
    wanted = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=10))
    assert Groups.from_lists(lists).take(wanted).tolist() == [lists[i] for i in wanted]


def test_a_group_is_reached_from_either_end_and_not_beyond():
    groups = Groups.from_lists([[1], [2, 3]])
    assert groups[-1].tolist() == [2, 3]
    with pytest.raises(IndexError, match="group 2 of 2"):
        groups[2]


def test_cutting_by_size_leaves_a_short_last_group():
    assert Groups.of_size([4, 5, 6], 2).tolist() == [[4, 5], [6]]
    assert Groups.of_size([], 2).tolist() == []
    assert Groups.singles([4, 5]).tolist() == [[4], [5]]
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        Groups.of_size([4], 0)


def test_the_fingerprint_tells_other_members_and_other_borders_apart():
    one = Groups.from_lists([[1, 2], [3]])
    assert one.fingerprint() == Groups.from_lists([[1, 2], [3]]).fingerprint() == "b630ee2ccb20e4f5"
    assert one.fingerprint() != Groups.from_lists([[1], [2, 3]]).fingerprint()
    assert one.fingerprint() != Groups.from_lists([[1, 2], [4]]).fingerprint()


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 3, 2, 3], []])
def test_offsets_that_do_not_cut_the_members_are_refused(offsets):
    with pytest.raises(ValueError, match="offsets"):
        Groups(np.arange(3), np.array(offsets, dtype=np.int64))
