"""Where ranks are or were: a job that runs has not ended, and a cause comes before its echoes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sightline as sl
from sightline.store.writer import amend_info
from tests.ranks.fake_ranks import record_ranks

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:27564. This is typically caused by a remote worker crashing. Check the logs of the remote "
    "worker before reporting an error. GLHF! 🏖️"
)


def line(function: Callable[..., object], after: int) -> str:
    return f"test_rank_ends.py:{function.__code__.co_firstlineno + after} in {function.__qualname__}"


def screen(path: Path) -> str:
    return " ".join(str(sl.load(path)).split())


def test_a_job_that_runs_has_not_ended(tmp_path: Path) -> None:
    screens = []

    def run(rank: int) -> None:
        x = torch.ones(4)
        dist.all_reduce(x)
        if rank == 0:
            dist.all_reduce(x)
        else:
            x.exp()
            time.sleep(1.6)  # for longer than it takes until ops are written, and a second
            screens.append(screen(tmp_path / "run.sight"))
            dist.all_reduce(x)

    record_ranks(tmp_path / "run.sight", run, 2)
    (text,) = screens
    assert "still running" in text
    assert f"rank 1 is running; its last op was exp at tests/ranks/{line(run, 6)}, " in text
    assert " s ago" in text
    assert "now rank 0 ended" in text
    assert "at the end" not in text
    assert "cut short" not in text
    assert "never came" not in text
    after = screen(tmp_path / "run.sight")
    assert "running" not in after


def test_a_rank_that_has_not_come_yet_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.sight"
    monkeypatch.setattr("sightline.ranks.record.is_being_recorded", lambda path: True)
    listed = []

    def run(rank: int) -> None:
        x = torch.ones(4)
        dist.all_reduce(x)
        if rank == 1:  # as if the other one still waited, for which a fake group has no time
            amend_info(path / "rank0.sight", {"unfinished": True})
            time.sleep(0.8)
            listed.append(" ".join(str(sl.load(path).problems()).split()))
        dist.all_reduce(x)

    record_ranks(path, run, 2)
    (text,) = listed
    assert "note Rank 1 has not come to all_reduce #1 of 4 float32, in which rank 0 waits" in text
    assert "The job is running: it may still come." in text
    assert "error" not in text
    assert "ikely a mistake" not in text


def fails(rank: int) -> None:
    x = torch.ones(4)
    dist.all_reduce(x)
    if rank == 1:
        raise ValueError("no data")
    dist.all_reduce(x)
    raise RuntimeError(CLOSED)


def test_the_cause_comes_before_the_error_of_a_backend(tmp_path: Path) -> None:
    path = tmp_path / "run.sight"
    for rank in (0, 1):
        with pytest.raises((ValueError, RuntimeError)):
            record_ranks(path, fails, 2, ranks=[rank])
    text = screen(path)
    cause = text.index("error Rank 1 only: ValueError: no data")
    hang = text.index("error Rank 1 died before all_reduce #1 of 4 float32, in which rank 0 waited")
    echo = text.index("note Rank 0 only: RuntimeError: Connection closed by peer")
    assert cause < hang < echo
    assert "Rank 0 waited for it and failed:" in text
    assert "time out" not in text
    for words in ("pair.cc", "27564", "GLHF", "typically"):
        assert words not in text
    listed = " ".join(str(sl.load(path).problems()).split())
    assert listed.index("Rank 1 only: ValueError") < listed.index("Rank 1 died before")
    assert "GLHF" not in listed
    assert "GLHF" in str(sl.load(path).problems(rank=0)), "all of it is kept"


def test_ranks_wait_only_while_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that failed, those that were killed and those that still run are told apart."""
    path = tmp_path / "run.sight"

    def run(rank: int) -> None:
        if rank != 1:
            dist.all_reduce(torch.ones(4))
            if rank == 0:
                raise RuntimeError(CLOSED)

    def ending() -> str:
        return screen(path).partition("every rank of a group")[0].rpartition("runs all_reduce")[2]

    for rank in range(4):
        with contextlib.suppress(RuntimeError):
            record_ranks(path, run, 4, ranks=[rank])
    for rank in (2, 3):
        amend_info(path / f"rank{rank}.sight", {"unfinished": True})
    assert "Rank 0 waited for it and failed, ranks 2 and 3 waited for it and were cut short:" in ending()
    monkeypatch.setattr("sightline.ranks.record.is_being_recorded", lambda path: path.name == "rank3.sight")
    assert "in which ranks 0, 2 and 3 wait " in screen(path)
    assert "failed, rank 2 waited for it and was cut short, rank 3 still waits:" in ending()
    amend_info(path / "rank0.sight", {"unfinished": True, "exception": None})
    monkeypatch.setattr("sightline.ranks.record.is_being_recorded", lambda path: path.name != "rank1.sight")
    assert "The others wait for it until they time out:" in ending()


