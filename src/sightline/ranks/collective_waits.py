"""Who waits: clocks brought together by the collectives, and the rank that comes last to each of these.

A rank comes to a collective when it calls it. The others wait for the last one; the difference is waiting
time, whatever the backend. Clocks that disagree are found by the same collectives: their ends are common.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.notation import time_text
from sightline.ranks.desync import GroupTable, group_tables
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run

#: ns that two clocks may differ by before they are corrected: of two hosts, and of one by its name.
_CORRECTED, _CORRECTED_HERE = 1_000_000, 60_000_000_000
_NOTED: Final = 2_000_000_000  #: ns of a clock that is wrong, and not only a little off like all clocks


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
        """The ns to add to the times of each rank, in ns since it began, to get one common clock."""
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
        clocks: dict[int, int] = {}
        for table in self.tables:
            times = self.times(table, "released", raw=True)
            if not times.shape[1]:
                continue
            reference = times[0]
            for row, rank in enumerate(table.ranks[1:], 1):
                both = ~np.isnan(reference) & ~np.isnan(times[row])
                if both.any() and rank not in clocks:
                    ahead = float(np.median(times[row][both] - reference[both]))
                    hosts = {self.run.records[each].host for each in (table.ranks[0], rank)}
                    is_one_host = len(hosts) == 1 and hosts != {""}
                    if abs(ahead) > (_CORRECTED_HERE if is_one_host else _CORRECTED):
                        clocks[rank] = int(ahead) + clocks.get(table.ranks[0], 0)
        return clocks

    def notes(self) -> list[str]:
        """A sentence for the ranks whose clocks disagree."""
        by_size: dict[str, list[int]] = {}
        for rank, ahead in self.clocks.items():
            if abs(ahead) < _NOTED:
                continue
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
    def arrivals(self) -> list[NDArray[np.float64]]:
        """For each group the arrivals on the common clock, only of collectives that all ranks came to."""
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
    def waits(self) -> list[NDArray[np.float64]]:
        """For each group how long each rank waited for the last one, in ns; 0 where not all ranks came.

        A rank waits until the last one comes, but no longer than until it runs its next op: one that goes on
        at once, as DDP does while it reduces gradients, waits later or never.
        """
        kept = []
        for table, arrivals in zip(self.tables, self.arrivals, strict=True):
            until = np.minimum(arrivals.max(axis=0, initial=0), self.times(table, "released"))
            kept.append(np.nan_to_num(np.maximum(until - arrivals, 0)))
        return kept

    @cached_property
    def waited(self) -> dict[int, int]:
        """How long each rank waited for others to come, in ns; a wait that had no end is in it."""
        waited = dict.fromkeys(self.run.records, 0)
        for table, waits in zip(self.tables, self.waits, strict=True):
            for rank, each in zip(table.ranks, waits.sum(axis=1).tolist(), strict=True):
                waited[rank] += int(each)
        for rank, record in self.run.records.items():
            if record.unfinished and record.waits_at is not None:
                waited[rank] += record.waits_at[1]
        return waited

    def lines(self) -> list[LineWaits]:
        """The waiting by kind and line of collectives, the longest first; lines are of the lowest rank."""
        lines: list[LineWaits] = []
        for table, arrivals, waits in zip(self.tables, self.arrivals, self.waits, strict=True):
            calls = self.run.records[table.ranks[0]].groups.get(table.group)
            columns = np.flatnonzero(~np.isnan(arrivals).any(axis=0))
            if calls is None or not len(columns):
                continue
            own = columns - table.shifts[0]
            rows: dict[tuple[str, str], list[int]] = {}
            for column, place, signature in zip(
                columns.tolist(), calls.place[own].tolist(), calls.signature[own].tolist(), strict=True
            ):
                names = self.run.names
                key = names.signatures.all[signature].kind, names.places.all[place]
                rows.setdefault(key, []).append(column)
            for (kind, line), each in rows.items():
                lost, last = waits[:, each], np.bincount(arrivals[:, each].argmax(axis=0))
                lines.append(
                    LineWaits(
                        kind, line, len(each), int(lost.sum()), int(lost.max()),
                        table.ranks[int(last.argmax())], int(last.max()),
                    )
                )  # fmt: skip
        return sorted(lines, key=lambda each: -each.waited)
