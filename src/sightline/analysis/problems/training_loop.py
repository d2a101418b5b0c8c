"""Mistakes of a training loop: what is cleared, clipped, stepped and scheduled, and in which order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from sightline.analysis.problems.context import FORWARD, ProblemContext
from sightline.analysis.problems.loop_record import LoopRecord, OptimizerRecord, StepRecord
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check
from sightline.trace.data import KINDS

_NAMED: Final = 3  #: parameters that a title names
_LOOKED_AT: Final = 8  #: gradients of an optimizer that are followed back
_FARTHEST: Final = 64  #: versions of a gradient
_CLEARS: Final = frozenset("zero_ zero zeros_like _foreach_zero_ fill_".split())
_PATIENCE: Final = 5  #: steps after which a scheduler should have stepped once
_CLIPPING: Final = "nn/utils/clip_grad.py"


@check(
    "step-without-gradients",
    Severity.ERROR,
    "Nothing is learned. The order is zero_grad(), forward, loss.backward(), step(), on the parameters of "
    "the model that runs.",
)
def step_without_gradients(context: ProblemContext) -> Iterator[Finding]:
    """An optimizer in all of whose steps none of its parameters has a gradient."""
    record = context.derived(LoopRecord)
    for number, optimizer in enumerate(record.optimizers):
        steps = record.of(number)
        if not steps or any(step.graded for step in steps) or context.data.info.get("last"):
            continue
        head = f"{optimizer.type}.step() finds no gradient in any of its {optimizer.parameters} parameters"
        yield _at(optimizer, f"{head}: {_why_no_gradient(record, steps)}")


def _why_no_gradient(record: LoopRecord, steps: list[StepRecord]) -> str:
    elsewhere = record.in_order(name for name in record.gradients if name not in record.held)
    if elsewhere and len(elsewhere) == len(record.gradients):
        return f"the gradients are in {_named(elsewhere)}, which no optimizer holds"
    last = 0
    for step in steps:
        first = bisect_left(record.backward, last)
        if first < len(record.backward) and record.backward[first] < step.position and len(steps) > 1:
            if step is steps[0]:
                return "they were cleared after loss.backward() and before the step"
        last = step.position
    ran = bisect_left(record.backward, steps[0].position)
    return (
        "they were cleared after loss.backward() and before the step"
        if ran
        else "no backward pass ran before it"
    )


@check(
    "gradients-not-cleared",
    Severity.ERROR,
    "Every step adds the gradients of all steps before to its own. Call optimizer.zero_grad() in every step, "
    "before loss.backward().",
)
def gradients_not_cleared(context: ProblemContext) -> Iterator[Finding]:
    """An optimizer whose gradients in each step still hold those of the step before."""
    record = context.derived(LoopRecord)
    for number, optimizer in enumerate(record.optimizers):
        steps = record.of(number)
        names = [name for name in sorted(optimizer.names) if name in record.gradients][:_LOOKED_AT]
        if len(steps) < 3 or not names:
            continue
        pairs = list(pairwise(steps))
        held = [
            _still_holds(context, record.gradients[name], one, other)
            for name in names
            for one, other in pairs
        ]
        if all(held):
            yield _at(
                optimizer,
                f"gradients are never cleared: in {len(pairs)} of {len(pairs)} later steps of "
                f"{optimizer.type} "
                f"they hold those of the step before ({_named(names)})",
            )


def _still_holds(context: ProblemContext, versions: list[int], before: StepRecord, now: StepRecord) -> bool:
    """Whether the gradient of a step was made by adding to what it was in the step before."""
    value = max((v for v in versions if 0 <= context.producer(v) < now.position), default=-1)
    for _ in range(_FARTHEST):
        maker = context.producer(value) if value >= 0 else -1
        if maker < 0:
            return False
        if maker < before.position:
            return True
        if context.name(maker) in _CLEARS:
            return False
        previous = int(context.data.values.previous[value])
        old = [one for one in context.inputs(maker) if one in versions]
        if previous < 0 and (not old or not context.name(maker).startswith("add")):
            return False
        value = previous if previous >= 0 else old[0]
    return False


@check(
    "parameters-without-optimizer",
    Severity.WARNING,
    "Their gradients are computed, and nothing ever uses them. Give them to an optimizer, or freeze them "
    "with requires_grad_(False).",
)
def parameters_without_optimizer(context: ProblemContext) -> Iterator[Finding]:
    """Parameters with gradients that no optimizer holds, by the model they are in."""
    record = context.derived(LoopRecord)
    steps = [one for one in record.steps if one.graded]
    if not steps or any(one.foreign for one in record.optimizers) or context.data.info.get("last"):
        return  # an optimizer may hold copies of them
    missing = record.in_order(name for name in record.gradients if name not in record.held)
    modules = context.data.modules
    owner = {info.path: module.root for module in modules for info in module.parameters}
    by_root: dict[int, list[str]] = {}
    for name in missing:
        if name in owner:
            by_root.setdefault(owner[name], []).append(name)
    unregistered = {
        row[0] for row in context.data.info.get("unregistered") or () if isinstance(row, list) and row
    }
    for root, names in by_root.items():
        wanted = [name for name in owner if owner[name] == root]
        call = next(iter(context.index.calls_of_module.get(root, ())), -1)
        if root in unregistered:
            continue  # it is told by a name of its own
        if not any(name in record.held for name in wanted):
            if not _made_here(context, names):  # its optimizer may step outside the recording
                continue
            frame = int(context.data.calls.frame[call]) if call >= 0 else -1
            count = len(names)
            title = (
                f"{context.module_type(root)} gets gradients in {count} parameters; no optimizer holds any"
            )
            yield Finding(title, root, frame, parameter=names[0])
        else:
            title = f"{_named(names)} get gradients, and no optimizer holds them"
            optimizer = record.optimizers[steps[0].optimizer]
            yield Finding(title, root, place=optimizer.place, called=optimizer.called, parameter=names[0])


def _made_here(context: ProblemContext, names: list[str]) -> bool:
    """Whether the recording began before these parameters were made."""
    values = context.data.values
    wanted = set(names)
    for id in range(len(values)):
        if values.kind[id] == KINDS.index("parameter") and context.index.name(values.name[id]) in wanted:
            at = id
            while values.previous[at] >= 0:
                at = int(values.previous[at])
            return bool(values.producer[at] >= 0 or values.base[at] >= 0)
    return False


@check(
    "clipped-after-step",
    Severity.ERROR,
    "The step has used the gradients as they were. Clip them between loss.backward() and optimizer.step().",
)
def clipped_after_step(context: ProblemContext) -> Iterator[Finding]:
    """Gradients are clipped when the optimizer has used them already."""
    record = context.derived(LoopRecord)
    data = context.data
    clipping = {id for id, code in enumerate(data.codes) if code.file.replace("\\", "/").endswith(_CLIPPING)}
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
    "learning-rate",
    Severity.ERROR,
    "Nothing is learned: look at how the rate is computed, and at what a scheduler makes of it.",
)
def learning_rate_of_zero(context: ProblemContext) -> Iterator[Finding]:
    """An optimizer whose learning rate is zero in every step."""
    record = context.derived(LoopRecord)
    for number, optimizer in enumerate(record.optimizers):
        steps = record.of(number)
        if len(steps) > 1 and all(step.highest == 0 for step in steps):
            yield _at(optimizer, f"the learning rate of {optimizer.type} is 0 in all of {len(steps)} steps")


@check(
    "scheduler",
    Severity.WARNING,
    "The learning rate is not what it is meant to be: call scheduler.step() after optimizer.step(), on the "
    "scheduler of the optimizer that steps.",
)
def scheduler_out_of_order(context: ProblemContext) -> Iterator[Finding]:
    """A scheduler that never steps, whose optimizer never does, or that steps before it."""
    record = context.derived(LoopRecord)
    ended = context.complete or not (
        context.data.info.get("exception") or context.data.info.get("unfinished")
    )
    stepped = {one.optimizer for one in record.schedulers if one.steps}
    scaled = any("_amp_" in name for name in context.bare_names)
    for one in record.schedulers:
        if not one.made or not ended or context.data.info.get("last"):
            continue
        count = record.optimizers[one.optimizer].count if 0 <= one.optimizer < len(record.optimizers) else 0
        if not one.steps and count >= _PATIENCE and one.optimizer not in stepped:
            title = (
                f"{one.type} never steps, in {count} steps of its optimizer: the learning rate stays as it is"
            )
            yield Finding(title, place=one.made)
        elif one.steps and one.optimizer < 0 and record.steps:
            other = record.optimizers[record.steps[0].optimizer]
            title = (
                f"{one.type} is of an optimizer that never steps; {other.type}, which does, keeps its rate"
            )
            yield Finding(title, place=one.made)
        elif one.early and count and not scaled:
            title = f"{one.type}.step() runs before the first optimizer.step(): the first rate is never used"
            yield Finding(title, place=one.stepped, confidence=Confidence.CERTAIN)


def _at(optimizer: OptimizerRecord, title: str) -> Finding:
    return Finding(title, place=optimizer.place, called=optimizer.called)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
