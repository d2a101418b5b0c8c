"""Problems of the processes of a job, each by itself: found rank by rank, equal problems folded.

One rank is open at a time. A problem at one line is the same on two ranks if its sentence is, numbers aside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from sightline.analysis.problems import FIRST, Problem, Severity, find, gaps
from sightline.data.index import Index
from sightline.data.trace_data import TraceData
from sightline.errors import SightlineError, UsageError
from sightline.ranks.folder import ranks_text
from sightline.ranks.merge import Run
from sightline.ranks.rank_ends import error_text, is_consequence
from sightline.store import load
from sightline.views.problems import matching_paths

_LONG: Final = 300  #: characters of an exception; the others may have as many
_NUMBER: Final = re.compile(r"\d[\d.,:]*(?:e[+-]?\d+)?")


@dataclass
class _Folded:
    """A problem that several ranks have."""

    problem: Problem
    ranks: list[int] = field(default_factory=list)
    has_other_numbers: bool = False


def process_problems(
    run: Run, module: str | None = None, part: Callable[[TraceData], Index] = Index
) -> tuple[list[Problem], list[str]]:
    """The problems of all ranks, and the subjects that could not be looked at.

    Problems of some ranks only come before those of all, under their severity.

    ``module`` is a glob that selects modules; ``part`` selects the part of a recording to examine. A rank
    without that part, such as a step it did not come to, has no problems; if no rank has it, it is an error.
    """
    folded: dict[Hashable, _Folded] = {}
    errors: list[UsageError] = []
    unread: list[Problem] = []
    unseen: dict[str, list[int]] = {}
    for rank, record in run.records.items():
        try:
            problems, subjects, paths = _problems_of_rank(record.path, module, part)
        except UsageError as error:
            errors.append(error)
            continue
        except SightlineError as error:
            unread.append(Problem(
                kind="unreadable", severity=Severity.NOTE,
                title=f"Rank {rank} could not be looked at by itself",
                why="", module="", modules=(), place="", detail=str(error),
            ))  # fmt: skip
            continue
        for subject in subjects:
            unseen.setdefault(subject, []).append(rank)
        for problem in problems:
            if paths is not None and paths.isdisjoint(problem.modules):
                continue
            if problem.kind == FIRST and is_consequence(run, record):
                # The words of the backend on a failure that another rank has caused matter little.
                problem = replace(
                    problem, title=error_text(str(record.info["exception"])), detail="",
                    severity=Severity.NOTE,
                    why="It came from what another rank did, or did not do. Nothing after it was looked at.",
                )  # fmt: skip
            sentence = _NUMBER.sub("#", problem.title)
            key = (
                problem.kind, problem.place, problem.called, problem.module, problem.parameter, sentence,
            )  # fmt: skip
            same = folded.setdefault(key, _Folded(problem))
            same.ranks.append(rank)
            same.has_other_numbers |= problem.title != same.problem.title
    if errors and len(errors) == len(run.records):
        raise errors[0]

    def order(each: _Folded) -> tuple[object, ...]:
        problem, is_common = each.problem, len(each.ranks) == len(run.records)
        return problem.kind != FIRST, -problem.severity, -problem.confidence, is_common

    not_looked_at = [
        subject if len(ranks) == len(run.records) else f"{subject} of {ranks_text(ranks)}"
        for subject, ranks in unseen.items()
    ]
    return [*(_shown(each, run) for each in sorted(folded.values(), key=order)), *unread], not_looked_at


def _problems_of_rank(
    path: Path, module: str | None, part: Callable[[TraceData], Index]
) -> tuple[list[Problem], list[str], set[str] | None]:
    """The problems of one rank, the subjects not looked at, and the paths of the selected modules."""
    data = load(path)
    try:
        index = part(data)
        subjects = [each.subject for each in gaps(index) if each.subject]
        return find(index), subjects, None if module is None else matching_paths(index, module)
    finally:
        data.close()


def _shown(folded: _Folded, run: Run) -> Problem:
    """``Ranks 0–3: …`` where all have it, ``Rank 3 only: …`` where others do not."""
    problem, ranks = folded.problem, folded.ranks
    who = ranks_text(ranks).capitalize()
    if problem.kind == FIRST and len(problem.title) > _LONG:
        problem = replace(problem, title=f"{problem.title[: _LONG - 1].rstrip()}…")
    if len(run.records) > 1:
        only = "" if len(ranks) == len(run.records) else " only"
        problem = replace(problem, title=f"{who}{only}: {problem.title}")
    if folded.has_other_numbers:
        note = f"the numbers are those of rank {ranks[0]}, and not the same on all of them"
        problem = replace(problem, detail="\n".join(filter(None, (problem.detail, note))))
    return problem
