"""Desync: the first collective that is not the same on every rank of its group, and the op that caused it.

The collectives of a group have to come in the same order on all its ranks. The first that differs, or that a
rank never comes to, is a problem; between it and the one before, the first op that differs is its cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.ranks.collectives import Collective
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run
from sightline.ranks.rank_ends import whereabouts
from sightline.ranks.record import GroupCalls, RankRecord
from sightline.store import load

ENDED, BEFORE = -1, -2  #: instead of a signature: after the last call of a rank, before the first one kept
_WHY_DIFFERENT: Final = (
    "Ranks of a group must run the same collectives in the same order: these hang or mix up their data."
)
_WHY_NOT_YET: Final = (
    "The job is running: it may still come. Every rank of a group must come to every collective."
)
_EVERY_RANK: Final = "every rank of a group must come to every collective"


@dataclass(frozen=True)
class GroupTable:
    """The collectives of a process group: a row for each rank, a column for each order number."""

    group: str
    ranks: list[int]
    first: int  #: the order number of the first column: with ``last=`` earlier ones are left out
    shifts: list[int]  #: the column of the first collective that a rank still has; negative before the table
    signature: NDArray[np.int32]

    def call(self, run: Run, rank: int, column: int) -> tuple[GroupCalls, int] | None:
        """A rank's calls, and the number of the one in this column; None where it has none there."""
        calls = run.records[rank].groups.get(self.group)
        at = column - self.shifts[self.ranks.index(rank)]
        return (calls, at) if calls is not None and 0 <= at < len(calls) else None

    def cells(self, row: int, calls: GroupCalls) -> tuple[slice, slice]:
        """The columns in which a row has its calls, and the slice of its calls that these are."""
        shift = self.shifts[row]
        end = max(shift + len(calls), 0)
        return slice(max(shift, 0), end), slice(max(-shift, 0), None)

    def first_difference(self) -> int | None:
        """The column of the first collective that is not the same on all ranks."""
        known = self.signature != BEFORE
        low = np.where(known, self.signature, np.iinfo(np.int32).max).min(axis=0)
        high = np.where(known, self.signature, np.iinfo(np.int32).min).max(axis=0)
        differs = np.flatnonzero(low < high)
        return int(differs[0]) if len(differs) else None


def group_tables(run: Run) -> Iterator[GroupTable]:
    """The table of each group with at least two ranks here."""
    for group, members in run.groups.items():
        ranks = [rank for rank in members if rank in run.records]
        if len(ranks) < 2:
            continue
        calls = [run.records[rank].groups.get(group) for rank in ranks]
        firsts = [0 if each is None else each.first for each in calls]
        counts = [len(each or ()) for each in calls]
        end = max(begin + count for begin, count in zip(firsts, counts, strict=True))
        # A rank that died long before the others' last ops would make a table of mostly nothing.
        first = max(min(firsts), end - max(counts))
        signature = np.full((len(ranks), end - first), ENDED, dtype=np.int32)
        table = GroupTable(group, ranks, first, [each - first for each in firsts], signature)
        for row, each in enumerate(calls):
            signature[row, : max(table.shifts[row], 0)] = BEFORE
            if each is not None:
                columns, own = table.cells(row, each)
                signature[row, columns] = each.signature[own]
        yield table


def desync_problems(run: Run) -> list[Problem]:
    """The first difference of each group; of several groups the one that came first in the run leads."""
    problems: list[tuple[int, Problem]] = []
    for table in group_tables(run):
        column = table.first_difference()
        if column is not None:
            problems += _problems_at(run, table, column)
    return [problem for _, problem in sorted(problems, key=lambda pair: (-pair[1].severity, pair[0]))]


def _problems_at(run: Run, table: GroupTable, column: int) -> Iterator[tuple[int, Problem]]:
    """The problems of one collective of a group, and when it began."""
    classes: dict[int, list[int]] = {}
    for rank, signature in zip(table.ranks, table.signature[:, column].tolist(), strict=True):
        if signature != BEFORE:
            classes.setdefault(signature, []).append(rank)
    absent = classes.pop(ENDED, [])
    ordered = sorted(classes.items(), key=lambda pair: (-len(pair[1]), pair[1][0]))
    signature, most = ordered[0]
    call = _named(run.names.signatures.all[signature], table.first + column)
    here = table.call(run, most[0], column)
    assert here is not None
    began = int(here[0].start[here[1]])
    place = run.names.places.all[here[0].place[here[1]]]
    for other, ranks in ordered[1:]:
        there = table.call(run, ranks[0], column)
        assert there is not None
        line = run.names.places.all[there[0].place[there[1]]]
        theirs = _named(run.names.signatures.all[other], table.first + column)
        verb = "runs" if len(most) == 1 else "run"
        title = (
            f"{ranks_text(most).capitalize()} {verb} {call} where {ranks_text(ranks)} "
            f"{'runs' if len(ranks) == 1 else 'run'} {theirs}{_of_group(run, table.group)}"
        )
        detail = [f"{ranks_text(ranks)}: {line}", *_unmatched_text(run, table, most[0], ranks[0], column)]
        yield began, _problem("desync", Severity.ERROR, title, _WHY_DIFFERENT, place, detail)
    by_state: dict[tuple[object, ...], list[int]] = {}  # ranks that ended in the same way at the same line
    for rank in absent:
        record = run.records[rank]
        key = record.failed, record.unfinished, record.running, record.last_place
        by_state.setdefault(key, []).append(rank)
    for ranks in by_state.values():
        yield began, _missing(run, table, column, (call, place), most, ranks)


