"""Memory that was held, batch by batch: what refers to a value that has not come waits for it."""

from __future__ import annotations

import numpy as np

from sightline.assemble.values import Allocations
from sightline.data.arrays import EMPTY


def columns(found: dict[str, np.ndarray]) -> list[list[int]]:
    """Value, bytes, start and end."""
    return [column.tolist() for column in found.values()]


def test_a_value_whose_op_still_runs_is_waited_for() -> None:
    held = Allocations()
    rows = np.array([7, 64, 10, 7, -1, 12])
    assert columns(held.add(rows, values=7, last=False)) == [[], [], [], []]
    assert columns(held.add(EMPTY, values=8, last=False)) == [[7], [64], [10], [12]]
    assert columns(held.add(EMPTY, values=8, last=True)) == [[], [], [], []]


def test_of_a_killed_process_it_never_comes() -> None:
    held = Allocations()
    rows = np.array([6, 32, 9, 7, 64, 10])
    assert columns(held.add(rows, values=7, last=True)) == [[6], [32], [9], [-1]]
