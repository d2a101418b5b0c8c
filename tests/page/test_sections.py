from __future__ import annotations

import numpy as np
import pytest

from sightline.page.sections import Sections
from tests.page.packed import unpacked


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(
    "numbers",
    [[], [0], [-1, 127, -128], [300, -300], [70_000, 1], [2**40, 0, -(2**40)]],
    ids=["empty", "one", "i1", "i2", "i4", "f8"],
)
def test_a_column_comes_out_as_it_went_in(numbers: list[int], grows: bool) -> None:
    made = Sections()
    made.column("numbers", np.array(numbers, dtype=np.int64), grows=grows)
    assert unpacked(made.bytes())["numbers"].tolist() == numbers


def test_small_numbers_take_a_byte_each() -> None:
    made = Sections()
    made.column("small", np.arange(100))
    made.column("sorted", np.arange(0, 100_000, 1000), grows=True)
    assert [entry["type"] for entry in made.header] == ["i1", "i2"]


def test_floats_keep_nan_and_infinity() -> None:
    made = Sections()
    made.floats("floats", np.array([1.5, np.nan, np.inf, 1e300]))
    assert np.array_equal(unpacked(made.bytes())["floats"], [1.5, np.nan, np.inf, np.inf], equal_nan=True)


def test_tables_keep_every_character() -> None:
    made = Sections()
    made.table("texts", ["</script>", "×µ€", "\x00", "\U0001f600", "\ud800"])
    assert unpacked(made.bytes())["texts"] == ["</script>", "×µ€", "\x00", "\U0001f600", "?"]