def _missing(
    run: Run, table: GroupTable, column: int, call: tuple[str, str], most: list[int], absent: list[int]
) -> Problem:
    """Some ranks never come to a collective that others are in."""
    record = run.records[absent[0]]
    text, place = call
    detail = [f"{ranks_text(absent)}: {whereabouts(run, record)}"]
    detail += _unmatched_text(run, table, most[0], absent[0], column)
    stopped = [rank for rank in most if not _went_on(run, table, rank, column)]
    who = ranks_text(absent).capitalize()
    if not stopped:
        title = f"{who} has no {text}{_of_group(run, table.group)}, which {ranks_text(most)} completed"
        why = "Its recording may cover less of the run; if not, ranks have mixed up their collectives."
        return _problem("desync", Severity.NOTE, title, why, place, detail, Confidence.GUESS)
    how = "died before" if record.failed else "never came to"
    wait = "waits" if len(stopped) == 1 else "wait"
    waits = (
        f"{ranks_text(stopped)} {wait if any(run.records[rank].running for rank in stopped) else 'waited'}"
    )
    calls = run.records[stopped[0]].groups.get(table.group)
    last = -1 if calls is None else table.shifts[table.ranks.index(stopped[0])] + len(calls) - 1
    if record.unfinished and calls is not None and last > column:
        # The last ops of a killed process may be lost: the others have gone on with it for a while.
        how = f"{'was' if len(absent) == 1 else 'were'} cut short before"
        text = _named(run.names.signatures.all[calls.signature[-1]], table.first + last)
        place = run.names.places.all[calls.place[-1]]
        detail.append("the last third of a second of a killed process is not recorded")
    if record.running:
        have = "has" if len(absent) == 1 else "have"
        title = f"{who} {have} not come to {text}{_of_group(run, table.group)}, in which {waits}"
        return _problem("hang", Severity.NOTE, title, _WHY_NOT_YET, place, detail)
    title = f"{who} {how} {text}{_of_group(run, table.group)}, in which {waits}"
    likely = Confidence.LIKELY if record.unfinished else Confidence.CERTAIN
    why = f"{_outcome(run, stopped)}: {_EVERY_RANK}."
    return _problem("hang", Severity.ERROR, title, why, place, detail, likely)


def _outcome(run: Run, waiting: list[int]) -> str:
    """How the waiting of some ranks ended: they failed, were killed, or still wait."""
    records = [run.records[rank] for rank in waiting]
    still = [each.rank for each in records if each.running]
    failed = [each.rank for each in records if each.failed]
    rest = [each.rank for each in records if not (each.running or each.failed)]
    parts = [f"{ranks_text(failed)} waited for it and failed"] if failed else []
    cut = "was" if len(rest) == 1 else "were"
    parts += [f"{ranks_text(rest)} waited for it and {cut} cut short"] if rest else []
    if still and parts:
        parts.append(f"{ranks_text(still)} still {'waits' if len(still) == 1 else 'wait'}")
    elif still:
        parts.append("the others wait for it until they time out")
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def _problem(
    kind: str, severity: Severity, title: str, why: str, place: str, detail: list[str],
    confidence: Confidence = Confidence.CERTAIN,
) -> Problem:  # fmt: skip
    return Problem(
        kind=kind, severity=severity, title=title, why=why, module="", modules=(), place=place,
        confidence=confidence, detail="\n".join(detail),
    )  # fmt: skip


def _named(call: Collective, number: int) -> str:
    """A collective under its number in this group: the first with its signature had another."""
    return str(call).replace(f"#{call.number}", f"#{number}", 1)


def _of_group(run: Run, group: str) -> str:
    return f" of group {group}" if len(run.groups) > 1 and group else ""


def _went_on(run: Run, table: GroupTable, rank: int, column: int) -> bool:
    """Whether a rank has finished, and ran more after a collective: then that was completed."""
    record, here = run.records[rank], table.call(run, rank, column)
    if here is None or record.failed:
        return False
    calls, at = here
    return not record.unfinished or not (record.last_is_collective and at == len(calls) - 1)


