"""Mistakes of a training loop: clearing, stepping and scheduling, and their order.

Also autograd graphs that outlive their step: a sum of losses, a list of tensors that keep their graph.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from sightline.analysis.problems.context import FORWARD, ProblemContext
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check, names_text
from sightline.analysis.problems.trained_parameters import Training
from sightline.analysis.problems.training_loop_events import LoopRecord, OptimizerRecord, StepRecord
from sightline.analysis.step_summaries import backward_starts
from sightline.data.trace_data import KINDS, REQUIRES_GRAD
from sightline.data.training_steps import innermost_steps, scaler_updates
from sightline.notation import bytes_text, number_text

_SAMPLE: Final = 16  #: how many gradients of an optimizer are followed back
_MAX_PAIRS: Final = 32  #: of steps that are compared
_MAX_VERSIONS: Final = 64  #: how many versions of a gradient are followed back
_CLEARS: Final = frozenset("zero_ zero zeros_like _foreach_zero_ fill_".split())
_PATIENCE: Final = 5  #: steps after which a scheduler should have stepped once
#: Schedulers that change the rate in every step.
_CHANGES_ALWAYS: Final = frozenset(
    "CosineAnnealingLR CosineAnnealingWarmRestarts ExponentialLR OneCycleLR CyclicLR".split()
)


@check(
    "step-without-gradients",
    Severity.ERROR,
    "These steps change nothing. The order is zero_grad(), forward, loss.backward(), step(), on the "
    "parameters of the model that runs.",
)
def step_without_gradients(context: ProblemContext) -> Iterator[Finding]:
    """An optimizer in all of whose steps none of its parameters has a gradient."""
    record = context.derived(LoopRecord)
    for number, optimizer in enumerate(record.optimizers):
        steps = record.steps_of(number)
        if not steps or any(step.graded for step in steps) or context.data.info.get("last"):
            continue
        head = f"{optimizer.type}.step() finds no gradient in any of its {optimizer.parameters} parameters"
        why = _why_no_gradient(context, record, optimizer, steps)
        yield _optimizer_finding(optimizer, f"{head}: {why}")


def _why_no_gradient(
    context: ProblemContext, record: LoopRecord, optimizer: OptimizerRecord, steps: list[StepRecord]
) -> str:
    """The reason that an optimizer finds no gradient, as far as it is known."""
    elsewhere = record.in_order(name for name in record.gradients if name not in record.optimized)
    if elsewhere and len(elsewhere) == len(record.gradients):
        return f"the gradients are in {names_text(elsewhere)}, which no optimizer holds"
    first = steps[0].position
    if not bisect_left(record.backward, first):
        return "no backward pass ran before its first step"
    training = context.derived(Training)
    if optimizer.names and all(map(training.is_frozen, optimizer.names)):
        return "they are frozen (requires_grad=False)"
    starts = [(op, value) for op, value, _ in backward_starts(context.data) if op < first]
    if not optimizer.names or not context.complete:
        return "a backward pass ran before it, and left none in them"
    if any(training.is_reached(name) for name in optimizer.names):
        called = {context.data.names[context.data.ops.name[op]] for op, _ in starts}
        if any(name.endswith("backward") for name in called):
            return "they were cleared after loss.backward() and before the step"
        return (
            "a backward pass reached them, and none was left in .grad: torch.autograd.grad leaves none there"
        )
    text = "the backward pass before it did not reach them"
    for name in sorted(optimizer.names):
        op = training.cut_of(name)
        if op >= 0:
            detached = context.name(op) == "detach"
            how = context.at_line(op) if detached else f"a block without gradients, {context.at_line(op)}"
            return f"{text}: they are cut off by {how}"
    for _, value in starts:
        creator = _created_from_numbers(context, value)
        if creator >= 0:
            return f"{text}: its loss was computed from a new tensor alone, {context.at_line(creator)}"
    return text


def _created_from_numbers(context: ProblemContext, value: int) -> int:
    """The op that created a value from numbers, without any tensor; -1 if it was computed from one."""
    for _ in range(_MAX_VERSIONS):
        op = context.producer(value)
        if op < 0:
            consumers = context.index.consumers(value)
            return next((each for each in consumers if value in context.outputs(each)), -1)
        inputs = [each for each in context.inputs(op) if each != value]
        if len(inputs) > 1:
            return -1
        if not inputs:
            return op
        value = inputs[0]
    return -1


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
        steps = record.steps_of(number)
        names = [name for name in sorted(optimizer.names) if name in record.gradients]
        if len(steps) < 3 or not names:
            continue
        names = names[:: -(-len(names) // _SAMPLE)]  # of all parts of the model
        pairs = list(pairwise(steps))[:_MAX_PAIRS]
        held = {
            name: all(_still_holds(context, record.gradients[name], *pair) for pair in pairs)
            for name in names
        }
        shown, fault = names, "gradients are never cleared"
        if not all(held.values()):  # those of a part of the model: each step adds to them a new version
            shown = []
            for name in names:
                ops = [context.producer(version) for version in record.gradients[name]]
                grows = (any(a.position <= op < b.position for op in ops) for a, b in pairs)
                if held[name] and all(grows):
                    shown.append(name)
            fault = f"gradients of {len(shown)} parameters are never cleared, those of others are"
        if shown:
            title = (
                f"{fault}: every step of {optimizer.type} after the first still holds those of the one "
                f"before ({names_text(shown)})"
            )
            yield _optimizer_finding(optimizer, title)


def _still_holds(context: ProblemContext, versions: list[int], before: StepRecord, now: StepRecord) -> bool:
    """Whether the gradient of a step was accumulated into that of the step before."""
    value = max((v for v in versions if 0 <= context.producer(v) < now.position), default=-1)
    for _ in range(_MAX_VERSIONS):
        producer = context.producer(value) if value >= 0 else -1
        if producer < 0:
            return False
        if producer < before.position:
            return True
        if context.name(producer) in _CLEARS:
            return False
        previous = int(context.data.values.previous[value])
        accumulated = [one for one in context.inputs(producer) if one in versions]
        if previous < 0 and (not accumulated or not context.name(producer).startswith("add")):
            return False
        value = previous if previous >= 0 else accumulated[0]
    return False


@check(
    "parameters-without-optimizer",
    Severity.WARNING,
    "Their gradients are computed, and no optimizer that stepped here uses them. Give them to one, or freeze "
    "them with requires_grad_(False).",
)
def parameters_without_optimizer(context: ProblemContext) -> Iterator[Finding]:
    """Parameters with gradients that no optimizer holds, by the model they are in."""
    record = context.derived(LoopRecord)
    steps = [one for one in record.steps if one.graded]
    if not steps or any(one.foreign for one in record.optimizers) or context.data.info.get("last"):
        return  # an optimizer may hold copies of them
    missing = record.in_order(name for name in record.gradients if name not in record.optimized)
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
        if root in unregistered:
            continue  # the check for unregistered modules reports it
        if not any(name in record.optimized for name in owner if owner[name] == root):
            if not _created_here(context, root, names):  # its optimizer may step outside the recording
                continue
            label, count = context.module_label(root), len(names)
            title = f"{label} gets gradients in {count} parameters; no optimizer holds any"
            frame = context.call_frame(context.first_call(root))
            yield Finding(title, root, frame, parameter=names[0])
        else:
            title = f"{names_text(names)} get gradients, and no optimizer holds them"
            optimizer = record.optimizers[steps[0].optimizer]
            yield Finding(title, root, place=optimizer.place, called=optimizer.called, parameter=names[0])


def _created_here(context: ProblemContext, root: int, names: list[str]) -> bool:
    """Whether these parameters of a model were created within the recording, before its first call."""
    values = context.data.values
    wanted = set(names)
    parameters = np.flatnonzero((values.kind == KINDS.index("parameter")) & (values.name >= 0))
    call = context.first_call(root)
    end = int(context.data.calls.first_op[call]) if call >= 0 else 0
    for id in parameters.tolist():
        at = id if context.index.name(values.name[id]) in wanted else -1
        while at >= 0:
            if 0 <= values.producer[at] < end or values.base[at] >= 0:
                return True
            at = int(values.previous[at])
    return False


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
    stepped = {scheduler.optimizer for scheduler in record.schedulers if scheduler.steps}
    updates = scaler_updates(context.data)
    for scheduler in record.schedulers:
        if not scheduler.created_at or not ended or context.data.info.get("last"):
            continue
        count = (
            record.optimizers[scheduler.optimizer].count
            if 0 <= scheduler.optimizer < len(record.optimizers)
            else 0
        )
        if not scheduler.steps and count >= _PATIENCE and scheduler.optimizer not in stepped:
            name = f"{scheduler.type} never steps"
            title = f"{name}, in {count} steps of its optimizer: the learning rate stays as it is"
            yield Finding(title, place=scheduler.created_at)
        elif scheduler.steps and scheduler.optimizer < 0 and record.steps:
            other = record.optimizers[record.steps[0].optimizer].type
            title = (
                f"{scheduler.type} is of an optimizer that never steps; {other}, which does, keeps its rate"
            )
            yield Finding(title, place=scheduler.created_at)
        elif scheduler.early and count and not _skipped_at_first(record, scheduler.optimizer, updates):
            call = f"{scheduler.type}.step()"
            title = f"{call} runs before the first optimizer.step(): each rate comes one step early"
            yield Finding(title, place=scheduler.stepped_at, confidence=Confidence.CERTAIN)


def _skipped_at_first(record: LoopRecord, optimizer: int, updates: list[int]) -> bool:
    """Whether a gradient scaler skipped steps before the first one of an optimizer."""
    steps = record.steps_of(optimizer)
    return bool(updates and steps) and updates[0] < steps[0].position


@check(
    "learning-rate-unchanged",
    Severity.WARNING,
    "A schedule of this kind changes the rate with every step. Something sets it back after each one, or the "
    "arguments of the scheduler leave it as it is.",
    Confidence.LIKELY,
)
def learning_rate_unchanged(context: ProblemContext) -> Iterator[Finding]:
    """A scheduler that steps and should change the rate each time, while the rate stays the same."""
    record = context.derived(LoopRecord)
    for scheduler in record.schedulers:
        if scheduler.type not in _CHANGES_ALWAYS or scheduler.steps < _PATIENCE or not scheduler.created_at:
            continue
        steps = record.steps_of(scheduler.optimizer)
        rates = {(step.lowest, step.highest) for step in steps}
        if len(steps) <= _PATIENCE or len(steps) < record.optimizers[scheduler.optimizer].count:
            continue  # of a long run only the first steps are recorded
        rate = steps[0].highest
        if len(rates) == 1 and rate:
            times = f"{scheduler.type} stepped {scheduler.steps} times"
            title = f"{times}, and the learning rate is still {number_text(rate)}"
            yield Finding(title, place=scheduler.created_at)


def _optimizer_finding(optimizer: OptimizerRecord, title: str) -> Finding:
    return Finding(title, place=optimizer.place, called=optimizer.called)


_SUMS: Final = frozenset("add add_ cat stack".split())
_LEAST_STEPS: Final = 3


@check(
    "graph-grows",
    Severity.WARNING,
    "The graph of every step is kept for as long as the sum is, and memory grows with the steps. Add "
    "loss.item(), or loss.detach().",
)
def graph_grows(context: ProblemContext) -> Iterator[Finding]:
    """A sum over the steps of a loop that keeps the graph of each step alive."""
    record = context.derived(LoopRecord)
    if len(record.steps) < _LEAST_STEPS:
        return
    starts = [step.first_op for step in innermost_steps(context.index.step_infos)]
    data = context.data
    has_graph = (data.values.flags & REQUIRES_GRAD) != 0
    sums: list[int] = []
    summed: dict[int, frozenset[int]] = {}  # for each sum, the steps whose graphs it holds
    for op in np.flatnonzero(context.forward & context.named(_SUMS) & (data.ops.call < 0)).tolist():
        outputs = context.outputs(op)
        if not outputs or not has_graph[outputs[0]] or context.meta(outputs[0]).numel != 1:
            continue
        steps: frozenset[int] = frozenset()
        for value in context.inputs(op):
            producer = context.producer(value)
            if has_graph[value] and producer >= 0:
                steps |= summed.get(value) or {bisect_right(starts, producer)}
        summed[outputs[0]] = steps
        if len(steps) > 1:
            sums.append(op)
    for ops in context.by_line(sums, context.name):
        count = max(len(summed[context.outputs(op)[0]]) for op in ops)
        if count >= _LEAST_STEPS:
            title = f"{context.written(ops[0])} sums up what still has its graph, over {count} steps"
            yield Finding(title, -1, int(context.frames[ops[0]]), ops[0], context.outputs(ops[0])[0])


@check(
    "graph-kept",
    Severity.WARNING,
    "Something holds on to it, and with it to the graph of every step: memory grows. Keep tensor.detach(), "
    "or a number, tensor.item().",
)
def graph_kept(context: ProblemContext) -> Iterator[Finding]:
    """A tensor with its graph, made at one line in every step, and each is still held at the end."""
    record = context.derived(LoopRecord)
    steps = sorted(step.position for step in record.steps)
    spans = [(step.first_op, step.end_op) for step in innermost_steps(context.index.step_infos)]
    begins = [first for first, _ in spans]
    rows = context.data.allocations
    if len(begins) < _LEAST_STEPS + 1 or not steps or not len(rows) or context.data.info.get("last"):
        return
    data = context.data
    has_graph = (data.values.flags & REQUIRES_GRAD) != 0
    starts = data.ops.start
    last = max((end for first, end in spans if first <= steps[-1]), default=0)
    # Storages that a tensor without a graph shares: ``loss.detach()``. Autograd detaches saved tensors.
    detached: set[int] = set()
    for view in np.flatnonzero((data.values.base >= 0) & ~has_graph).tolist():
        op = context.producer(view)
        saved = op >= 0 and context.name(op) == "detach" and "detach" not in context.written(op)
        if op < 0 or (data.ops.phase[op] == FORWARD and not saved):
            detached.add(int(data.values.storage[view]))
    kept: dict[tuple[int, str], dict[int, int]] = {}
    for value, end in zip(rows.value.tolist(), rows.end.tolist(), strict=True):
        producer = context.producer(value) if value >= 0 else -1
        if producer < 0 or not has_graph[value] or context.kind(value) != "activation":
            continue
        if data.ops.phase[producer] != FORWARD:
            continue
        if int(data.values.storage[value]) in detached:  # a tensor without a graph may keep it alive
            continue
        if end < 0 or int(np.searchsorted(starts, end)) >= last:  # after the last step, or never
            line = context.visible(int(context.frames[producer])), context.name(producer)
            kept.setdefault(line, {})[bisect_right(begins, producer) - 1] = value
    for by_step in kept.values():
        if len(by_step) >= len(begins) - 1 and all(step in by_step for step in range(1, len(begins) - 1)):
            value = by_step[min(by_step)]
            op = context.producer(value)
            size = bytes_text(context.meta(value).nbytes)
            title = (
                f"{context.meta(value)} ({size}) of {context.written(op)} is kept with its graph in "
                f"{len(by_step)} steps"
            )
            yield context.finding(title, op, value)
            return  # the same graph keeps its inputs alive
