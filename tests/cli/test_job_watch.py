"""Where the processes of a job are: what the launcher prints, when, and how often."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sightline.cli.job_watch import JobWatch, _position, position_written
from sightline.store.journal import JOURNAL


class Job:
    """A job whose ranks are where they are put; nothing runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.positions = folder / "run.sight", folder / "positions"
        self.positions.mkdir()
        self.watch = JobWatch(self.positions, self.folder, "sightline show run.sight")

    def put(
        self, rank: int, line: str, call: str = "", *, idle: float = 0, since: float = 0, silent: float = 0
    ) -> None:
        """A rank is at a line, and has run no op for ``idle`` seconds and nothing else for ``since``."""
        recording = self.folder / f"rank{rank}.sight"
        recording.mkdir(parents=True, exist_ok=True)
        (recording / JOURNAL).write_bytes(b"")
        now = time.time()
        os.utime(recording / JOURNAL, (now - idle, now - idle))
        position = {"recording": str(recording), "line": line, "call": call, "since": now - (since or idle)}
        (self.positions / f"{rank}.json").write_text(json.dumps({**position, "now": now - silent}))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def printed(job: Job, capsys: pytest.CaptureFixture[str]) -> str:
    job.watch.look()
    found = capsys.readouterr()
    assert not found.out, "standard output is the program's"
    return found.err


