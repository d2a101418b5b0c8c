"""The rank that the others wait for, and the work that only it does: delays of known length and place."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sightline as sl
from sightline.analysis.problems.problem import Problem
from sightline.ranks.overview import rank_problems
from tests.ranks.fake_ranks import let_ranks_wait, record_ranks
from tests.recording.engines import BOTH_ENGINES

STEPS = 12


def stragglers(path: Path, run: Callable[[int], None], world: int = 2, **options: Any) -> list[Problem]:
    """The problems of late ranks when these run together."""
    record_ranks(path, run, world, **options)
    let_ranks_wait(path)
    merged = sl.load(path)._run()
    assert merged is not None
    return [each for each in rank_problems(merged) if each.kind == "straggler"]


def wait(ms: float) -> None:
    time.sleep(ms / 1000)


def line(function: Callable[..., object], after: int) -> str:
    return f"test_stragglers.py:{function.__code__.co_firstlineno + after} in {function.__qualname__}"


def loads(rank: int, late: int, ms: float) -> None:
    """Rank ``late`` takes so long to make each of its batches."""
    w = torch.ones(8, 8)
    for _ in range(STEPS):
        wait(ms if rank == late else 0)
        x = torch.ones(8, 8)
        wait(5)
        dist.all_reduce(x @ w)


@BOTH_ENGINES
def test_a_line_that_takes_longer_is_named(tmp_path: Path, engine: str) -> None:
    run = lambda rank: loads(rank, 2, 50)  # noqa: E731
    (problem,) = stragglers(tmp_path / "run.sight", run, 3, engine=engine)
    assert problem.severity.word == "warning"
    assert re.match("Rank 2 comes last to 1[12] of 12 collectives: ranks 0 and 1 wait", problem.title)
    assert problem.place.endswith(line(loads, 7))
    lost = float(problem.title.partition("wait ")[2].partition(" ms")[0])
    assert 0.5 * 50 * (STEPS - 1) < lost < 1.6 * 50 * (STEPS - 1)
    assert " at and before " in problem.detail
    assert line(loads, 5) in problem.detail
    assert problem.detail.endswith(" for the same ops")
    assert "mistake" not in str(sl.load(tmp_path / "run.sight")), "that is not known"


def test_milliseconds_are_no_straggler(tmp_path: Path) -> None:
    assert stragglers(tmp_path / "run.sight", lambda rank: loads(rank, 1, 1)) == []


def test_a_small_part_of_a_long_job_is_no_straggler(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        wait(1500)
        loads(rank, 1, 2)

    assert stragglers(tmp_path / "run.sight", run) == []


def test_one_delay_is_no_straggler(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        wait(300 * rank)  # it begins later
        x = torch.ones(8)
        for step in range(STEPS):
            wait(300 if (rank, step) == (0, 5) else 2)  # it writes a checkpoint
            dist.all_reduce(x.exp())

    assert stragglers(tmp_path / "run.sight", run) == []


def more(rank: int) -> None:
    for _ in range(STEPS):
        x = torch.ones(8)
        for _ in range(15 if rank == 1 else 5):
            wait(3)
            x = x.exp()
        dist.all_reduce(x)


def larger(rank: int) -> None:
    for _ in range(STEPS):
        x = torch.ones(64 if rank == 1 else 16)
        wait(40 if rank == 1 else 10)  # as long as its larger tensors would take
        x = x.exp()
        dist.all_reduce(x.sum())


def others(rank: int) -> None:
    for _ in range(STEPS):
        x = torch.ones(8)
        wait(2)
        if rank == 1:
            wait(25)
            x = x.relu()
        dist.all_reduce(x)


@pytest.mark.parametrize(
    ("run", "after", "text"),
    [
        (more, 5, r"; it runs (\d+) ops there, rank 0 (\d+)"),
        (larger, 4, r"; its ops there make (\d+) elements, those of rank 0 (\d+)"),
        (others, 6, ", where rank 0 runs nothing"),
    ],
)
def test_other_work_is_distinguished_from_slow_work(
    tmp_path: Path, run: Callable[[int], None], after: int, text: str
) -> None:
    (problem,) = stragglers(tmp_path / "run.sight", run)
    assert problem.severity.word == "warning"
    assert line(run, after) in problem.detail
    match = re.search(f"{text}$", problem.detail)
    assert match is not None
    if match.groups():  # of the steps in which it was the last
        mine, yours = map(int, match.groups())
        per_step = (15, 5) if run is more else (64, 16)
        assert mine // per_step[0] == yours // per_step[1] in range(STEPS - 2, STEPS)


def slower(rank: int) -> None:
    for _ in range(STEPS):
        ms = 12 if rank == 1 else 6
        wait(ms)
        x = torch.ones(8)
        wait(ms)
        x = x.exp()
        wait(ms)
        x = x.relu()
        wait(ms)
        dist.all_reduce(x)


def test_a_slower_core_is_a_note_without_a_cause(tmp_path: Path) -> None:
    (problem,) = stragglers(tmp_path / "run.sight", slower)
    assert problem.severity.word == "note"
    assert problem.title.startswith("Rank 1 comes last to 1")
    assert problem.detail == (
        "it runs as many ops on as large tensors as rank 0 in more time, and no single line accounts for that"
    )


def by_parameter(rank: int) -> None:
    """Several collectives in a row, of which a slow rank is late to the first."""
    tensors = [torch.ones(4) for _ in range(4)]
    for _ in range(STEPS):
        wait(40 if rank == 1 else 5)
        tensors[0].exp_()
        for tensor in tensors:
            dist.all_reduce(tensor)


def test_a_rank_that_is_late_to_the_first_of_several_is_a_straggler(tmp_path: Path) -> None:
    (problem,) = stragglers(tmp_path / "run.sight", by_parameter)
    assert problem.title.startswith("Rank 1 comes last to ")
    assert line(by_parameter, 5) in problem.detail
