"""Who waits for whom, on ranks whose times are set: nothing here runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sightline.ranks.collective_waits import Waiting
from sightline.ranks.collectives import Collective
from sightline.ranks.merge import Run, run_of
from sightline.ranks.record import GroupCalls, RankRecord, SharedNames
from sightline.ranks.stragglers import straggler_problems

MS = 1_000_000
STEP = 100 * MS
COUNT = 10
BEGAN = 10**18


def run_with(
    arrivals: dict[int, NDArray[np.int64]],
    ahead: dict[int, int] | None = None,
    hosts: dict[int, str] | None = None,
) -> Run:
    """A run of ranks that come to the collectives of one group at these times, in ns; all leave together."""
    names = SharedNames()
    call = Collective(0, "all_reduce", "0", tuple(arrivals), 0, 16, 4, "float32", "sum", -1, ("0",), 0, 0)
    signature, place = names.signatures.of(call.signature, call), names.places.of("train.py:9 in step")
    released = np.max(list(arrivals.values()), axis=0) + MS
    records = {}
    for rank, start in arrivals.items():
        calls = GroupCalls(
            first=0, signature=np.full(COUNT, signature, dtype=np.int32),
            place=np.full(COUNT, place, dtype=np.int32), op=np.arange(COUNT, dtype=np.int32), start=start,
            released=released, bytes=np.full(COUNT, 16),
        )  # fmt: skip
        info = {
            "world_size": len(arrivals), "began_ns": BEGAN + (ahead or {}).get(rank, 0),
            "groups": {"0": {"ranks": list(arrivals)}},
        }  # fmt: skip
        records[rank] = RankRecord(
            rank=rank, path=Path(f"rank{rank}.sight"), info=info, host=(hosts or {}).get(rank, "one"),
            ops=COUNT, steps=np.zeros(COUNT, dtype=np.int32), step_ops=calls.op, groups={"0": calls},
            last_place=place, last_op="c10d::allreduce_", last_is_collective=True,
        )  # fmt: skip
    return run_of(records, names)


def on_time(late: int = 0) -> NDArray[np.int64]:
    return np.arange(COUNT, dtype=np.int64) * STEP + late


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    run = run_with({0: on_time(), 1: on_time(), 2: on_time(40 * MS), 3: on_time()})
    waiting = Waiting.of(run)
    assert waiting.waited == {0: 400 * MS, 1: 400 * MS, 2: 0, 3: 400 * MS}
    (problem,) = straggler_problems(waiting)
    assert problem.kind == "straggler"
    assert problem.title == (
        "Rank 2 comes last to 10 of 10 collectives: ranks 0, 1 and 3 wait 360 ms for it between the "
        "first and the last, 40 % of that time"
    )
    assert problem.place == "train.py:9 in step"


def test_waiting_is_added_up_by_line() -> None:
    (waits,) = Waiting.of(run_with({0: on_time(), 1: on_time(40 * MS), 2: on_time(10 * MS)})).lines()
    assert (waits.kind, waits.place, waits.count) == ("all_reduce", "train.py:9 in step", COUNT)
    assert (waits.waited, waits.longest) == (COUNT * 70 * MS, 40 * MS)
    assert (waits.last, waits.times_last) == (1, COUNT)


def test_ranks_that_take_turns_at_being_late_are_no_stragglers() -> None:
    late = np.where(np.arange(COUNT) % 2 == 0, 40 * MS, 0)
    run = run_with({0: on_time() + late, 1: on_time() + (40 * MS - late)})
    assert list(straggler_problems(Waiting.of(run))) == []
    assert Waiting.of(run).waited == {0: 200 * MS, 1: 200 * MS}


def test_a_rank_that_is_a_little_late_is_no_straggler() -> None:
    assert list(straggler_problems(Waiting.of(run_with({0: on_time(), 1: on_time(10 * MS)})))) == []


def test_being_late_once_is_no_habit() -> None:
    once = on_time()
    once[4] += 90 * MS
    assert list(straggler_problems(Waiting.of(run_with({0: on_time(), 1: once})))) == []


def test_clocks_that_disagree_by_minutes_are_noted_and_change_nothing_else() -> None:
    arrivals = {0: on_time(), 1: on_time(40 * MS), 2: on_time()}
    run = run_with(arrivals, ahead={2: -300 * 1000 * MS}, hosts={0: "a", 1: "a", 2: "b"})
    waiting = Waiting.of(run)
    assert waiting.notes() == [
        "The clock of rank 2 is 300 s behind; times are corrected by the common collectives."
    ]
    assert waiting.waited == {0: 400 * MS, 1: 0, 2: 400 * MS}
    assert [each.title[:6] for each in straggler_problems(waiting)] == ["Rank 1"]


def test_clocks_of_one_host_agree() -> None:
    """A rank whose recording began later looks as if it had another clock."""
    run = run_with({0: on_time(), 1: on_time()}, ahead={1: 5 * 1000 * MS})
    assert Waiting.of(run).notes() == []


def test_a_rank_that_is_late_to_most_of_a_few_is_so_by_chance() -> None:
    often = np.where(np.arange(COUNT) < 8, 40 * MS, -40 * MS)
    assert (
        list(straggler_problems(Waiting.of(run_with({0: on_time(40 * MS), 1: on_time(40 * MS) + often}))))
        == []
    )
    always = Waiting.of(run_with({0: on_time(), 1: on_time(40 * MS)}))
    assert [each.kind for each in straggler_problems(always)] == ["straggler"]
