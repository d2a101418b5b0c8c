"""Where ranks part: the first collective that is not the same on every rank of its group, and why.

The collectives of a group have to come in the same order on all its ranks. The first that differs, or that a
rank never comes to, is a problem; between it and the one before, the first op that differs is its cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.problems.problem import Confidence, Problem, Severity
from sightline.ranks.collectives import Collective
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run
from sightline.ranks.record import GroupCalls, RankRecord
from sightline.trace.bundle import load

ENDED, BEFORE = -1, -2  #: instead of a signature: after the last call of a rank, before the first one kept
_NEAR: Final = 8  #: a ring of last ops is aligned by time, and this many collectives around by what they are
_WHY_DIFFERENT: Final = (
    "Ranks of a group must run the same collectives in the same order: these hang or mix up their data."
)
_WHY_MISSING: Final = (
    "The others wait for it until they time out: every rank of a group must come to every collective."
)


@dataclass(frozen=True)
class GroupTable:
    """The collectives of a process group: a row for each rank, a column for each order number."""

    group: str
    ranks: list[int]
    shifts: list[int]  #: how many collectives of the group came before the first that a rank still has
    signature: NDArray[np.int32]

    def call(self, run: Run, rank: int, number: int) -> tuple[GroupCalls, int] | None:
        """A rank's calls, and which of them has this order number; None where it has none."""
        calls = run.records[rank].groups.get(self.group)
        at = number - self.shifts[self.ranks.index(rank)]
        return (calls, at) if calls is not None and 0 <= at < len(calls) else None

    def first_difference(self) -> int | None:
        """The order number of the first collective that is not the same on all ranks."""
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
        shifts = _shifts(run, ranks, calls)
        lengths = [shift + len(each or ()) for shift, each in zip(shifts, calls, strict=True)]
        signature = np.full((len(ranks), max(lengths)), ENDED, dtype=np.int32)
        for row, (shift, each) in enumerate(zip(shifts, calls, strict=True)):
            signature[row, :shift] = BEFORE
            if each is not None:
                signature[row, shift : shift + len(each)] = each.signature
        yield GroupTable(group, ranks, shifts, signature)


def _shifts(run: Run, ranks: list[int], calls: list[GroupCalls | None]) -> list[int]:
    """Zero, except where a recording has only its last ops: then by time, and by what is near."""
    if not any(run.records[rank].info.get("dropped") for rank in ranks):
        return [0] * len(ranks)
    began = [int(run.records[rank].info.get("began_ns", 0)) for rank in ranks]
    known = max((each for each in calls if each is not None), key=len, default=None)
    if known is None or not len(known):
        return [0] * len(ranks)
    base = began[next(row for row, each in enumerate(calls) if each is known)]
    shifts = [
        0 if each is None or not len(each) else _shift(known, each, at - base)
        for each, at in zip(calls, began, strict=True)
    ]
    return [shift - min(shifts) for shift in shifts]


def _shift(known: GroupCalls, calls: GroupCalls, later: int) -> int:
    """Where the first call of a rank whose recording began so much later stands among known calls."""
    about = int(np.searchsorted(known.start, calls.start[0] + later))
    fits = partial(_agreement, calls=calls, known=known, later=later)
    best = max(range(about - _NEAR, about + _NEAR + 1), key=fits)
    if fits(best)[0] < 1:  # ranks that do not wait for each other come at different times
        half = len(calls) // 2
        best = max(range(-half, max(len(known) - half, 1)), key=fits)
    return best


def _agreement(shift: int, calls: GroupCalls, known: GroupCalls, later: int) -> tuple[float, float]:
    """How well two sequences fit: the share of equal calls, then how near they are in time."""
    count = min(len(known) - max(shift, 0), len(calls) + min(shift, 0))
    if count <= 0:
        return 0.0, -float("inf")
    here, there = slice(max(shift, 0), max(shift, 0) + count), slice(max(-shift, 0), max(-shift, 0) + count)
    same = (known.signature[here] == calls.signature[there]) & (known.place[here] == calls.place[there])
    equal = float(np.mean(same))
    return equal, -float(np.median(np.abs(known.start[here] - calls.start[there] - later)))


def desync_problems(run: Run) -> list[Problem]:
    """The first difference of each group; of several groups the one that came first in the run leads."""
    found: list[tuple[int, Problem]] = []
    for table in group_tables(run):
        number = table.first_difference()
        if number is not None:
            found += _problems_at(run, table, number)
    return [problem for _, problem in sorted(found, key=lambda pair: (-pair[1].severity, pair[0]))]


