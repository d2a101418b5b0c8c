"""The tree of a run: steps, phases, module calls, source lines and ops, with what repeats taken together.

`tree_of` walks over the ops in the order they ran. A backward op stands under the module call of its forward
op, in a stretch of its own. Siblings that follow each other and look alike become a group,
``h.0 … h.11 ×12``, which holds all of them. The rows come depth first: those inside row ``i`` are
``i + 1 … end - 1``.
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
#: What each row is; the viewer reads the words.
ROW_KINDS: Final = ("step", "phase", "call", "line", "op", "group", "round", "aside")
#: What is not the model, and stands in rows of its own.
_ASIDES: Final = (
    "building the model",
    "around the model",
    "before the first step",
    "between the steps",
    "after the last step",
)
_BUILDING, _AROUND, _BEFORE, _BETWEEN, _AFTER = range(len(_ASIDES))
_MANY_OPS: Final = 4  #: so many ops in a row that look alike are a group; fewer are read faster one by one
_NAMED: Final = 3  #: members of a round that are named


@dataclass(frozen=True)
class Tree:
    """The rows of the tree, depth first."""

    kind: I32
    ref: I32  #: the op, module call, frame, step, phase or aside it is; the number of a round; -1 of a group
    depth: I32
    end: I32  #: the rows inside it are those after it and before this one
    count: I32  #: how often a group repeats; 1 of anything else
    label: list[str]  #: of what has no name elsewhere: steps, phases, calls, groups and rounds
    time: I64  #: ns of host time of the ops in it
    memory: I64  #: bytes of the storages that its ops made
    flops: I64

    def __len__(self) -> int:
        return len(self.kind)


def tree_of(facts: TableContext) -> Tree:
    """The tree of a recording."""
    made = _Builder(facts)
    made.add_run()
    return made.rows()


class _Builder:
    """Nodes while they are put together: each a kind, what it refers to, and its children."""

    def __init__(self, facts: TableContext) -> None:
        self._facts, self._data = facts, facts.raw
        self._parent = written_calls(facts.raw)
        self._inside = _children(self._parent)
        self._op_look = _op_looks(facts.raw)
        self._kind: list[int] = []
        self._ref: list[int] = []
        self._children: list[list[int]] = []
        self._key: list[int] = []  # equal for nodes that look alike
        self._count: dict[int, int] = {}  # of groups
        self._keys: dict[Hashable, int] = {}
        self._folded: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # by the keys of siblings
        self._paths: dict[int, tuple[int, ...]] = {-1: ()}
        self._top: list[int] = []

    # -- nesting -----------------------------------------------------------------------------------------

    def add_run(self) -> None:
        """All ops that came from no other op, and the calls in which none ran, nested."""
        ops, calls = self._data.ops, self._data.calls
        roots = np.flatnonzero(self._parent < 0)
        steps, lines = self._facts.op_steps.tolist(), self._line_keys()
        phased = len(set(ops.phase.tolist())) > 1
        op_call, op_phase = ops.call.tolist(), ops.phase.tolist()
        asides = self._asides().tolist()
        order = self._order(asides, steps)
        items = [(*order[op], 1, op) for op in roots.tolist()]
        first, call_phase = calls.first_op.tolist(), calls.phase.tolist()
        for call in self._idle_calls():
            at = first[call]
            items.append((1, order[at][1] if at < len(steps) and steps[at] >= 0 else at, -1, at, 0, call))
        items.sort()
        place: tuple[int, int, int, int] | None = None
        open_path: tuple[tuple[int, int], ...] = ()
        open_nodes: list[int] = []
        for _, _, _, at, is_op, id in items:
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
        """For each op the part of the run that it stands aside in; -1 for one of the model or of a step."""
        ops, part = self._data.ops, model_part(self._facts.index)
        found = np.select([part.building, part.around], [_BUILDING, _AROUND], -1).astype(np.int32)
        in_step = np.flatnonzero(self._facts.op_steps >= 0)
        if len(in_step):
            loose = (self._facts.op_steps < 0) & (ops.call < 0) & ~part.building
            at = np.arange(len(ops))
            zones = np.select([at < in_step[0], at > in_step[-1]], [_BEFORE, _AFTER], _BETWEEN)
            found[loose] = zones[loose]
        return found

    def _order(self, asides: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Where each op stands: as it ran, but what stands aside in a step or of all steps is taken together.

        Between two steps, or between forward and backward, it would hide what repeats.
        """
        infos = self._facts.index.step_infos
        turns = (0, 1, 0, 2, 2) if infos else (1,) * len(_ASIDES)
        return [
            (1, infos[step].first_op, aside, op) if step >= 0 else
            (turns[aside], aside, aside, op) if aside >= 0 and turns[aside] != 1 else (1, op, -1, op)
            for op, (aside, step) in enumerate(zip(asides, steps, strict=True))
        ]  # fmt: skip

    def _path(self, step: int, phase: int, call: int, aside: int) -> tuple[tuple[int, int], ...]:
        if aside >= 0:
            return ((ASIDE, aside),) if step < 0 else ((STEP, step), (ASIDE, aside))
        outer = [(kind, ref) for kind, ref in ((STEP, step), (PHASE, phase)) if ref >= 0]
        return *outer, *((CALL, each) for each in self._calls_to(call))

    def _calls_to(self, call: int) -> tuple[int, ...]:
        missing: list[int] = []
        while call not in self._paths:
            missing.append(call)
            call = int(self._data.calls.parent[call])
        path = self._paths[call]
        for each in reversed(missing):
            path = self._paths[each] = (*path, each)
        return path

    def _idle_calls(self) -> list[int]:
        """Module calls in which no op ran, the innermost of them."""
        calls = self._data.calls
        parents = calls.parent.tolist()
        busy = np.zeros(len(calls) + 1, dtype=bool)
        busy[self._data.ops.call] = True
        for call in range(len(calls) - 1, -1, -1):  # a parent comes before what it calls
            if busy[call]:
                busy[parents[call]] = True
        holds = {parent for call, parent in enumerate(parents) if not busy[call]}
        return [call for call in range(len(calls)) if not busy[call] and call not in holds]

    def _node(self, kind: int, ref: int, parent: int) -> int:
        node = len(self._kind)
        self._kind.append(kind)
        self._ref.append(ref)
        self._children.append([])
        self._key.append(-1)
        (self._children[parent] if parent >= 0 else self._top).append(node)
        return node

    def _line_keys(self) -> list[int]:
        """For each op a number that is equal for ops of one source line; -1 without one."""
        frames = self._data.frames
        files = {code.file: at for at, code in enumerate(self._data.codes)}
        by_code = np.array([files[code.file] for code in self._data.codes] or [0], dtype=np.int64)
        line = np.append(frames.line + (by_code[frames.code] << 32), -1) if len(frames) else np.array([-1])
        found: list[int] = line[self._facts.op_lines].tolist()
        return found

    def _add_op(self, op: int, line: int, parent: int) -> None:
        siblings = self._children[parent] if parent >= 0 else self._top
        last = siblings[-1] if siblings else -1
        if line < 0:
            self._op_node(op, parent)
        elif last >= 0 and self._kind[last] == LINE and self._key[last] == line:
            self._op_node(op, last)
        else:
            node = self._node(LINE, int(self._facts.op_lines[op]), parent)
            self._key[node] = line  # until it is finished
            self._op_node(op, node)

    def _op_node(self, op: int, parent: int) -> None:
        node = self._node(OP, op, parent)
        if op not in self._inside:
            return
        pending = [(child, node) for child in reversed(self._inside[op])]
        while pending:
            id, above = pending.pop()
            node = self._node(OP, id, above)
            if id in self._inside:
                pending += [(child, node) for child in reversed(self._inside[id])]

    # -- folding -----------------------------------------------------------------------------------------

    def _close(self, open_nodes: list[int], keep: int) -> None:
        """Finish the innermost open nodes: what they hold will not change."""
        while len(open_nodes) > keep:
            self._finish(self._children[open_nodes.pop()])

    def _finish(self, siblings: list[int]) -> None:
        """Number what looks alike among finished nodes, and group it."""
        for at, node in enumerate(siblings):
            if self._kind[node] == LINE:
                siblings[at] = self._finished_line(node)
        keys = [self._look(node) for node in siblings]
        if len(set(keys)) < len(keys):
            siblings[:] = self._grouped(siblings, keys)

    def _finished_line(self, node: int) -> int:
        """A line with a single op is that op: a row for both would say nothing."""
        inside, line = self._children[node], self._key[node]
        if len(inside) == 1:
            return inside[0]
        self._finish(inside)
        self._key[node] = self._number((LINE, line, *(self._look(child) for child in inside)))
        return node

    def _look(self, node: int) -> int:
        """The number of how a node looks; equal for two that look alike."""
        kind, ref = self._kind[node], self._ref[node]
        if self._key[node] >= 0:
            return self._key[node]
        look: tuple[Any, ...]
        if kind == OP:
            look = (OP, self._op_look[ref])
        elif kind == CALL:
            module = self._data.modules[int(self._data.calls.module[ref])]
            place = tuple("#" if part.isdigit() else part for part in module.path.split("."))
            look = (CALL, module.type, place, *(self._look(child) for child in self._children[node]))
        elif kind == GROUP:
            look = (GROUP, self._count[node], *(self._look(child) for child in self._children[node]))
        else:
            own = ref if kind in (PHASE, ASIDE) else -1
            look = (kind, own, *(self._look(child) for child in self._children[node]))
        self._key[node] = self._number(look)
        return self._key[node]

    def _number(self, look: Hashable) -> int:
        return self._keys.setdefault(look, len(self._keys))

    def _grouped(self, siblings: Sequence[int], keys: Sequence[int]) -> list[int]:
        made: list[int] = []
        at = 0
        for length, count in self._stretches(tuple(keys)):
            members = siblings[at : at + length]
            at += length
            few = length < _MANY_OPS and all(self._kind[each] == OP for each in members)
            if count > 1 and not few:
                made.append(self._group(members, count))
            else:
                made += members
        return made

    def _stretches(self, keys: tuple[int, ...]) -> list[tuple[int, int]]:
        """Stretches of siblings, each with how often it repeats; a layer that comes again is folded once."""
        found = self._folded.get(keys)
        if found is None:
            found = self._folded[keys] = [
                (length_of(node), node.count if isinstance(node, Repeat) else 1) for node in fold(keys)
            ]
        return found

    def _group(self, members: Sequence[int], count: int) -> int:
        """A group of so many rounds; a round of one member is that member."""
        group = self._apart(GROUP, -1)
        self._count[group] = count
        period = len(members) // count
        for number in range(count if period > 1 else 0):
            node = self._apart(ROUND, number)
            self._children[node] = list(members[number * period : (number + 1) * period])
            self._children[group].append(node)
        self._children[group] = self._children[group] or list(members)
        return group

    def _apart(self, kind: int, ref: int) -> int:
        """A node that nothing holds yet."""
        node = self._node(kind, ref, -1)
        self._top.pop()
        return node

    # -- rows --------------------------------------------------------------------------------------------

    def rows(self) -> Tree:
        """The nodes depth first, with what they cost."""
        order: list[int] = []
        depth: list[int] = []
        label: list[str] = []
        kinds, children = self._kind, self._children
        stack = [(node, 0, "") for node in reversed(self._top)]
        while stack:
            node, level, path = stack.pop()
            order.append(node)
            depth.append(level)
            label.append("" if kinds[node] == OP else self._label(node, path))
            if kinds[node] == CALL:
                path = self._module_path(node)
            if children[node]:
                stack += [(child, level + 1, path) for child in reversed(children[node])]
        ends = _ends(depth)
        counts = np.ones(len(kinds), dtype=np.int32)
        counts[list(self._count)] = list(self._count.values())
        kind, ref, count = (np.array(each, dtype=np.int32)[order] for each in (kinds, self._ref, counts))
        time, memory, flops = self._costs(kind, ref, np.array(ends, dtype=np.int64))
        return Tree(kind, ref, np.array(depth, dtype=np.int32), np.array(ends, dtype=np.int32), count,
                    label, time, memory, flops)  # fmt: skip

    def _module_path(self, node: int) -> str:
        return self._data.modules[int(self._data.calls.module[self._ref[node]])].path

    def _label(self, node: int, outer: str) -> str:
        """What a row is called below a module with the path ``outer``; empty where a table has the name."""
        kind, ref = self._kind[node], self._ref[node]
        if kind == STEP:
            return self._facts.index.step_infos[ref].name
        if kind == PHASE:
            return PHASES[ref]
        if kind == ASIDE:
            return _ASIDES[ref]
        if kind == CALL:
            module = self._data.modules[int(self._data.calls.module[ref])]
            return _below(module.path, outer) or module.type
        if kind == ROUND:
            return f"round {ref + 1}"
        if kind == GROUP:
            return self._group_label(node, outer)
        return ""

    def _group_label(self, node: int, outer: str) -> str:
        rounds = self._children[node]
        if self._kind[rounds[0]] != ROUND:
            return self._span_label(rounds[0], rounds[-1], outer)
        first = self._children[rounds[0]]
        if all(self._kind[each] == STEP for each in first):
            span = self._span_label(first[0], self._children[rounds[-1]][-1], outer)
            return f"{span}, in rounds of {len(first)} steps"
        members = list(zip(first, self._children[rounds[-1]], strict=True))
        calls = [each for each in members if self._kind[each[0]] == CALL]  # they tell more than ops
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
            apart = np.flatnonzero((self._parent < 0) & (ops.parent >= 0))  # they have rows of their own
            alone = took.copy()
            np.subtract.at(alone, ops.parent[apart], took[apart])
            holds = np.bincount(ops.parent[ops.parent >= 0], minlength=len(ops)) > 0
            own[0] = np.where(is_op & (self._parent[op] < 0), np.maximum(alone, 0)[op], 0)
            own[1] = np.where(is_op, created_bytes(self._data)[op], 0)
            own[2] = np.where(is_op & ~holds[op], np.maximum(ops.flops[op], 0), 0)
        sums = np.concatenate([np.zeros((3, 1), dtype=np.int64), np.cumsum(own, axis=1)], axis=1)
        time, memory, flops = sums[:, ends] - sums[:, :-1]
        if len(ops):  # an op inside another one took what it took; its time is part of the other's
            time = np.where(is_op, np.maximum(ops.duration[op], 0), time)
        return time, memory, flops


