"""A bar is for people who wait: on a terminal, for long work, and gone before anything else is printed."""

from __future__ import annotations

import io
import sys

import pytest

from sightline.cli import screen as progress
from sightline.cli.screen import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_ends_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_DELAY", -1.0)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar("writing") as report:
        report(1, 4)
        report(3, 4)
        report(4, 4)
        seen = screen.getvalue()
        assert "writing" in seen
        assert "100%" in seen
        assert "\n" in seen[seen.index("100%") :]
    assert screen.getvalue() == seen


def test_quick_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar("writing") as report:
        report(1, 4)
        report(4, 4)
    assert screen.getvalue() == ""


def test_nothing_goes_into_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_DELAY", -1.0)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar("writing") as report:
        report(1, 4)
    assert screen.getvalue() == ""
