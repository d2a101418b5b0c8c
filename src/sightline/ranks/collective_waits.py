"""Who waits: clocks brought together by the collectives, the rank that comes last, and what it does before.

A rank comes to a collective when it calls it. The others wait for the last one; the difference is waiting
time, whatever the backend. Clocks that disagree are found by the same collectives: their ends are common.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import comb
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.notation import time_text
from sightline.ranks.desync import GroupTable, group_tables
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run

#: ns that two clocks may differ by before they are corrected: of two hosts, and of what says to be one.
_DISAGREE, _DISAGREE_HERE = 2_000_000_000, 60_000_000_000
_CHANCE: Final = 0.01  #: that one of the ranks is last so often, if each is last as often as the others
_PLENTY: Final = 100  #: collectives: whoever is last to most of these is so by no chance
_SHARE: Final = 0.2  #: of the time from one collective to the next by which it is late, typically
_OFTEN: Final = 0.75  #: of the collectives that it has to be the last at


@dataclass(frozen=True)
class LineWaits:
    """The waiting in the collectives of one kind that one line calls."""

    kind: str
    place: str
    count: int
    waited: int  #: by all ranks together, in ns
    longest: int  #: of one rank in one of them
    last: int  #: the rank that came last most often
    times_last: int


@dataclass(frozen=True)
class Waiting:
    """The waiting times of a run."""

    run: Run
    tables: list[GroupTable] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run) -> Waiting:
        return cls(run, list(group_tables(run)))

    @cached_property
    def offsets(self) -> dict[int, int]:
        """What has to be added to the times of each rank, in ns since it began, to get one common clock."""
        records = self.run.records
        began = {rank: int(record.info.get("began_ns") or 0) for rank, record in records.items()}
        first = min(began.values(), default=0)
        offsets = {rank: at - first for rank, at in began.items()}
        for rank, ahead in self.clocks.items():
            offsets[rank] -= ahead
        return offsets

    @cached_property
    def clocks(self) -> dict[int, int]:
        """The ranks whose clock disagrees with that of the lowest rank of their group, and by how many ns."""
        found: dict[int, int] = {}
        for table in self.tables:
            times = self.times(table, "released", raw=True)
            if not times.shape[1]:
                continue
            reference = times[0]
            for row, rank in enumerate(table.ranks[1:], 1):
                both = ~np.isnan(reference) & ~np.isnan(times[row])
                if both.any() and rank not in found:
                    ahead = float(np.median(times[row][both] - reference[both]))
                    if abs(ahead) > self._tolerance(table.ranks[0], rank):
                        found[rank] = int(ahead) + found.get(table.ranks[0], 0)
        return found

    def _tolerance(self, rank: int, other: int) -> int:
        hosts = {self.run.records[each].host for each in (rank, other)}
        return _DISAGREE_HERE if len(hosts) == 1 and hosts != {""} else _DISAGREE

    def notes(self) -> list[str]:
        """A sentence for the ranks whose clocks disagree."""
        by_size: dict[str, list[int]] = {}
        for rank, ahead in self.clocks.items():
            way = "ahead" if ahead > 0 else "behind"
            by_size.setdefault(f"{time_text(abs(ahead))} {way}", []).append(rank)
        return [
            f"The clock of {ranks_text(ranks)} is {size}; times are corrected by the common collectives."
            for size, ranks in by_size.items()
        ]

    def times(self, table: GroupTable, column: str, raw: bool = False) -> NDArray[np.float64]:
        """Times of a group's collectives on the common clock; NaN where a rank has none."""
        times = np.full(table.signature.shape, np.nan)
        records = self.run.records
        base = min((int(r.info.get("began_ns") or 0) for r in records.values()), default=0)
        for row, rank in enumerate(table.ranks):
            calls = records[rank].groups.get(table.group)
            if calls is not None and len(calls):
                began = int(records[rank].info.get("began_ns") or 0) - base if raw else self.offsets[rank]
                columns, own = table.cells(row, calls)
                times[row, columns] = getattr(calls, column)[own] + float(began)
        return times

    @cached_property
    def _arrivals(self) -> list[NDArray[np.float64]]:
        """For each group the arrivals, only of collectives that all its ranks came to."""
        kept = []
        for table in self.tables:
            times = self.times(table, "start")
            whole: NDArray[np.bool_] = np.asarray(~np.isnan(times).any(axis=0))
            different = table.first_difference()
            if different is not None:
                whole[different:] = False
            kept.append(np.where(whole, times, np.nan))
        return kept

    @cached_property
    def waited(self) -> dict[int, int]:
        """How long each rank waited for others to come, in ns."""
        waited = dict.fromkeys(self.run.records, 0)
        for table, arrivals in zip(self.tables, self._arrivals, strict=True):
            whole = ~np.isnan(arrivals).any(axis=0)
            lost = arrivals[:, whole].max(axis=0, initial=0) - arrivals[:, whole]
            for rank, each in zip(table.ranks, lost.sum(axis=1).tolist(), strict=True):
                waited[rank] += int(each)
        return waited

    def lines(self) -> list[LineWaits]:
        """The waiting by kind and line of collectives, the longest first; lines are of the lowest rank."""
        found: list[LineWaits] = []
        for table, arrivals in zip(self.tables, self._arrivals, strict=True):
            calls = self.run.records[table.ranks[0]].groups.get(table.group)
            columns = np.flatnonzero(~np.isnan(arrivals).any(axis=0))
            if calls is None or not len(columns):
                continue
            own = columns - table.shifts[0]
            keys = np.stack([calls.place[own], calls.signature[own]])
            found += self._by_line(table, arrivals[:, columns], keys)
        return sorted(found, key=lambda each: -each.waited)

    def _by_line(
        self, table: GroupTable, arrivals: NDArray[np.float64], keys: NDArray[np.int32]
    ) -> Iterator[LineWaits]:
        names = self.run.names
        rows: dict[tuple[str, str], list[int]] = {}
        for at, (place, signature) in enumerate(keys.T.tolist()):
            kind = names.signatures.all[signature].kind
            rows.setdefault((kind, names.places.all[place]), []).append(at)
        for (kind, line), columns in rows.items():
            times = arrivals[:, columns]
            lost = times.max(axis=0) - times
            last = np.bincount(times.argmax(axis=0))
            yield LineWaits(
                kind, line, len(columns), int(lost.sum()), int(lost.max()), table.ranks[int(last.argmax())],
                int(last.max()),
            )  # fmt: skip

    def problems(self) -> list[Problem]:
        """The rank that the others wait for most of the time, if there is one."""
        return [
            problem
            for table, arrivals in zip(self.tables, self._arrivals, strict=True)
            if (problem := self._straggler(table, arrivals)) is not None
        ]

    def _straggler(self, table: GroupTable, arrivals: NDArray[np.float64]) -> Problem | None:
        numbers = np.flatnonzero(~np.isnan(arrivals).any(axis=0))
        if len(numbers) < 2 or len(table.ranks) < 2:
            return None
        times = arrivals[:, numbers]
        ordered = np.sort(times, axis=0)
        late = ordered[-1] - ordered[-2]  # what the last one alone costs the others
        rows, counts = np.unique(times.argmax(axis=0), return_counts=True)
        row = int(rows[counts.argmax()])
        its = times.argmax(axis=0) == row
        lost = float(late[its].sum())
        span = float(times.max() - times.min()) or 1.0
        typical = float(np.median(np.diff(ordered[-1]))) or 1.0
        if its.mean() < _OFTEN or float(np.median(late[its])) < _SHARE * typical:
            return None
        if _by_chance(int(its.sum()), len(numbers), len(table.ranks)) > _CHANCE:
            return None
        rank, worst = table.ranks[row], int(numbers[np.flatnonzero(its)[late[its].argmax()]])
        call = table.call(self.run, rank, worst)
        assert call is not None
        place = self.run.names.places.all[call[0].place[call[1]]]
        others = ranks_text([each for each in table.ranks if each != rank])
        title = (
            f"Rank {rank} comes last to {int(its.sum()):,} of {len(numbers):,} collectives: {others} "
            f"{'waits' if len(table.ranks) == 2 else 'wait'} {time_text(int(lost))} for it, "
            f"{100 * min(lost / span, 1):.0f} % of the time"
        )
        return Problem(
            kind="straggler", severity=Severity.WARNING, title=title, module="", modules=(), place=place,
            why="Every rank goes at the pace of the slowest one.", confidence=Confidence.LIKELY,
            detail=self._slow_line(rank, [each for each in table.ranks if each != rank]),
        )  # fmt: skip

    def _slow_line(self, rank: int, others: list[int]) -> str:
        """The line on which a rank spends most more than the others do."""
        records = self.run.records
        spent = records[rank].spent
        more = {
            place: time - float(np.median([records[other].spent.get(place, 0) for other in others]))
            for place, time in spent.items()
            if self.run.names.places.all[place]
        }
        if not more:
            return ""
        worst = max(more, key=more.__getitem__)
        usual = int(spent[worst] - more[worst])
        place = self.run.names.places.all[worst]
        return f"it spends {time_text(spent[worst])} at and before {place}, the others {time_text(usual)}"


def _by_chance(last: int, count: int, ranks: int) -> float:
    """How likely one of the ranks is last at least so often, if each time it is any of them."""
    if count > _PLENTY:
        return 0.0
    one = 1 / ranks
    return ranks * sum(comb(count, k) * one**k * (1 - one) ** (count - k) for k in range(last, count + 1))
