"""The rank that the others wait for again and again, and the work that it does and they do not.

Ranks leave a collective that they wait in together, so that all time from there to a rank's own arrival at
the next is work of that rank. A cause is named only where it shows before most of the late arrivals; slow
cores make a rank late without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.data.index import Index
from sightline.data.trace_data import TraceData
from sightline.errors import SightlineError
from sightline.notation import time_text
from sightline.ranks.collective_waits import Waiting
from sightline.ranks.collectives import Collectives, released
from sightline.ranks.desync import GroupTable
from sightline.ranks.folder import ranks_text
from sightline.ranks.record import RankRecord, waited_time
from sightline.store import load

_CHANCE: Final = 0.01  #: that one of the ranks is last so often, if each is last as often as the others
_MOSTLY: Final = 0.75  #: of the late arrivals that it has to be the last at, and that a cause has to show in
_WEIGHT: Final = 0.95  #: of the time lost, which the late arrivals that count make up
_LEAST_LOST: Final = 50_000_000  #: ns altogether
_LEAST_SHARE: Final = 0.02  #: of the time of the job that is lost
_STEP_SHARE: Final = 0.15  #: of the time from the first collective to the last that is lost
_TOGETHER: Final = 100_000  #: ns by which a rank may seem to go on before the last one has come
_EVEN: Final = 9  #: times the least that each third of the run has to lose
_MUCH: Final = 0.25  #: of the time that is lost to a rank that is slow without a cause
_LONGEST: Final = 3  #: times the median: the most that one late arrival counts
_HALF: Final = 0.5  #: of the time lost that one line has to account for
_MORE: Final = 1.1  #: times as many ops, or elements, are more
_TYPICAL: Final = 1.5  #: times its share of the work: a line may lose this where the whole rank is slower
_MUCH_SLOWER: Final = 3  #: times: more than a core that is shared


@dataclass(frozen=True)
class Lateness:
    """The late arrivals of one rank at the collectives of a group."""

    rank: int
    times_last: int  #: of all collectives
    count: int
    lost: int  #: ns that the others wait for it
    span: int  #: ns from the first collective to the last
    columns: NDArray[np.int64]  #: the collectives that it is the last at, but the first
    counted: NDArray[np.bool_]  #: which of these make up most of the time that is lost
    #: When all ranks had come to the collective before each of them, on the common clock.
    begins: NDArray[np.float64]


def straggler_problems(waiting: Waiting) -> Iterator[Problem]:
    """At most one straggler for each group."""
    for table, arrivals, waits in zip(waiting.tables, waiting.arrivals, waiting.waits, strict=True):
        released = waiting.times(table, "released")
        job = max(int(record.info.get("duration_ns") or 0) for record in waiting.run.records.values())
        late = lateness(table.ranks, arrivals, waits, released, job)
        if late is not None:
            yield from _problems(waiting, table, arrivals, late)


def lateness(
    ranks: list[int], arrivals: NDArray[np.float64], waits: NDArray[np.float64],
    released: NDArray[np.float64], job: int,
) -> Lateness | None:  # fmt: skip
    """The rank that loses the others' time again and again; None if there is none."""
    numbers = np.flatnonzero(~np.isnan(arrivals).any(axis=0))
    if len(numbers) < 3 or len(ranks) < 2:
        return None
    times, waits = arrivals[:, numbers], waits[:, numbers]
    ordered, last = np.sort(times, axis=0), times.argmax(axis=0)
    # The last rank is waited for, by itself, for as long as the others wait; it does not wait.
    late = np.minimum(ordered[-1] - ordered[-2], np.median(np.sort(waits, axis=0)[1:], axis=0))
    # A collective that some rank does not wait in does not bring ranks together.
    together = (released[:, numbers] >= ordered[-1] - _TOGETHER).all(axis=0)
    before = np.maximum.accumulate(np.where(together, np.arange(len(numbers)), -1))[:-1]
    # Ranks that begin at other times are late to the first collective, and no slower for that.
    late = np.concatenate([[0.0], np.where(before >= 0, late[1:], 0.0)])
    row = int(np.bincount(last, weights=late).argmax())
    largest = np.argsort(-late)
    enough = int(np.searchsorted(np.cumsum(late[largest]), _WEIGHT * late.sum())) + 1
    counted = np.sort(largest[:enough])
    own = counted[last[counted] == row]
    span = float(ordered[-1, -1] - ordered[-1, 0])
    if not len(own) or len(own) < _MOSTLY * len(counted):
        return None
    usual = np.zeros(len(numbers))
    usual[own] = np.minimum(late[own], _LONGEST * np.median(late[own]))
    if usual.sum() < max(_LEAST_LOST, _LEAST_SHARE * job, _STEP_SHARE * span):
        return None
    if min(part.sum() for part in np.array_split(usual, 3)) < usual.sum() / _EVEN:
        return None  # a slow start, or the pace of a part of the run
    count, one = len(counted), 1 / len(ranks)
    if count <= 1000:  # the chance that one of the ranks is last so often, if each time it is any of them
        chances = (comb(count, k) * one**k * (1 - one) ** (count - k) for k in range(len(own), count + 1))
        if len(ranks) * sum(chances) > _CHANCE:
            return None
    every = np.flatnonzero(last == row)[1:] if last[0] == row else np.flatnonzero(last == row)
    every = every[before[every - 1] >= 0]
    return Lateness(
        ranks[row], int((last == row).sum()), len(numbers), int(late[last == row].sum()), int(span),
        numbers[every], np.isin(every, own), ordered[-1, before[every - 1]],
    )  # fmt: skip


