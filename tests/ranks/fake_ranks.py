"""Ranks of a job that never ran: each is recorded in this process, with torch's fake process group."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import sightline as sl
from sightline.analysis.problems.problem import Problem
from sightline.ranks.overview import rank_problems
from sightline.store import load, save
from sightline.store.writer import amend_info


def record_ranks(
    path: Path, run: Callable[[int], Any], world: int, ranks: Iterable[int] | None = None, job: str = "one",
    **options: Any,
) -> None:  # fmt: skip
    """Record ``run(rank)`` as each rank of a world; collectives return at once and change nothing."""
    for rank in range(world) if ranks is None else ranks:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world)):
                patch.setenv(name, str(value))
            patch.setenv("TORCHELASTIC_RUN_ID", job)
            patch.setattr(sys, "excepthook", sys.excepthook)  # which a process group replaces
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            try:
                with sl.trace(path=path, **options):
                    run(rank)
            finally:
                dist.destroy_process_group()
                # They ran one after the other, and are to look as if they had run together.
                amend_info(path / f"rank{rank}.sight", {"began_ns": 10**18})


def problems_of(path: Path) -> list[Problem]:
    """The problems between ranks, but for who is late: these ranks ran alone."""
    run = sl.load(path)._run()
    assert run is not None
    return [each for each in rank_problems(run) if each.kind != "straggler"]


def let_ranks_wait(path: Path) -> None:
    """Move the ops of all ranks as if these had left each collective together, all in one group."""
    t = sl.load(path)
    at = {rank: t.ranks[rank].collectives.ops for rank in t.ranks}
    starts = {rank: t.ranks[rank].data.ops.start[at[rank]] for rank in t.ranks}
    work = [np.diff(each, prepend=0) for each in starts.values()]
    together = np.cumsum(np.max(work, axis=0))  # when the last rank comes to each
    for rank, own in zip(at, work, strict=True):
        data = load(path / f"rank{rank}.sight")
        arrivals = np.concatenate([[0], together[:-1]]) + own
        # All that runs after a collective begins when the last rank has come to it.
        moved = np.concatenate([[0], together - np.cumsum(own)])
        before = np.searchsorted(at[rank], np.arange(len(data.ops)), side="left")
        ops = dataclasses.replace(data.ops, start=data.ops.start + moved[before])
        assert (ops.start[at[rank]] == arrivals).all()
        save(dataclasses.replace(data, ops=ops), path / f"rank{rank}.sight")
        data.close()
