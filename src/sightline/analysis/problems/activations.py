"""Activations that pass nothing on, wherever they are written: dead, saturated, or masked as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import RANDOM, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.notation import number_text
from sightline.trace.data import KINDS

_LEAST: Final = 32  #: elements; fewer may be alike by chance
RECTIFIERS: Final = frozenset(
    "relu relu_ threshold threshold_ hardtanh hardtanh_ clamp_min clamp_min_".split()
)
_BOUNDED: Final = frozenset("tanh tanh_ sigmoid sigmoid_".split())
_NEAR: Final = 1e-6  #: how far the mean of 1 - x² or x(1 - x) may be from 0
_MASKS: Final = frozenset("masked_fill masked_fill_ where".split())
#: How low a number must be to say that something is left out.
_LEFT_OUT: Final = -1e4


@check(
    "dead-activation",
    Severity.WARNING,
    "Nothing passes through it, and no gradient comes back to revive it. Look at the bias and the scale of "
    "what comes before, and at the learning rate.",
)
def dead_activation(context: ProblemContext) -> Iterator[Finding]:
    """A rectifier that gives zero for every element in every call, though what it is given varies."""
    stats = context.data.stats
    for ops in _by_line(context, RECTIFIERS):
        rows = [(op, context.stat(context.outputs(op)[0])) for op in ops if context.outputs(op)]
        large = all(context.meta(context.outputs(op)[0]).numel >= _LEAST for op, _ in rows)
        if rows and large and all(row >= 0 and _is_zero(context, op, row) for op, row in rows):
            op = rows[0][0]
            given = _measured_input(context, op)
            if given < 0 or not _weights_vary(context, op):
                continue
            high = number_text(float(stats.max[given]))
            title = (
                f"{context.written(op)} gives zero for all {context.meta(context.outputs(op)[0])} in {len(rows)} "
                f"of "
                f"{len(rows)} calls: the largest it is given is {high}"
            )
            yield Finding(title, context.module(op), int(context.frames[op]), op, context.outputs(op)[0])


def _is_zero(context: ProblemContext, op: int, row: int) -> bool:
    stats = context.data.stats
    given = _measured_input(context, op)
    varied = given >= 0 and stats.min[given] < stats.max[given]
    return bool(varied and stats.min[row] == 0 and stats.max[row] == 0 and not stats.nans[row])


def _measured_input(context: ProblemContext, op: int) -> int:
    """The row of the numbers of what an op was given; of what an in-place op changed, those before."""
    given = context.inputs(op)
    if not given:
        return -1
    row = context.stat(given[0])
    base = int(context.data.values.base[given[0]])
    return row if row >= 0 or base < 0 else context.stat(base)


def _weights_vary(context: ProblemContext, op: int) -> bool:
    """Whether nothing just before an op is zero on purpose: a layer that starts at zero."""
    stats = context.data.stats
    maker = context.producer(context.inputs(op)[0])
    for value in context.inputs(maker) if maker >= 0 else ():
        row = context.stat(value)
        if context.data.values.kind[value] == KINDS.index("parameter") and row >= 0:
            if len(context.meta(value).shape) > 1 and stats.min[row] == stats.max[row]:
                return False
    return True


@check(
    "saturated-activation",
    Severity.WARNING,
    "At its bound it is flat: no gradient passes. Scale what comes in (inputs to about 1, weights by their "
    "fan-in), or normalise before it.",
)
def saturated_activation(context: ProblemContext) -> Iterator[Finding]:
    """A tanh or sigmoid that is at one of its bounds for every element in every call."""
    stats = context.data.stats
    for ops in _by_line(context, _BOUNDED):
        rows = [(op, context.stat(context.outputs(op)[0])) for op in ops if context.outputs(op)]
        if not rows or any(row < 0 for _, row in rows):
            continue
        op = rows[0][0]
        counts = [context.meta(context.outputs(each)[0]).numel for each, _ in rows]
        if min(counts) < _LEAST or not all(_is_flat(context, each, at) for each, at in rows):
            continue
        given = _measured_input(context, op)
        low, high = (
            (number_text(float(bound[given])) for bound in (stats.min, stats.max))
            if given >= 0
            else ("?", "?")
        )
        title = (
            f"{context.written(op)} is at its bound for all {context.meta(context.outputs(op)[0])} in "
            f"{len(rows)} of "
            f"{len(rows)} calls: it is given {low} … {high}"
        )
        yield Finding(title, context.module(op), int(context.frames[op]), op, context.outputs(op)[0])


def _is_flat(context: ProblemContext, op: int, row: int) -> bool:
    """Whether all numbers are at a bound: of tanh 1 - x² is 0 there, of a sigmoid x - x²."""
    stats = context.data.stats
    if stats.nans[row] or stats.infs[row]:
        return False
    given = _measured_input(context, op)
    if given >= 0 and (stats.infs[given] or stats.nans[given] or stats.min[given] == stats.max[given]):
        return False
    count = context.meta(context.outputs(op)[0]).numel
    squares = float(stats.l2[row]) ** 2 / count
    rest = 1 - squares if context.name(op).startswith("tanh") else float(stats.mean[row]) - squares
    return abs(rest) < _NEAR


def _by_line(context: ProblemContext, names: frozenset[str]) -> list[list[int]]:
    """The ops of these names inside module calls, by line and module."""
    groups: dict[tuple[int, int], list[int]] = {}
    if not len(context.data.stats):
        return []
    inside = context.forward & context.named(names) & (context.data.ops.call >= 0)
    for op in np.flatnonzero(inside).tolist():
        groups.setdefault((context.visible(int(context.frames[op])), context.module(op)), []).append(op)
    return list(groups.values())


@check(
    "masks-everything",
    Severity.WARNING,
    "After a softmax everything counts alike, or is NaN. Look at the sense of the mask (is True kept, or "
    "left out?) and at its shape.",
)
def masks_everything(context: ProblemContext) -> Iterator[Finding]:
    """A mask leaves out every element, in every call of its line."""
    stats = context.data.stats
    for ops in _by_line(context, _MASKS):
        rows = [(op, context.stat(context.outputs(op)[0])) for op in ops if context.outputs(op)]
        if rows and all(row >= 0 and _leaves_out_all(context, op, row) for op, row in rows):
            op, row = rows[0]
            value = context.outputs(op)[0]
            level = "-inf" if stats.infs[row] else number_text(float(stats.max[row]))
            times = f"{len(rows)} of {len(rows)} calls"
            title = f"{context.written(op)} masks all {context.meta(value)} with {level} in {times}"
            yield Finding(title, context.module(op), int(context.frames[op]), op, value)


def _leaves_out_all(context: ProblemContext, op: int, row: int) -> bool:
    """Whether a result is one very low number throughout, and what it was made of was not."""
    stats = context.data.stats
    value = context.outputs(op)[0]
    count = context.meta(value).numel
    if count < _LEAST or context.named(RANDOM)[op]:
        return False
    given = [
        context.stat(one)
        for one in context.inputs(op)
        if context.meta(one).shape == context.meta(value).shape
    ]
    varied = any(at >= 0 and stats.min[at] < stats.max[at] for at in given)
    low = stats.infs[row] == count or (not stats.infs[row] and stats.min[row] == stats.max[row] <= _LEFT_OUT)
    return bool(varied and low and not stats.nans[row])
