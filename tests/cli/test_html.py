from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest
from click.testing import CliRunner

from sightline.cli import main
from sightline.page import document
from tests.builders import make_trace


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(document, "_viewer_file", lambda name: f"/* {name} */")
    monkeypatch.chdir(tmp_path)
    make_trace().save(tmp_path / "run.sight")
    return tmp_path / "run.sight"


@pytest.fixture
def browsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def opened(url: str) -> bool:
        seen.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", opened)
    return seen


def test_the_page_has_the_name_of_the_recording(run: Path) -> None:
    done = CliRunner().invoke(main, ["html", str(run)])
    assert done.exit_code == 0
    assert done.stderr.startswith("Wrote run.html: ")
    assert Path("run.html").read_text("utf-8").startswith("<!doctype html>")


def test_what_is_there_is_kept_unless_it_is_to_be_replaced(run: Path) -> None:
    Path("run.html").write_text("mine")
    done = CliRunner().invoke(main, ["html", str(run), "-o", "run.html"])
    assert done.exit_code == 1
    assert "run.html is there already: give another name with -o, or --force to replace it." in done.stderr
    assert Path("run.html").read_text() == "mine"
    assert CliRunner().invoke(main, ["html", str(run), "--force"]).exit_code == 0
    assert Path("run.html").read_text("utf-8") != "mine"


def test_open_starts_the_browser(run: Path, browsed: list[str]) -> None:
    assert CliRunner().invoke(main, ["html", str(run), "--open"]).exit_code == 0
    assert browsed == [Path("run.html").resolve().as_uri()]


def test_show_open_writes_a_page_elsewhere_and_opens_it(run: Path, browsed: list[str]) -> None:
    done = CliRunner().invoke(main, ["show", str(run), "--open"])
    assert done.exit_code == 0
    assert browsed[0].endswith("/run.html")
    assert not Path("run.html").exists()


def test_show_open_takes_no_view(run: Path, browsed: list[str]) -> None:
    done = CliRunner().invoke(main, ["show", str(run), "--open", "--view", "code"])
    assert done.exit_code == 2
    assert "--view does not go with --open: the page has all views. --step does." in done.stderr
    assert not browsed
