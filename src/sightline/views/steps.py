"""The steps of a run in the overview: a line about all of them, what one does, a table of the notable ones.

Without steps, as when text is generated, the calls themselves are what repeats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.training_loop_events import LoopRecord, RateCurve
from sightline.analysis.step_kinds import StepContent, step_kinds
from sightline.analysis.step_summaries import BackwardPasses, StepSummary
from sightline.analysis.value_names import root_names
from sightline.data.index import Index
from sightline.data.optimizer_steps import optimizer_steps
from sightline.data.trace_data import FLAVOURS, NO_GRAD, PHASES
from sightline.data.training_steps import dropped_steps
from sightline.hints import Hint
from sightline.notation import bytes_text, number_text, time_text
from sightline.views.rendering import WIDTH, Cell, Column, Grid, Line, Span, grid, line, width

_OPAQUE, _BACKWARD = FLAVOURS.index("opaque"), PHASES.index("backward")
LOSS: Final = "loss"  #: the title of the line, and of the column, about losses
_CLOCK: Final = "recording included"  #: in times of steps, but not in those of ops and calls
_MAX_ROWS: Final = 6  #: of the table, where all steps are alike
_MAX_ODD: Final = 4  #: further rows, for steps that differ
_SLOW: Final = 3  #: times the median
_INCOMPLETE: Final = "its first ops may not have been kept"
_MARGIN: Final = 10
_GAP: Final = 2  #: between columns
#: Between the parts of a note; a comparison is one part.
_PARTS: Final = re.compile(", (?!the others|most)")
_MAX_OUTSIDE: Final = 4  #: modules that were called outside of the steps
_MAX_MOMENTS: Final = 3
_MAX_CURVES: Final = 3  #: of the rates of different parameter groups
_MAX_TURNS: Final = 4  #: of one curve that are shown


def step_lines(index: Index, steps: Sequence[StepSummary]) -> list[Line]:
    """How many steps there are, how long one takes, and what it does; empty without steps."""
    if not steps:
        return []
    whole, excerpt = _whole(steps), index.raw.info.get("excerpt")
    times = [step.info.duration for step in whole or steps]
    many = f"{len(steps):,}{_dropped_count(index)}{_optimizer_count(index, steps)}"
    usual = f"{time_text(int(np.median(times)))} at the median, {_CLOCK}"
    one = "; ".join([f"{time_text(times[0])}, {_CLOCK}", *_details(steps[0])])
    shows_one = f"{Hint.option('step', steps[-1].number)} shows one"
    texts = [("steps", f"{many}, {usual if len(steps) > 1 else one}; {shows_one}")]
    if excerpt and len(steps) == 1:  # this is the screen that shows one
        texts = [("step", f"{_step_name(steps[0])}, {one}")]
    contents = step_contents(index, whole)
    texts += zip(["one step", *[""] * len(contents)], contents, strict=False)
    texts += [(LOSS, _losses_note(index, steps)), ("norm", _norm_note(index, steps))]
    texts += [("outside", _outside_steps(index, steps))]
    return [line((f"{title:<{_MARGIN}}", "dim"), text, hang=_MARGIN) for title, text in texts if text]


def _whole(steps: Sequence[StepSummary]) -> list[StepSummary]:
    """The steps of which ``last=`` has surely kept every op."""
    return [step for step in steps if not step.incomplete]


def _dropped_count(index: Index) -> str:
    """How many steps came before those that ``last=`` kept."""
    dropped = dropped_steps(index.raw)
    if dropped is None:
        return " that were kept"
    return f", after {dropped:,} that {'was' if dropped == 1 else 'were'} not kept" if dropped else ""


def _optimizer_count(index: Index, steps: Sequence[StepSummary]) -> str:
    """How many steps of optimizers the steps hold, where these are not as many.

    Optimizers of several groups of weights that step one right after the other count as one.
    """
    every = optimizer_steps(index.raw)
    turns = sum(each.follows_backward for each in every)
    different = turns != len(steps) if len(steps) > 1 else len(every) > 1 < turns
    return f", with {len(every):,} optimizer steps" if every and different else ""


def _details(step: StepSummary) -> list[str]:
    loss = _losses_text(step)
    details = [f"loss {loss}"] if loss else []
    details += [_INCOMPLETE] if step.incomplete else []
    return details + (["skipped by the scaler"] if step.skipped else [])


def _losses_note(index: Index, steps: Sequence[StepSummary]) -> str:
    """Whose loss the losses are, where a step has several; empty where each has one."""
    every = [passes for step in steps for passes in step.passes]
    sources = {passes.frame: passes for passes in every}
    rows = {tuple(passes.frame for passes in step.passes) for step in steps if step.passes}
    names = _places(index, list(sources))
    parts = []
    longest = max(rows, key=len, default=())
    if len(longest) > 1 and all(row == longest[: len(row)] for row in rows) and all(names.values()):
        scaled = any(passes.divided_after != 1 or passes.count > 1 for passes in sources.values())
        divided = any(_division(passes, scaled) for passes in sources.values())
        each = []
        for frame, passes in sources.items():
            count = sum(frame in (own.frame for own in step.passes) for step in steps)
            some = f" in {count:,} of the steps" if count < len(steps) else ""
            each.append(f"{names[frame]}{_division(passes, scaled)}{some}")
        parts.append(f"of the backward passes at {' and '.join(each) if divided else ', '.join(each)}")
    several = [passes for passes in every if passes.count > 1]
    if several:
        ranged = every if len(sources) == 1 else several
        all_known = all(passes.known == passes.count for passes in ranged)
        known = _range([passes.known for passes in ranged])
        which = "the range over the" if all_known else f"known of {known} of the"
        count = sum(any(passes in ranged for passes in step.passes) for step in steps)
        whose = "of a step" if count == len(steps) else f"of {count:,} of the steps"
        parts.append(f"{which} {_range([passes.count for passes in ranged])} backward passes {whose}")
        weights = {(passes.divided_before, passes.divided_after) for passes in every}
        if len(sources) == len(weights) == 1:
            before, after = weights.pop()
            parts += [f"which the program had {_scaling(before)}"] if before != 1 else []
            parts += [f"which the program then {_scaling(after, 's')}"] if after != 1 else []
            summed = all_known and all(passes.adds_up for passes in several)
            parts += [f"and their sum{' after that' * (after != 1)}"] if summed else []
    return ", ".join(parts)


def _norm_note(index: Index, steps: Sequence[StepSummary]) -> str:
    """Why the table has no norm of the gradients though statistics were taken; empty where it has one."""
    ops = index.raw.ops
    compiled = (ops.flavour == _OPAQUE) & (ops.phase == _BACKWARD)
    if not len(index.raw.stats) or not compiled.any() or any(step.norm is not None for step in steps):
        return ""
    return "of the gradients: not known, those of compiled code are not measured"


def _places(index: Index, frames: Sequence[int]) -> dict[int, str]:
    """The lines of some frames: ``train.py:9``; that of the user's own code where one is a library's."""
    context = ProblemContext(index)
    names: dict[int, str] = {}
    for frame in frames:
        place = context.own_place(frame) or context.place(frame)
        name = place.partition(" in ")[0].rpartition("/")[2]
        names[frame] = f"{name} again" if name and name in names.values() else name
    return names


def _range(counts: Collection[int]) -> str:
    """``2``, or ``1…2``."""
    return "…".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _division(passes: BackwardPasses, scaled: bool) -> str:
    """The program's division of a loss that is shown, and the one between it and its backward pass.

    Where no loss is ``scaled`` for its backward pass, a division is a part of it: ``(real + fake) / 2``.
    """
    before, after = passes.divided_before, passes.divided_after
    texts = [f"already {_scaling(before)}"] if before != 1 and scaled else []
    texts += [f"then {_scaling(after)}"] if after != 1 else []
    return f" ({', '.join(texts)})" if texts else ""


def _scaling(divisor: float, ending: str = "d") -> str:
    """``divided by 2``, or ``multiplied by 2``."""
    if 0 < divisor < 1:
        return f"multiplie{ending} by {number_text(1 / divisor)}"
    return f"divide{ending} by {number_text(divisor)}"


def _outside_steps(index: Index, steps: Sequence[StepSummary]) -> str:
    """The modules that were called outside of all steps: an evaluation, a sampling loop."""
    calls, names = index.raw.calls, root_names(index)
    firsts, ends = (
        np.array([getattr(step.info, end) for step in steps]) for end in ("first_call", "end_call")
    )
    roots = np.flatnonzero(calls.parent < 0)
    after = np.searchsorted(firsts, roots, side="right")  # how many steps had begun
    inside = (after > 0) & (roots < ends[np.maximum(after - 1, 0)])
    in_steps, failed = set(calls.module[roots[inside]].tolist()), index.raw.info.get("exception")
    groups: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    for call, at in zip(roots[~inside].tolist(), after[~inside].tolist(), strict=True):
        key = (int(calls.module[call]), bool(calls.flags[call] & NO_GRAD))
        groups.setdefault(key, []).append((call, at))
    texts = []
    for (module, without), members in groups.items():
        times = calls.duration[[call for call, _ in members]]
        name = _times(names.get(module) or index.raw.modules[module].label, len(members))
        duration = time_text(int(np.median(times))) + " at the median" * (len(times) > 1)
        first = f"step {_step_name(steps[0])}" if index.raw.info.get("dropped") else "the first step"
        where = _moments_text(sorted({at for _, at in members}), steps, first)
        if failed and not without and module in in_steps and all(at == len(steps) for _, at in members):
            where = "in the step that failed"
        texts.append(f"{name}{' without gradients' * without}, {where}; {duration}")
    more = len(texts) - _MAX_OUTSIDE
    texts = [*texts[:_MAX_OUTSIDE], f"{more} more modules"] if more > 0 else texts
    return f"the steps: {'; '.join(texts)}" if texts else ""


def _moments_text(begun: Sequence[int], steps: Sequence[StepSummary], first: str) -> str:
    """When something ran, by how many steps had begun: ``before the first step, after step 4, 9``."""
    texts = [f"before {first}"] if begun[0] == 0 else []
    after = [_step_name(steps[at - 1]) for at in begun if at]
    if len(after) > _MAX_MOMENTS:
        texts.append(f"after {len(after):,} of the steps, the last of them step {after[-1]}")
    elif after:
        texts.append(f"after step {', '.join(after)}")
    return ", ".join(texts)


def step_table(steps: Sequence[StepSummary]) -> Grid | None:
    """A row for the first steps, the last, the slowest and those that differ from the others."""
    if len(steps) < 2:
        return None
    notes = _notes(steps)
    shown = _chosen_steps(steps, notes)
    has_peak = any(step.peak for step in steps)
    columns = [Column("step"), Column("time", right=True)]
    columns += [Column(LOSS, right=True)] if any(step.losses for step in steps) else []
    columns += [Column("gradient norm", right=True)] if any(step.norm is not None for step in steps) else []
    columns += [Column("peak memory", right=True)] if has_peak else []
    columns += [Column("", least=12)] if any(notes[at] for at in shown) else []
    rows: list[list[Cell | str]] = []
    room = _room_for_notes([_row(steps[at], "", columns) for at in shown], columns)
    for before, at in zip([-1, *shown], shown, strict=False):
        if at > before + 1:
            rows.append([Span(f"… {at - before - 1:,} more", "dim"), *[""] * (len(columns) - 1)])
        rows.append(_row(steps[at], _within(notes[at], room), columns))
    return grid(columns, rows)


def _room_for_notes(rows: Sequence[Sequence[Cell | str]], columns: Sequence[Column]) -> int:
    """How wide a note may be in a table of the usual width."""
    texts = [[cell.text if isinstance(cell, Span) else str(cell) for cell in row] for row in rows]
    widths = [
        max(map(width, column)) for column in zip([each.title for each in columns], *texts, strict=True)
    ]
    return WIDTH - sum(widths) - _GAP * (len(widths) - 1)


def _within(note: str, room: int) -> str:
    """The parts of a note that fit, the first in any case.

    >>> _within("4× the median, 9 ops, most 8", 20), _within("4× the median, 9 ops, most 8", 30)
    ('4× the median', '4× the median, 9 ops, most 8')
    """
    parts = _PARTS.split(note)
    while len(parts) > 1 and width(", ".join(parts)) > room:
        parts.pop()
    return ", ".join(parts)


def _row(step: StepSummary, note: str, columns: Sequence[Column]) -> list[Cell | str]:
    cells: dict[str, Cell | str] = {
        "step": _step_name(step),
        "time": Span(time_text(step.info.duration), "number"),
        LOSS: Span(_losses_text(step), "error" if _has_bad_loss(step) else "number"),
        "gradient norm": "" if step.norm is None else Span(number_text(step.norm), "number"),
        "peak memory": bytes_text(step.peak) if step.peak else "",
        "": Span(note, "warn"),
    }
    return [cells[column.title] for column in columns]


def _step_name(step: StepSummary) -> str:
    """The number of a step; the name that the program gave it, if that is another."""
    return str(step.number) if step.info.name == f"step{step.number}" else step.info.name


def _losses_text(step: StepSummary) -> str:
    """The losses of a step: a range for each line that computes one, ``0.71…0.65``, and their sum."""
    texts = [_range_text(losses) for losses in step.losses]
    for at, passes in enumerate(step.passes):
        whole = sum(step.losses[at])
        if passes.adds_up and passes.count == passes.known > 1 and math.isfinite(whole):
            texts[at] += f", sum {number_text(whole / passes.divided_after)}"
    return "; ".join(texts) if len(texts) > 1 and any(", " in text for text in texts) else ", ".join(texts)


def _range_text(losses: Sequence[float]) -> str:
    """The losses of one line as a range, highest first where they fell; those that are no number beside it.

    >>> _range_text([0.5, 0.25]), _range_text([0.3, 0.4, 0.1]), _range_text([0.5, math.nan])
    ('0.5…0.25', '0.4…0.1', '0.5 and nan')
    """
    numbers = [loss for loss in losses if not math.isnan(loss)]
    ends = sorted({min(numbers), max(numbers)}, reverse=numbers[0] > numbers[-1]) if numbers else []
    texts = list(dict.fromkeys(map(number_text, ends)))
    parts = ["…".join(texts)] * bool(texts) + ["nan"] * (len(numbers) < len(losses))
    return " and ".join(parts)


def _has_bad_loss(step: StepSummary) -> bool:
    return any(not math.isfinite(loss) for losses in step.losses for loss in losses)


def _notes(steps: Sequence[StepSummary]) -> list[str]:
    """How each step differs from the others."""
    times = np.array([step.info.duration for step in steps])
    whole = _whole(steps)
    usual = float(np.median([step.info.duration for step in whole]))
    slowest = int(times.argmax())
    counts = [step.ops for step in whole]
    most = max(set(counts), key=counts.count)
    mostly_equal = counts.count(most) * 2 > len(counts)
    notes = []
    for at, step in enumerate(steps):
        parts = ["skipped by the scaler"] if step.skipped else []
        parts += [_INCOMPLETE] if step.incomplete else []
        if times[at] > _SLOW * usual and len(steps) > 2:
            parts.append(f"{times[at] / usual:.0f}× the median" if usual else "slow")
        elif at == slowest and len(steps) > _MAX_ROWS:
            parts.append("slowest")
        if mostly_equal and step.ops != most:
            others = "the others" if counts.count(most) == len(counts) - 1 else "most"
            parts.append(f"{step.ops:,} ops, {others} {most:,}")
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


_FORWARD: Final = PHASES.index("forward")
_MAX_MODULES: Final = 6
_MAX_KINDS: Final = 3  #: of steps


def step_contents(index: Index, steps: Sequence[StepSummary]) -> list[str]:
    """What a step does, in the words of the program: ``G, D ×3; backward ×2; Adam (lr 0.001)``.

    Where steps are of several kinds a line for each of them: ``steps 0…3: …``. None where no step calls a
    module.
    """
    kinds = step_kinds(index, steps)
    if not any(content.modules for kind in kinds for content in kind.contents):
        return []
    if len(kinds) == 1:
        return [_content_text(index, kinds[0].contents)]
    commonest = sorted(kinds, key=lambda kind: -len(kind.numbers))[:_MAX_KINDS]
    shown = [kind for kind in kinds if kind in commonest]
    texts = [f"{_which(kind.numbers, steps)}: {_content_text(index, kind.contents)}" for kind in shown]
    others = [kind for kind in kinds if kind not in commonest]
    if others:
        count = sum(len(kind.numbers) for kind in others)
        name = f"{len(others):,} other kinds" if len(others) > 1 else "another kind"
        texts.append(f"{count:,} of {len(steps):,} steps: {name}")
    return texts


def _which(numbers: Sequence[int], steps: Sequence[StepSummary]) -> str:
    """Which steps are meant: ``steps 0…3``, or ``6 of 12 steps``."""
    if numbers[-1] - numbers[0] >= len(numbers):
        return f"{len(numbers):,} of {len(steps):,} steps"
    first, last = _step_name(steps[numbers[0]]), _step_name(steps[numbers[-1]])
    if len(numbers) == 1:
        return f"step {first}"
    return f"steps {first}…{last}" if first.isdigit() and last.isdigit() else f"steps {first} … {last}"


def _content_text(index: Index, contents: Sequence[StepContent]) -> str:
    """What steps of one kind do, with ranges where they do it differently often."""
    names = list(contents[0].modules)
    shown = [_times_range(name, [each.modules[name] for each in contents]) for name in names[:_MAX_MODULES]]
    shown += [f"{len(names) - _MAX_MODULES} more"] if len(names) > _MAX_MODULES else []
    parts = [", ".join(shown) or "no module"]
    parts += [_times_range("backward", [each.backward for each in contents])] if contents[0].backward else []
    return "; ".join([*parts, *_optimizers(index, [each for each in contents if not each.skipped])])


def _optimizers(index: Index, contents: Sequence[StepContent]) -> list[str]:
    """The optimizers that step, each with its learning rates over all of its steps."""
    loop = LoopRecord(ProblemContext(index))
    texts: dict[str, list[int]] = {}
    for number in dict.fromkeys(number for each in contents for number in each.optimizers or ()):
        known = bool(loop.optimizers[number].rates)
        rates = rates_text(loop.rates_of(number), extremes=not known)
        text = f"{loop.optimizers[number].type}{f' ({rates})' if rates else ''}"
        counts = [(each.optimizers or {}).get(number, 0) for each in contents]
        texts[text] = [sum(both) for both in zip(texts.get(text, [0] * len(counts)), counts, strict=True)]
    return [", ".join(_times_range(text, counts) for text, counts in texts.items())] if texts else []


def repeated_calls(index: Index) -> str:
    """The modules that were called several times, where nothing was trained: ``Llama ×50, 37 ms each``."""
    data, names, texts = index.raw, root_names(index), []
    roots = np.flatnonzero((data.calls.parent < 0) & (data.calls.phase == _FORWARD))
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


def rates_text(groups: Sequence[RateCurve], *, extremes: bool = False) -> str:
    """The learning rates of the parameter groups of an optimizer.

    With ``extremes`` only the lowest and the highest of all groups are known, not those of each group.

    >>> rates_text([RateCurve((0.0, 1e-3, 3e-5))])
    'lr 0 → 0.001 → 3e-05'
    >>> rates_text([RateCurve((0.1,)), RateCurve((0.01,), after=6)])
    'lr 0.1 and, after 6 steps, 0.01'
    """
    curves = list(dict.fromkeys(groups))
    texts = list(dict.fromkeys(map(_rate_text, curves)))
    if not texts:
        return ""
    if extremes and len(texts) == 2:
        return f"lr {texts[0]} in the lowest group, {texts[1]} in the highest"
    if len(texts) <= _MAX_CURVES:
        joined: dict[str, int] = {}
        for text, curve in zip(map(_rate_text, curves), curves, strict=True):
            joined[text] = min(curve.after, joined.get(text, curve.after))
        since = [
            f", after {joined[text]:,} step{'s' * (joined[text] > 1)}," if joined[text] else ""
            for text in texts
        ]
        others = [f" and{when} {text}" for when, text in zip(since[1:], texts[1:], strict=True)]
        return f"lr {texts[0]}{''.join(others)}"
    lowest, highest = (_rate_text(end(curves, key=lambda curve: max(curve.points))) for end in (min, max))
    return f"lr of {len(groups)} groups: {lowest} in the lowest, {highest} in the highest"


def _rate_text(curve: RateCurve) -> str:
    """``0 → 0.001 → 3e-05``; of a rate that goes up and down for long, the beginning and the end."""
    points = [number_text(rate) for rate in curve.points]
    turns = len(points) + curve.more - 2
    if turns >= _MAX_TURNS:
        more = turns - _MAX_TURNS + 1
        points = [*points[:_MAX_TURNS], f"… {more} more turn{'s' * (more > 1)}", points[-1]]
    return " → ".join(points)


def _times(text: str, count: int) -> str:
    return f"{text} ×{count}" if count > 1 else text


def _times_range(text: str, counts: Sequence[int]) -> str:
    """``pi ×5…10``; of something that every step does once the text alone."""
    return text if set(counts) == {1} else f"{text} ×{_range(counts)}"
