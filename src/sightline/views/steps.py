"""The steps of a run in the overview: one line about all of them, and a row for each that is worth one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from sightline.analysis.steps import StepSummary
from sightline.notation import bytes_text, number_text, time_text
from sightline.views.outline import Cell, Column, Grid, Line, Span, grid, line
from sightline.views.variation import spread

_ROWS: Final = 6  #: of the table, where all steps are alike
_ODD: Final = 4  #: more, of those that are not
_SLOW: Final = 3  #: times the median
_MARGIN: Final = 10


def steps_told(steps: Sequence[StepSummary]) -> list[Line]:
    """How many steps there are, and how long one takes; nothing where there are none."""
    if not steps:
        return []
    times = [step.info.duration for step in steps]
    many = f"{len(steps):,}, {time_text(int(np.median(times)))} at the median"
    told = many if len(steps) > 1 else "; ".join([f"1, {time_text(times[0])}", *_told(steps[0])])
    return [
        line((f"{'steps':<{_MARGIN}}", "dim"), f"{told}; step={steps[-1].number} shows one", hang=_MARGIN)
    ]


def _told(step: StepSummary) -> list[str]:
    loss = _losses_text(step)
    return ([f"loss {loss}"] if loss else []) + (["skipped by the scaler"] if step.skipped else [])


def step_table(steps: Sequence[StepSummary]) -> Grid | None:
    """A row for the first steps, for the last, for the slowest and for those in which something is odd."""
    if len(steps) < 2:
        return None
    notes = _notes(steps)
    shown = _chosen(steps, notes)
    has_peak = any(step.peak for step in steps)
    columns = [Column("step"), Column("time", right=True)]
    columns += [Column("loss", right=True)] if any(step.losses for step in steps) else []
    columns += [Column("gradient norm", right=True)] if any(step.norm is not None for step in steps) else []
    columns += [Column("peak memory", right=True)] if has_peak else []
    columns += [Column("", least=12)] if any(notes[at] for at in shown) else []
    rows: list[list[Cell | str]] = []
    for before, at in zip([-1, *shown], shown, strict=False):
        if at > before + 1:
            rows.append([Span(f"… {at - before - 1:,} more", "dim"), *[""] * (len(columns) - 1)])
        rows.append(_row(steps[at], notes[at], columns))
    return grid(columns, rows)


def _row(step: StepSummary, note: str, columns: Sequence[Column]) -> list[Cell | str]:
    plain = step.info.name == f"step{step.number}"
    cells: dict[str, Cell | str] = {
        "step": str(step.number) if plain else step.info.name,
        "time": Span(time_text(step.info.duration), "number"),
        "loss": Span(_losses_text(step), "error" if _wrong(step) else "number"),
        "gradient norm": "" if step.norm is None else Span(number_text(step.norm), "number"),
        "peak memory": bytes_text(step.peak) if step.peak else "",
        "": Span(note, "warn"),
    }
    return [cells[column.title] for column in columns]


def _losses_text(step: StepSummary) -> str:
    """The losses of a step: of one line the first and the last, ``0.71…0.65``, of several one each."""
    return ", ".join(spread(losses, number_text) for losses in step.losses)


def _wrong(step: StepSummary) -> bool:
    return any(not math.isfinite(loss) for losses in step.losses for loss in losses)


def _notes(steps: Sequence[StepSummary]) -> list[str]:
    """What is odd about each step."""
    times = np.array([step.info.duration for step in steps])
    usual = float(np.median(times))
    slowest = int(times.argmax())
    counts = [step.ops for step in steps]
    most = max(set(counts), key=counts.count)
    alike = counts.count(most) * 2 > len(counts)
    found = []
    for at, step in enumerate(steps):
        told = ["skipped by the scaler"] if step.skipped else []
        if times[at] > _SLOW * usual and len(steps) > 2:
            told.append(f"{times[at] / usual:.0f}× the median" if usual else "slow")
        elif at == slowest and len(steps) > _ROWS:
            told.append("slowest")
        if alike and step.ops != most:
            told.append(f"{step.ops:,} ops, the others {most:,}")
        found.append(", ".join(told))
    return found


def _chosen(steps: Sequence[StepSummary], notes: Sequence[str]) -> list[int]:
    """Which steps have a row."""
    count = len(steps)
    if count <= _ROWS + 1:
        return list(range(count))
    odd = [at for at in range(count) if notes[at] or _wrong(steps[at])]
    shown = {0, 1, 2, count - 2, count - 1, *odd[: _ODD - 1], *odd[-1:]}
    return [at for at in range(count) if at in shown or {at - 1, at + 1} <= shown]  # one has no need of a gap
