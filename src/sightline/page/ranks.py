"""The page of a distributed job: the overview of all ranks, and the recording of one rank of each kind.

`rank_blocks(run)` packs it. Ranks that ran the same ops at the same lines are of one kind, and the page holds
the lowest of them. Of many kinds it holds a few, those that a problem names before others. A problem between
ranks leads to its line on each side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.analysis.problems.problem import Problem
from sightline.data.index import Index
from sightline.page.kept_rows import Kept
from sightline.page.payload import MOST_OPS, packed_recording, problem_row
from sightline.page.sections import Sections
from sightline.ranks.desync import BEFORE, ENDED, GroupTable, first_unmatched_op, group_tables
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run
from sightline.ranks.overview import rank_problems, ranks_overview
from sightline.ranks.rank_ends import whereabouts
from sightline.store import load
from sightline.views.problems import problem_lines
from sightline.views.rendering import Block, Cell, Line, Span, printable

MOST_RANKS: Final = 8  #: whose recordings a page holds
_ROOM: Final = 100  #: columns of the text of the overview


class Side(NamedTuple):
    """The action of some ranks where others did something else."""

    ranks: list[int]
    text: str  #: ``runs all_reduce #2 of 4 float32``
    place: str
    op: int  #: of the first of the ranks; -1 without one


@dataclass(frozen=True)
class Difference:
    """A collective that is not the same on all ranks of its group."""

    sides: list[Side]
    since: str  #: ``after collective #1``; empty if no op differs before
    parting: list[Side]  #: the first ops that two ranks do not share

    def is_at(self, place: str) -> bool:
        return any(side.place == place for side in (*self.sides, *self.parting))


def rank_blocks(run: Run) -> dict[str, bytes]:
    """The blocks of a page: ``ranks``, and ``recording-3`` for each rank that it holds."""
    problems = rank_problems(run)
    differences = [_difference(run, table, number) for table in group_tables(run)
                   if (number := table.first_difference()) is not None]  # fmt: skip
    # The lowest rank of each kind; of very many kinds those of a difference first.
    lowest = [ranks[0] for ranks in run.classes]
    concerned = [_like(run, side.ranks[0]) for each in differences for side in each.sides]
    embedded = sorted(list(dict.fromkeys([*lowest[:1], *concerned, *lowest]))[:MOST_RANKS])
    blocks: dict[str, bytes] = {}
    kept: dict[int, Kept] = {}
    for rank in embedded:
        data = load(run.records[rank].path)
        try:
            packed, rows = packed_recording(Index(data), max(1, MOST_OPS // len(embedded)))
        finally:
            data.close()
        blocks[f"recording-{rank}"], kept[rank] = packed, rows.ops
    sections = Sections()
    sections.table("job", {
        "name": job_name(run) or "run",
        "world": run.world_size,
        "kinds": [{"rank": ranks[0] if ranks[0] in embedded else -1, "text": ranks_text(ranks),
                   "ops": run.records[ranks[0]].ops} for ranks in run.classes],
        "blocks": list(_overview_rows(run, problems)),
        "problems": [_problem_row(run, each, differences, kept) for each in problems],
    })  # fmt: skip
    return blocks | {"ranks": sections.bytes()}


def job_name(run: Run) -> str:
    """The name of the recordings of a job, without the rank; empty without one."""
    name = next((str(record.info.get("name") or "") for record in run.records.values()), "")
    return name.rpartition(", rank ")[0] or name


def _like(run: Run, rank: int) -> int:
    """The lowest rank that ran the same ops."""
    return next(ranks[0] for ranks in run.classes if rank in ranks)


# -- differences -----------------------------------------------------------------------------------------


def _difference(run: Run, table: GroupTable, number: int) -> Difference:
    classes: dict[Any, list[int]] = {}
    for rank, signature in zip(table.ranks, table.signature[:, number].tolist(), strict=True):
        if signature != BEFORE:
            ended = whereabouts(run, run.records[rank]) if signature == ENDED else ""
            classes.setdefault((signature, ended), []).append(rank)
    ordered = sorted(classes.items(), key=lambda pair: (pair[0][0] == ENDED, -len(pair[1]), pair[1][0]))
    sides = [_side(run, table, number, signature, ended, ranks) for (signature, ended), ranks in ordered]
    here, there = sides[0].ranks[0], sides[-1].ranks[0]
    first = first_unmatched_op(run, table, here, there, number)
    if first is None:
        return Difference(sides, "", [])
    since = "from the start" if first.since < 0 else f"after collective #{first.since}"
    parts = []
    for rank, step in ((here, first.ours), (there, first.theirs)):
        if step is None:
            parts.append(Side([rank], "ends", "", -1))
            continue
        record = run.records[rank]
        before = table.call(run, rank, first.since) if first.since >= 0 else None
        after = -1 if before is None else int(before[0].op[before[1]])
        ops = record.step_ops[(record.steps == step) & (record.step_ops > after)]
        name, place, forward = run.names.steps.all[step]
        op = int(ops.min()) if len(ops) else -1
        line = run.names.places.all[place] or run.names.places.all[forward]
        parts.append(Side([rank], f"runs {run.names.ops.all[name]}", line, op))
    return Difference(sides, since, parts)


def _side(run: Run, table: GroupTable, number: int, signature: int, ended: str, ranks: list[int]) -> Side:
    """The collective that some ranks ran with this number, or how they ended."""
    record = run.records[ranks[0]]
    call = table.call(run, ranks[0], number)
    if call is None:
        last = int(record.step_ops.max()) if len(record.step_ops) else -1
        return Side(ranks, ended, run.names.places.all[record.last_place], last)
    calls, at = call
    first = run.names.signatures.all[signature]
    text = str(first).replace(f"#{first.number}", f"#{number}", 1)
    verb = "run" if len(ranks) > 1 else "runs"
    return Side(ranks, f"{verb} {text}", run.names.places.all[calls.place[at]], int(calls.op[at]))


# -- rows of the page ------------------------------------------------------------------------------------


def _problem_row(
    run: Run, problem: Problem, differences: list[Difference], kept: dict[int, Kept]
) -> dict[str, Any]:
    difference = next((each for each in differences if each.is_at(problem.place)), None)
    if difference is None or problem.kind not in ("desync", "hang"):
        sides, since, parts = list(_sides_at(run, problem.place, kept)), "", []
    else:
        sides, since, parts = difference.sides, difference.since, difference.parting
    return problem_row(problem) | {
        "sides": [_side_row(run, side, kept) for side in sides],
        "since": since,
        "parting": [_side_row(run, side, kept) for side in parts],
    }


def _sides_at(run: Run, place: str, kept: dict[int, Kept]) -> Iterator[Side]:
    """The first op at a line on each rank that the page holds."""
    number = next((at for at, text in enumerate(run.names.places.all) if text == place), -1)
    steps = np.array([step for step, (_, *at) in enumerate(run.names.steps.all) if number in at])
    for rank in kept if place else ():
        record = run.records[rank]
        ops = record.step_ops[np.isin(record.steps, steps)]
        if len(ops):
            ranks = next(ranks for ranks in run.classes if rank in ranks)
            yield Side(ranks, "", place, int(ops.min()))


def _side_row(run: Run, side: Side, kept: dict[int, Kept]) -> dict[str, Any]:
    rank = _like(run, side.ranks[0])
    # The op in the same place on the rank of the page, which ran the same ops.
    places = np.flatnonzero(run.records[side.ranks[0]].step_ops == side.op)
    op = int(run.records[rank].step_ops[places[0]]) if len(places) else -1
    return {
        "ranks": ranks_text(side.ranks), "text": side.text, "place": side.place,
        "rank": rank if rank in kept else -1,
        "op": kept[rank].one(op) if rank in kept and op >= 0 else -1,
    }  # fmt: skip


def _overview_rows(run: Run, problems: list[Problem]) -> Iterator[dict[str, Any]]:
    """The overview as a terminal shows it, with the number of a problem in place of its text."""
    blocks: list[Block] = list(ranks_overview(run).blocks)[:-1]  # the last names Python's views
    texts = [[line.text for line in problem_lines(each, _ROOM)] for each in problems]
    printed = [block.text if isinstance(block, Line) else "" for block in blocks]
    at = shown = 0
    while at < len(blocks):
        lines, block = texts[shown] if shown < len(texts) else [""], blocks[at]
        if lines[0] and printed[at : at + len(lines)] == lines:
            yield {"problem": shown}
            at += len(lines)
            shown += 1
            continue
        if isinstance(block, Line):
            yield {"line": _spans((Span(block.prefix), *block.spans) if block.prefix else block.spans)}
        else:
            yield {
                "columns": [[column.title, column.right] for column in block.columns],
                "rows": [[_spans(cell) for cell in row] for row in block.rows],
            }
        at += 1


def _spans(cell: Cell) -> list[list[str]]:
    return [[printable(span.text), span.style] for span in ((cell,) if isinstance(cell, Span) else cell)]
