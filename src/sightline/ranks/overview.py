"""``print(sl.load("run.sight"))`` of a distributed job: all ranks on one screen.

Equal ranks are folded; then come their differences, their last positions, the problems, the traffic of the
collectives, and the lines whose time differs most between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from sightline.analysis.problems.problem import FIRST, Problem, Severity
from sightline.hints import Hint
from sightline.notation import bytes_text, time_text
from sightline.ranks.collective_waits import Waiting
from sightline.ranks.collectives import Collective, messages_of
from sightline.ranks.desync import desync_problems
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run
from sightline.ranks.messages import message_problems
from sightline.ranks.process_problems import process_problems
from sightline.ranks.rank_ends import whereabouts
from sightline.ranks.record import begins_thread
from sightline.ranks.replicas import replica_problems
from sightline.ranks.stragglers import straggler_problems
from sightline.ranks.times import Spread, line_spreads, module_spreads, spread_grid
from sightline.views.problems import problem_lines
from sightline.views.rendering import (
    WIDTH,
    Block,
    Column,
    Grid,
    Line,
    Span,
    View,
    comment_lines,
    cut,
    grid,
    line,
)
from sightline.views.table_layout import fit_blocks

_MARGIN: Final = 11
_MOST_ROWS: Final = 6  #: of each list
_MOST_PROBLEMS: Final = 4
#: Of all ranks together: up to here the screen shows the problems of each rank by itself, which is quick.
_MOST_OPS: Final = 300_000
_MORE: Final = "t.rank_times()  t.problems()  t.code(rank=0)  t.summary(rank=0)  t.to_perfetto(…)"


def rank_problems(run: Run, waiting: Waiting | None = None) -> list[Problem]:
    """The problems between the ranks of a run, the most serious first."""
    waiting = waiting or Waiting.of(run)
    problems = [
        *desync_problems(run),
        *message_problems(run),
        *replica_problems(run),
        *straggler_problems(waiting),
    ]
    return sorted(problems, key=lambda problem: (-problem.severity, -problem.confidence))


def in_order(between: list[Problem], single: list[Problem]) -> list[Problem]:
    """The problems between ranks and of single ones, the exceptions that ended the job before all others."""
    problems = [*between, *single]
    return sorted(
        problems, key=lambda each: (each.kind != FIRST or each.severity < Severity.ERROR, -each.severity)
    )


#: The kinds of problem that only several ranks can have.
RANK_KINDS: Final = (
    "desync", "hang", "replicas", "seeds", "same-batch", "other-batch", "modes", "straggler", "unreadable",
)  # fmt: skip


def rank_lines(info: dict[str, Any]) -> list[Line]:
    """A line above a view that says which rank of a job it shows; none if there are no others."""
    rank, count = info.get("rank"), info.get("world_size")
    if type(rank) is not int or type(count) is not int or count < 2:
        return []
    other = Hint.option("rank", 1 if rank == 0 else 0)
    return comment_lines([f"rank {rank} of {count:,}; {other} shows another"])


def view_of_rank(view: View, info: dict[str, Any]) -> View:
    """A view under `rank_lines`."""
    lines, fit = rank_lines(info), view.fit
    fitted = None if fit is None else lambda room: (*lines, *fit(room))
    return replace(view, blocks=(*lines, *view.blocks), fit=fitted)


def ranks_overview(run: Run, more: str = _MORE) -> View:
    """One screen about all ranks; ``more`` lists the other views, as the caller spells them."""
    waiting = Waiting.of(run)
    problems = rank_problems(run, waiting)
    not_looked_at: list[str] = []
    is_small = sum(record.ops for record in run.records.values()) <= _MOST_OPS
    if is_small:
        single, not_looked_at = process_problems(run)
        problems = in_order(problems, single)
    waits = np.array([waiting.waited[rank] for rank in run.ranks], dtype=np.int64)
    spreads = [Spread("waiting for other ranks", waits)] if waits.any() else []
    spreads += module_spreads(run, _MOST_ROWS // 2)
    # Also the time on the way to its ops: loading a batch, importing a module.
    lines = line_spreads(run, _MOST_ROWS // 2)
    spreads += [Spread(f"{each.text}, and the time before it", each.times) for each in lines]
    spread = spread_grid(run, "time of a rank", spreads) if len(run.ranks) > 1 else None

    def fit(room: int) -> list[Block]:
        room = min(room, WIDTH)
        blocks: list[Block] = list(_head(run))
        blocks += [_fact("note", note, "warn") for note in (*run.notes, *waiting.notes())[: 2 * _MOST_ROWS]]
        blocks += _classes(run)
        ends = list(_ends(run))
        if ends:
            blocks += [line(), *ends]
        for problem in problems[:_MOST_PROBLEMS]:
            blocks += [line(), *problem_lines(problem, room)]
        if len(problems) > _MOST_PROBLEMS:
            blocks.append(
                line((f"… and {len(problems) - _MOST_PROBLEMS} more: {Hint.view('problems')}", "dim"))
            )
        if is_small and not problems:
            unseen = f"; not looked at: {', '.join(not_looked_at)}" if not_looked_at else ""
            blocks += [line(), _fact("problems", f"none found{unseen}")]
        elif not is_small:
            text = f"looked for between ranks; {Hint.view('problems')} looks at each rank by itself, too"
            blocks += [line(), _fact("problems", text)]
        for table in (_collectives(run), spread):
            blocks += [line(), table] if table is not None else []
        return fit_blocks([*blocks, line(), _fact("more", more)], room)

    return View(tuple(fit(WIDTH)), fit=fit)


def _fact(title: str, text: str, style: str = "") -> Line:
    return line((f"{title:<{_MARGIN}}", "dim"), (text, style), hang=_MARGIN)


def _head(run: Run) -> Iterator[Line]:
    records = list(run.records.values())
    if not records:
        yield _fact("run", "none of its ranks can be read", "warn")
        return
    first = records[0]
    name = str(first.info.get("name") or "run").rpartition(", rank ")[0] or "run"
    hosts = {record.host for record in records if record.host}
    backends = {
        str(group.get("backend"))
        for record in records
        for group in (record.info.get("groups") or {}).values()
        if isinstance(group, dict) and group.get("backend")
    }
    parts = [f"{len(records)} of {run.world_size} ranks"] if len(records) < run.world_size else []
    parts = parts or [f"{run.world_size} ranks"]
    parts[0] += f" on {len(hosts)} host{'s' * (len(hosts) > 1)}" if hosts else ""
    parts += [", ".join(sorted(backends))] if backends else []
    parts += [f"torch {first.info['torch']}"] if first.info.get("torch") else []
    parts += ["still running"] if any(record.running for record in records) else []
    parts.append(time_text(max(record.elapsed for record in records)))
    yield line(("run ", "dim"), (cut(name, 50), "title"), (f"  {' · '.join(parts)}", "dim"), hang=_MARGIN)
    for mesh in (first.info.get("meshes") or ())[:2]:
        if isinstance(mesh, dict):
            names = ", ".join(map(str, mesh.get("names") or ()))
            if not names and "×" not in _mesh_text(mesh.get("ranks")):
                continue  # all ranks in a row
            yield _fact("mesh", " ".join(filter(None, [_mesh_text(mesh.get("ranks")), names])))
    groups = [(name, ranks) for name, ranks in run.groups.items() if len(ranks) > 1]
    if len(groups) > 1:
        texts = [f"{name}: {ranks_text(ranks)}" for name, ranks in groups[:_MOST_ROWS]]
        rest = f" and {len(groups) - _MOST_ROWS} more" if len(groups) > _MOST_ROWS else ""
        yield _fact("groups", "; ".join(texts) + rest)


def _mesh_text(ranks: object) -> str:
    """The sizes of a mesh from its nested ranks.

    >>> _mesh_text([[0, 1], [2, 3], [4, 5]])
    '3 × 2'
    """
    sizes: list[str] = []
    while isinstance(ranks, list | tuple):
        sizes.append(str(len(ranks)))
        ranks = ranks[0] if ranks else None
    return " × ".join(sizes)


def _classes(run: Run) -> Iterator[Line]:
    """Ranks that ran the same ops, and where the others begin to differ from the first."""
    classes = run.classes
    for number, ranks in enumerate(classes[:_MOST_ROWS]):
        record = run.records[ranks[0]]
        count = sum(len(calls) for calls in record.groups.values())
        ops = _range([run.records[rank].ops for rank in ranks], "{:,}".format)
        text = f"{ranks_text(ranks)}: {ops} ops, {count:,} collective{'s' if count != 1 else ''}"
        text += " each" if len(ranks) > 1 else ""
        yield _fact("ranks" if not number else "", text + _difference(run, classes[0][0], ranks))
    if len(classes) > _MOST_ROWS:
        yield _fact("", f"… and {len(classes) - _MOST_ROWS} more kinds of ranks")


def _difference(run: Run, first: int, ranks: list[int]) -> str:
    """Where equal ranks first do something else than the first one; empty for the first one itself."""
    base, record = run.records[first], run.records[ranks[0]]
    if record.rank == first or record.info.get("dropped") or base.info.get("dropped"):
        return ""
    count = min(len(base.steps), len(record.steps))
    differs = np.flatnonzero(base.steps[:count] != record.steps[:count])
    at = int(differs[0]) if len(differs) else count
    it, its, runs = ("it", "its", "runs") if len(ranks) == 1 else ("they", "their", "run")
    here, there = (
        "" if at >= len(each.steps) else run.names.step_text(int(each.steps[at])) for each in (record, base)
    )
    if at and (not there or (begins_thread(base, at) and not begins_thread(record, at))):
        return f"; after the last op of rank {first} {it} {runs} {here}"
    if at and (not here or (begins_thread(record, at) and not begins_thread(base, at))):
        return f"; after {its} last op rank {first} runs {there}"
    return f"; where rank {first} runs {there}, {it} {runs} {here}" if here and there else ""


def _ends(run: Run) -> Iterator[Line]:
    """The last position of each rank, if one did not end as it should have."""
    if not any(record.unfinished or record.failed for record in run.records.values()):
        return
    where: dict[str, list[int]] = {}
    for rank, record in run.records.items():
        where.setdefault(whereabouts(run, record), []).append(rank)
    rows = sorted(where.items(), key=lambda pair: pair[1])
    for number, (text, ranks) in enumerate(rows[:_MOST_ROWS]):
        style = "error" if run.records[ranks[0]].failed else "warn"
        title = "now" if any(record.running for record in run.records.values()) else "at the end"
        yield _fact(title if not number else "", f"{ranks_text(ranks)} {text}", style)
    if len(rows) > _MOST_ROWS:
        yield _fact("", f"… and {len(rows) - _MOST_ROWS} more places")


def _collectives(run: Run) -> Grid | None:
    """The counts and bytes of collectives by kind and group: of each rank, or from the least to the most."""
    rows: dict[tuple[str, str], dict[int, list[int]]] = {}
    for rank, record in run.records.items():
        for name, calls in record.groups.items():
            messages = messages_of(name)
            group = name if messages is None else messages[0]
            for number in np.unique(calls.signature).tolist():
                call: Collective = run.names.signatures.all[number]
                row = rows.setdefault((call.kind, group), {}).setdefault(rank, [0, 0])
                row[0] += int((calls.signature == number).sum())
                row[1] += int(calls.bytes[calls.signature == number].sum())
    if not rows:
        return None
    columns = (Column("collective"), Column("group"), Column("per rank", right=True),
               Column("bytes", right=True))  # fmt: skip
    table = []
    for (kind, group), by_rank in rows.items():
        members = run.groups.get(group) or list(run.records)
        each = [by_rank.get(rank, [0, 0]) for rank in members if rank in run.records]
        counts, sizes = ([row[at] for row in each] for at in (0, 1))
        cells = _range(counts, "{:,}".format), _range(sizes, bytes_text)
        table.append((max(sizes), (Span(kind, "op"), group, *cells)))
    table.sort(key=lambda row: -row[0])
    return grid(columns, [cells for _, cells in table[:_MOST_ROWS]])


def _range(numbers: list[int], text: Callable[[int], str]) -> str:
    """One number where all are the same, or the least and the most.

    >>> _range([3, 3], str), _range([1, 3, 2], str)
    ('3', '1–3')
    """
    least, most = text(min(numbers)), text(max(numbers))
    return least if least == most else f"{least}–{most}"