def _problems_at(run: Run, table: GroupTable, number: int) -> Iterator[tuple[int, Problem]]:
    """What is wrong with one collective of a group, and when it began."""
    classes: dict[int, list[int]] = {}
    for rank, signature in zip(table.ranks, table.signature[:, number].tolist(), strict=True):
        if signature != BEFORE:
            classes.setdefault(signature, []).append(rank)
    absent = classes.pop(ENDED, [])
    ordered = sorted(classes.items(), key=lambda pair: (-len(pair[1]), pair[1][0]))
    signature, most = ordered[0]
    call = _named(run.names.signatures.all[signature], number)
    here = table.call(run, most[0], number)
    assert here is not None
    began = int(here[0].start[here[1]])
    place = run.names.places.all[here[0].place[here[1]]]
    for other, ranks in ordered[1:]:
        there = table.call(run, ranks[0], number)
        assert there is not None
        line = run.names.places.all[there[0].place[there[1]]]
        theirs = _named(run.names.signatures.all[other], number)
        verb = "runs" if len(most) == 1 else "run"
        title = (
            f"{ranks_text(most).capitalize()} {verb} {call} where {ranks_text(ranks)} "
            f"{'runs' if len(ranks) == 1 else 'run'} {theirs}{_of_group(run, table.group)}"
        )
        detail = [f"{ranks_text(ranks)}: {line}", *_parting_text(run, table, most[0], ranks[0], number)]
        yield began, _problem("desync", Severity.ERROR, title, _WHY_DIFFERENT, place, detail)
    for ranks in _by_state(run, absent):
        yield began, _missing(run, table, number, (call, place), most, ranks)


def _missing(
    run: Run, table: GroupTable, number: int, call: tuple[str, str], most: list[int], absent: list[int]
) -> Problem:
    """Some ranks never come to a collective that others are in."""
    record = run.records[absent[0]]
    text, place = call
    detail = [f"{ranks_text(absent)}: {whereabouts(run, record)}"]
    detail += _parting_text(run, table, most[0], absent[0], number)
    stopped = [rank for rank in most if not _went_on(run, table, rank, number)]
    who = ranks_text(absent).capitalize()
    if not stopped:
        title = f"{who} has no {text}{_of_group(run, table.group)}, which {ranks_text(most)} completed"
        why = "Its recording may cover less of the run; if not, ranks have mixed up their collectives."
        return _problem("desync", Severity.NOTE, title, why, place, detail, Confidence.GUESS)
    how = "died before" if record.failed else "never came to"
    waits = f"{ranks_text(stopped)} {'waits' if len(stopped) == 1 else 'wait'}"
    ahead = _last_call(run, table, stopped[0])
    if record.unfinished and ahead is not None and ahead[0] > number:
        # What a killed process recorded last may be lost: the others have gone on with it for a while.
        how = f"{'was' if len(absent) == 1 else 'were'} cut short before"
        _, text, place = ahead
        detail.append("what a killed process did in its last third of a second is not recorded")
    title = f"{who} {how} {text}{_of_group(run, table.group)}, in which {waits}"
    likely = Confidence.LIKELY if record.unfinished else Confidence.CERTAIN
    return _problem("hang", Severity.ERROR, title, _WHY_MISSING, place, detail, likely)


def _last_call(run: Run, table: GroupTable, rank: int) -> tuple[int, str, str] | None:
    """The last collective of a rank in a group: its order number, what it was, and its line."""
    calls = run.records[rank].groups.get(table.group)
    if calls is None or not len(calls):
        return None
    number = table.shifts[table.ranks.index(rank)] + len(calls) - 1
    names = run.names
    return (
        number,
        _named(names.signatures.all[calls.signature[-1]], number),
        names.places.all[calls.place[-1]],
    )


def _problem(
    kind: str, severity: Severity, title: str, why: str, place: str, detail: list[str],
    confidence: Confidence = Confidence.CERTAIN,
) -> Problem:  # fmt: skip
    return Problem(
        kind=kind, severity=severity, title=title, why=why, module="", modules=(), place=place,
        confidence=confidence, detail="; ".join(detail),
    )  # fmt: skip


def _named(call: Collective, number: int) -> str:
    """A collective under its number in this group: the first with its signature had another."""
    return str(call).replace(f"#{call.number}", f"#{number}", 1)


def _of_group(run: Run, group: str) -> str:
    return f" of group {group}" if len(run.groups) > 1 and group else ""


def _went_on(run: Run, table: GroupTable, rank: int, number: int) -> bool:
    """Whether a rank has finished, and ran more after a collective: then that was completed."""
    record, here = run.records[rank], table.call(run, rank, number)
    if here is None or record.failed:
        return False
    calls, at = here
    return not record.unfinished or not (record.last_is_collective and at == len(calls) - 1)


