from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from sightline.page import document as documents
from sightline.views.overview import overview
from tests.builders import make_trace
from tests.page.packed import recording_in
from tests.views.odd_traces import SCRIPT, hostile


@pytest.fixture
def viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_viewer_file", lambda name: f"/* {name} */")


@pytest.mark.usefixtures("viewer")
def test_a_cell_shows_the_page_in_a_frame_of_its_own() -> None:
    trace = make_trace()
    shown = trace._repr_html_()
    assert shown.count("<iframe") == 1
    assert 'sandbox="allow-scripts"' in shown
    found = re.search(r'srcdoc="([^"]*)"', shown)
    assert found is not None
    assert recording_in(html.unescape(found[1]))["run"]["ops"] == len(trace.ops)


@pytest.mark.usefixtures("viewer")
def test_names_are_text_in_a_notebook_too() -> None:
    shown = hostile()._repr_html_()
    assert SCRIPT not in shown
    assert "<script" not in shown


@pytest.mark.usefixtures("viewer")
@pytest.mark.parametrize("limit", ["MOST_OPS", "_MOST_BYTES"])
def test_a_page_too_large_for_a_notebook_is_the_overview(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, limit, 1)
    trace = make_trace()
    assert trace._repr_html_() == overview(trace)._repr_html_()


def test_without_a_viewer_a_cell_shows_the_overview(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "files", lambda package: tmp_path)
    trace = make_trace()
    assert trace._repr_html_() == overview(trace)._repr_html_()
