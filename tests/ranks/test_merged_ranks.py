"""Ranks as one run: equal ones are folded, differences are named, bad input leaves the rest readable."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import sightline as sl
from sightline.cli import main
from sightline.ranks.desync import group_tables
from sightline.store.writer import amend_info
from tests.ranks.fake_ranks import problems_of, record_ranks
from tests.recording.engines import BOTH_ENGINES

WORLD = 4


def alike(rank: int) -> None:
    x = torch.full((4,), float(rank))
    for _ in range(3):
        dist.all_reduce(x.exp())
    dist.broadcast(x, 0)


@BOTH_ENGINES
def test_a_folder_of_ranks_opens_as_one_run(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "run.sight"
    record_ranks(path, alike, WORLD, engine=engine)
    t = sl.load(path)
    assert list(t.ranks) == [0, 1, 2, 3]
    assert t.info["rank"] == 0
    assert t.ranks[3].info["rank"] == 3
    assert "relu" not in str(t.ranks[3].code())
    assert [(each.kind, each.number, each.bytes, each.dtype) for each in t.collectives] == [
        *[("all_reduce", number, 16, "float32") for number in range(3)],
        ("broadcast", 3, 16, "float32"),
    ]
    assert len({each.group for each in t.collectives}) == 1  # torch numbers the groups of a process
    assert t.collectives[0].peers == (0, 1, 2, 3)
    assert t.collectives[0].reduction == ("sum" if engine == "native" else t.collectives[0].reduction)
    assert t.info["groups"][t.collectives[0].group] == {
        "ranks": [0, 1, 2, 3],
        "backend": "fake",
        "description": "default_pg",
    }
    text = str(t)
    assert text.startswith("run trace  4 ranks on 1 host · fake · torch ")
    assert "ranks      ranks 0–3: " in text
    assert problems_of(path) == []
    assert list(sl.load(path / "rank2.sight").ranks) == [0, 1, 2, 3], "one rank finds the others"
    assert str(sl.load(path / "rank2.sight")).startswith("trace trace, rank 2 of 4")
    assert list(pickle.loads(pickle.dumps(t)).ranks) == [0, 1, 2, 3]
    with pytest.raises(sl.UsageError, match=r"There is no recording of rank 9; there is one of ranks 0–3\."):
        t.ranks[9]
    assert t.ranks.get(9) is None


def test_every_view_takes_a_rank(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        model = torch.nn.Linear(4, 2 + rank)
        model(torch.ones(3, 4)).sum().backward()
        dist.barrier()

    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    t = sl.load(tmp_path / "run.sight")
    views = {
        name for name, method in vars(sl.Trace).items()
        if callable(method) and "step" in inspect.signature(method).parameters and name[0] != "_"
    } - {"step"}  # fmt: skip
    assert {"code", "log", "summary", "graph", "html", "to_perfetto"} < views
    for name in views:
        assert "rank" in inspect.signature(getattr(sl.Trace, name)).parameters, name
    for name in sorted(views - {"graph", "lineage", "html", "to_perfetto"}):
        assert str(getattr(t, name)(rank=1)) == str(getattr(t.ranks[1], name)()), name
    assert "f32[3, 3]" in str(t.code(rank=1))
    assert "f32[3, 3]" not in str(t.code())
    assert str(t.lineage("Linear", rank=1)) == str(t.ranks[1].lineage("Linear"))
    assert len(t.graph(rank=1)) == len(t.ranks[1].graph())
    t.to_perfetto(rank=1).save(tmp_path / "one.json")
    assert len({each["pid"] for each in json.loads((tmp_path / "one.json").read_text())["traceEvents"]}) == 1
    assert str(t.ranks[0].code(rank=1)) == str(t.code(rank=1)), "one rank finds the others"
    with pytest.raises(
        sl.UsageError, match=r"There is no recording of rank 7; there is one of ranks 0 and 1"
    ):
        t.log(rank=7)
    with pytest.raises(sl.UsageError, match=r"rank='1' must be the number of a rank\."):
        t.log(rank="1")  # type: ignore[arg-type]


def test_a_view_of_one_rank_of_a_job_says_so(tmp_path: Path) -> None:
    """Those that are not of all ranks, unless the program or the command line named the rank."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(rank: int) -> None:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        dist.barrier()

    path = str(tmp_path / "run.sight")
    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    t = sl.load(path)
    for name in ("code", "log", "summary", "call_order", "memory", "source", "nonfinite"):
        for step in (None, 0):
            first = str(getattr(t, name)(step=step)).splitlines()[0]
            assert first == "# rank 0 of 2; rank=1 shows another", name
            assert not str(getattr(t, name)(step=step, rank=0)).startswith("# rank"), name
        shown = "order" if name == "call_order" else name
        for more in ([], ["--step", "0"]):
            output = CliRunner().invoke(main, ["show", path, "--view", shown, *more]).output
            assert output.startswith("# rank 0 of 2; --rank 1 shows another\n"), output
            output = CliRunner().invoke(main, ["show", path, "--view", shown, "--rank", "1", *more]).output
            assert not output.startswith("# rank")
    assert str(t.summary(width=60)).startswith("# rank 0 of 2")
    narrow = [next(iter(each.summary().within(60))) for each in (t, t.ranks[0])]
    assert narrow[0] != narrow[1]


