"""The steps of a run in the overview: a line about all of them, what one does, a table of the notable ones.

Without steps, as when text is generated, the calls themselves are what repeats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from sightline.analysis.fold import spread
from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.analysis.step_summaries import StepSummary
from sightline.analysis.value_names import root_names
from sightline.notation import bytes_text, number_text, time_text
from sightline.patterns import bare_name
from sightline.trace.data import LEVELS, StepInfo
from sightline.trace.index import Index
from sightline.views.rendering import Cell, Column, Grid, Line, Span, grid, line

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


_API = LEVELS.index("api")
_MAX_MODULES = 6


def step_content(index: Index, steps: Sequence[StepInfo]) -> str:
    """What most steps do, in the words of the program: ``G, D ×3; backward ×2; Adam (lr 0.001)``.

    Empty where steps call no module.
    """
    names = root_names(index)
    backwards = [id for id, name in enumerate(index.raw.names) if bare_name(name, "api") == "backward"]
    called = Counter(_called(index, step, names, backwards) for step in steps)
    if not called:
        return ""
    modules, backward = called.most_common(1)[0][0]
    if not modules:
        return ""
    shown = [_times(name, count) for name, count in modules[:_MAX_MODULES]]
    shown += [f"{len(modules) - _MAX_MODULES} more"] if len(modules) > _MAX_MODULES else []
    parts = [", ".join(shown), *([_times("backward", backward)] if backward else [])]
    return "; ".join([*parts, *_optimizers(index)])


def repeated_calls(index: Index) -> str:
    """The modules that were called several times, where nothing was trained: ``Llama ×50, 37 ms each``."""
    data, names, texts = index.raw, root_names(index), []
    roots = np.flatnonzero(data.calls.parent < 0)
    for module in dict.fromkeys(data.calls.module[roots].tolist()):
        calls = roots[data.calls.module[roots] == module]
        times = data.calls.duration[calls]
        if len(times) > 1:
            usual, first = time_text(int(np.median(times))), time_text(int(times[0]))
            name = names.get(module) or data.modules[module].label
            given = [_input(index, int(call)) for call in (calls[0], calls[-1])]
            sizes = [f", on {given[0]}", f"; the last on {given[1]}"] if given[0] != given[1] else ["", ""]
            texts.append(f"{name} ×{len(times):,}, {usual} at the median; the first {first}{''.join(sizes)}")
    return "; ".join(texts[:_MAX_MODULES])


def _input(index: Index, call: int) -> str:
    """The first tensor that a call was given."""
    given = index.raw.calls.inputs_of(call)[:1]
    return index.meta_texts[int(index.raw.values.meta[given[0]])] if given else "nothing"


def _called(
    index: Index, step: StepInfo, names: dict[int, str], backwards: Sequence[int]
) -> tuple[tuple[tuple[str, int], ...], int]:
    """The modules that a step calls, with how often, in the order of their first call; backward passes."""
    data = index.raw
    calls = np.arange(max(step.first_call, 0), min(step.end_call, len(data.calls)))
    outermost = data.calls.module[calls[data.calls.parent[calls] < 0]].tolist()
    counts = Counter(names.get(module) or data.modules[module].label for module in outermost)
    ops = slice(max(step.first_op, 0), step.end_op)
    backward = (data.ops.level[ops] == _API) & np.isin(data.ops.name[ops], backwards)
    return tuple(counts.items()), int(backward.sum())


def _optimizers(index: Index) -> list[str]:
    """The optimizers that stepped, each with its learning rate in the first and the last step."""
    loop = LoopRecord(ProblemContext(index))
    texts: Counter[str] = Counter()
    for number, optimizer in enumerate(loop.optimizers):
        rates = [step.highest for step in loop.steps_of(number) if step.highest is not None]
        ends = [number_text(rate) for rate in (rates[0], rates[-1])] if rates else []
        rate = f" (lr {' → '.join(dict.fromkeys(ends))})" if ends else ""
        texts[f"{optimizer.type}{rate}"] += 1
    return [", ".join(_times(text, count) for text, count in texts.items())] if texts else []


def _times(text: str, count: int) -> str:
    return f"{text} ×{count}" if count > 1 else text
