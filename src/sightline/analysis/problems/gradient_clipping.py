"""Gradients that are clipped too late or while they are scaled, and steps that a gradient scaler skips."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sightline.analysis.problems.context import BACKWARD, FORWARD, ProblemContext
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.analysis.step_summaries import step_numbers
from sightline.data.nonfinite_rule import INF, argument_states
from sightline.data.trace_data import PHASES
from sightline.data.training_steps import scaler_updates

_UNSCALES: Final = frozenset({"_amp_foreach_non_finite_check_and_unscale_"})
_FILE: Final = "nn/utils/clip_grad.py"
_CLIPPING_FUNCTIONS: Final = (
    "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_",
)  # fmt: skip
_OPTIMIZER: Final = PHASES.index("optimizer")
_MAX_OPS: Final = 64  #: between the scale and the number it began with
_MANY: Final = 6  #: a scaler skips some steps in a row until its scale is low enough
_SHARE: Final = 10  #: one step in so many may be taken


@check(
    "skipped-steps",
    Severity.ERROR,
    "Their gradients held NaN or infinities, so the weights stayed the same. Where the losses are finite, "
    "the scale is too high: give GradScaler a lower init_scale.",
)
def steps_all_skipped(context: ProblemContext) -> Iterator[Finding]:
    """A gradient scaler skips every step, or nearly every one."""
    steps = step_numbers(context.index)
    skipped = [step for step in steps if step.skipped]
    if len(skipped) < _MANY or (len(steps) - len(skipped)) * _SHARE > len(steps):
        return
    count = f"all of {len(steps):,}" if len(skipped) == len(steps) else f"{len(skipped):,} of {len(steps):,}"
    update = max(op for op in scaler_updates(context.data) if op < skipped[-1].info.end_op)
    yield context.finding(f"the gradient scaler skipped {count} steps", update)


@check(
    "clipped-after-step",
    Severity.ERROR,
    "The step has used the gradients as they were. Clip them between loss.backward() and optimizer.step().",
)
def clipped_after_step(context: ProblemContext) -> Iterator[Finding]:
    """Gradients are clipped after the optimizer has used them."""
    record = context.derived(LoopRecord)
    data = context.data
    clipping = {id for id, code in enumerate(data.codes) if code.file.replace("\\", "/").endswith(_FILE)}
    if not clipping or not record.steps or not record.backward:
        return
    inside = [code in clipping for code in data.frames.code.tolist()]
    parents = data.frames.parent.tolist()
    for frame, parent in enumerate(parents):  # a frame comes after the one that called it
        inside[frame] = inside[frame] or (parent >= 0 and inside[parent])
    positions = sorted({step.position for step in record.steps})
    late: list[int] = []
    last = -1
    for op, frame in enumerate(data.ops.frame.tolist()):
        if frame < 0 or not inside[frame] or data.ops.phase[op] != FORWARD:
            continue
        before = bisect_left(record.backward, op)
        computed = record.backward[before - 1] if before else -1
        step = bisect_left(positions, op + 1)
        stepped = positions[step - 1] if step else -1
        if computed < 0 or stepped <= computed:
            return
        if computed != last:
            late.append(op)
            last = computed
    for op in late:
        yield Finding("gradients are clipped after the step that used them", -1, int(context.frames[op]), op)


@check(
    "scaled-gradients",
    Severity.ERROR,
    "Only scaler.step() divides them by the scale, so they end far below the limit. Write "
    "scaler.unscale_(optimizer) before the clipping.",
)
def clipped_while_scaled(context: ProblemContext) -> Iterator[Finding]:
    """Gradients are clipped after the backward pass of a scaled loss and before they are unscaled."""
    unscales = {op: _storages(context, op) for op in np.flatnonzero(context.named(_UNSCALES)).tolist()}
    if not unscales:
        return
    backward = np.flatnonzero(context.aten & (context.data.ops.phase == BACKWARD))
    for call in _clipping_calls(context):
        at = int(np.searchsorted(backward, call.first))
        computed = int(backward[at - 1]) if at else -1
        clipped = set().union(*(_storages(context, op) for op in range(call.first, call.last + 1)))
        for op, gradients in unscales.items():
            if computed < op < call.first:
                clipped -= gradients
        later = (op for op, gradients in unscales.items() if op > call.last and gradients & clipped)
        unscale = next(later, -1)
        if computed < 0 or unscale < 0 or _steps_between(context, call.last, unscale, clipped):
            continue
        scale = _scale(context, unscale)
        if scale == 1:
            continue
        factor = f" by {scale:,.6g}" if scale else ""
        share = f"1/{scale:,.6g} of the limit" if scale else "the limit divided by the scale"
        title = f"{call.function} clips gradients that the scaler has multiplied{factor} and not yet divided"
        why = (
            f"scaler.step() divides them after that, so they end at {share} at most. Write "
            "scaler.unscale_(optimizer) before the clipping; scaler.step() then leaves them as they are."
        )
        yield context.finding(title, call.first, why=why)


@dataclass(frozen=True, slots=True)
class _ClippingCall:
    """A call of one of torch's functions that clip gradients."""

    first: int  #: op
    last: int
    function: str