def test_one_process_has_no_ranks() -> None:
    with sl.trace() as t:
        torch.ones(2)
    with pytest.raises(
        sl.UsageError, match=r"rank=3 is for a distributed job, and this is the recording of one process\."
    ):
        t.code(rank=3)
    with pytest.raises(
        sl.UsageError, match=r"This is the recording of one process: there are no ranks to compare\."
    ):
        t.rank_times()


def test_times_of_ranks_are_shown_by_module_line_and_collective(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        for _ in range(3):
            dist.all_reduce(model(torch.ones(3, 4)))

    record_ranks(tmp_path / "run.sight", run, 3)
    t = sl.load(tmp_path / "run.sight")
    modules, lines, collectives = str(t.rank_times()).split("\n\n")
    assert re.search(
        r"^Sequential +\S+ [nµm]?s +\S+ [nµm]?s +\S+ [nµm]?s  rank [012]$", modules, re.MULTILINE
    )
    assert len(modules.splitlines()) == 2 + 3
    assert lines.splitlines()[2].startswith("waiting for other ranks ")
    line = f"test_merged_ranks.py:{run.__code__.co_firstlineno + 3} in {run.__qualname__}"
    assert line[-30:] in lines
    assert re.search(r"^all_reduce .* 3 .*  rank [012], ×[123]$", collectives, re.MULTILINE)
    assert len(str(t.rank_times(top=1)).splitlines()) == 3 + 1 + 4 + 1 + 3
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "run.sight"), "--view", "ranks"])
    assert shown.output.strip() == str(t.rank_times()).strip()
    with pytest.raises(
        sl.UsageError, match=r"there are no ranks to compare; open the folder of the whole job"
    ):
        t.ranks[1].rank_times()
    with pytest.raises(sl.UsageError, match=r"top=0 is how many rows to show: a whole number from 1 up\."):
        t.rank_times(top=0)


def test_a_line_that_a_rank_did_not_run_has_no_time_there(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        if rank:
            torch.ones(300, 300) @ torch.ones(300, 300)
        dist.barrier()

    record_ranks(tmp_path / "run.sight", run, 2)
    text = str(sl.load(tmp_path / "run.sight"))
    rows = [row for row in text.splitlines() if ", and the time before it " in row]
    assert [" none " in row for row in rows].count(True) == 1


def test_recordings_beside_each_other_are_brought_together(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", alike, 2)
    for rank in (0, 1):  # as earlier versions named them
        shutil.copytree(tmp_path / "run.sight" / f"rank{rank}.sight", tmp_path / f"old.rank{rank}.sight")
    assert list(sl.load(tmp_path / "old.rank1.sight").ranks) == [0, 1]
    other = tmp_path / "copied"
    other.mkdir()
    for rank, name in enumerate(("from_host_a.sight", "b")):
        shutil.copytree(tmp_path / "run.sight" / f"rank{rank}.sight", other / name)
    assert list(sl.load(other).ranks) == [0, 1], "each says its own rank"


def test_a_rank_of_the_command_line(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", alike, 2)
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "run.sight"), "--rank", "1"])
    assert shown.output.startswith("trace trace, rank 1 of 2")
    assert "2 ranks" in CliRunner().invoke(main, ["show", str(tmp_path / "run.sight")]).output
    wrong = CliRunner().invoke(main, ["show", str(tmp_path / "run.sight"), "--rank", "7"])
    assert wrong.output == "Error: There is no recording of rank 7; there is one of ranks 0 and 1.\n"
    kind = CliRunner().invoke(
        main, ["show", str(tmp_path / "run.sight"), "--view", "problems", "--kind", "hang"]
    )
    assert "problems: none" in kind.output


