"""Problems in the numbers, where statistics were taken: NaN and infinities, layers that say nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from sightline.analysis.problems.facts import FORWARD, RANDOM, Facts, Mask
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.notation import number_text
from sightline.trace.data import KINDS, PHASES
from sightline.trace.forms import Form, Record

#: Ops that hand out memory as it is: whatever it holds means nothing.
_GARBAGE: Final = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided empty_permuted resize_ resize_as_".split()
)
_LEAST_DEAD: Final = 32  #: elements; fewer may be zero together by chance


# -- not finite --------------------------------------------------------------------------------------------


@check(
    "non-finite",
    Severity.ERROR,
    "Whatever is computed from it is lost, and one update with it destroys the weights.",
)
def first_non_finite(facts: Facts) -> Iterator[Finding]:
    """The first op that made an infinity out of finite inputs and the first that made a NaN out of inputs
    with none, if it, or what became of it, is there at the end.

    Infinities that a constant asks for, that a softmax or a ``where`` takes away again, and those of a loss
    scaler are no problem.
    """
    if not len(facts.data.stats):
        return
    measured = _Measured(facts)
    yield from _came_with(facts)
    not_a_number = _makers(facts, measured.nan)
    infinite = sorted({*_makers(facts, measured.nan | measured.inf)} - {*not_a_number})
    for makers in (infinite, not_a_number):
        for op in makers:
            if not _is_meant(facts, op) and measured.survives(facts.outputs(op)[0]):
                yield _non_finite(facts, op, facts.outputs(op)[0])
                break  # all that follow may come of this one


def _came_with(facts: Facts) -> Iterator[Finding]:
    """Parameters, buffers and inputs that held a NaN before anything ran."""
    stats, values = facts.data.stats, facts.data.values
    for value in stats.value[stats.nans > 0].tolist():
        kind = KINDS[values.kind[value]]
        new = values.producer[value] >= 0 or values.previous[value] >= 0
        if not new and kind in ("parameter", "buffer", "input"):
            numbers = facts.index.numbers(value)
            reader = next(iter(facts.index.consumers(value)), -1)
            if numbers is not None and reader >= 0:
                name = facts.index.name(values.name[value])
                what = f"{kind} {name}" if name else f"an {kind} {facts.meta(value)}"
                title = f"{what} came with {numbers.nans:,} NaN of {facts.meta(value).numel:,}"
                yield Finding(title, facts.module(reader), int(facts.frames[reader]), reader, value)


def _non_finite(facts: Facts, op: int, value: int) -> Finding:
    numbers = facts.index.numbers(value)
    assert numbers is not None  # it was found by them
    what, count = ("NaN", numbers.nans) if numbers.nans else ("Inf", numbers.infs)
    shown = f"{what} ({count:,} of {facts.meta(value).numel:,} elements)"
    given = ", ".join(_with_range(facts, each) for each in facts.inputs(op)[:3])
    phase = PHASES[facts.data.ops.phase[op]]
    where = f" in the {phase} pass" if phase != "forward" else ""
    name = facts.data.names[facts.data.ops.name[op]]
    title = f"{name}{where} made the first {shown} out of {given or 'nothing'}"
    return Finding(title, facts.module(op), int(facts.frames[op]), op, value)


def _with_range(facts: Facts, value: int) -> str:
    numbers = facts.index.numbers(value)
    if numbers is None or math.isnan(numbers.min):
        return str(facts.meta(value))
    return f"{facts.meta(value)} in {number_text(numbers.min)} … {number_text(numbers.max)}"


class _Measured:
    """Which values hold NaN or infinities, and where those go."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        stats = facts.data.stats
        self.nan = np.zeros(len(facts.data.values), dtype=np.bool_)
        self.inf = np.zeros(len(facts.data.values), dtype=np.bool_)
        self.nan[stats.value] = stats.nans > 0
        self.inf[stats.value] = stats.infs > 0
        self._watched = facts.finest & facts.ended

    def survives(self, value: int) -> bool:
        """Whether it is still there, or what became of it, in a result that nothing more is made of."""
        front, seen = [value], {value}
        while front:
            after: list[int] = []
            for each in front:
                users = [op for op in self._facts.index.consumers(each) if self._watched[op]]
                if not users:
                    return True
                made = (out for op in users for out in self._facts.outputs(op)[:1])
                after += (out for out in made if (self.nan[out] or self.inf[out]) and out not in seen)
            seen.update(after)
            front = list(dict.fromkeys(after))
        return False


def _makers(facts: Facts, bad: Mask) -> list[int]:
    """Ops whose first output is bad though no input is, in order; not those that only hand out memory."""
    ops = facts.data.ops
    some = np.flatnonzero(facts.finest & facts.ended & (np.diff(ops.output_offsets) > 0))
    some = some[bad[ops.outputs[ops.output_offsets[some]]]]
    tainted = facts.any_input(bad | _unknown(facts)) | facts.named(_GARBAGE)
    found: list[int] = some[~tainted[some]].tolist()
    return found


