"""Parameters that get no gradient, where their branch was cut, and gradients that vanish or explode."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check, names_text
from sightline.analysis.problems.trained_parameters import IdleParameter, Training
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.notation import number_text


@check(
    "unused-parameter",
    Severity.WARNING,
    "It cannot learn, and DistributedDataParallel waits for its gradient unless find_unused_parameters is "
    "set: use it, freeze it or leave it out.",
)
def unused_parameter(context: ProblemContext) -> Iterator[Finding]:
    """A trainable parameter of a model that was trained, which no op of the forward read.

    A module that was skipped while its siblings of the same class ran is an expert without tokens or a
    dropped layer, which is no problem.
    """
    training = context.derived(Training)
    unused: dict[tuple[int, bool], list[IdleParameter]] = {}
    for idle in training.idle:
        missed = training.not_called(idle.module)
        if not idle.used and not any(map(training.is_alternative, missed)):
            unused.setdefault((missed[-1] if missed else idle.module, bool(missed)), []).append(idle)
    for (module, whole_module), members in unused.items():
        call = training.nearest_call(module)
        finding = _finding(context, module, members, "never used", context.call_frame(call))
        if whole_module:
            names = f"{len(members)} trainable parameter{'s' if len(members) > 1 else ''}"
            finding = replace(finding, title=f"{context.module_type(module)} with {names} was never called")
        yield finding


@check(
    "no-gradient",
    Severity.WARNING,
    "Such parameters stay as they were initialised. Use what they compute in the loss, or freeze them.",
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
        if call >= 0 and not calls.first_op[call] <= op < calls.end_op[call]:  # copied outside the call
            first, last = calls.first_op[call], calls.end_op[call]
            inside = [use for use in training.uses(members[0]) if first <= use < last]
            op = inside[0] if inside else op
            frame = int(context.frames[op]) if inside else int(calls.frame[call])
        last, passes_none = training.branch_end(members[0])
        end = ""
        if last >= 0:
            name, line = context.written(last), context.line(last)
            if passes_none:
                end = f": {name} at {line} passes none back"
            elif context.name(last) in _READS:
                end = f": {name} at {line} makes a plain number of it"
            else:
                end = f": the result of {name} at {line} does not reach the loss"
        finding = _finding(context, module, members, f"used but got no gradient{end}", frame, op)
        one = len(members) == 1
        stays = "It stays as it was" if one else "They stay as they were"
        repair = (
            _repair(context, last) if passes_none else _USE.format("it computes" if one else "they compute")
        )
        yield replace(finding, why=f"{stays} initialised. {repair}")


@check(
    "no-gradient",
    Severity.WARNING,
    "The optimizer does not change them. Use them in the loss, or leave them out of the optimizer.",
)
def optimizer_without_gradients(context: ProblemContext) -> Iterator[Finding]:
    """Trainable parameters of an optimizer that never get a gradient and belong to no module that ran."""
    record = context.derived(LoopRecord)
    for number, optimizer in enumerate(record.optimizers):
        steps, idle = record.steps_of(number), optimizer.idle
        if not idle or not any(step.graded > 0 for step in steps):
            continue  # one that never finds a gradient is another problem
        never = f"in any of its {optimizer.count:,} steps" if optimizer.count > 1 else "in its step"
        which = f"{idle:,} of the {optimizer.parameters:,} parameters of {optimizer.type}"
        whose = f"{'it belongs' if idle == 1 else 'they belong'} to no module that was recorded"
        title = f"{which} got no gradient {never}: {whose}"
        yield Finding(title, place=optimizer.place, called=optimizer.called)


def _repair(context: ProblemContext, op: int) -> str:
    """How a branch that ends at an op without a gradient gets one."""
    name = context.name(op)
    if name in _CHOICES:
        return (
            "Multiply what is chosen by its softmax weight, or pass the gradient straight through: "
            "soft + (hard - soft).detach(), with soft the softmax."
        )
    if name in _COMPARISONS:
        return (
            "Weigh by a sigmoid instead of the comparison, or pass the gradient straight through: "
            "soft + (hard - soft).detach(), with soft the sigmoid."
        )
    return (
        "Keep it a floating-point number on the way to the loss: whole numbers and booleans have no gradient."
    )


@check(
    "cut-gradient",
    Severity.WARNING,
    "They do not learn. Remove what cuts them off, or freeze them if it is meant.",
)
def cut_gradient(context: ProblemContext) -> Iterator[Finding]:
    """A trainable parameter whose way to the loss leads only through ``detach`` or a ``no_grad`` block."""
    training = context.derived(Training)
    cuts: dict[int, list[IdleParameter]] = {}
    for idle in training.idle:
        op = training.cut(idle) if idle.used else -1
        if op >= 0:  # the ops of one line, such as those of a layer, are one cut
            same = (cut for cut in cuts if context.line(cut) == context.line(op))
            cuts.setdefault(next(same, op), []).append(idle)
    for op, members in cuts.items():
        detached = context.name(op) == "detach"
        how = "detach" if detached else "a block without gradients (no_grad)"
        repair = (
            f"Remove the {context.written(op).rpartition('.')[2]}" if detached else "Move it out of the block"
        )
        why = f"They do not learn. {repair}, or freeze the parameters if it is meant: requires_grad_(False)."
        for module, group in _by_module(members):
            finding = _finding(
                context, module, group, f"cut from the loss by {how}", int(context.frames[op]), op
            )
            yield replace(finding, why=why)


def _by_module(parameters: Iterable[IdleParameter]) -> Iterator[tuple[int, list[IdleParameter]]]:
    """Parameters, grouped by module."""
    for module, group in groupby(sorted(parameters, key=lambda idle: idle.module), lambda idle: idle.module):
        yield module, list(group)


def _finding(
    context: ProblemContext,
    module: int,
    parameters: Sequence[IdleParameter],
    fate: str,
    frame: int,
    op: int = -1,
) -> Finding:
    """A finding about parameters of a module: ``weight, bias of Linear were never used``."""
    verb = "was" if len(parameters) == 1 else "were"
    names = names_text([each.name for each in parameters])
    title = f"{names} of {context.module_type(module)} {verb} {fate}"
    values = parameters[0].values
    return Finding(title, module, frame, op, values[0] if values else -1, parameters[0].path)


#: Ops that choose one of several by its number, and those that compare.
_CHOICES: Final = frozenset("argmax argmin argsort multinomial".split())
_COMPARISONS: Final = frozenset("gt lt ge le eq ne bucketize searchsorted".split())
_USE: Final = "Use what {} in the loss, or freeze: requires_grad_(False)."
#: Ops that make a number of Python's.
_READS: Final = frozenset("_local_scalar_dense item tolist is_nonzero".split())
_ACTIVATIONS: Final = frozenset(
    "sigmoid tanh relu gelu silu softmax _softmax hardtanh hardsigmoid leaky_relu elu softsign".split()
)
_MIN_LAYERS: Final = 4  #: layers of a stack
_RATIO: Final = 1e-4  #: between the two ends of a stack
_NUMBER: Final = re.compile(r"\b\d+\b")
_HUGE: Final = 1e4
_NOISE: Final = 5.0  #: how much a layer may differ from the trend


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
        if len(members) >= _MIN_LAYERS:
            yield sorted(members, key=lambda one: order[one[0]][0])


@check(
    "vanishing-gradients",
    Severity.WARNING,
    "The first layers get next to no gradient. Add a skip connection around each layer, or a LayerNorm "
    "before each: either is enough, another activation alone often is not.",
)
def vanishing_gradients(context: ProblemContext) -> Iterator[Finding]:
    """A stack of layers along which the gradients become far smaller towards the input."""
    measured = context.derived(LoopRecord).norms()
    for members in _stacks(context, measured[0]) if measured else ():
        if all(_ratio_of(members, norms) < _RATIO for norms in measured):
            finding = _stack_finding(context, members, "shrink")
            name, count = _activation_between(context, members)
            if name:
                why = (
                    f"Each {name} passes on only a part of the gradient. Add a skip connection, "
                    f"x + {name}(layer(x)), or a LayerNorm before each layer: either is enough, another "
                    "activation alone often is not."
                )
                title = f"{finding.title}; between them is {name} ×{count}"
                finding = replace(finding, title=title, why=why)
            yield finding
            return


@check(
    "exploding-gradients",
    Severity.WARNING,
    "A step of plain SGD with them throws the weights away. Draw the weights smaller (by their fan-in), add "
    "a norm, and clip the gradients before the step.",
)
def exploding_gradients(context: ProblemContext) -> Iterator[Finding]:
    """A stack of layers whose gradients are huge, or grow towards the input without end."""
    measured = context.derived(LoopRecord).norms()
    for members in _stacks(context, measured[0]) if measured else ():
        huge = all(min(norms.get(name, 0.0) for name, _, _ in members) > _HUGE for norms in measured)
        if huge or all(_ratio_of(members, norms) > 1 / _RATIO for norms in measured):
            yield _stack_finding(context, members, "grow" if not huge else "are huge")
            return


def _activation_between(context: ProblemContext, members: list[tuple[str, float, int]]) -> tuple[str, int]:
    """The activation that follows most layers of a stack, and after how many; empty if there is none."""
    counts: Counter[str] = Counter()
    for _, _, module in members:
        call = context.first_call(module)
        calls = context.data.calls
        outputs = calls.outputs_of(call)
        users = {context.name(op).rstrip("_") for value in outputs for op in context.users(value)}
        counts.update(name.lstrip("_") for name in users & _ACTIVATIONS)
    name, count = counts.most_common(1)[0] if counts else ("", 0)
    return (name, count) if count * 2 > len(members) else ("", 0)


def _ratio_of(members: list[tuple[str, float, int]], measured: dict[str, float]) -> float:
    """The first norm of a stack over the last, if both halves of the stack go the same way; else 1."""
    norms = [measured.get(name, 0.0) for name, _, _ in members]
    if min(norms) <= 0 or not all(norm < float("inf") for norm in norms):
        return 1.0
    middle = norms[len(norms) // 2]
    grows = norms[0] / middle * _NOISE < 1 < norms[-1] / middle / _NOISE
    shrinks = norms[0] / middle > _NOISE and middle / norms[-1] > _NOISE
    return norms[0] / norms[-1] if grows or shrinks else 1.0


def _stack_finding(context: ProblemContext, members: list[tuple[str, float, int]], how: str) -> Finding:
    """A finding about the gradients of a stack, at its first layer."""
    (first, low, module), (last, high, _) = members[0], members[-1]
    frame = context.call_frame(context.first_call(module))
    towards = "" if how == "are huge" else " towards the input"
    title = (
        f"gradients {how}{towards} over {len(members)} layers: norm {number_text(low)} in {first}, "
        f"{number_text(high)} in {last}"
    )
    return Finding(title, module, frame, parameter=first)
