"""Curves over the steps of a training run that go wrong: losses, norms of gradients, learning rates.

They are the numbers that the first screen shows beside each step, as far as the run read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from statistics import median
from typing import Final, NamedTuple

from sightline.analysis.nonfinite import first_nonfinite
from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.nonfinite import cause, first_non_finite
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.analysis.step_summaries import BackwardPasses, StepSummary, step_numbers
from sightline.hints import Hint
from sightline.notation import number_text

_LEAST_STEPS: Final = 2
_SOME_STEPS: Final = 5  #: so that one odd batch is not taken for a trend
_GROWS: Final = 10  #: the last losses over the first ones, in a run that diverges
_EXPLODES: Final = 1000
_HUGE: Final = 100  #: no loss is as large by its nature; one of 3 after 0.001 may be
_BROKEN: Final = 30  #: the last losses over the lowest ones before, in a run that does not recover
_LARGE: Final = 10  #: the least of such last losses
_PEAK: Final = 50  #: and of the largest
_WINDOW: Final = 16  #: steps of which the median is a level, at most
_FASTER: Final = 2
_VANISHED: Final = 1e-6  #: of the highest rate
_NOTHING: Final = 1e-10  #: a rate at which float32 weights stay as they are
_SHARE: Final = 10  #: one step in so many without a rate is too much; a last one may have none


class TrainingCurves:
    """The losses and the norms of gradients of a run, step by step."""

    def __init__(self, context: ProblemContext) -> None:
        self.steps: Sequence[StepSummary] = step_numbers(context.index)
        losses: dict[int, list[tuple[StepSummary, BackwardPasses, tuple[float, ...]]]] = {}
        for step in self.steps:
            for passes, numbers in zip(step.passes, step.losses, strict=True):
                if not step.skipped:
                    losses.setdefault(passes.frame, []).append((step, passes, numbers))
        self.losses = [_loss_curve(frame, curve) for frame, curve in losses.items()]
        self.norms = [(step, step.norm) for step in self.steps if step.norm is not None and not step.skipped]


class LossCurve(NamedTuple):
    """The loss of each step that one line computes, as the first screen shows it."""

    frame: int
    name: str  #: "the loss", or how one number was made of the several losses of a step
    points: list[tuple[StepSummary, float]]


def _loss_curve(frame: int, curve: list[tuple[StepSummary, BackwardPasses, tuple[float, ...]]]) -> LossCurve:
    """The sum where a step adds up the gradients of several losses, else their mean."""
    summed = all(passes.adds_up and passes.count == passes.known for _, passes, _ in curve)
    several = any(len(numbers) > 1 for _, _, numbers in curve)
    name = f"the {'sum' if summed else 'mean'} of the losses of a step" if several else "the loss"
    points = []
    for step, passes, numbers in curve:
        whole = sum(numbers) / (passes.divided_after if several and summed else len(numbers))
        points.append((step, whole))
    return LossCurve(frame, name, points)


@check(
    "non-finite",
    Severity.ERROR,
    "A step with gradients that are not finite destroys the weights.",
)
def loss_not_finite(context: ProblemContext) -> Iterator[Finding]:
    """A loss or a norm of gradients that was read and is not finite, where no op can be named."""
    curves = context.derived(TrainingCurves)
    norms = [("the norm of the gradients", -1, curves.norms)]
    losses = [("the loss", frame, curve) for frame, _, curve in curves.losses]
    named = (each for each in (*losses, *norms) if not all(math.isfinite(number) for _, number in each[2]))
    name, frame, curve = next(named, ("", -1, []))
    bad = [(step.number, number) for step, number in curve if not math.isfinite(number)]
    if not bad or any(first_non_finite.find(context)):
        return
    repair = f"{Hint.recording('stats')} names the op that made the first one."
    if len(context.data.stats):
        source = first_nonfinite(context.index)
        repair = "No op that was measured made it: it was given to the run, or asked for."
        if source is not None:
            given, repair = cause(context, source.op.id)
            made = f"The first one was made by {context.at_line(source.op.id)}"
            repair = f"{made}{f': {given}' if given else ''}. {repair}".rstrip()
    kinds = dict.fromkeys(number_text(abs(number)) for _, number in bad)
    count, first = len(bad), bad[0][0]
    steps = f"{count:,} of {len(curve):,} steps, the first of them step {first}"
    if count == len(curve):
        steps = f"all of {count:,} steps" if count > 1 else f"step {first}"
    title = f"{name} is {' or '.join(kinds)} in {steps}"  # others that are not finite are a consequence
    harm = _harm([step.norm for step, number in curve if not math.isfinite(number)], curve[-1][1])
    yield Finding(title, frame=frame, why=f"{harm} {repair}")


def _harm(norms: Sequence[float | None], last: float) -> str:
    """The effect of steps with these norms of gradients, as far as they or the last loss of the run tell."""
    if all(norm == 0 for norm in norms):
        return "The norm of the gradients is 0 there: such a step teaches nothing."
    if all(norm is not None and math.isfinite(norm) for norm in norms):
        return "The norm of the gradients is finite there."
    if math.isfinite(last):
        return "The last one is finite again."
    return "A step with gradients that are not finite destroys the weights."


@check(
    "diverging-loss",
    Severity.ERROR,
    "The steps make the model worse: lower the learning rate, clip the gradients, and check the sign of the "
    "loss.",
    Confidence.LIKELY,
)
def loss_grows(context: ProblemContext) -> Iterator[Finding]:
    """A loss that is many times as large at the end as it was before."""
    for frame, name, curve in context.derived(TrainingCurves).losses:
        finite = list(takewhile(lambda each: math.isfinite(each[1]), curve))
        numbers = [number for _, number in finite]
        factor = _growth(numbers)
        explodes = factor >= _EXPLODES and abs(numbers[-1]) >= _HUGE
        grows = factor >= _GROWS and abs(numbers[-1]) >= 1 and len(numbers) >= _SOME_STEPS
        start: int | None = 0
        if not explodes and not (grows and _accelerates(numbers)):
            start = _low_before_breakdown(numbers)
        if start is not None:
            sure = Confidence.CERTAIN if explodes else Confidence.LIKELY
            first, last = number_text(numbers[start]), number_text(numbers[-1])
            grows_or_falls = "grows" if numbers[-1] > numbers[start] else "falls"
            title = f"{name} {grows_or_falls} from {first} to {last} in {len(numbers):,} steps"
            op, before = -1, finite[-1][0]
            if start or len(curve) > len(finite):
                title = (
                    f"{name} {grows_or_falls} from {first} in step {finite[start][0].number} to {last} in "
                    f"step {before.number}"
                )
            if len(curve) > len(finite):
                state = "NaN" if math.isnan(curve[len(finite)][1]) else "infinite"
                title += f" and is {state} in step {curve[len(finite)][0].number}"
                op = before.info.first_op  # before the op that made it infinite, which is a consequence
            yield Finding(title, frame=frame, op=op, confidence=sure)


@check(
    "loss-spike",
    Severity.WARNING,
    "Look at the batch of this step, and clip the gradients: one such step can undo many.",
    Confidence.LIKELY,
)
def loss_jumps(context: ProblemContext) -> Iterator[Finding]:
    """A loss that is many times as large in one step as in the others, and comes back."""
    for frame, name, curve in context.derived(TrainingCurves).losses:
        sizes = [abs(number) for _, number in curve]
        if not all(map(math.isfinite, sizes)):
            continue
        jumps = []
        lowest = math.inf  # of the steps behind: a loss that stays as large has not come back
        for at in range(len(sizes) - 2, 0, -1):
            lowest = min(lowest, sizes[at + 1])
            usual = max(median(sizes[max(0, at - _SOME_STEPS) : at]), lowest)
            if usual and _is_jump(sizes[at] / usual, sizes[at]):
                jumps.append((sizes[at], at, usual))
        if jumps:
            size, at, usual = max(jumps)
            step, number = curve[at]
            times = number_text(float(f"{size / usual:.2g}"))
            title = f"{name} jumps to {number_text(number)} in step {step.number}, {times} times the usual"
            yield Finding(title, frame=frame)


def _is_jump(factor: float, size: float) -> bool:
    """Whether a loss of this size, so many times the usual one, is no batch like the others."""
    return (factor >= _EXPLODES and size >= 1) or (factor >= _HUGE and size >= _HUGE)


def _low_before_breakdown(numbers: Sequence[float]) -> int | None:
    """The step with the low loss from which a curve went up for good; None if it did not.

    The first loss counts as such by itself: no step had changed the weights. Later ones vary by their
    batches, so there the median of some steps counts.

    >>> _low_before_breakdown([1.1, 672, 209, 150, 88]), _low_before_breakdown([1, 4.6, 86.2])
    (0, 0)
    >>> _low_before_breakdown([300, 9, 1, 1, 1, 1, 1, 200, 290]), _low_before_breakdown([672, 80, 70, 60])
    (2, None)
    """
    count, sizes = len(numbers), [abs(number) for number in numbers]
    tail = max(count // 4, 2)
    window = min(max(count // 4, 3), _WINDOW)
    levels = [(size, 0, 1) for size in sizes[: count > 1]]
    levels += [(median(sizes[at : at + window]), at, window) for at in range(count - tail - window + 1)]
    low, start, length = min((each for each in levels if each[0]), default=(0.0, 0, 1))
    if not low:
        return None
    rises = count < _SOME_STEPS and all(one < other for one, other in pairwise(sizes))
    end = numbers[-1] if rises else min(numbers[-tail:])
    stays = count > _LEAST_STEPS and end >= max(_LARGE, _BROKEN * low) and max(numbers) >= _PEAK
    if not stays and numbers[-1] < _HUGE * max(1, low):
        return None
    return min(range(start, start + length), key=sizes.__getitem__)


def _growth(numbers: Sequence[float]) -> float:
    """The smallest of the last numbers over the largest of the first ones; 0 if unknown.

    >>> _growth([1.0, 2.0, 50.0]), _growth([2.0, 1.0, 0.5])
    (50.0, 0.25)
    """
    if len(numbers) < _LEAST_STEPS or not all(map(math.isfinite, numbers)):
        return 0.0
    part = max(len(numbers) // 4, 1)
    first = max(abs(number) for number in numbers[:part])
    last = min(abs(number) for number in numbers[-part:])
    return last / first if first else 0.0


def _accelerates(numbers: Sequence[float]) -> bool:
    """Whether numbers grow faster in their second half, as those of a run that diverges do.

    A contrastive loss whose queue fills up, and one with a weight that is warmed up, grow and settle.

    >>> _accelerates([1, 2, 4, 8, 16]), _accelerates([0.3, 1.5, 2.5, 3, 3.4])
    (True, False)
    """
    sizes = [abs(number) for number in numbers]
    middle = sizes[len(sizes) // 2]
    return sizes[-1] - middle >= _FASTER * (middle - sizes[0]) and sizes[-1] == max(sizes)


@check(
    "zero-gradients",
    Severity.ERROR,
    "Nothing is learned: the loss does not depend on the weights, all units are dead, or the gradients were "
    "cleared before they were used.",
)
def gradients_of_zero(context: ProblemContext) -> Iterator[Finding]:
    """The norm of all gradients is zero in every step, or from some step on to the end."""
    curve = context.derived(TrainingCurves).norms
    zeros = 0
    while zeros < len(curve) and curve[-1 - zeros][1] == 0:
        zeros += 1
    if zeros >= _LEAST_STEPS or (zeros and zeros == len(curve)):
        first = curve[-zeros][0].number
        when = f"all of {zeros:,} steps" if zeros == len(curve) else f"every step from step {first} on"
        when = f"step {first}" if len(curve) == 1 else when
        yield Finding(f"the norm of the gradients is 0 in {when}")
        return
    measured = [norms for norms in context.derived(LoopRecord).norms() if norms]
    if not curve and measured and not any(any(norms.values()) for norms in measured):
        when = "every step in which they were measured" if len(measured) > 1 else "the first step"
        yield Finding(f"all gradients are 0 in {when}")


@check(
    "exploding-gradients",
    Severity.WARNING,
    "A step of plain SGD with them throws the weights away: lower the learning rate, and clip the gradients "
    "before the step.",
)
def norm_grows(context: ProblemContext) -> Iterator[Finding]:
    """The norm of all gradients is many times as large at the end as at the beginning."""
    numbers = [norm for _, norm in context.derived(TrainingCurves).norms]
    if not all(map(math.isfinite, numbers)) or len(numbers) < _LEAST_STEPS:
        return
    # The first norm counts by itself, too: those of the next steps may be of weights that are thrown away.
    last = min(numbers[-max(len(numbers) // 4, 2) :])
    grows = _growth(numbers) >= _EXPLODES or (len(numbers) > _LEAST_STEPS and last >= _EXPLODES * numbers[0])
    if grows and numbers[0] and numbers[-1] >= _EXPLODES:
        ends = f"from {number_text(numbers[0])} to {number_text(numbers[-1])}"
        yield Finding(f"the norm of the gradients grows {ends} in {len(numbers):,} steps")


@check(
    "learning-rate",
    Severity.ERROR,
    "A step with it destroys the weights or goes uphill. Look at the scheduler, or at the code that sets it.",
)
def learning_rate_wrong(context: ProblemContext) -> Iterator[Finding]:
    """A rate that is no number, infinite or below zero, or zero in every step."""
    record = context.derived(LoopRecord)
    for number, optimizer in enumerate(record.optimizers):
        steps = record.steps_of(number)
        noted = [rate for step in steps for rate in (step.lowest, step.highest) if rate is not None]
        bad = [rate for rate in noted if not 0 <= rate < math.inf]
        every = [*noted, *(point for curve in record.rates_of(number) for point in curve.points)]
        title, why = f"the learning rate of {optimizer.type} is", ""
        if bad:
            title = f"{title} {number_text(bad[0])}"
        elif len(steps) > 1 and noted and not any(every):
            count = optimizer.count if optimizer.rates else len(steps)  # of a long run some are noted
            title = f"{title} 0 in all of {count:,} steps"
            why = "These steps change nothing: look at how the rate is computed, and at its scheduler."
        else:
            continue
        yield Finding(title, place=optimizer.place, called=optimizer.called, why=why)


@check(
    "learning-rate",
    Severity.WARNING,
    "With such a rate the weights stay as they are. Look at how often the scheduler steps (for each batch or "
    "each epoch), and at the number of steps it was made for.",
)
def learning_rate_vanishes(context: ProblemContext) -> Iterator[Finding]:
    """A rate that falls to a millionth of its peak, or to zero, long before the run ends."""
    record = context.derived(LoopRecord)
    for number, optimizer in enumerate(record.optimizers):
        rates = [step.highest for step in record.steps_of(number) if step.highest is not None]
        if not rates or not all(0 <= rate < math.inf for rate in rates):
            continue
        curves = record.rates_of(number)
        peak = max(*rates, *(max(curve.points) for curve in curves), 0.0)
        low, longer = 0, optimizer.count > len(rates)
        rises = peak > max(rates) or any(curve.points[-1] > rates[-1] for curve in curves)
        if longer and rises:  # after the steps whose rates were noted one by one
            continue
        while low < len(rates) and rates[-1 - low] <= max(peak * _VANISHED, _NOTHING):
            low += 1
        if not peak or low < max(2, -(-len(rates) // _SHARE)):
            continue  # zero in every step is another problem
        if peak <= _NOTHING:
            most = f"the learning rate of {optimizer.type} is {number_text(peak)} at most"
            title = f"{most}: no step moves anything"
            yield Finding(title, place=optimizer.place, called=optimizer.called)
            continue
        fall = f"falls from {number_text(peak)} to {number_text(rates[-1])}"
        steps = f"{low:,} of {'the first ' * longer}{len(rates):,} steps hardly move"
        title = f"the learning rate of {optimizer.type} {fall}: {steps}"
        yield Finding(title, place=optimizer.place, called=optimizer.called)
