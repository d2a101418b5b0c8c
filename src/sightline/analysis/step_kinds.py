"""The kinds of steps in a run: those that call the same modules and in which the same optimizers step.

Most runs have one kind. A GAN whose critic steps more often has two, and so have two trainings of which one
follows the other. How often a module is called may differ from step to step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sightline.analysis.module_tree import brief_modules
from sightline.analysis.step_summaries import StepSummary, backward_ops
from sightline.analysis.value_names import root_names
from sightline.data.index import Index
from sightline.data.optimizer_steps import optimizer_steps
from sightline.data.trace_data import I64, PHASES, StepInfo

_FORWARD: Final = PHASES.index("forward")


@dataclass(frozen=True, slots=True)
class StepContent:
    """What one step does."""

    modules: dict[str, int]  #: how often it calls each outermost module, in the order of the first calls
    backward: int
    optimizers: dict[int, int] | None  #: how often each optimizer steps; None where that is not known
    skipped: bool = False  #: by a scaler, so that no optimizer steps


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps that do the same, apart from how often."""

    numbers: tuple[int, ...]  #: which of all steps, counted from 0
    contents: tuple[StepContent, ...]


def step_kinds(index: Index, steps: Sequence[StepSummary]) -> list[StepKind]:
    """The kinds of some steps, in the order of their first steps."""
    contents = _with_unrecorded_optimizers(index, _contents(index, steps))
    groups: dict[tuple[frozenset[str], bool], dict[frozenset[int], list[int]]] = {}
    for number, content in enumerate(contents):
        if not content.skipped:
            alike = groups.setdefault(_forward_of(content), {})
            alike.setdefault(frozenset(content.optimizers or ()), []).append(number)
    for number, content in enumerate(contents):
        if content.skipped:  # it is of the commonest kind that does the same before the optimizer
            alike = groups.setdefault(_forward_of(content), {frozenset(): []})
            max(alike.values(), key=len).append(number)
    kinds = sorted(sorted(kind) for alike in groups.values() for kind in alike.values())
    return [StepKind(tuple(kind), tuple(contents[number] for number in kind)) for kind in kinds]


def _forward_of(content: StepContent) -> tuple[frozenset[str], bool]:
    return frozenset(content.modules), content.backward > 0


def _contents(index: Index, steps: Sequence[StepSummary]) -> list[StepContent]:
    names, backwards = root_names(index), backward_ops(index.raw)
    # Steps that each make their own `CrossEntropyLoss()` are alike.
    names |= {module: type for type, same in brief_modules(index.raw).items() for module in same}
    stepped = _optimizers(index, [step.info for step in steps])
    return [
        StepContent(
            _called(index, step.info, names), _count(backwards, step.info), optimizers, step.skipped
        )
        for step, optimizers in zip(steps, stepped, strict=True)
    ]  # fmt: skip


def _called(index: Index, step: StepInfo, names: dict[int, str]) -> dict[str, int]:
    """The outermost modules that a step calls, with how often, in the order of their first call."""
    data = index.raw
    calls = np.arange(max(step.first_call, 0), min(step.end_call, len(data.calls)))
    own = (data.calls.parent[calls] < 0) & (data.calls.phase[calls] == _FORWARD)  # not what is computed again
    outermost = data.calls.module[calls[own]].tolist()
    return dict(Counter(names.get(module) or data.modules[module].label for module in outermost))


def _count(ops: I64, step: StepInfo) -> int:
    return int(((ops >= step.first_op) & (ops < step.end_op)).sum())


def _optimizers(index: Index, steps: Sequence[StepInfo]) -> list[dict[int, int] | None]:
    """How often each optimizer stepped in each step; None where a step of one is not known to be whose."""
    begins = np.array([step.start for step in steps], dtype=np.int64)
    counts: list[Counter[int]] = [Counter() for _ in steps]
    for each in optimizer_steps(index.raw):
        end = each.info.start + each.info.duration  # with a closure it may begin before the step does
        at = int(np.searchsorted(begins, end, side="right")) - 1
        if at >= 0 and end <= steps[at].start + steps[at].duration:
            counts[at][each.optimizer] += 1
    return [None if -1 in stepped else dict(stepped) for stepped in counts]


def _with_unrecorded_optimizers(index: Index, contents: Sequence[StepContent]) -> Sequence[StepContent]:
    """The contents with the optimizers of late steps, of which only the number is recorded.

    They are those of the recorded steps that call the same modules, if that makes the recorded number of
    steps of each optimizer. Otherwise no step has any.
    """
    if all(content.optimizers is not None for content in contents):
        return contents
    known: dict[tuple[frozenset[str], bool], list[dict[int, int]]] = {}
    for content in contents:
        if content.optimizers is not None and not content.skipped:
            known.setdefault(_forward_of(content), []).append(content.optimizers)
    filled = []
    for content in contents:
        if content.optimizers is None:
            usual = known.get(_forward_of(content)) or [{}]
            content = replace(content, optimizers=usual[0] if usual.count(usual[0]) == len(usual) else {})
        filled.append(content)
    counts: Counter[int] = Counter()
    for content in filled:
        counts.update(content.optimizers or {})
    if counts == _recorded_counts(index):
        return filled
    return [replace(content, optimizers={}) for content in contents]


def _recorded_counts(index: Index) -> Counter[int]:
    """How often each optimizer stepped in the whole recording."""
    training = index.raw.info.get("training")
    rows = training.get("optimizers") if isinstance(training, dict) else None
    counts: Counter[int] = Counter()
    for number, row in enumerate(rows if isinstance(rows, list) else ()):
        steps = row.get("steps") if isinstance(row, dict) else None
        counts[number] = steps if type(steps) is int else -1
    return counts
