"""Precision: a float32 tensor that turns the work of a low-precision model into float32 by accident."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

import numpy as np

from sightline.analysis.problems.context import MATMULS, Mask, ProblemContext
from sightline.analysis.problems.losses import computed_by, moved_from
from sightline.analysis.problems.problem import Finding, Severity, check
from sightline.analysis.value_names import Assignment, assignments, returned_assignments
from sightline.data.op_groups import VIEWS
from sightline.notation import bytes_text

_PROMOTING: Final = frozenset(
    "add sub rsub mul div where maximum minimum addcmul addcdiv lerp cat stack".split()
)


@check(
    "upcast",
    Severity.WARNING,
    "What follows needs twice the memory and is slower. Cast the float32 tensor once, where it is made.",
)
def accidental_upcast(context: ProblemContext) -> Iterator[Finding]:
    """In a model of low precision a float32 tensor is mixed in, and a matmul further on is fed the result.

    An explicit cast (``.float()``, ``.to(x.dtype)``) is intended, before and after; so is float32 work whose
    result never reaches a matmul, such as a norm, a softmax or a loss.
    """
    sizes: dict[bool, int] = {True: 0, False: 0}
    infos = (info for module in context.data.modules for info in module.parameters if not info.buffer)
    for info in {info.key: info for info in infos}.values():
        sizes[info.dtype in ("bfloat16", "float16")] += info.numel
    if sizes[True] <= sizes[False]:  # under autocast alone the parameters are float32
        return
    single = context.of_meta(lambda meta: meta.dtype == "float32" and bool(meta.shape))
    mixed = context.any_input(context.low) & context.any_input(single)
    candidates = np.flatnonzero(
        context.forward & context.named(_PROMOTING) & mixed & (context.data.ops.call >= 0)
    )
    if not len(candidates):
        return
    from_low, feeds = _computed_from_low(context), _feeds_matmul(context, single)
    for op in candidates.tolist():
        inputs, outputs = context.inputs(op), context.outputs(op)
        other = next(value for value in inputs if single[value])
        if outputs and single[outputs[0]] and feeds[outputs[0]] and not from_low[other]:
            low = next(value for value in inputs if context.low[value])
            yield _upcast_finding(context, op, low, other, _spread(context, op, single))


def _upcast_finding(context: ProblemContext, op: int, low: int, single: int, spread: str) -> Finding:
    """A finding at the line that makes the float32 tensor an attribute, if it is known; else at the op."""
    dtype, name = context.meta(low).dtype, context.index.name(context.data.values.name[single])
    source = f" ({context.kind(single)} {name})" if name else ""
    operands = f"{context.meta(low)} and {context.meta(single)}{source}"
    attribute = _attribute(context, single)
    if attribute is None:
        title = f"{context.written(op)} of {operands} gives float32, which {spread}"
        maker = computed_by(context, single)
        line = context.line(maker) if maker >= 0 else ""
        where = f" where it is made, {line}" if line else ""
        cost = "What follows needs twice the memory and is slower."
        why = f"{cost} Cast the float32 tensor{where}: .to(torch.{dtype})."
        return context.finding(title, op, single, why)
    title = f"{attribute.name} is float32: {context.at_line(op)} of {operands} gives float32, which {spread}"
    name = attribute.name.removeprefix("self.")
    why = (
        f"It is a plain tensor, which model.to(torch.{dtype}) does not cast. Make it a buffer: "
        f'self.register_buffer("{name}", …, persistent=False).'
    )
    return Finding(title, context.module(op), attribute.frame, op, single, why=why)


def _attribute(context: ProblemContext, value: int) -> Assignment | None:
    """The assignment of a tensor to a module attribute in the constructor, unless it is a buffer."""
    if context.kind(value) in ("parameter", "buffer"):
        return None
    held = set(moved_from(context, value, VIEWS))
    index = context.index
    for each in chain(assignments(index), returned_assignments(index)):
        constructor = index.frames[each.frame].function.endswith(".__init__")
        if each.value in held and each.name.startswith("self.") and constructor:
            return each
    return None


def _spread(context: ProblemContext, first: int, single: Mask) -> str:
    """How far float32 spreads from an op, and its cost: the ops, the line of the last one, and the memory."""
    reached = set(context.outputs(first))
    queue, ops = sorted(reached), {first}
    while queue:
        for op in context.users(queue.pop()):
            results = [value for value in context.outputs(op) if single[value]]
            if results:
                ops.add(op)
            queue += [value for value in results if value not in reached]
            reached.update(results)
    owners = [value for value in reached if context.data.values.base[value] < 0]
    memory = bytes_text(sum(context.meta(value).nbytes for value in owners) // 2)
    if len(ops) == 1:
        return f"feeds a matmul and needs {memory} more memory"
    return f"spreads over {len(ops)} ops to {context.line(max(ops))} and needs {memory} more memory"


def _computed_from_low(context: ProblemContext) -> list[bool]:
    """For every value, whether it was computed from one of low precision: its float32 is then a cast."""
    from_low = [False] * len(context.data.values)
    low = context.low.tolist()
    for op in np.flatnonzero(context.forward).tolist():
        if any(low[value] or from_low[value] for value in context.inputs(op)):
            for value in context.results(op):
                from_low[value] = True
    return from_low


def _feeds_matmul(context: ProblemContext, single: Mask) -> list[bool]:
    """For every value, whether float32 computed from it reaches a matmul, as it is or cast by autocast."""
    feeds = [False] * len(context.data.values)
    matmul, is_single = context.named(MATMULS).tolist(), single.tolist()
    parents = context.data.ops.parent.tolist()
    for op in np.flatnonzero(context.forward)[::-1].tolist():
        reaches = matmul[op] or any(feeds[value] for value in context.results(op) if is_single[value])
        if not reaches and parents[op] >= 0 and context.name(op) == "_to_copy":  # by autocast, for a matmul
            casts = any(context.low[value] for value in context.outputs(op))
            siblings = context.index.children(parents[op])
            reaches = casts and any(context.name(each) in MATMULS for each in siblings)
        if reaches:
            for value in context.inputs(op):
                feeds[value] = True
    return feeds