def test_a_rank_that_waits_and_one_that_does_not_come(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.put(0, "train.py:31 in step", "all_reduce", idle=8)
    job.put(1, "train.py:12 in load", idle=8)
    assert printed(job, capsys) == "", "not yet"
    job.put(0, "train.py:31 in step", "all_reduce", idle=12)
    job.put(1, "train.py:12 in load", idle=13)
    assert printed(job, capsys) == (
        "sightline: no rank has run an op for 12 s.\n"
        "  rank 0 has been in all_reduce at train.py:31 in step for 12 s\n"
        "  rank 1 has been at train.py:12 in load for 13 s\n"
        "  More: sightline show run.sight\n"
    )
    for idle in (13, 40, 400):
        job.put(0, "train.py:31 in step", "all_reduce", idle=idle)
        job.put(1, "train.py:12 in load", idle=idle)
        assert printed(job, capsys) == "", "once"
    job.put(0, "train.py:40 in step", "barrier", idle=15)
    job.put(1, "train.py:12 in load", idle=15)
    assert printed(job, capsys) == "", "the next one later"
    job.put(0, "train.py:40 in step", "barrier", idle=25)
    job.put(1, "train.py:12 in load", idle=25)
    assert "rank 0 has been in barrier at train.py:40 in step for 25 s" in printed(job, capsys)


def test_ranks_that_compute_for_long_are_said_to_do_nothing_else(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    for idle in (15, 50):
        for rank in (0, 1):
            job.put(rank, "train.py:9 in step", idle=idle)
        assert printed(job, capsys) == "", "none waits"
    for rank in (0, 1):
        job.put(rank, "train.py:9 in step", idle=70)
    text = printed(job, capsys)
    assert "ranks 0 and 1 have been at train.py:9 in step for 70 s" in text
    assert "hang" not in text
    assert "wait" not in text


def test_one_rank_works_while_the_others_wait(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(50):
        job.put(0, f"evaluate.py:{number} in score")
        job.put(1, "train.py:31 in step", "barrier", idle=12 + number)
        text = printed(job, capsys)
        if 12 + number < 60:
            assert text == "", "a rank goes on"
        elif number == 48:
            assert text == (
                "sightline: ranks wait for others.\n"
                "  rank 0 runs, at evaluate.py:48 in score\n"
                "  rank 1 has been in barrier at train.py:31 in step for 60 s\n"
                "  More: sightline show run.sight\n"
            )
        else:
            assert text == "", "once"


def test_a_rank_that_reads_files_while_another_waits_runs_no_op(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.put(0, "train.py:31 in step", "all_reduce", idle=12)
    job.put(1, "train.py:12 in load", idle=12, since=1)
    text = printed(job, capsys)
    assert "no rank has run an op for 12 s" in text
    assert "rank 1 has run no op for 12 s, now at train.py:12 in load" in text


def test_other_states_of_a_rank(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.put(0, "train.py:31 in step", "recv", idle=20)
    job.put(1, "")
    job.put(2, "train.py:7 in native", idle=20, silent=15)
    text = printed(job, capsys)
    assert "rank 1 has ended" in text
    assert "rank 2 has been seen at train.py:7 in native last, 15 s ago" in text
    job.put(3, "a\x1b[2J.py:1 in x", "all_reduce", idle=100)
    assert "\x1b" not in printed(job, capsys), "a name moves no cursor"


def test_nothing_is_said_of_what_is_not_recorded(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.put(0, "train.py:31 in step", "all_reduce", idle=100)
    job.put(1, "train.py:31 in step", "all_reduce", idle=100)
    (job.folder / "rank1.sight" / JOURNAL).unlink()
    assert printed(job, capsys) == "", "steps that --steps leaves out"
    (job.positions / "2.json").write_text("{")
    (job.positions / "x.json").write_text("[]")
    assert printed(job, capsys) == ""


def test_many_ranks_share_lines(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(16):
        job.put(
            rank,
            "train.py:31 in step" if rank != 5 else "train.py:2 in load",
            "" if rank == 5 else "all_reduce",
            idle=20,
        )
    lines = printed(job, capsys).splitlines()
    assert lines[1:-1] == [
        "  ranks 0–4 and 6–15 have been in all_reduce at train.py:31 in step for 20 s",
        "  rank 5 has been at train.py:2 in load for 20 s",
    ]


def test_a_rank_writes_where_its_main_thread_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sightline.cli.job_watch._SECONDS", 0.05)
    file = tmp_path / "1.json"

    def read() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    with position_written(tmp_path, tmp_path / "rank1.sight"):
        time.sleep(0.5)
        first = read()
        time.sleep(0.3)
        second = read()
    line = test_a_rank_writes_where_its_main_thread_is.__code__.co_firstlineno + 12
    assert first["line"].startswith(f"test_job_watch.py:{line} in ")
    assert second["line"].startswith(f"test_job_watch.py:{line + 2} in ")
    assert second["since"] > first["since"]
    assert "line" not in read(), "it has ended"
    assert [each.name for each in tmp_path.iterdir()] == ["1.json"]


def test_a_line_that_calls_again_and_again_is_one_place() -> None:
    def load() -> Iterator[None]:
        yield from ((yield), (yield))  # twice on one line

    calls: Any = load()
    places = []
    for _ in range(2):
        next(calls)
        places.append((_position(calls.gi_frame), calls.gi_frame.f_lasti))
    (first, at), (second, later) = places
    assert at != later
    assert first == second


HANGS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
print("begun", flush=True)
if dist.get_rank() == 1:
    time.sleep(6)
dist.all_reduce(x)
dist.destroy_process_group()
"""

QUICKLY = """
import sys
import sightline.cli.job_watch as watch
watch._PATIENCE = 2.0
from sightline.cli import main
main(sys.argv[1:])
"""


def test_a_job_that_stands_still_says_where(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HANGS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", QUICKLY, "run", "--no-stats", "--nproc", "2", "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\n", "") == "begunbegun", "the output is the program's own"
    assert done.stderr.count("sightline: no rank has run an op for ") == 1
    message = done.stderr.partition("sightline: no rank")[2].splitlines()[1:5]
    assert message[0].startswith("  rank 0 has been in all_reduce at train.py:9 in <module> for ")
    assert message[1].startswith("  rank 1 has been at train.py:8 in <module> for ")
    assert message[2].startswith("  Rank 1 has not come to all_reduce #1 of 4 float32, in which rank 0 waits")
    assert message[3] == "  More: sightline show train.sight"
    assert "2 ranks on 1 host" in done.stderr
