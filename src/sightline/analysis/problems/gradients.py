"""Parameters that get no gradient, where their branch was cut, and gradients that vanish or explode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.loop_record import LoopRecord
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.analysis.problems.training import Idle, Training
from sightline.notation import number_text

_NAMED: Final = 3  #: how many parameters a title names


@check(
    "unused-parameter",
    Severity.WARNING,
    "It cannot learn, and DistributedDataParallel waits for its gradient: use it, freeze it or leave it out.",
)
def unused_parameter(context: ProblemContext) -> Iterator[Finding]:
    """A trainable parameter of a model that was trained, which no op of the forward read.

    A module that was passed over while others of its class beside it ran is an expert without tokens or a
    dropped layer, and no problem.
    """
    training = context.derived(Training)
    calls = context.data.calls
    unused: dict[tuple[int, bool], list[Idle]] = {}
    for idle in training.idle:
        missed = training.not_called(idle.module)
        if not idle.used and not any(map(training.is_alternative, missed)):
            unused.setdefault((missed[-1] if missed else idle.module, bool(missed)), []).append(idle)
    for (module, whole_module), members in unused.items():
        call = training.nearest_call(module)
        finding = _about(context, module, members, "never used", int(calls.frame[call]) if call >= 0 else -1)
        if whole_module:
            names = f"{len(members)} trainable parameter{'s' if len(members) > 1 else ''}"
            finding = replace(finding, title=f"{context.module_type(module)} with {names} was never called")
        yield finding


@check(
    "no-gradient",
    Severity.WARNING,
    "It stays as it was initialised: what it computes reaches the loss in no way that can be differentiated.",
)
def no_gradient(context: ProblemContext) -> Iterator[Finding]:
    """A trainable parameter that the forward used and the backward did not reach, for no known reason."""
    training = context.derived(Training)
    calls = context.data.calls
    uncut = (idle for idle in training.idle if idle.used and training.cut(idle) < 0)
    for module, members in _by_module(uncut):
        op = training.uses(members[0])[0]
        call = training.nearest_call(module)
        frame = int(context.frames[op])
        if (
            call >= 0 and not calls.first_op[call] <= op < calls.end_op[call]
        ):  # a copy of it was made elsewhere
            own = [
                use for use in training.uses(members[0]) if calls.first_op[call] <= use < calls.end_op[call]
            ]
            op = own[0] if own else op
            frame = int(context.frames[op]) if own else int(calls.frame[call])
        end = training.branch_end(members[0])
        what = f"used but got no gradient: {end}" if end else "used but got no gradient"
        yield _about(context, module, members, what, frame, op)


@check(
    "cut-gradient",
    Severity.WARNING,
    "The parameters before the cut want gradients and get none; freeze them if that is meant.",
)
def cut_gradient(context: ProblemContext) -> Iterator[Finding]:
    """A trainable parameter whose way to the loss leads only through ``detach`` or a ``no_grad`` block."""
    training = context.derived(Training)
    cuts: dict[int, list[Idle]] = {}
    for idle in training.idle:
        op = training.cut(idle) if idle.used else -1
        if op >= 0:  # the ops of one line, such as those of a layer, are one cut
            same = (known for known in cuts if _place(context, known) == _place(context, op))
            cuts.setdefault(next(same, op), []).append(idle)
    for op, members in cuts.items():
        how = "detach" if context.name(op) == "detach" else "a block without gradients (no_grad)"
        for module, group in _by_module(members):
            yield _about(context, module, group, f"cut from the loss by {how}", int(context.frames[op]), op)


def _place(context: ProblemContext, op: int) -> str:
    return context.place(int(context.frames[op]))


def _by_module(parameters: Iterable[Idle]) -> Iterator[tuple[int, list[Idle]]]:
    """Parameters together with the others of their module."""
    for module, group in groupby(sorted(parameters, key=lambda idle: idle.module), lambda idle: idle.module):
        yield module, list(group)


def _about(
    context: ProblemContext, module: int, parameters: Sequence[Idle], what: str, frame: int, op: int = -1
) -> Finding:
    names = ", ".join(each.name for each in parameters[:_NAMED])
    more = f" and {len(parameters) - _NAMED} more" if len(parameters) > _NAMED else ""
    verb = "was" if len(parameters) == 1 else "were"
    title = f"{names}{more} of {context.module_type(module)} {verb} {what}"
    values = parameters[0].values
    return Finding(title, module, frame, op, values[0] if values else -1, parameters[0].path)


_LEAST: Final = 4  #: layers of a stack
_RATIO: Final = 1e-4  #: between the two ends of a stack
_NUMBER: Final = re.compile(r"\b\d+\b")
_TOO_LARGE: Final = 1e4
_ROUGH: Final = 5.0  #: how much a layer may differ from the trend


def _stacks(context: ProblemContext, norms: dict[str, float]) -> Iterator[list[tuple[str, float, int]]]:
    """The matrices of layers that differ only in a number, in the order in which these are called."""
    order: dict[str, tuple[int, int]] = {}
    for id, info in enumerate(context.data.modules):
        calls = context.index.calls_of_module.get(id)
        for parameter in info.parameters:
            if calls and not parameter.buffer and len(parameter.shape) > 1:
                order[parameter.path] = (calls[0], id)
    groups: dict[str, list[tuple[str, float, int]]] = {}
    for name, norm in norms.items():
        if name in order:
            groups.setdefault(_NUMBER.sub("*", name), []).append((name, norm, order[name][1]))
    for members in groups.values():
        if len(members) >= _LEAST:
            yield sorted(members, key=lambda one: order[one[0]][0])


def _trend(members: list[tuple[str, float, int]]) -> float:
    """The first norm over the last, if it goes that way along the whole stack; else 1."""
    norms = [norm for _, norm, _ in members]
    if min(norms) <= 0 or not all(norm < float("inf") for norm in norms):
        return 1.0
    ratio = norms[0] / norms[-1]
    half = norms[len(norms) // 2]
    goes = norms[0] / half * _ROUGH < 1 < norms[-1] / half / _ROUGH * 1.0 or (
        norms[0] / half > _ROUGH and half / norms[-1] > _ROUGH
    )
    return ratio if goes else 1.0


@check(
    "vanishing-gradients",
    Severity.WARNING,
    "The first layers hardly learn. Add skip connections or a norm, or use an activation that is not flat, "
    "such as ReLU or GELU.",
)
def vanishing_gradients(context: ProblemContext) -> Iterator[Finding]:
    """A stack of layers along which the gradients become far smaller towards the input."""
    measured = context.derived(LoopRecord).norms()
    for members in _stacks(context, measured[0]) if measured else ():
        if all(_ratio_of(members, norms) < _RATIO for norms in measured):
            yield _finding(context, members, "shrink")
            return


@check(
    "exploding-gradients",
    Severity.WARNING,
    "One step with them throws the weights away. Draw the weights smaller (by their fan-in), add a norm, and "
    "clip the gradients before the step.",
)
def exploding_gradients(context: ProblemContext) -> Iterator[Finding]:
    """A stack of layers whose gradients are huge, or grow towards the input without end."""
    measured = context.derived(LoopRecord).norms()
    for members in _stacks(context, measured[0]) if measured else ():
        first = {name for name, _, _ in members}
        huge = all(min(norms.get(name, 0.0) for name in first) > _TOO_LARGE for norms in measured)
        if huge or all(_ratio_of(members, norms) > 1 / _RATIO for norms in measured):
            yield _finding(context, members, "grow" if not huge else "are huge")
            return


def _ratio_of(members: list[tuple[str, float, int]], norms: dict[str, float]) -> float:
    return _trend([(name, norms.get(name, 0.0), id) for name, _, id in members])


def _finding(context: ProblemContext, members: list[tuple[str, float, int]], how: str) -> Finding:
    (first, low, module), (last, high, _) = members[0], members[-1]
    calls = context.index.calls_of_module.get(module, ())
    frame = int(context.data.calls.frame[calls[0]]) if calls else -1
    towards = "" if how == "are huge" else " towards the input"
    title = (
        f"gradients {how}{towards} over {len(members)} layers: norm {number_text(low)} in {first}, "
        f"{number_text(high)} in {last}"
    )
    return Finding(title, module, frame, parameter=first)
