from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sightline as sl
from sightline.page import document as documents
from sightline.page.document import document
from sightline.page.payload import payload
from tests.builders import TraceBuilder, make_trace
from tests.page.packed import recording_in, unpacked
from tests.views.odd_traces import SCRIPT, hostile, nested


@pytest.fixture(autouse=True)
def _viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page can be checked without the viewer being built."""
    monkeypatch.setattr(documents, "_viewer_file", lambda name: f"/* {name} é */")


def test_nothing_of_a_recording_stands_in_the_page_as_markup() -> None:
    page = document(hostile().index)
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    assert "<title>&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert any(SCRIPT in text for text in recording_in(page)["strings"])


def test_the_policy_allows_the_one_script_and_the_one_style_sheet_and_nothing_else() -> None:
    page = document(make_trace().index)
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        text = page.rpartition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in found[1]
    assert found[1].startswith("default-src 'none'; ")
    assert "unsafe" not in found[1]
    assert not re.search(r"(src|href)\s*=", page.replace(found[0], ""))


def test_the_columns_are_those_of_the_recording() -> None:
    trace = make_trace(2)
    held = unpacked(payload(trace.index))
    strings = held["strings"]
    assert [strings[at] for at in held["ops.name"]] == [op.name for op in trace.ops]
    assert held["values.producer"].tolist() == trace.data.values.producer.tolist()
    assert [strings[at] for at in held["values.meta"]] == [str(value) for value in trace.values]
    assert held["run"]["ops"] == len(trace.ops)


def _empty() -> sl.Trace:
    return TraceBuilder().build()


def _single_op() -> sl.Trace:
    with sl.trace(ops="aten") as t:
        torch.ones(2)
    return t


@pytest.mark.parametrize("make", [hostile, nested, _empty, _single_op])
def test_odd_recordings_have_a_page(make: Callable[[], sl.Trace]) -> None:
    held = recording_in(document(make().index))
    assert held["run"]["ops"] == len(held["ops.name"])


def test_a_saved_recording_has_the_page_of_the_one_it_was_made_from(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with sl.trace(model, stats=True) as t:
        model(torch.ones(1, 3)).sum().backward()
    t.save(tmp_path / "run.sight")
    held, loaded = (unpacked(payload(each.index)) for each in (t, sl.load(tmp_path / "run.sight")))
    assert held.keys() == loaded.keys()
    for name in ("strings", "files", "problems", "ops.line", "tree.label", "stats.mean"):
        assert repr(held[name]) == repr(loaded[name])


def test_without_a_viewer_one_sentence_gives_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(documents, "files", lambda package: tmp_path)
    with pytest.raises(sl.UsageError, match=r"^The viewer of the page is not built: run `make viewer` .*\.$"):
        make_trace().html(tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()