def _problems(
    waiting: Waiting, table: GroupTable, arrivals: NDArray[np.float64], late: Lateness
) -> Iterator[Problem]:
    """A problem with the cost of a late rank and the reason why it is late, as far as that is known.

    A rank with the same work as the others, only slower, is no problem unless it costs much.
    """
    names = waiting.run.names
    lines = []
    for column in late.columns[late.counted].tolist():
        call = table.call(waiting.run, late.rank, column)
        assert call is not None
        lines.append(names.places.all[call[0].place[call[1]]])
    others = [rank for rank in table.ranks if rank != late.rank]
    title = (
        f"Rank {late.rank} comes last to {late.times_last:,} of {late.count:,} collectives: "
        f"{ranks_text(others)} {'waits' if len(others) == 1 else 'wait'} {time_text(late.lost)} for it "
        f"between the first and the last, {100 * min(late.lost / max(late.span, 1), 1):.0f} % of that time"
    )
    # The others are alike in that they wait: the one in the middle stands for them.
    other = sorted(others, key=lambda rank: (waiting.waited[rank], rank))[len(others) // 2]
    try:
        ours, theirs = (
            _work(
                waiting.run.records[rank], late.begins - waiting.offsets[rank],
                arrivals[table.ranks.index(rank), late.columns] - waiting.offsets[rank],
            )
            for rank in (late.rank, other)
        )  # fmt: skip
        # Communication takes its time besides the waiting, and one rank may see more of it than another.
        carried = [
            max(waited_time(waiting.run.records[rank].info) - waiting.waited[rank], 0)
            for rank in (late.rank, other)
        ]
        if ours.times.sum() - theirs.times.sum() - max(carried[0] - carried[1], 0) < _HALF * late.lost:
            return  # it works no longer than the others, but is later to leave the collectives
        detail, has_cause = _cause(ours, theirs, late.counted, other)
    except SightlineError:  # it has been removed meanwhile
        detail, has_cause = "", False
    if not has_cause and late.lost < _MUCH * late.span:
        return
    yield Problem(
        kind="straggler", severity=Severity.WARNING if has_cause else Severity.NOTE, title=title, module="",
        modules=(), place=max(set(lines), key=lines.count), confidence=Confidence.CERTAIN, detail=detail,
        why="Every rank goes at the pace of the slowest one.",
    )  # fmt: skip


# -- the work before the late arrivals ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """The work of one rank before some collectives: a row for each of these, a column for each line."""

    lines: list[str]
    times: NDArray[np.float64]  #: ns on the way to the ops of a line and in them
    ops: NDArray[np.int64]
    elements: NDArray[np.int64]  #: of the results of these ops

    def of(self, line: str) -> tuple[NDArray[np.float64], int, int]:
        """Times, ops and elements of a line; zeros where it has none."""
        if line not in self.lines:
            return np.zeros(len(self.times)), 0, 0
        at = self.lines.index(line)
        return self.times[:, at], int(self.ops[:, at].sum()), int(self.elements[:, at].sum())


def _is_more(mine: int, yours: int) -> bool:
    return mine > _MORE * yours


def _cause(ours: _Work, theirs: _Work, counted: NDArray[np.bool_], other: int) -> tuple[str, bool]:
    """How the work of the late rank differs, in a sentence, and whether that is more than a slow core."""
    more = {line: ours.of(line)[0] - theirs.of(line)[0] for line in {*ours.lines, *theirs.lines}}
    lost = float(ours.times.sum() - theirs.times.sum())
    worst = max(more, key=lambda line: (float(more[line].sum()), line), default="")
    if worst and lost > 0:
        of_lost = float(more[worst].sum()) / lost
        if of_lost >= _HALF and bool((more[worst][counted] > 0).mean() >= _MOSTLY):
            mine, yours = ours.of(worst), theirs.of(worst)
            share = float(yours[0].sum() / max(theirs.times.sum(), 1.0))
            has_other_work = _is_more(mine[1], yours[1]) or _is_more(mine[2], yours[2])
            is_much = float(mine[0].sum()) > _MUCH_SLOWER * float(yours[0].sum())
            has_cause = has_other_work or is_much or of_lost > _TYPICAL * share
            return _line_text(worst, mine, yours, other), has_cause
    ops, elements = (
        (int(getattr(ours, name).sum()), int(getattr(theirs, name).sum())) for name in ("ops", "elements")
    )
    if _is_more(*ops):
        return f"before these it runs {ops[0]:,} ops, rank {other} {ops[1]:,}", True
    if _is_more(*elements):
        sizes = f"{elements[0]:,} elements, those of rank {other} {elements[1]:,}"
        return f"its ops before these make {sizes}", True
    is_same = ops[0] == ops[1] and elements[0] == elements[1]
    alike = "as many ops on as large tensors" if is_same else "similar ops"
    return f"it runs {alike} as rank {other} in more time, and no single line accounts for that", False


def _line_text(
    line: str, mine: tuple[NDArray[np.float64], int, int], yours: tuple[NDArray[np.float64], int, int],
    other: int,
) -> str:  # fmt: skip
    """The time and the work of the late rank at one line, against another rank."""
    spent = f"before these it spends {time_text(int(mine[0].sum()))} at and before {line}"
    if not yours[1]:
        return f"{spent}, where rank {other} runs nothing"
    text = f"{spent}, rank {other} {time_text(int(yours[0].sum()))}"
    if _is_more(mine[1], yours[1]):
        return f"{text}; it runs {mine[1]:,} ops there, rank {other} {yours[1]:,}"
    if _is_more(mine[2], yours[2]):
        return f"{text}; its ops there make {mine[2]:,} elements, those of rank {other} {yours[2]:,}"
    return f"{text}, for the same ops"


def _work(record: RankRecord, begins: NDArray[np.float64], ends: NDArray[np.float64]) -> _Work:
    """The work of a rank in some stretches of its run, which are given in ns since its recording began."""
    data = load(record.path)
    try:
        index, ops, values = Index(data), data.ops, data.values
        rows = np.flatnonzero(ops.level == 1)
        stops = ops.start[rows] + ops.duration[rows]
        covered = np.concatenate([[0], np.maximum.accumulate(stops)[:-1]]) if len(rows) else stops
        stretch = np.searchsorted(ends, ops.start[rows], side="left")
        inside = np.flatnonzero(stretch < len(ends))
        inside = inside[ops.start[rows[inside]] > begins[stretch[inside]]]
        own_part = _own_part(data, index, rows, inside)
        rows, stretch = rows[inside], stretch[inside]
        begun = np.maximum(covered[inside], begins[stretch])
        is_first = np.diff(stretch, prepend=-1) != 0
        # Before the first op a rank leaves the collective, which takes its time, too.
        begun += np.where(is_first, np.maximum(ops.start[rows] - begun, 0) * (1 - own_part), 0)
        # The collective at the end of a stretch counts up to its begin.
        times = np.minimum(stops[inside], ends[stretch]) - begun
        frames, column = np.unique(index.op_user_frames[rows], return_inverse=True)
        sizes = np.array([meta.numel for meta in data.metas] or [0], dtype=np.int64)
        total = np.concatenate([[0], np.cumsum(sizes[values.meta[ops.outputs]])])
        elements = total[ops.output_offsets[rows + 1]] - total[ops.output_offsets[rows]]
        lines: dict[str, int] = {}
        numbers = [
            lines.setdefault(
                f"{index.frames[frame].position} in {index.frames[frame].function}" if frame >= 0 else "",
                len(lines),
            )
            for frame in frames.tolist()
        ]
        shape = len(ends), len(lines)
        work = _Work(list(lines), np.zeros(shape), *(np.zeros(shape, dtype=np.int64) for _ in range(2)))
        where = stretch, np.array(numbers, dtype=np.int64)[column]
        np.add.at(work.times, where, np.maximum(times, 0))
        np.add.at(work.ops, where, 1)
        np.add.at(work.elements, where, elements)
        return work
    finally:
        data.close()


def _own_part(
    data: TraceData, index: Index, rows: NDArray[np.int64], at: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The share of the time before each op that is the program's own, if the op before it is a collective.

    Where both are of one line, as in a backward pass that reduces gradients, the library waits in between;
    elsewhere the program does, as long as was recorded of ``Work.wait``.
    """
    frames = index.op_user_frames
    before = rows[np.maximum(at - 1, 0)]
    same_line = frames[rows[at]] == frames[before]
    collectives = Collectives(data).ops
    went_on = released(data, collectives)
    gaps = int(np.maximum(went_on - data.ops.start[collectives] - data.ops.duration[collectives], 0).sum())
    return np.where(same_line, 0.0, 1 - min(waited_time(data.info) / max(gaps, 1), 1.0))