BOTH = pytest.mark.parametrize("engine", ["native", "python"])


@BOTH
def test_a_rank_in_a_backward_pass_stands_where_that_was_called(tmp_path: Path, engine: str) -> None:
    def run(rank: int) -> None:
        weight = torch.ones(4, requires_grad=True)
        loss = weight.exp().sum()
        if rank == 0:
            loss.backward()
            dist.all_reduce(torch.ones(4))

    record_ranks(tmp_path / "run.sight", run, 2, engine=engine)
    forward, called = (line(run, after) for after in (2, 4))
    text = screen(tmp_path / "run.sight")
    stands = f"at tests/ranks/{called}, in the backward of tests/ranks/{forward.partition(' in ')[0]}"
    assert re.search(rf"after its last op rank 0 runs \S+ {re.escape(stands)}", text)
    assert re.search(rf"rank 0 runs \S+ {re.escape(stands)}(?! in) rank 1 ends", text)


@BOTH
def test_a_rank_that_ended_in_a_backward_pass_stood_where_that_was_called(
    tmp_path: Path, engine: str
) -> None:
    def run(rank: int) -> None:
        weight = torch.ones(4, requires_grad=True)
        loss = weight.exp().sum()
        if rank == 0:
            weight.register_hook(fail)
            loss.backward()

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("no gradient")

    with pytest.raises(ValueError, match="no gradient"):
        record_ranks(tmp_path / "run.sight", run, 2, ranks=[0], engine=engine)
    record_ranks(tmp_path / "run.sight", run, 2, ranks=[1], engine=engine)
    stood = f"at tests/ranks/{line(run, 5)}, in the backward of tests/ranks/test_rank_ends.py:"
    assert f"raised ValueError: no gradient after mul.Tensor {stood}" in screen(tmp_path / "run.sight")


def test_an_error_of_its_own_behind_a_collective_is_no_echo(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        dist.all_reduce(torch.ones(4))
        if rank == 1:
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        record_ranks(tmp_path / "run.sight", run, 2)
    assert "error Rank 1 only: ValueError: no data" in screen(tmp_path / "run.sight")


def test_a_long_exception_does_not_fill_the_screen(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.ones(4)
        raise RuntimeError(
            "Error(s) in loading state_dict:\n" + "\n".join(f"missing {n}" for n in range(500))
        )

    for rank in (0, 1):
        with pytest.raises(RuntimeError):
            record_ranks(tmp_path / "run.sight", run, 2, ranks=[rank])
    assert len(screen(tmp_path / "run.sight")) < 2500


def test_a_rank_that_was_killed_in_a_collective_was_cut_short(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        dist.all_reduce(torch.ones(4))

    path = tmp_path / "run.sight"
    record_ranks(path, run, 2)
    place = [str(Path(__file__)), run.__code__.co_firstlineno + 1, run.__qualname__, 12 * 10**9]
    amend_info(path / "rank0.sight", {"unfinished": True, "waits": {"lines": [], "now": [place]}})
    text = screen(path)
    assert "rank 0 was cut short while it waited " in text
    # Rank 1 may have come last, and then it waited for none.
    assert re.search(r"waiting for other ranks (none|\S+ .s) 6.00 s 12.0 s rank 0", text), (
        "a wait without an end counts"
    )
