"""Groups of equal rows are those that a dict of tuples finds."""

from __future__ import annotations

import numpy as np
import pytest

from sightline.analysis.row_groups import flat_positions, group_rows, list_keys


@pytest.mark.parametrize("high", [2, 1 << 30, (1 << 62) - 1])  # of the last no two columns fit one number
def test_groups_are_in_the_order_of_their_first_rows(high: int) -> None:
    chance = np.random.default_rng(0)
    columns = [chance.choice(np.array([-1, 0, high]), 200) for _ in range(4)]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    known: dict[tuple[int, ...], int] = {}
    expected = [known.setdefault(row, len(known)) for row in rows]
    groups = group_rows(*columns)
    assert groups.of.tolist() == expected
    assert groups.first.tolist() == [rows.index(row) for row in known]


def test_lists_have_one_number_where_they_are_equal() -> None:
    chance = np.random.default_rng(1)
    lists = [chance.integers(0, 3, chance.integers(0, 4)).tolist() for _ in range(100)]
    flat = np.array([item for each in lists for item in each])
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])])
    rows = chance.permutation(100)
    places, lengths = flat_positions(offsets, rows)
    numbers = list_keys(flat[places], lengths).tolist()
    meant = [tuple(lists[row]) for row in rows]
    assert len(set(numbers)) == len(set(meant)) == len(set(zip(numbers, meant, strict=True)))


def test_no_rows_have_no_groups() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    places, lengths = flat_positions(np.zeros(1, dtype=np.int64), nothing)
    assert not len(places)
    assert not len(list_keys(nothing, lengths))
    assert not len(group_rows(nothing, nothing).first)
