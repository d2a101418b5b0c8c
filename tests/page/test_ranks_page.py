"""The page of a distributed job: all ranks first, each side of a difference one click away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import sightline as sl
from sightline.cli import main
from sightline.page import document as documents
from sightline.page import ranks as ranks_page
from sightline.page.document import ranks_document
from tests.page.conftest import Opener
from tests.page.packed import blocks_in
from tests.ranks.fake_ranks import record_ranks

WORLD = 4


def part(rank: int) -> None:
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 2:
        x = x.relu()
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "run.sight"
    record_ranks(path, part, WORLD)
    return path


def job_of(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The job as the page describes it, and its blocks."""
    run = sl.load(path)._run()
    assert run is not None
    blocks = blocks_in(ranks_document(run))
    job: dict[str, Any] = blocks["ranks"]["job"]
    return job, blocks


@pytest.fixture
def no_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page can be checked without the viewer being built."""
    monkeypatch.setattr(documents, "_viewer_file", lambda name: "")


@pytest.mark.usefixtures("no_viewer")
def test_the_page_holds_one_rank_of_each_kind(parted: Path) -> None:
    job, blocks = job_of(parted)
    assert list(blocks) == ["recording-0", "recording-2", "ranks"]
    assert [(kind["rank"], kind["text"]) for kind in job["kinds"]] == [
        (0, "ranks 0, 1 and 3"),
        (2, "rank 2"),
    ]
    assert (job["name"], job["world"]) == ("trace", WORLD)


@pytest.mark.usefixtures("no_viewer")
def test_a_difference_leads_to_its_op_on_both_sides(parted: Path) -> None:
    job, blocks = job_of(parted)
    problem = next(each for each in job["problems"] if each["kind"] == "desync")
    first = part.__code__.co_firstlineno
    seen = []
    for side in (*problem["sides"], *problem["parting"]):
        held = blocks[f"recording-{side['rank']}"]
        name = held["strings"][held["ops.name"][side["op"]]]
        seen.append((side["ranks"], name, int(side["place"].partition(" in ")[0].rpartition(":")[2]) - first))
    assert seen == [
        ("ranks 0, 1 and 3", "c10d::allreduce_", 7),
        ("rank 2", "c10d::broadcast_", 5),
        ("rank 0", "c10d::allreduce_", 7),
        ("rank 2", "relu", 4),
    ]
    assert problem["since"] == "after collective #0"


@pytest.mark.usefixtures("no_viewer")
def test_the_overview_is_that_of_the_terminal_with_cards_for_its_problems(parted: Path) -> None:
    job, _ = job_of(parted)
    lines = ["".join(text for text, _ in block["line"]) for block in job["blocks"] if "line" in block]
    printed = str(sl.load(parted))
    assert lines[0].startswith("run trace  4 ranks")
    assert all(line.rstrip() in printed for line in lines)
    assert not any("desync" in line for line in lines)
    placed = [block["problem"] for block in job["blocks"] if "problem" in block]
    assert placed == list(range(len(job["problems"])))[:4]


@pytest.mark.usefixtures("no_viewer")
def test_a_job_with_many_kinds_of_ranks_holds_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> None:
        x = torch.ones(4)
        for _ in range(rank):
            x = x.relu()
        if rank == 4:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)

    record_ranks(tmp_path / "run.sight", run, 5)
    monkeypatch.setattr(ranks_page, "MOST_RANKS", 2)
    job, blocks = job_of(tmp_path / "run.sight")
    assert list(blocks) == ["recording-0", "recording-4", "ranks"]
    assert [kind["rank"] for kind in job["kinds"]] == [0, -1, -1, -1, 4]


@pytest.mark.usefixtures("no_viewer")
def test_a_cell_of_a_notebook_shows_all_ranks(parted: Path) -> None:
    job = sl.load(parted)
    assert "id=&quot;ranks&quot;" in job._repr_html_()
    assert "id=&quot;ranks&quot;" not in job.ranks[2]._repr_html_()


@pytest.mark.usefixtures("no_viewer")
def test_a_rank_that_never_came_is_a_side(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        x = torch.ones(4)
        dist.all_reduce(x)
        if rank == 1:
            raise ValueError("no more data")
        dist.all_reduce(x)

    record_ranks(tmp_path / "run.sight", run, 2, [0])
    with pytest.raises(ValueError, match="no more data"):
        record_ranks(tmp_path / "run.sight", run, 2, [1])
    job, _ = job_of(tmp_path / "run.sight")
    problem = next(each for each in job["problems"] if each["kind"] in ("desync", "hang"))
    assert [side["ranks"] for side in problem["sides"]] == ["rank 0", "rank 1"]
    assert "no more data" in problem["sides"][1]["text"]
    assert all(side["op"] >= 0 for side in problem["sides"])


def test_a_step_or_a_rank_has_a_page_of_its_own(tmp_path: Path, parted: Path) -> None:
    pytest.importorskip("playwright")
    for name, options in (("all", []), ("one", ["--rank", "1"])):
        target = tmp_path / f"{name}.html"
        done = CliRunner().invoke(main, ["html", str(parted), "-o", str(target), *options])
        assert done.exit_code == 0, done.output
        assert f"Wrote {target}: " in done.output
    assert "ranks" in blocks_in((tmp_path / "all.html").read_text("utf-8"))
    assert list(blocks_in((tmp_path / "one.html").read_text("utf-8"))) == ["recording"]


def test_ranks_in_the_browser(opened: Opener, parted: Path) -> None:
    page = opened(sl.load(parted))
    assert page.text("h1") == "trace"
    assert "ranks 0, 1 and 3: " in page.text(".job .lines")
    assert "This page holds the recording of rank 0 (for ranks 0, 1 and 3), rank 2" in page.text(".job")
    assert page.barriers() == []
    page.page.locator("[aria-label='Show the line on rank 2']").first.click()
    page.page.wait_for_selector(".code-line.current")
    assert "dist.broadcast(x, 0)" in page.line()
    assert page.fragment().startswith("#rank-2/op-")
    assert page.barriers() == []
    page.page.click("text=ranks 0, 1 and 3")
    page.page.wait_for_selector("[aria-pressed=true] >> text=ranks 0, 1 and 3")
    assert page.fragment().startswith("#rank-0")
    page.page.click("text=all ranks")
    page.page.wait_for_selector(".job")
    assert page.fragment() == ""


def test_a_link_leads_to_an_op_of_a_rank(opened: Opener, parted: Path) -> None:
    run = sl.load(parted)
    op = next(op.id for op in run.ranks[2].ops if op.name == "relu")
    page = opened(run, fragment=f"#rank-2/op-{op}")
    page.page.wait_for_selector(".detail h2")
    assert page.text(".detail h2") == "relu"
    assert page.fragment() == f"#rank-2/op-{op}"
    other = opened(run, fragment="#rank-77/op-1")
    assert other.page.locator(".job").count() == 1
