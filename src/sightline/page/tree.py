"""The tree of a run: steps, phases, module calls, source lines and ops, with repeats in groups.

`tree_of` walks over the ops in the order they ran. A backward op stands under the module call of its forward
op, in a stretch of its own. Consecutive siblings that look alike become a group, ``h.0 … h.11 ×12``, which
holds all of them. The rows come depth first: those inside row ``i`` are ``i + 1 … end - 1``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sightline.analysis.cost import created_bytes
from sightline.analysis.fold import Repeat, Variation, fold, length_of
from sightline.analysis.producers import written_calls
from sightline.analysis.select import model_part
from sightline.convert.context import TableContext
from sightline.data.trace_data import I32, I64, PHASES, TraceData
from sightline.notation import position_text

STEP, PHASE, CALL, LINE, OP, GROUP, ROUND, ASIDE = range(8)
#: Names of the kinds of rows; the viewer reads them.
ROW_KINDS: Final = ("step", "phase", "call", "line", "op", "group", "round", "aside")
#: Parts of a run outside the model, which have rows of their own.
_ASIDES: Final = (
    "building the model",
    "around the model",
    "before the first step",
    "between the steps",
    "after the last step",
)
_BUILDING, _AROUND, _BEFORE, _BETWEEN, _AFTER = range(len(_ASIDES))
_MANY_OPS: Final = 4  #: consecutive ops that look alike become a group; fewer are read faster one by one
_NAMED: Final = 3  #: members of a round in the label of its group


@dataclass(frozen=True)
class Tree:
    """The rows of the tree, depth first."""

    kind: I32
    ref: I32  #: the op, module call, frame, step, phase or aside it is; the number of a round; -1 of a group
    depth: I32
    end: I32  #: the rows inside it are those after it and before this one
    count: I32  #: how often a group repeats; 1 for other rows
    label: list[str]  #: of steps, phases, asides, calls, groups and rounds; other tables name the rest
    time: I64  #: ns of host time of the ops in it
    memory: I64  #: bytes of the storages that its ops allocated
    flops: I64

    def __len__(self) -> int:
        return len(self.kind)


def tree_of(context: TableContext) -> Tree:
    """The tree of a recording."""
    builder = _TreeBuilder(context)
    builder.add_run()
    return builder.rows()


class _TreeBuilder:
    """The nodes of a tree under construction: each has a kind, a reference and children."""

    def __init__(self, context: TableContext) -> None:
        self._context, self._data = context, context.raw
        self._parent = written_calls(context.raw)
        self._inside: dict[int, list[int]] = {}  # the ops in the row of each op that holds any
        inner = np.flatnonzero(self._parent >= 0)
        for child, holder in zip(inner.tolist(), self._parent[inner].tolist(), strict=True):
            self._inside.setdefault(holder, []).append(child)
        self._op_keys = _op_keys(context.raw)
        self._kind: list[int] = []
        self._ref: list[int] = []
        self._children: list[list[int]] = []
        self._key: list[int] = []  # equal for nodes that look alike; of an open line, the key of the line
        self._count: dict[int, int] = {}  # of groups
        self._numbers: dict[Hashable, int] = {}
        self._folded: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # by the keys of siblings
        self._call_paths: dict[int, tuple[tuple[int, int], ...]] = {-1: ()}
        self._top: list[int] = []

    # -- nesting -----------------------------------------------------------------------------------------

    def add_run(self) -> None:
        """Nest all ops that came from no other op, and the module calls without ops."""
        ops = self._data.ops
        steps, lines, asides = (
            self._context.op_steps.tolist(), self._context.line_keys.tolist(), self._asides().tolist()
        )  # fmt: skip
        phased = len(set(ops.phase.tolist())) > 1
        op_call, op_phase, call_phase = ops.call.tolist(), ops.phase.tolist(), self._data.calls.phase.tolist()
        place: tuple[int, int, int, int] | None = None
        open_path: tuple[tuple[int, int], ...] = ()
        open_nodes: list[int] = []
        for at, is_op, id in self._items(asides, steps):
            call, phase = (op_call[id], op_phase[id]) if is_op else (id, call_phase[id])
            step = steps[min(at, len(steps) - 1)] if steps else -1
            aside = asides[id] if is_op else -1
            if (step, phase, call, aside) != place:
                place = (step, phase, call, aside)
                path = self._path(step, phase if phased else -1, call, aside)
                shared = 0
                while shared < min(len(path), len(open_path)) and path[shared] == open_path[shared]:
                    shared += 1
                self._close(open_nodes, shared)
                for kind, ref in path[shared:]:
                    open_nodes.append(self._node(kind, ref, open_nodes[-1] if open_nodes else -1))
                open_path = path
            if is_op:
                self._add_op(id, lines[id], open_nodes[-1] if open_nodes else -1)
        self._close(open_nodes, 0)
        self._finish(self._top)

    def _asides(self) -> I32:
        """For each op the number of its aside; -1 for an op of the model or of a step."""
        ops, part = self._data.ops, model_part(self._context.index)
        asides = np.select([part.building, part.around], [_BUILDING, _AROUND], -1).astype(np.int32)
        in_step = np.flatnonzero(self._context.op_steps >= 0)
        if len(in_step):
            loose = (self._context.op_steps < 0) & (ops.call < 0) & ~part.building
            at = np.arange(len(ops))
            zones = np.select([at < in_step[0], at > in_step[-1]], [_BEFORE, _AFTER], _BETWEEN)
            asides[loose] = zones[loose]
        return asides

    def _items(self, asides: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int, int]]:
        """Ops and module calls in the order of their rows: position, whether it is an op, and id.

        They stand as they ran. But the asides of a step, or of all steps, are each one row: between two
        steps, or between forward and backward, they would hide repeats.
        """
        infos = self._context.index.step_infos
        turns = (0, 1, 0, 2, 2) if infos else (1,) * len(_ASIDES)
        order = [
            (1, infos[step].first_op, aside, op) if step >= 0 else
            (turns[aside], aside, aside, op) if aside >= 0 and turns[aside] != 1 else (1, op, -1, op)
            for op, (aside, step) in enumerate(zip(asides, steps, strict=True))
        ]  # fmt: skip
        items = [(*order[op], 1, op) for op in np.flatnonzero(self._parent < 0).tolist()]
        calls = self._data.calls
        parents, first = calls.parent.tolist(), calls.first_op.tolist()
        busy = np.zeros(len(calls) + 1, dtype=bool)
        busy[self._data.ops.call] = True
        for call in range(len(calls) - 1, -1, -1):  # a parent comes before its children
            if busy[call]:
                busy[parents[call]] = True
        holds = {parent for call, parent in enumerate(parents) if not busy[call]}
        for call in range(len(calls)):
            if not busy[call] and call not in holds:  # the innermost calls without ops
                at = first[call]
                items.append((1, order[at][1] if at < len(steps) and steps[at] >= 0 else at, -1, at, 0, call))
        return [item[3:] for item in sorted(items)]

    def _path(self, step: int, phase: int, call: int, aside: int) -> tuple[tuple[int, int], ...]:
        """The kinds and references of the rows around an op, from the outermost."""
        if aside >= 0:
            return ((ASIDE, aside),) if step < 0 else ((STEP, step), (ASIDE, aside))
        missing: list[int] = []
        while call not in self._call_paths:
            missing.append(call)
            call = int(self._data.calls.parent[call])
        path = self._call_paths[call]
        for each in reversed(missing):
            path = self._call_paths[each] = (*path, (CALL, each))
        return *((kind, ref) for kind, ref in ((STEP, step), (PHASE, phase)) if ref >= 0), *path

    def _node(self, kind: int, ref: int, parent: int) -> int:
        node = len(self._kind)
        self._kind.append(kind)
        self._ref.append(ref)
        self._children.append([])
        self._key.append(-1)
        (self._children[parent] if parent >= 0 else self._top).append(node)
        return node

    def _add_op(self, op: int, line: int, parent: int) -> None:
        """Add an op to the node of its line, with the ops inside it."""
        if line >= 0:
            siblings = self._children[parent] if parent >= 0 else self._top
            last = siblings[-1] if siblings else -1
            if last < 0 or self._kind[last] != LINE or self._key[last] != line:
                last = self._node(LINE, int(self._context.op_lines[op]), parent)
                self._key[last] = line
            parent = last
        pending = [(op, parent)]
        while pending:
            id, holder = pending.pop()
            node = self._node(OP, id, holder)
            pending += [(child, node) for child in reversed(self._inside.get(id, ()))]

    # -- folding -----------------------------------------------------------------------------------------

    def _close(self, open_nodes: list[int], keep: int) -> None:
        """Finish the innermost open nodes: their children will not change."""
        while len(open_nodes) > keep:
            self._finish(self._children[open_nodes.pop()])

    def _finish(self, siblings: list[int]) -> None:
        """Give finished nodes their keys, and group those that look alike."""
        for at, node in enumerate(siblings):
            if self._kind[node] != LINE:
                continue
            inside = self._children[node]
            if len(inside) == 1:  # rows for both the line and its only op would say the same
                siblings[at] = inside[0]
            else:
                self._finish(inside)
                self._key[node] = self._number((LINE, self._key[node], *map(self._key_of, inside)))
        keys = tuple(map(self._key_of, siblings))
        if len(set(keys)) == len(keys):
            return
        stretches = self._folded.get(keys)
        if stretches is None:  # a layer that comes again is folded once
            stretches = self._folded[keys] = [
                (length_of(node), node.count if isinstance(node, Repeat) else 1) for node in fold(keys)
            ]
        grouped: list[int] = []
        at = 0
        for length, count in stretches:
            members = siblings[at : at + length]
            at += length
            few = length < _MANY_OPS and all(self._kind[each] == OP for each in members)
            grouped += [self._group(members, count)] if count > 1 and not few else members
        siblings[:] = grouped

    def _key_of(self, node: int) -> int:
        """The key of a finished node, equal for nodes that look alike."""
        kind, ref = self._kind[node], self._ref[node]
        if self._key[node] >= 0:
            return self._key[node]
        look: tuple[Any, ...]
        if kind == OP:
            look = (OP, self._op_keys[ref])
        elif kind == CALL:
            module = self._data.modules[int(self._data.calls.module[ref])]
            place = tuple("#" if part.isdigit() else part for part in module.path.split("."))
            look = (CALL, module.type, place, *map(self._key_of, self._children[node]))
        elif kind == GROUP:
            look = (GROUP, self._count[node], *map(self._key_of, self._children[node]))
        else:
            own = ref if kind in (PHASE, ASIDE) else -1
            look = (kind, own, *map(self._key_of, self._children[node]))
        self._key[node] = self._number(look)
        return self._key[node]

    def _number(self, look: Hashable) -> int:
        return self._numbers.setdefault(look, len(self._numbers))

    def _group(self, members: Sequence[int], count: int) -> int:
        """A group of ``count`` rounds; a round of one member is that member."""
        group = self._detached_node(GROUP, -1)
        self._count[group] = count
        period = len(members) // count
        for number in range(count if period > 1 else 0):
            node = self._detached_node(ROUND, number)
            self._children[node] = list(members[number * period : (number + 1) * period])
            self._children[group].append(node)
        self._children[group] = self._children[group] or list(members)
        return group

    def _detached_node(self, kind: int, ref: int) -> int:
        """A node without a parent."""
        node = self._node(kind, ref, -1)
        self._top.pop()
        return node

    # -- rows --------------------------------------------------------------------------------------------

    def rows(self) -> Tree:
        """The nodes depth first, with their costs."""
        order: list[int] = []
        depth: list[int] = []
        label: list[str] = []
        ends: list[int] = []
        opened: list[int] = []
        kinds, children = self._kind, self._children
        stack = [(node, 0, "") for node in reversed(self._top)]
        while stack:
            node, level, path = stack.pop()
            while opened and depth[opened[-1]] >= level:
                ends[opened.pop()] = len(order)
            opened.append(len(order))
            order.append(node)
            depth.append(level)
            label.append("" if kinds[node] == OP else self._label(node, path))
            ends.append(-1)
            if kinds[node] == CALL:
                path = self._data.modules[int(self._data.calls.module[self._ref[node]])].path
            if children[node]:
                stack += [(child, level + 1, path) for child in reversed(children[node])]
        for row in opened:
            ends[row] = len(order)
        counts = np.ones(len(kinds), dtype=np.int32)
        counts[list(self._count)] = list(self._count.values())
        kind, ref, count = (np.array(each, dtype=np.int32)[order] for each in (kinds, self._ref, counts))
        time, memory, flops = self._costs(kind, ref, np.array(ends, dtype=np.int64))
        return Tree(kind, ref, np.array(depth, dtype=np.int32), np.array(ends, dtype=np.int32), count,
                    label, time, memory, flops)  # fmt: skip

    def _label(self, node: int, outer: str) -> str:
        """The label of a row below a module with the path ``outer``; empty where a table has its name."""
        kind, ref = self._kind[node], self._ref[node]
        if kind == STEP:
            return self._context.index.step_infos[ref].name
        if kind == PHASE:
            return PHASES[ref]
        if kind == ASIDE:
            return _ASIDES[ref]
        if kind == CALL:
            module = self._data.modules[int(self._data.calls.module[ref])]
            return (module.path.removeprefix(f"{outer}.") if outer else module.path) or module.type
        if kind == ROUND:
            return f"round {ref + 1}"
        if kind == GROUP:
            return self._group_label(node, outer)
        return ""

    def _group_label(self, node: int, outer: str) -> str:
        rounds = self._children[node]
        if self._kind[rounds[0]] != ROUND:
            return self._span_label(rounds[0], rounds[-1], outer)
        members = list(zip(self._children[rounds[0]], self._children[rounds[-1]], strict=True))
        steps = [each for each in members if self._kind[each[0]] == STEP]
        if steps:  # epochs: an evaluation may stand between the steps of two
            span = self._span_label(steps[0][0], steps[-1][1], outer)
            return f"{span}, in rounds of {len(steps)} steps" if len(steps) > 1 else span
        calls = [each for each in members if self._kind[each[0]] == CALL]  # they say more than ops
        names = [self._span_label(*each, outer) for each in calls or members]
        more = f" +{len(names) - _NAMED}" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more

    def _span_label(self, first: int, last: int, outer: str) -> str:
        names = self._named(first, outer), self._named(last, outer)
        return names[0] if names[0] == names[1] else " … ".join(names)

    def _named(self, node: int, outer: str) -> str:
        kind, ref = self._kind[node], self._ref[node]
        if kind == OP:
            return self._data.names[int(self._data.ops.name[ref])]
        if kind == LINE:
            frames = self._data.frames
            return position_text(self._data.codes[int(frames.code[ref])].file, int(frames.line[ref]))
        return self._label(node, outer)

    def _costs(self, kind: I32, ref: I32, ends: I64) -> tuple[I64, I64, I64]:
        """Time, memory and FLOPs of every row: sums over the ops in it."""
        ops = self._data.ops
        is_op = kind == OP
        op = np.where(is_op, ref, 0)
        own = np.zeros((3, len(kind)), dtype=np.int64)
        if len(ops):
            took = np.maximum(ops.duration, 0)
            apart = np.flatnonzero((self._parent < 0) & (ops.parent >= 0))  # with rows outside their parents
            alone = took.copy()
            np.subtract.at(alone, ops.parent[apart], took[apart])
            holds = np.bincount(ops.parent[ops.parent >= 0], minlength=len(ops)) > 0
            own[0] = np.where(is_op & (self._parent[op] < 0), np.maximum(alone, 0)[op], 0)
            own[1] = np.where(is_op, created_bytes(self._data)[op], 0)
            own[2] = np.where(is_op & ~holds[op], np.maximum(ops.flops[op], 0), 0)
        sums = np.concatenate([np.zeros((3, 1), dtype=np.int64), np.cumsum(own, axis=1)], axis=1)
        time, memory, flops = sums[:, ends] - sums[:, :-1]
        if len(ops):  # an op inside another one shows its own duration, which is part of the other's
            time = np.where(is_op, np.maximum(ops.duration[op], 0), time)
        return time, memory, flops


def _op_keys(data: TraceData) -> list[int]:
    """For each op a key, equal for ops that differ only in numbers, as in folded code.

    The cache of a decoder grows and a rate changes from call to call. Weights of other sizes differ.
    """
    everything = np.arange(len(data.ops))
    variation, numbers = Variation(data), dict[Hashable, int]()
    groups = variation.groups(everything, np.zeros(len(everything), dtype=np.int32))
    keys = [variation.op_key(op)[0] for op in groups.first.tolist()]
    number = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int32)
    op_keys: list[int] = number[groups.of].tolist()
    return op_keys
