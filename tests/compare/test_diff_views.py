"""The views of a comparison at a hundred columns."""

from __future__ import annotations

import pytest

import sightline as sl
from tests.compare.models import net, recorded
from tests.conftest import Golden


@pytest.fixture(scope="module")
def parted() -> sl.Diff:
    return sl.diff(recorded(net(), name="before"), recorded(net(1.0, 2.0, 1.0), name="after"))


def test_the_verdict(parted: sl.Diff, golden: Golden) -> None:
    golden("diff_verdict", str(parted))


def test_the_table_of_modules(parted: sl.Diff, golden: Golden) -> None:
    golden("diff_modules", str(parted.summary()))


def test_both_sources_side_by_side(parted: sl.Diff, golden: Golden) -> None:
    golden("diff_source", str(parted.source()))
