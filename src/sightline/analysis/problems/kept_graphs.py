"""Autograd graphs that outlive their step: a sum of losses, a list of tensors that keep their graph."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import FORWARD, ProblemContext
from sightline.analysis.problems.loop_record import LoopRecord
from sightline.analysis.problems.problem import Finding, Severity, check, group_by_line, op_finding
from sightline.notation import bytes_text
from sightline.trace.data import REQUIRES_GRAD

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
    steps = sorted(step.position for step in record.steps)
    if len(steps) < _LEAST_STEPS:
        return
    data = context.data
    has_graph = (data.values.flags & REQUIRES_GRAD) != 0
    sums: list[int] = []
    depth: dict[int, int] = {}  # for each sum, how many steps it reaches back
    for op in np.flatnonzero(context.forward & context.named(_SUMS) & (data.ops.call < 0)).tolist():
        outputs = context.outputs(op)
        if not outputs or not has_graph[outputs[0]] or context.meta(outputs[0]).numel != 1:
            continue
        excluded = (-1, bisect_right(steps, op))
        old = [
            value
            for value in context.inputs(op)
            if has_graph[value] and _step(context, steps, value) not in excluded
        ]
        if old:
            depth[outputs[0]] = 1 + max(depth.get(value, 0) for value in old)
            sums.append(op)
    for ops in group_by_line(context, sums, context.name):
        longest = max(depth[context.outputs(op)[0]] for op in ops)
        if longest >= _LEAST_STEPS - 1:
            title = f"{context.written(ops[0])} sums up what still has its graph, over {longest + 1} steps"
            yield Finding(title, -1, int(context.frames[ops[0]]), ops[0], context.outputs(ops[0])[0])


def _step(context: ProblemContext, steps: list[int], value: int) -> int:
    """Between which steps a value was made; -1 where no op made it."""
    producer = context.producer(value)
    return bisect_right(steps, producer) if producer >= 0 else -1


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
    rows = context.data.allocations
    if len(steps) < _LEAST_STEPS + 1 or not len(rows) or context.data.info.get("last"):
        return
    data = context.data
    has_graph = (data.values.flags & REQUIRES_GRAD) != 0
    starts = data.ops.start
    detached = _detached_storages(context)
    kept: dict[tuple[int, str], dict[int, int]] = {}
    for value, end in zip(rows.value.tolist(), rows.end.tolist(), strict=True):
        producer = context.producer(value) if value >= 0 else -1
        if producer < 0 or not has_graph[value] or context.kind(value) != "activation":
            continue
        if data.ops.phase[producer] != FORWARD:
            continue
        if int(data.values.storage[value]) in detached:  # a tensor without a graph may keep it alive
            continue
        freed = len(steps) if end < 0 else bisect_right(steps, int(np.searchsorted(starts, end)))
        if freed >= len(steps):  # after the last step, or never
            line = context.visible(int(context.frames[producer])), context.name(producer)
            kept.setdefault(line, {})[bisect_right(steps, producer)] = value
    for by_step in kept.values():
        if len(by_step) >= len(steps) - 1 and all(step in by_step for step in range(1, len(steps) - 1)):
            value = by_step[min(by_step)]
            op = context.producer(value)
            size = bytes_text(context.meta(value).nbytes)
            title = (
                f"{context.meta(value)} ({size}) of {context.written(op)} is kept with its graph in "
                f"{len(by_step)} steps"
            )
            yield op_finding(context, title, op, value)
            return  # the same graph keeps its inputs alive


def _detached_storages(context: ProblemContext) -> set[int]:
    """The storages that a tensor without a graph shares: ``loss.detach()``."""
    values = context.data.values
    views = np.flatnonzero((values.base >= 0) & ((values.flags & REQUIRES_GRAD) == 0))
    return {
        int(values.storage[view]) for view in views.tolist() if _is_written(context, context.producer(view))
    }


def _is_written(context: ProblemContext, op: int) -> bool:
    """Whether the user's code made a view: autograd itself detaches what it saves."""
    if op < 0:
        return True
    saves = context.name(op) == "detach" and "detach" not in context.written(op)
    return bool(context.data.ops.phase[op] == FORWARD) and not saves
