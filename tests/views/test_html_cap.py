"""A page of a long view has an end, and says what it leaves out."""

from __future__ import annotations

import pytest

from sightline.views.rendering import Column, View, grid, line
from tests.views.long_run import long_run


def test_a_page_of_a_long_view_is_cut_and_says_so() -> None:
    view = View(tuple(line(f"line {number}") for number in range(10_000)))
    page = view._repr_html_()
    assert "line 3999" in page
    assert "line 4000" not in page
    assert "… 6,000 more lines are left out here; print() shows all, filters fewer" in page
    assert str(view).count("\n") == 9_999


def test_a_short_view_is_whole() -> None:
    view = View(tuple(line(f"line {number}") for number in range(4000)))
    assert "left out" not in view._repr_html_()
    assert "line 3999" in view._repr_html_()


def test_long_lines_count_by_their_length() -> None:
    view = View(tuple(line("x" * 100_000) for _ in range(100)))
    page = view._repr_html_()
    assert len(page) < 2 << 20
    assert "more lines are left out" in page


def test_a_long_table_is_cut_too() -> None:
    table = grid([Column("n")], [[str(number)] for number in range(5000)])
    page = View((line("head"), table, line("foot")))._repr_html_()
    assert page.count("<tr>") == 1 + 3999
    assert "… 1,002 more lines are left out" in page


@pytest.mark.parametrize("view", ["code", "log"])
def test_pages_of_a_long_run_stay_small(view: str) -> None:
    options = {"fold": False}
    page = getattr(long_run(8_000), view)(**options)._repr_html_()
    assert len(page) < 4 << 20
    assert "more lines are left out" in page
