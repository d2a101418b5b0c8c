"""Weights outside the model, shared or untied by accident, or read before they were written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sightline.analysis.problems.context import ProblemContext
from sightline.analysis.problems.problem import Confidence, Finding, Severity, check
from sightline.analysis.problems.training_loop_events import LoopRecord
from sightline.analysis.producers import creator
from sightline.data.op_groups import ALLOCATIONS, VIEWS
from sightline.data.trace_data import KINDS, MUTATES, ParameterInfo

_CONTAINERS: Final = frozenset("ModuleList ModuleDict Sequential".split())
#: Ops that read no elements, or only pass the memory on.
_SHAPE_ONLY: Final = VIEWS | frozenset(
    "detach_ as_strided set_ resize_ empty_like zeros_like ones_like full_like rand_like "
    "randn_like new_zeros new_empty new_ones new_full lift lift_fresh is_same_size "
    "swapaxes diagonal narrow requires_grad_ _shape_as_tensor view_as_real chunk unsafe_chunk unsafe_split "
    "native_batch_norm _to_copy clone copy_ uniform normal bernoulli equal".split()
)


@check(
    "unregistered-module",
    Severity.ERROR,
    "Its parameters are not in model.parameters(): no optimizer, no .to(), no checkpoint reaches them. "
    "Hold it in an nn.ModuleList or nn.ModuleDict.",
)
def unregistered_module(context: ProblemContext) -> Iterator[Finding]:
    """A module with parameters that another one holds in a plain list or dict, and calls."""
    record = context.derived(LoopRecord)
    modules = context.data.modules
    rows = context.data.info.get("unregistered")
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, list | tuple) or len(row) != 3 or not all(type(one) is int for one in row[:2]):
            continue
        id, owner, attribute = row
        if not (0 <= id < len(modules) and 0 <= owner < len(modules)):
            continue
        root = modules[id].root
        infos = [info for module in modules if module.root == root for info in module.parameters]
        trainable = [info for info in infos if info.trainable and not info.buffer]
        free = [info for info in trainable if info.path not in record.optimized]
        call = context.first_call(id)
        if not free or call < 0:
            continue
        title = (
            f"{modules[id].type} with {len(free)} parameters is held in the plain {attribute} of "
            f"{context.module_type(owner)}, which does not know it"
        )
        yield Finding(title, owner, context.call_frame(call), parameter=free[0].path)


@check(
    "untied-weights",
    Severity.WARNING,
    "They begin alike and part with the first update. If they are meant to be one, assign the parameter "
    "itself, head.weight = embed.weight, after everything that replaces either.",
    Confidence.LIKELY,
)
def untied_weights(context: ProblemContext) -> Iterator[Finding]:
    """An embedding and a layer with equal weights in two tensors."""
    rows = context.data.info.get("same_weights")
    modules = context.data.modules
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, list | tuple) or len(row) != 2:
            continue
        one, other = map(str, row)
        owner = next(
            (id for id, module in enumerate(modules) if any(p.path == other for p in module.parameters)), -1
        )
        call = context.first_call(owner)
        if call < 0:
            continue
        keys = {p.path: p.key for module in modules for p in module.parameters if p.path in (one, other)}
        if len(keys) == 2 and len(set(keys.values())) == 2:
            title = f"{one} and {other} hold the same numbers but are two parameters"
            yield Finding(title, owner, context.call_frame(call), parameter=other)


@check(
    "shared-layers",
    Severity.WARNING,
    "A list like [layer] * n repeats one object, with one set of weights. Make each anew: "
    "[Layer(…) for _ in range(n)]. If sharing is meant, hold the layer once and call it in a loop.",
    Confidence.LIKELY,
)
def shared_layers(context: ProblemContext) -> Iterator[Finding]:
    """One layer with parameters that appears several times in one list."""
    modules = context.data.modules
    groups: dict[tuple[int, ...], list[int]] = {}
    for id, info in enumerate(modules):
        lists: dict[str, list[str]] = {}  # its paths in each list that holds it
        for alias in info.aliases:
            parent, _, name = alias.rpartition(".")
            if name.isdigit():
                lists.setdefault(parent, []).append(alias)
        paths = max(lists.values(), key=len, default=[])
        calls = context.index.calls_of_module.get(id, ())
        if len(paths) > 1 and len(calls) > 1 and has_parameters(context, id):
            title = f"{', '.join(paths[:3])}{' …' if len(paths) > 3 else ''} are one and the same {info.type}"
            yield Finding(title, id, _list_frame(context, id, context.call_frame(calls[0])))
        keys = tuple(p.key for p in info.parameters if not p.buffer)
        if len(keys) > 1 and info.path.rpartition(".")[2].isdigit():
            groups.setdefault(keys, []).append(id)
    for members in groups.values():
        if len(members) > 1 and len({modules[id].parent for id in members}) == 1:
            names = ", ".join(modules[id].path for id in members[:3])
            call = context.first_call(members[0])
            if call >= 0:
                frame = _list_frame(context, members[0], context.call_frame(call))
                yield Finding(f"{names} share all their parameters", members[0], frame)


def _list_frame(context: ProblemContext, layer: int, otherwise: int) -> int:
    """The line in the constructor of a list's owner that made the layer, if that was recorded."""
    modules, values, frames = context.data.modules, context.data.values, context.data.frames
    owner = modules[layer].parent
    while owner >= 0 and modules[owner].type in _CONTAINERS:
        owner = modules[owner].parent
    names = {info.path for info in _parameters_below(context, layer)}
    parameters = np.flatnonzero(values.kind == KINDS.index("parameter")).tolist()
    first = next((id for id in parameters if context.index.name(values.name[id]) in names), -1)
    maker = creator(context.index.values[first]) if first >= 0 else None
    frame = int(context.data.ops.frame[maker.id]) if owner >= 0 and maker is not None else -1
    while frame >= 0:
        if context.index.frames[frame].function.split(".")[-2:] == [modules[owner].type, "__init__"]:
            return frame
        frame = int(frames.parent[frame])
    return otherwise


