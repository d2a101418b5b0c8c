"""The steps of a run in the overview: one line about all of them, and a table of the notable ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from sightline.analysis.step_content import step_content
from sightline.analysis.steps import StepSummary
from sightline.notation import bytes_text, number_text, time_text
from sightline.trace.index import Index
from sightline.views.fold import spread
from sightline.views.outline import Cell, Column, Grid, Line, Span, grid, line

_MAX_ROWS: Final = 6  #: of the table, where all steps are alike
_MAX_ODD: Final = 4  #: further rows, for steps that differ
_SLOW: Final = 3  #: times the median
_MARGIN: Final = 10


def step_lines(index: Index, steps: Sequence[StepSummary]) -> list[Line]:
    """How many steps there are, how long one takes, and what it does; empty without steps."""
    if not steps:
        return []
    times = [step.info.duration for step in steps]
    many = f"{len(steps):,}, {time_text(int(np.median(times)))} at the median"
    text = many if len(steps) > 1 else "; ".join([f"1, {time_text(times[0])}", *_details(steps[0])])
    texts = {
        "steps": f"{text}; step={steps[-1].number} shows one",
        "one step": step_content(index, [step.info for step in steps]),
    }
    return [line((f"{title:<{_MARGIN}}", "dim"), text, hang=_MARGIN) for title, text in texts.items() if text]


def _details(step: StepSummary) -> list[str]:
    loss = _losses_text(step)
    return ([f"loss {loss}"] if loss else []) + (["skipped by the scaler"] if step.skipped else [])


def step_table(steps: Sequence[StepSummary]) -> Grid | None:
    """A row for the first steps, the last, the slowest and those that differ from the others."""
    if len(steps) < 2:
        return None
    notes = _notes(steps)
    shown = _chosen_steps(steps, notes)
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
        "loss": Span(_losses_text(step), "error" if _has_bad_loss(step) else "number"),
        "gradient norm": "" if step.norm is None else Span(number_text(step.norm), "number"),
        "peak memory": bytes_text(step.peak) if step.peak else "",
        "": Span(note, "warn"),
    }
    return [cells[column.title] for column in columns]


def _losses_text(step: StepSummary) -> str:
    """The losses of a step: a range for each line that computes one, ``0.71…0.65``."""
    return ", ".join(spread(losses, number_text) for losses in step.losses)


def _has_bad_loss(step: StepSummary) -> bool:
    return any(not math.isfinite(loss) for losses in step.losses for loss in losses)


def _notes(steps: Sequence[StepSummary]) -> list[str]:
    """How each step differs from the others."""
    times = np.array([step.info.duration for step in steps])
    usual = float(np.median(times))
    slowest = int(times.argmax())
    counts = [step.ops for step in steps]
    most = max(set(counts), key=counts.count)
    mostly_equal = counts.count(most) * 2 > len(counts)
    notes = []
    for at, step in enumerate(steps):
        parts = ["skipped by the scaler"] if step.skipped else []
        if times[at] > _SLOW * usual and len(steps) > 2:
            parts.append(f"{times[at] / usual:.0f}× the median" if usual else "slow")
        elif at == slowest and len(steps) > _MAX_ROWS:
            parts.append("slowest")
        if mostly_equal and step.ops != most:
            parts.append(f"{step.ops:,} ops, the others {most:,}")
        notes.append(", ".join(parts))
    return notes


def _chosen_steps(steps: Sequence[StepSummary], notes: Sequence[str]) -> list[int]:
    """Which steps have a row."""
    count = len(steps)
    if count <= _MAX_ROWS + 1:
        return list(range(count))
    odd = [at for at in range(count) if notes[at] or _has_bad_loss(steps[at])]
    shown = {0, 1, 2, count - 2, count - 1, *odd[: _MAX_ODD - 1], *odd[-1:]}
    return [at for at in range(count) if at in shown or {at - 1, at + 1} <= shown]  # no gap for a single step