def _unmatched_text(run: Run, table: GroupTable, rank: int, other: int, column: int) -> list[str]:
    """Sentences on the first difference between two ranks before a collective."""
    difference = first_unmatched_op(run, table, rank, other, column)
    if difference is None:
        return first_other_shape(run, rank, other)
    mine, yours = (
        f"runs {run.names.step_text(step)}"
        if step is not None
        else "has run no more"
        if run.records[each].running
        else "ends"
        for each, step in ((rank, difference.ours), (other, difference.theirs))
    )
    where = "from the start" if difference.since < 0 else f"after collective #{difference.since}"
    return [f"they part {where}:", f"  rank {rank} {mine}", f"  rank {other} {yours}"]


@dataclass(frozen=True)
class FirstUnmatchedOp:
    """The first op that two ranks do not share."""

    since: int  #: the order number of the last collective before it; -1 for none
    ours: int | None  #: a step in the shared names; None where the rank has ended
    theirs: int | None


def first_unmatched_op(
    run: Run, table: GroupTable, rank: int, other: int, column: int
) -> FirstUnmatchedOp | None:
    """The first op that differs between two ranks before a column; None where they run the same ops.

    They are compared from one collective to the next. A difference that comes again and again, such as a log
    that only one rank writes, does no harm: of those that are as rare as any, the last is taken. One that
    only shows that a rank has ended is taken where there is no other.
    """
    differences = list(_unmatched_ops(run, table, rank, other, column))
    if not differences:
        return None
    counts = Counter((each.ours, each.theirs) for each in differences)
    between_ops = [each for each in differences if None not in (each.ours, each.theirs)] or differences
    rarest = min(counts[each.ours, each.theirs] for each in between_ops)
    return [each for each in between_ops if counts[each.ours, each.theirs] == rarest][-1]


def _unmatched_ops(
    run: Run, table: GroupTable, rank: int, other: int, column: int
) -> Iterator[FirstUnmatchedOp]:
    """The first difference between each two collectives, up to one; at most one for each."""
    here, there = run.records[rank], run.records[other]
    shifts = [table.shifts[table.ranks.index(each)] for each in (rank, other)]
    first = max(*shifts, 0)
    positions = [
        _positions(record, table.group)[first - shift : column - shift + 1]
        for record, shift in zip((here, there), shifts, strict=True)
    ]
    is_cut = table.first + first > 0  # ops before the first collective that both have cannot be compared
    if is_cut and not all(positions):
        return
    begins = [] if is_cut else [(0, 0)]
    begins += list(zip(*positions, strict=False))
    ends = [*begins[1:], (len(here.steps), len(there.steps))]
    for at, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        a, b = here.steps[begin[0] : end[0]], there.steps[begin[1] : end[1]]
        count = min(len(a), len(b))
        differs = np.flatnonzero(a[:count] != b[:count])
        step = int(differs[0]) if len(differs) else count
        if step < max(len(a), len(b)) and first + at <= column + 1:
            ours, theirs = (int(each[step]) if step < len(each) else None for each in (a, b))
            yield FirstUnmatchedOp(table.first + first + at - (not is_cut), ours, theirs)


def _positions(record: RankRecord, group: str) -> list[int]:
    """The position behind each collective of a group in the steps of a rank, as far as they are in order."""
    calls = record.groups.get(group)
    if calls is None or not len(calls):
        return []
    order = np.argsort(record.step_ops, kind="stable")
    behind = order[np.searchsorted(record.step_ops, calls.op, sorter=order)] + 1
    return list(behind.tolist()) if np.all(np.diff(behind) > 0) else []


def first_other_shape(run: Run, rank: int, other: int) -> list[str]:
    """A sentence on the first op of two ranks whose results have other shapes; they ran the same ops."""
    here, there = run.records[rank], run.records[other]
    if here.info.get("dropped") or there.info.get("dropped"):
        return []
    count = min(len(here.steps), len(there.steps))
    texts = []
    for record in (here, there):  # the results of each op: ``f32[2, 8]``
        data = load(record.path)
        try:
            shapes, metas = [str(meta) for meta in data.metas], data.values.meta
            texts.append([", ".join(shapes[metas[value]] for value in data.ops.outputs_of(op))
                          for op in record.step_ops[:count].tolist()])  # fmt: skip
        finally:
            data.close()
    for at, (mine, yours) in enumerate(zip(*texts, strict=True)):
        if mine != yours:
            step = run.names.step_text(int(here.steps[at]))
            return [f"shapes differ since {step}: {mine} on rank {rank}, {yours} on rank {other}"]
    return []
