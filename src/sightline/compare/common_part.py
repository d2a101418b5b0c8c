"""The part of two runs that both recordings have, where `last=` dropped the beginning of one."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sightline.analysis.step_summaries import numbered_steps
from sightline.compare.side import Span, span_of
from sightline.data.index import Index
from sightline.data.trace_data import OPTIMIZER_STEP, StepInfo
from sightline.data.training_steps import dropped_steps, may_lack_beginning
from sightline.errors import UsageError
from sightline.hints import Hint

#: A step by its number, or by the name the program gave it.
Steps = dict[int | str, StepInfo]


def common_part(a: Index, b: Index) -> tuple[Span, Span]:
    """The spans of two recordings that are of the same stretch of their runs, to the end of each.

    They begin with the first step that both have whole, else with the first op that both have. Raises
    `UsageError` where neither is known, because ops of different steps would be compared.
    """
    if _dropped(a) == _dropped(b):
        return span_of(a, None), span_of(b, None)
    steps_a, steps_b = _whole_steps(a), _whole_steps(b)
    common = [key for key in steps_a if key in steps_b]
    if common:
        return _span_from(a, steps_a[common[0]]), _span_from(b, steps_b[common[0]])
    if not steps_a and not steps_b and _dropped(a) + len(a.raw.ops) == _dropped(b) + len(b.raw.ops):
        first = max(_dropped(a), _dropped(b))
        return _span_after(a, first - _dropped(a)), _span_after(b, first - _dropped(b))
    kept = f"a keeps {_kept(a, steps_a)}, b {_kept(b, steps_b)}"
    advice = (
        f"{Hint.option('step', 'last')} compares the last step of each"
        if steps_a and steps_b
        else "steps that the program marks with sl.step(…) are lined up by their names"
    )
    raise UsageError(f"Nothing shows which ops of the two belong together: {kept}; {advice}.")


def _dropped(index: Index) -> int:
    return int(index.raw.info.get("dropped") or 0)


def _whole_steps(index: Index) -> Steps:
    """The steps with all their ops, in order; none where their numbers in the run are not known."""
    given = [step for step in index.raw.steps if step.name != OPTIMIZER_STEP]
    names = Counter(step.name for step in given)
    steps: Steps
    if given:
        steps = {step.name: step for step in given if names[step.name] == 1}
    elif dropped_steps(index.raw) is None:
        return {}
    else:
        steps = dict(numbered_steps(index).items())
    if steps and _dropped(index) and may_lack_beginning(index):
        begin = min(step.first_op for step in steps.values())
        return {key: step for key, step in steps.items() if step.first_op > begin}
    return steps


def _span_from(index: Index, step: StepInfo) -> Span:
    return Span(step.first_op, len(index.raw.ops), step.first_call, len(index.raw.calls))


def _span_after(index: Index, first_op: int) -> Span:
    calls = index.raw.calls
    return Span(first_op, len(index.raw.ops), int(np.searchsorted(calls.first_op, first_op)), len(calls))


def _kept(index: Index, steps: Steps) -> str:
    """``the steps 3 to 5``, ``its last 60 ops``."""
    first, *more = steps or [""]
    if steps:
        return f"the steps {first} to {more[-1]}" if more else f"step {first}"
    return f"its last {len(index.raw.ops)} ops" if _dropped(index) else f"all its {len(index.raw.ops)} ops"