def has_parameters(context: ProblemContext, module: int) -> bool:
    """Whether a module or one below it has parameters."""
    return any(True for _ in _parameters_below(context, module))


def _parameters_below(context: ProblemContext, module: int) -> Iterator[ParameterInfo]:
    """The parameters and buffers of a module and of those below it."""
    path, root = context.data.modules[module].path, context.data.modules[module].root
    for info in context.data.modules:
        if info.root == root and (info.path == path or info.path.startswith(f"{path}.")):
            yield from info.parameters


@check(
    "uninitialised",
    Severity.ERROR,
    "Whatever was in that memory before is taken for numbers, and is different each time. Use torch.zeros, "
    "or write it first.",
)
def uninitialised(context: ProblemContext) -> Iterator[Finding]:
    """An op computes with memory that torch.empty allocated and nothing has written."""
    for op in np.flatnonzero(context.named(ALLOCATIONS)).tolist():
        value = next(iter(context.outputs(op)), -1)
        if value < 0 or not context.meta(value).numel or not context.is_own(op):
            continue
        if "empty" not in context.written(op):  # the function that allocated it writes it itself
            continue
        reader = _first_reader(context, value)
        if reader >= 0:
            title = (
                f"{context.written(reader)} reads {context.meta(value)} of {context.written(op)} at "
                f"{context.line(op)}, which nothing has written"
            )
            yield context.finding(title, reader, value)


def _first_reader(context: ProblemContext, value: int) -> int:
    """The op that first computes with a value or a view of it; -1 if it is written first or never read."""
    queue, seen = [value], {value}
    while queue:
        each = queue.pop(0)
        for op in context.index.consumers(each):
            if not context.aten[op]:
                continue
            if context.data.ops.flags[op] & MUTATES:
                return -1
            if context.name(op) not in _SHAPE_ONLY:
                return int(op)
            for output in context.outputs(op):
                if context.data.values.base[output] >= 0 and output not in seen:
                    seen.add(output)
                    queue.append(output)
    return -1