def _by_state(run: Run, ranks: list[int]) -> list[list[int]]:
    """Ranks that ended in the same way at the same line."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in ranks:
        record = run.records[rank]
        groups.setdefault((record.failed, record.unfinished, record.last_place), []).append(rank)
    return list(groups.values())


def whereabouts(run: Run, record: RankRecord) -> str:
    """Where a rank was when its recording ended, and how that ended."""
    last = f"{record.last_op} at {run.names.places.all[record.last_place]}".removesuffix(" at ")
    if not record.last_op:
        last = "it ran no op"
    if record.failed:
        return f"raised {_first_line(str(record.info['exception']))} after {last}"
    if record.stack:
        return f"is at {record.stack}, after {last}"
    waits = record.waits_at
    if record.unfinished and waits is not None:
        return f"waits at {waits[0]}, in {last}" if record.last_is_collective else f"waits at {waits[0]}"
    if record.unfinished:
        return f"was cut short {'in or after' if record.last_is_collective else 'after'} {last}"
    return f"ended after {last}"


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 120 else f"{line[:119]}…"


def _parting_text(run: Run, table: GroupTable, rank: int, other: int, number: int) -> list[str]:
    """Sentences on what two ranks did differently before a collective."""
    found = parting(run, table, rank, other, number)
    texts = []
    if found is not None:
        mine, yours = (
            "ends" if step is None else f"runs {run.names.step_text(step)}"
            for step in (found.ours, found.theirs)
        )
        where = "from the start" if found.since < 0 else f"after collective #{found.since}"
        texts.append(f"they part {where}: rank {rank} {mine}, rank {other} {yours}")
    else:
        texts += shape_parting(run, rank, other)
    return texts


@dataclass(frozen=True)
class Parting:
    """The first op that two ranks do not share."""

    since: int  #: the order number of the last collective before it; -1 for none
    ours: int | None  #: a step in the shared names; None where the rank has ended
    theirs: int | None


def parting(run: Run, table: GroupTable, rank: int, other: int, number: int) -> Parting | None:
    """Where two ranks part that differ at collective ``number``; None where they run the same ops.

    They are compared from one collective to the next. A difference that comes again and again, such as what
    one rank writes to a log, does no harm: of those that are as rare as any, the last is taken, but one that
    only says that a rank has ended.
    """
    found = list(_differences(run, table, rank, other, number))
    if not found:
        return None
    counts = Counter((each.ours, each.theirs) for each in found)
    telling = [each for each in found if None not in (each.ours, each.theirs)] or found
    rarest = min(counts[each.ours, each.theirs] for each in telling)
    return [each for each in telling if counts[each.ours, each.theirs] == rarest][-1]


def _differences(run: Run, table: GroupTable, rank: int, other: int, number: int) -> Iterator[Parting]:
    """The first difference between each two collectives, up to one; at most one for each."""
    here, there = run.records[rank], run.records[other]
    lead, lag = (table.shifts[table.ranks.index(each)] for each in (rank, other))
    first = max(lead, lag)
    positions = [
        _positions(record, table.group)[first - shift : number - shift + 1]
        for record, shift in ((here, lead), (there, lag))
    ]
    if first and not all(map(len, positions)):
        return  # only their last ops are known
    count = min(map(len, positions))
    begins = (
        [(0, 0)] if not first else []
    )  # what was before the first that is known of both is not comparable
    begins += list(zip(positions[0][:count], positions[1][:count], strict=True))
    ends = [*begins[1:], (len(here.steps), len(there.steps))]
    for at, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        found = _first_difference(here.steps[begin[0] : end[0]], there.steps[begin[1] : end[1]])
        if found is not None and first + at <= number + 1:
            yield Parting(first + at - (0 if first else 1), *found)


def _positions(record: RankRecord, group: str) -> list[int]:
    """The position behind each collective of a group in the steps of a rank, as far as they are in order."""
    calls = record.groups.get(group)
    if calls is None or not len(calls):
        return []
    order = np.argsort(record.step_ops, kind="stable")
    behind = order[np.searchsorted(record.step_ops, calls.op, sorter=order)] + 1
    return list(behind.tolist()) if np.all(np.diff(behind) > 0) else []


def _first_difference(a: NDArray[np.int32], b: NDArray[np.int32]) -> tuple[int | None, int | None] | None:
    count = min(len(a), len(b))
    differs = np.flatnonzero(a[:count] != b[:count])
    at = int(differs[0]) if len(differs) else count
    if at == len(a) == len(b):
        return None
    return int(a[at]) if at < len(a) else None, int(b[at]) if at < len(b) else None


def shape_parting(run: Run, rank: int, other: int) -> list[str]:
    """A sentence on the first op of two ranks that made tensors of other shapes; they ran the same ops."""
    here, there = run.records[rank], run.records[other]
    if here.info.get("dropped") or there.info.get("dropped"):
        return []
    count = min(len(here.steps), len(there.steps))
    ours, theirs = (_made(record, count) for record in (here, there))
    for at, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
        if mine != yours:
            step = run.names.step_text(int(here.steps[at]))
            return [f"shapes differ since {step}: {mine} on rank {rank}, {yours} on rank {other}"]
    return []


def _made(record: RankRecord, count: int) -> list[str]:
    """What each of the first ops of a rank made: ``f32[2, 8]``."""
    data = load(record.path)
    try:
        texts = [str(meta) for meta in data.metas]
        metas = data.values.meta
        return [", ".join(texts[metas[value]] for value in data.ops.outputs_of(op))
                for op in record.step_ops[:count].tolist()]  # fmt: skip
    finally:
        data.close()
