"""The part of a recording that is compared: all of it, or one named step."""

from __future__ import annotations

from dataclasses import dataclass

from sightline.errors import NothingMatched, UsageError
from sightline.given import said
from sightline.trace.data import TraceData


@dataclass(frozen=True, slots=True)
class Span:
    """Ops [first_op, end_op) and module calls [first_call, end_call)."""

    first_op: int
    end_op: int
    first_call: int
    end_call: int


def span_of(data: TraceData, step: str | int | None) -> Span:
    """The span of a step, by its name or its number; all of the recording without one."""
    if step is None:
        return Span(0, len(data.ops), 0, len(data.calls))
    if type(step) not in (str, int):
        raise UsageError(f"step={said(step)} must be the name or the number of a step, or a pair of them.")
    names = [info.name for info in data.steps]
    if isinstance(step, int) and 0 <= step < len(names):
        found = data.steps[step]
    elif step in names:
        found = data.steps[names.index(str(step))]
    else:
        known = (
            f"it has {', '.join(map(repr, names[:6]))}{', …' if len(names) > 6 else ''}"
            if names
            else "it has none"
        )
        raise NothingMatched(f"step={step!r} is no step of this recording; {known}.")
    return Span(found.first_op, found.end_op, found.first_call, found.end_call)