def _clipping_calls(context: ProblemContext) -> list[_ClippingCall]:
    """Every call that clips, but those with a limit of infinity: a way to compute the norm."""
    data = context.data
    outermost: list[tuple[int, str]] = []  # for each frame, the call of a clipping function it is in
    for code, parent in zip(data.frames.code.tolist(), data.frames.parent.tolist(), strict=True):
        outer = outermost[parent] if parent >= 0 else (-1, "")
        file, function = data.codes[code].file.replace("\\", "/"), data.codes[code].function
        clips = file.endswith(_FILE) and function in _CLIPPING_FUNCTIONS
        outermost.append((parent, function) if clips and not outer[1] else outer)
    calls: list[_ClippingCall] = []
    open_call = (-1, "")
    for op, frame in enumerate(data.ops.frame.tolist()):
        inside = outermost[frame] if frame >= 0 else (-1, "")
        if inside[1] and inside == open_call:
            calls[-1] = replace(calls[-1], last=op)
        elif inside[1]:
            calls.append(_ClippingCall(op, op, inside[1]))
        open_call = inside
    return [call for call in calls if not _has_infinite_limit(context, call)]


def _has_infinite_limit(context: ProblemContext, call: _ClippingCall) -> bool:
    ops = [op for op in range(call.first, call.last + 1) if "norm" not in context.name(op)]
    forms = {int(context.data.ops.form[op]) for op in ops}
    return any(argument_states(context.data.forms[form].args) & INF for form in forms)


def _steps_between(context: ProblemContext, first: int, end: int, gradients: set[int]) -> bool:
    """Whether an optimizer reads gradients in these storages between two ops."""
    steps = first + np.flatnonzero(context.data.ops.phase[first:end] == _OPTIMIZER)
    return any(_storages(context, op) & gradients for op in steps.tolist())


def _storages(context: ProblemContext, op: int) -> set[int]:
    return {int(context.data.values.storage[value]) for value in context.inputs(op)}


def _scale(context: ProblemContext, unscale: int) -> float:
    """The scale by which an op divides gradients; 0 if it is unknown."""
    inverse = context.inputs(unscale)[-1]
    numbers = context.index.numbers(inverse)
    if numbers is not None and numbers.mean:
        return 1 / float(numbers.mean)
    value = inverse
    for _ in range(_MAX_OPS):  # back to torch.full((), init_scale)
        op = context.producer(value)
        if op < 0 or not context.inputs(op):
            break
        value = context.inputs(op)[0]
    op = context.producer(value)
    given = [arg for arg in context.args(op) if type(arg) is float] if op >= 0 else []
    return given[0] if len(given) == 1 and context.name(op) == "full" else 0.0