def _unknown(facts: Facts) -> Mask:
    """Floating values made in the run that were not measured, such as a tensor changed through a view of it.

    Parameters are not measured either: what is bad in them shows in the first op that reads them.
    """
    values = facts.data.values
    root = np.arange(len(values))
    while (values.base[root] >= 0).any():
        root = np.where(values.base[root] >= 0, values.base[root], root)
    made: Mask = (values.producer[root] >= 0) & (values.kind[root] != KINDS.index("parameter"))
    made &= facts.floating
    made[facts.data.stats.value] = False
    return made


def _is_meant(facts: Facts, op: int) -> bool:
    """Whether an argument of the op is itself infinite, or a loss scaler looks for infinite gradients."""
    scaled = facts.data.ops.phase[op] != FORWARD and any("_amp_" in name for name in facts.bare_names)
    if scaled or _has_infinity(facts.data.forms[int(facts.data.ops.form[op])]):
        return True
    parent = int(facts.data.ops.parent[op])
    return parent >= 0 and _has_infinity(facts.data.forms[int(facts.data.ops.form[parent])])


def _has_infinity(item: Any) -> bool:
    if isinstance(item, float):
        return not math.isfinite(item)
    if isinstance(item, Form):
        return any(map(_has_infinity, item.args)) or any(map(_has_infinity, (item.kwargs or {}).values()))
    if isinstance(item, Record):
        return any(map(_has_infinity, item.fields.values()))
    if isinstance(item, list | tuple):
        return any(map(_has_infinity, item))
    return isinstance(item, dict) and any(map(_has_infinity, item.values()))


# -- dead layers -------------------------------------------------------------------------------------------


@check(
    "dead-layer",
    Severity.WARNING,
    "A layer that gives one number whatever it is given passes nothing on, and where it is flat there is no "
    "gradient to bring it back.",
)
def dead_layer(facts: Facts) -> Iterator[Finding]:
    """A module whose input varies and whose output does not.

    Layers with weights of zero begin so on purpose, dropout may drop everything, and a few elements may be
    equal by chance.
    """
    if not len(facts.data.stats):
        return
    constant, varied = _spread(facts)
    calls = facts.data.calls
    for call in _flat_calls(facts, constant):
        value = int(calls.outputs[calls.output_offsets[call]])
        given = calls.inputs[calls.input_offsets[call] : calls.input_offsets[call + 1]]
        if varied[given].any() and not _may_be_flat(facts, call, varied):
            numbers = facts.index.numbers(value)
            level = number_text(numbers.max) if numbers is not None and numbers.max else "zero"
            title = f"the output {facts.meta(value)} is {level} everywhere, though its input varies"
            module, frame = int(calls.module[call]), int(calls.frame[call])
            yield Finding(title, module, frame, facts.producer(value), value)


def _flat_calls(facts: Facts, constant: Mask) -> list[int]:
    """The calls whose first output is large, constant and made by themselves: not by a submodule."""
    calls, values = facts.data.calls, facts.data.values
    some = np.flatnonzero((calls.phase == FORWARD) & (np.diff(calls.output_offsets) > 0))
    made = calls.outputs[calls.output_offsets[some]]
    maker = values.producer[made]
    home = np.append(facts.data.ops.call, -1)  # what no op made has producer -1: the appended entry
    own = (maker >= 0) & (home[maker] == some)
    large = facts.of_meta(lambda meta: meta.numel >= _LEAST_DEAD)
    found: list[int] = some[own & constant[made] & large[made]].tolist()
    return found


def _spread(facts: Facts) -> tuple[Mask, Mask]:
    """Which values were measured to be one number throughout, and which to be several."""
    stats = facts.data.stats
    constant = np.zeros(len(facts.data.values), dtype=np.bool_)
    varied = constant.copy()
    finite = (stats.nans == 0) & (stats.infs == 0)
    constant[stats.value] = finite & (stats.min == stats.max)
    varied[stats.value] = finite & (stats.min < stats.max)
    return constant, varied


def _may_be_flat(facts: Facts, call: int, varied: Mask) -> bool:
    """Whether a call drops elements by chance, or uses a parameter not known to hold several numbers."""
    calls, ops = facts.data.calls, facts.data.ops
    first, end = int(calls.first_op[call]), int(calls.end_op[call])
    drops = "drop" in facts.module_type(int(calls.module[call])).lower()
    if drops or facts.named(RANDOM)[first:end].any():
        return True
    given = ops.inputs[ops.input_offsets[first] : ops.input_offsets[end]]
    weights = given[facts.data.values.kind[given] == KINDS.index("parameter")]
    return not varied[weights].all()