def test_another_collective_is_named_with_both_lines(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        x = torch.ones(4)
        dist.all_reduce(x)
        if rank == 2:
            x = x.relu()
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)

    record_ranks(tmp_path / "run.sight", run, WORLD)
    (problem,) = problems_of(tmp_path / "run.sight")
    assert (problem.kind, problem.severity.word) == ("desync", "error")
    assert problem.title == (
        "Ranks 0, 1 and 3 run all_reduce #1 of 4 float32 "
        "where rank 2 runs broadcast #1 of 4 float32 from rank 0"
    )
    here = Path(__file__).name
    line = run.__code__.co_firstlineno
    assert problem.place.endswith(f"{here}:{line + 7} in {run.__qualname__}")
    assert f"{here}:{line + 5} in" in problem.detail
    assert "they part after collective #0" in problem.detail
    assert f"rank 2 runs relu at {problem.place.rpartition('/')[0]}" in problem.detail
    assert "desync" in str(sl.load(tmp_path / "run.sight").problems())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rank: torch.ones(4 + rank // 3), "of 4 float32 where rank 3 runs all_reduce #0 of 5 float32"),
        (lambda rank: torch.ones(4, dtype=torch.float64 if rank == 3 else torch.float32),
         "of 4 float32 where rank 3 runs all_reduce #0 of 4 float64"),
    ],
)  # fmt: skip
def test_another_size_or_dtype_is_a_desync(tmp_path: Path, make: object, text: str) -> None:
    record_ranks(tmp_path / "run.sight", lambda rank: dist.all_reduce(make(rank)), WORLD)  # type: ignore[operator]
    (problem,) = problems_of(tmp_path / "run.sight")
    assert text in problem.title
    assert "shapes differ since ones at" in problem.detail


