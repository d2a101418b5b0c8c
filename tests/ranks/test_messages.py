"""Sends and receives between ranks: mismatches are named, by peer, tag and order."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sightline as sl
from tests.ranks.fake_ranks import problems_of, record_ranks
from tests.recording.engines import BOTH_ENGINES


def stage(rank: int, sizes: tuple[int, ...], count: int, fails: tuple[int, ...]) -> None:
    for step in range(3):
        if rank == 0 and step < count:
            dist.send(torch.ones(sizes[step]), 1)
        elif rank == 1:
            dist.recv(torch.ones(4), 0)
    if rank in fails:
        raise ValueError("stuck")


@pytest.mark.parametrize(
    ("sizes", "count", "fails", "title"),
    [
        ((4, 4, 4), 3, (1,), None),
        ((4, 4, 4), 2, (), None),
        ((4, 4, 4), 2, (1,), "Rank 1 waits in receive #2 from rank 0, which never sends it"),
        ((4, 5, 4), 3, (1,), "Rank 0 sends 20 B to rank 1, which receives 16 B (message #1)"),
    ],
)
def test_messages_that_do_not_match(
    tmp_path: Path, sizes: tuple[int, ...], count: int, fails: tuple[int, ...], title: str | None
) -> None:
    with pytest.raises(ValueError, match="stuck") if fails else nullcontext():
        record_ranks(tmp_path / "run.sight", lambda rank: stage(rank, sizes, count, fails), 2)
    problems = problems_of(tmp_path / "run.sight")
    assert [each.title for each in problems] == ([] if title is None else [title])
    if title is not None:
        name, first = "test_messages.py", stage.__code__.co_firstlineno
        lines = f"{problems[0].place}\n{problems[0].detail}"
        assert f"{name}:{first + 3} in stage" in lines
        assert f"{name}:{first + 5} in stage" in lines


def tagged(rank: int, tags: tuple[tuple[int, ...], tuple[int, ...]], sizes: dict[int, int]) -> None:
    for tag in tags[rank]:
        if rank == 0:
            dist.send(torch.ones(sizes.get(tag, 4)), 1, tag=tag)
        else:
            dist.recv(torch.ones(4), 0, tag=tag)
    if rank == 1:
        raise ValueError("stuck")


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("tags", "sizes", "title"),
    [
        (((1, 2, 1), (2, 1, 1)), {}, None),
        (
            ((1, 2), (2, 1)),
            {2: 5},
            "Rank 0 sends 20 B with tag 2 to rank 1, which receives 16 B (message #0)",
        ),
        (((7,), (7, 7)), {}, "Rank 1 waits in receive #1 with tag 7 from rank 0, which never sends it"),
        (
            ((1, 1), (1, 2)),
            {},
            "Rank 1 waits for a message with tag 2 from rank 0, which sends one with tag 1",
        ),
    ],
)
def test_messages_belong_together_by_their_tag(
    tmp_path: Path, engine: str, tags: tuple[tuple[int, ...], tuple[int, ...]], sizes: dict[int, int],
    title: str | None,
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match="stuck"):
        record_ranks(tmp_path / "run.sight", lambda rank: tagged(rank, tags, sizes), 2, engine=engine)
    assert [each.tag for each in sl.load(tmp_path / "run.sight").ranks[1].collectives] == list(tags[1])
    problems = problems_of(tmp_path / "run.sight")
    assert [each.title for each in problems] == ([] if title is None else [title])
    if title is not None:
        name, first = "test_messages.py", tagged.__code__.co_firstlineno
        lines = f"{problems[0].place}\n{problems[0].detail}"
        assert f"{name}:{first + 3} in tagged" in lines
        assert f"{name}:{first + 5} in tagged" in lines


def test_who_receives_from_any_rank_misses_no_message(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        if rank == 0:
            dist.send(torch.ones(4), 1)
            raise ValueError("stuck")
        received = [torch.ones(4)]
        group = dist.distributed_c10d._get_default_group()
        torch.ops.c10d.recv_any_source_(received, group.boxed(), 0)

    with pytest.raises(ValueError, match="stuck"):
        record_ranks(tmp_path / "run.sight", run, 2, ranks=[0])
    record_ranks(tmp_path / "run.sight", run, 2, ranks=[1])
    assert problems_of(tmp_path / "run.sight") == []