def _children(parent: I32) -> dict[int, list[int]]:
    """The ops in the row of each op that holds any."""
    children: dict[int, list[int]] = {}
    inner = np.flatnonzero(parent >= 0)
    for child, holder in zip(inner.tolist(), parent[inner].tolist(), strict=True):
        children.setdefault(holder, []).append(child)
    return children


def _op_looks(data: TraceData) -> list[int]:
    """For each op a number that is equal for ops that differ only in numbers, as in folded code.

    The cache of a decoder grows and a rate changes from call to call; weights of other sizes are others.
    """
    everything = np.arange(len(data.ops))
    variation, numbers = Variation(data), dict[Hashable, int]()
    groups = variation.groups(everything, np.zeros(len(everything), dtype=np.int32))
    keys = [variation.op_key(op)[0] for op in groups.first.tolist()]
    look = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int32)
    looks: list[int] = look[groups.of].tolist()
    return looks


def _below(path: str, outer: str) -> str:
    """The part of a module's path that its caller's does not say.

    >>> _below("h.0.attn", "h.0"), _below("h.0", ""), _below("other", "h")
    ('attn', 'h.0', 'other')
    """
    return path[len(outer) + 1 :] if outer and path.startswith(f"{outer}.") else path


def _ends(depth: Sequence[int]) -> list[int]:
    """For each row the first one after it that is not inside it.

    >>> _ends([0, 1, 2, 1, 0])
    [4, 3, 3, 4, 5]
    """
    ends = [len(depth)] * len(depth)
    opened: list[int] = []
    for at, level in enumerate(depth):
        while opened and depth[opened[-1]] >= level:
            ends[opened.pop()] = at
        opened.append(at)
    return ends