def test_a_log_of_one_rank_is_not_the_cause(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        x = torch.ones(4)
        for step in range(6):
            if rank == 0:
                x.sum()  # a loss that is logged
            if step == 3 and rank == 1:
                x.tanh()
                continue
            dist.all_reduce(x)
        if rank == 1:
            raise ValueError("too few")

    with pytest.raises(ValueError, match="too few"):
        record_ranks(tmp_path / "run.sight", run, 2)
    (problem,) = problems_of(tmp_path / "run.sight")
    assert problem.kind == "desync", "rank 0 has finished: with a fake group it waits for nobody"
    assert "they part after collective #2" in problem.detail
    assert "runs tanh at" in problem.detail


def faulty(rank: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        if rank != 3:
            optimizer.zero_grad()
        out = model(torch.full((5, 4), rank + 1.0))
        if rank == 2:
            out = (out - 100).log()
        (out - torch.ones(5)).square().mean().backward()
        optimizer.step()


@BOTH_ENGINES
def test_problems_of_one_process_are_looked_for_on_every_rank(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "run.sight"
    record_ranks(path, faulty, WORLD, stats=True, engine=engine)
    t = sl.load(path)
    text = " ".join(str(t.problems()).split())
    assert "error Rank 2 only: log made 5 NaN of 5" in text
    assert "error Rank 3 only: gradients are never cleared" in text
    assert "error Ranks 0–3: - of f32[5, 1] and f32[5] broadcasts both to [5, 5]" in text
    assert text.index("Rank 3 only") < text.index("Ranks 0–3"), "problems of some ranks come first"
    assert f" in {sum(len(each.ops) for each in t.ranks.values()):,} ops of 4 ranks" in text
    screen = " ".join(str(t).split())
    assert "error Rank 2 only: log made 5 NaN of 5" in screen, "the first screen has them, too"
    alone = " ".join(str(t.problems(rank=3)).split())
    assert "error gradients are never cleared" in alone
    assert "NaN" not in alone
    one = " ".join(str(t.problems(step=0)).split())
    assert "Rank 2 only: log made 5 NaN" in one
    shown = CliRunner().invoke(main, ["show", str(path), "--view", "problems", "--step", "0"])
    assert " ".join(shown.output.split()) == one
    kind = str(t.problems(kind="gradients-not-cleared"))
    assert kind.startswith("problems: 1 error in ")
    assert "Rank 3 only" in kind
    assert "none found" in str(t.problems(module="Linear", kind="broadcast")), "it is outside of the module"
    with pytest.raises(sl.UsageError, match=r"conv"):
        t.problems(module="conv")


def test_the_first_screen_of_a_healthy_job_says_that_no_problem_was_found(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.ones(4).relu()

    record_ranks(tmp_path / "run.sight", run, 2)
    screen = " ".join(str(sl.load(tmp_path / "run.sight")).split())
    assert "problems none found; not looked at: the numbers in tensors (no statistics)" in screen


def test_the_first_screen_of_a_large_job_says_that_ranks_were_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_ranks(tmp_path / "run.sight", faulty, WORLD, stats=True)
    monkeypatch.setattr("sightline.ranks.overview._MOST_OPS", 100)
    screen = " ".join(str(sl.load(tmp_path / "run.sight")).split())
    assert "Rank 2 only: log" not in screen
    assert "problems looked for between ranks; t.problems() looks at each rank by itself, too" in screen


def test_a_rank_that_is_damaged_inside_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    record_ranks(path, faulty, WORLD, stats=True)
    with sqlite3.connect(path / "rank1.sight" / "rank0.db") as database:
        database.execute("update chunks set data = zeroblob(9) where kind = 'stats' and name = 'nans'")
    t = sl.load(path)
    assert "Rank 1 could not be looked at by itself" in str(t.problems())
    for text in (str(t), str(t.problems())):
        assert "Rank 2 only: log made 5 NaN" in " ".join(text.split())


def test_a_step_that_only_some_ranks_have(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            out = model(torch.ones(2, 4))
            (out.log() if step == 3 else out).sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    text = " ".join(str(sl.load(tmp_path / "run.sight").problems(step=3)).split())
    assert "in 2 ranks" in text
    with pytest.raises(sl.NothingMatched, match="step=9"):
        sl.load(tmp_path / "run.sight").problems(step=9)


def test_ranks_without_ops_open(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", faulty, 2, ops="none", stats=sl.Stats(parameters=True))
    t = sl.load(tmp_path / "run.sight")
    assert "2 ranks" in str(t)
    assert len(t.ops) == 0


def test_numbers_of_folded_problems_are_those_of_one_rank(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.zeros(3 + rank).log()

    record_ranks(tmp_path / "run.sight", run, 2, stats=True)
    text = " ".join(str(sl.load(tmp_path / "run.sight").problems()).split())
    assert "Ranks 0 and 1: log made 3 -Inf of 3 in f32[3]" in text
    assert "the numbers are those of rank 0, and not the same on all of them" in text


def test_ranks_of_another_run_and_missing_ones_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    record_ranks(path, alike, WORLD, ranks=[0, 1])
    record_ranks(path, alike, WORLD, ranks=[3], job="another")
    text = str(sl.load(path))
    assert "Rank 3 is of another run than ranks 0 and 1, and left out of the comparison." in text
    assert "Ranks 2 and 3 of 4 are missing." in text
    assert "run trace  2 of 4 ranks" in text
    (path / "rank0.sight" / "rank0.db").write_bytes(b"no database")
    text = str(sl.load(path))
    assert "Rank 0 is left out:" in text
    assert sl.load(path).info["rank"] == 1


def test_saving_all_ranks_saves_all_of_them(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", alike, 3)
    (tmp_path / "run.sight" / "rank1.sight" / "stacks.txt").write_text("a stack")
    t = sl.load(tmp_path / "run.sight")
    line = t.save(tmp_path / "copy", source=False)
    assert line.startswith(
        f"{tmp_path / 'copy.sight'}: ranks 0–2; rank 0: {len(t.ops)} ops, 0 module calls; "
    )
    copy = sl.load(tmp_path / "copy.sight")
    assert list(copy.ranks) == [0, 1, 2]
    assert str(copy) == str(t)
    assert [each.name for each in copy.ranks[2].ops] == [each.name for each in t.ranks[2].ops]
    assert (tmp_path / "copy.sight" / "rank1.sight" / "stacks.txt").read_text() == "a stack"
    with pytest.raises(
        sl.UsageError, match=r"copy.sight already holds a recording: save under another name, or"
    ):
        t.save(tmp_path / "copy.sight")
    record_ranks(tmp_path / "two.sight", alike, 2)
    sl.load(tmp_path / "two.sight").save(tmp_path / "copy.sight", overwrite=True)
    assert list(sl.load(tmp_path / "copy.sight").ranks) == [0, 1], "rank 2 was of another run"
    t.save(tmp_path / "run.sight", overwrite=True)
    assert str(sl.load(tmp_path / "run.sight")) == str(t), "onto itself"


def test_a_rank_that_cannot_be_read_is_not_saved(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", alike, 2)
    (tmp_path / "run.sight" / "rank1.sight" / "rank0.db").write_bytes(b"no database")
    line = sl.load(tmp_path / "run.sight").save(tmp_path / "copy.sight")
    assert ": rank 0; rank 1 cannot be read and is not in it; rank 0: " in line
    assert list(sl.load(tmp_path / "copy.sight").ranks) == [0]
    with sl.trace(path=tmp_path / "one.sight"):
        torch.ones(2)
    with pytest.raises(
        sl.UsageError, match=r"one.sight already holds a recording of one process, and cannot be"
    ):
        sl.load(tmp_path / "run.sight").save(tmp_path / "one.sight", overwrite=True)


def test_two_recordings_of_a_rank_and_other_recordings_are_noted(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", alike, 2)
    copied = tmp_path / "copied"
    copied.mkdir()
    for name, rank in (("host_a", 0), ("host_b", 1), ("host_b_again", 1)):
        shutil.copytree(tmp_path / "run.sight" / f"rank{rank}.sight", copied / name)
    with sl.trace(path=copied / "other"):
        torch.ones(2)
    shutil.copytree(tmp_path / "run.sight" / "rank0.sight", copied / "rank0.restart1.sight")
    text = " ".join(str(sl.load(copied)).split())
    assert "host_b and host_b_again are both of rank 1: the first is taken." in text
    assert "other is left out: it is not of a distributed job." in text
    assert "The job was restarted: the recordings of earlier attempts are left out." in text
    assert "2 ranks on 1 host" in text


def test_a_clock_that_is_wrong_is_noted_and_corrected(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    record_ranks(path, alike, 2)
    began = sl.load(path / "rank1.sight").info["began_ns"]
    amend_info(path / "rank1.sight", {"began_ns": began + 180 * 10**9})
    text = " ".join(str(sl.load(path)).split())
    assert "The clock of rank 1 is 180 s ahead; times are corrected by the common collectives." in text


def test_last_ops_of_ranks_are_aligned(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        for step in range(40):
            for _ in range(rank + 1):  # more ops, and so fewer collectives among the last
                torch.ones(step + 1).exp()
            dist.all_reduce(torch.ones(step + 1))

    record_ranks(tmp_path / "run.sight", run, 2, last=50)
    assert len(sl.load(tmp_path / "run.sight").ranks[0].collectives) > len(
        sl.load(tmp_path / "run.sight").ranks[1].collectives
    )
    assert problems_of(tmp_path / "run.sight") == []


def test_order_numbers_of_last_ops_are_those_of_the_whole_run(tmp_path: Path) -> None:
    """Equal collectives in a loop look alike: only their count says which are the same on two ranks."""

    def run(rank: int) -> None:
        for _step in range(40 - (rank == 1)):
            for _ in range(rank + 1):
                torch.ones(4).exp()
            dist.all_reduce(torch.ones(4))
        if rank == 1:
            raise ValueError("early")

    with pytest.raises(ValueError, match="early"):
        record_ranks(tmp_path / "run.sight", run, 2, last=50)
    ranks = sl.load(tmp_path / "run.sight").ranks
    assert [[each.number for each in rank.collectives][-1] for rank in ranks.values()] == [39, 38]
    (problem,) = problems_of(tmp_path / "run.sight")
    assert problem.title == "Rank 1 has no all_reduce #39 of 4 float32, which rank 0 completed"


def test_a_rank_that_ended_long_before_the_last_ops_of_the_others(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        for _ in range(4 if rank == 1 else 3000):
            dist.all_reduce(torch.ones(4))

    record_ranks(tmp_path / "run.sight", run, 2, last=50)
    merged = sl.load(tmp_path / "run.sight")._run()
    assert merged is not None
    (table,) = group_tables(merged)
    assert table.signature.shape[1] < 50, "no column that no rank has"
    (problem,) = problems_of(tmp_path / "run.sight")
    assert problem.title.startswith("Rank 1 has no all_reduce #")


def test_the_timeline_has_a_process_per_rank_and_arrows(tmp_path: Path) -> None:
    record_ranks(tmp_path / "run.sight", alike, 3)
    sl.load(tmp_path / "run.sight").to_perfetto().save(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {rank + 1: f"trace, rank {rank} of 3" for rank in range(3)}
    arrows = [each for each in events if each.get("cat") == "collective"]
    assert sorted(each["ph"] for each in arrows) == ["f"] * 4 + ["s"] * 4 + ["t"] * 4
    by_id = {each["id"] for each in arrows}
    assert len(by_id) == 4
    out = CliRunner().invoke(
        main, ["convert", str(tmp_path / "run.sight"), "-o", str(tmp_path / "all.perfetto.json")]
    )
    assert out.exit_code == 0, out.output
    assert json.loads((tmp_path / "all.perfetto.json").read_text())["otherData"]["ranks"] == "3"


def test_a_folder_of_one_process_is_not_shared(tmp_path: Path) -> None:
    with sl.trace(path=tmp_path / "run.sight"):
        torch.ones(2)
    with pytest.raises(
        sl.UsageError, match=r"holds a recording of one process, and cannot be the folder of all"
    ):
        record_ranks(tmp_path / "run.sight", alike, 2)
