"""The graph of what ran: `graph(index)`, from any recorded Python, branches and loops as they were taken.

A node is an API call with the aten ops inside it, an aten op, or a module call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from sightline.analysis.model_part import SHOWS_ALL, ModelPart, model_part
from sightline.analysis.select import listed
from sightline.argument_checks import argument_text
from sightline.errors import UsageError
from sightline.graph.arguments import Arguments, call_arguments, op_arguments
from sightline.graph.context import GraphContext
from sightline.graph.graph import Edge, Graph, Node, Ref, collector_paused
from sightline.graph.node_names import Names, full_name, op_name, word
from sightline.trace.data import FLAVOURS, I64, KINDS, LEVELS, PHASES, TensorMeta
from sightline.trace.index import Index

API, ATEN = LEVELS.index("api"), LEVELS.index("aten")
_OPAQUE: Final = FLAVOURS.index("opaque")
_BACKWARD: Final = PHASES.index("backward")
#: The phases each choice of ``phase=`` shows.
SHOWN: Final = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
    "both": ("forward", "backward", "recompute"),
}


def unit_of_op(index: Index, level: str) -> I64:
    """For each op the unit it belongs to; -1 for one that is not shown at this level."""
    ops = index.raw.ops
    count = len(ops)
    units = np.arange(count, dtype=np.int64)
    if not count:
        return units
    if level == "aten":
        units[(ops.level == API) & (ops.flavour != _OPAQUE)] = -1
        return units
    # What a backward pass runs was written by nobody: ``loss.backward()`` is no node that holds it.
    backward = ops.phase == _BACKWARD
    held = (ops.parent >= 0) & ~backward & (ops.phase[ops.parent] == ops.phase)
    units[held] = ops.parent[held]
    starts = np.unique(ops.parent[(ops.parent >= 0) & backward])
    units[starts[(ops.level[starts] == API) & (ops.phase[starts] == _BACKWARD)]] = -1
    if level == "module":
        leaf = leaf_calls(index)
        inside = (units >= 0) & (ops.call >= 0) & ~backward
        calls = ops.call[inside]
        units[inside] = np.where(leaf[calls], count + calls, units[inside])
    return units


def leaf_calls(index: Index) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which module calls called no other module."""
    calls = index.raw.calls
    leaf = np.ones(len(calls), dtype=np.bool_)
    leaf[calls.parent[calls.parent >= 0]] = False
    return leaf


def ordered_units(index: Index, units: I64, level: str, phases: tuple[str, ...]) -> list[int]:
    """The units of these phases, in the order they began."""
    ops, calls = index.raw.ops, index.raw.calls
    wanted = [PHASES.index(phase) for phase in phases]
    meant = (units >= 0) & np.isin(ops.phase, wanted)
    found = dict.fromkeys(units[meant].tolist())
    # A call that ran inside backward (a recomputation) belongs to the phase of its ops.
    if level != "module":
        return sorted(found)
    count = len(ops)
    starts = {unit: unit if unit < count else int(calls.first_op[unit - count]) for unit in found}
    leaf = leaf_calls(index) & np.isin(calls.phase, wanted)
    for call in np.flatnonzero(leaf).tolist():  # also those in which no op was seen
        starts.setdefault(count + call, int(calls.first_op[call]))
    # A call that ran no op began before the op that has the number it would have had.
    return sorted(starts, key=lambda unit: (starts[unit], unit < count, unit))


_LEVELS: Final = ("api", "aten", "module")
#: A node: name, op, kind, arguments, module, source, phase, target, info; without a name and arguments.
_Row = tuple[str, str, str, dict[str, Any], str, str, str, str, dict[str, Any]]
_Fields = tuple[str, str, str, str, str, str, dict[str, Any]]
_NONE: Final[list[int]] = []
_KINDS: Final = {"parameter": "parameter", "buffer": "buffer", "state": "buffer", "constant": "constant"}


def graph(
    index: Index,
    *,
    level: str | None = None,
    depth: int | None = None,
    fold: bool = False,
    prune: str | Iterable[str] = (),
    phase: str = "forward",
    module: str | None = None,
    everything: bool = False,
) -> Graph:
    """The data-flow graph of a recording.

    >>> import torch, sightline as sl
    >>> with sl.trace() as t:
    ...     y = torch.ones(2, 3).relu() + 1
    >>> [node.name for node in graph(t.index)]
    ['ones', 'relu', 'add', 'output']

    ``level`` is "api" (the calls as written; the default where they were recorded), "aten" or "module" (calls
    of modules that call no other, and what ran between them). ``module`` is a glob: only what ran there.
    What builds the model, and in training what installed packages run around it, is left out unless
    ``everything=True``; ``info["left_out"]`` says how much it is. ``prune``, ``fold`` and ``depth`` are
    `Graph.prune`, `Graph.fold` and `Graph.collapse`, in this order.
    """
    if phase not in SHOWN:
        raise UsageError(f"phase={phase!r} is not shown as a graph; choose {listed(SHOWN)}.")
    if level is not None and level not in _LEVELS:
        raise UsageError(f"level={level!r} is no level of a graph; choose {listed(_LEVELS)}.")
    if depth is not None and (type(depth) is not int or depth < 0):
        raise UsageError(f"depth={argument_text(depth)} must be a whole number from 0 up.")
    with collector_paused():
        part = None if everything else model_part(index.raw)
        made = _Builder(index, level or _recorded(index), SHOWN[phase], part).build()
    if module is not None:
        made = made.subgraph(module)
    wanted = (prune,) if isinstance(prune, str) else tuple(prune)
    if wanted:
        made = made.prune(*wanted)
    if fold:
        made = made.fold()
    return made if depth is None else made.collapse(depth)


def _recorded(index: Index) -> str:
    levels = index.raw.ops.level
    if not len(levels):
        return "module"
    return "api" if bool((levels == LEVELS.index("api")).any()) else "aten"


class _Builder:
    """One walk over the units in the order they ran; who holds a value now is kept as it goes."""

    def __init__(self, index: Index, level: str, phases: tuple[str, ...], part: ModelPart | None) -> None:
        data = index.raw
        self._index, self._data, self._level = index, data, level
        units = unit_of_op(index, level)
        self._left_out = ""
        if part is not None:
            shown = (units == np.arange(len(units))) & np.isin(
                data.ops.phase, list(map(PHASES.index, phases))
            )
            self._left_out = part.excluded_text(shown, SHOWS_ALL)
            units = np.where(part.excluded, -1, units)
        self._order = ordered_units(index, units, level, phases)
        self._included = set(self._order)
        self._units: list[int] = units.tolist()
        self._op_count = len(data.ops)
        self._facts = GraphContext(index)
        self._names = Names()
        self._known: dict[tuple[int, int], tuple[Arguments, str, str, str]] = {}  # by name and form
        self._bound: dict[int, Arguments] = {}  # of module calls, by form
        self._rows: list[_Row] = []  # of the nodes; their outputs may grow until all are there
        self._edges: list[Edge] = []
        self._outputs: list[list[TensorMeta]] = []
        self._holder: dict[int, tuple[int, int, Ref]] = {}  # value -> node, slot, and how it is said
        self._node_of_unit: dict[int, int] = {}
        self._named: dict[tuple[str, str], int] = {}  # a parameter is one node, whatever its version
        # Lists: they are read one number at a time.
        values, ops, calls = data.values, data.ops, data.calls
        self._producer: list[int] = values.producer.tolist()
        self._meta: list[int] = values.meta.tolist()
        self._kind: list[int] = values.kind.tolist()
        self._base: list[int] = values.base.tolist()
        self._previous: list[int] = values.previous.tolist()
        self._name: list[int] = ops.name.tolist()
        self._form: list[int] = ops.form.tolist()
        self._phase: list[int] = ops.phase.tolist()
        self._inputs = (ops.input_offsets.tolist(), ops.inputs.tolist())
        self._made = (ops.output_offsets.tolist(), ops.outputs.tolist())
        self._given = (calls.input_offsets.tolist(), calls.inputs.tolist())
        self._returned = (calls.output_offsets.tolist(), calls.outputs.tolist())
        self._inner = self._inner_ops(self._units)

    def _inner_ops(self, units: list[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for op, unit in enumerate(units):
            if unit != op and unit >= 0:
                found.setdefault(unit, []).append(op)
        return found

    def build(self) -> Graph:
        for unit in self._order:
            self._add_unit(unit)
        self._add_outputs()
        nodes = [
            Node(id, name, op, kind, args, module, source, tuple(metas), 1, phase, target, info)
            for id, ((name, op, kind, args, module, source, phase, target, info), metas) in enumerate(
                zip(self._rows, self._outputs, strict=True)
            )
        ]
        info: dict[str, Any] = {"level": self._level, "calls": self._facts.calls()}
        if self._left_out:
            info["left_out"] = self._left_out
        name = str(self._data.info.get("name") or "")
        return Graph(tuple(nodes), tuple(self._edges), name, self._facts.modules(), info)

    # -- nodes -----------------------------------------------------------------------------------

    def _add_unit(self, unit: int) -> None:
        inner = self._inner.get(unit, _NONE)
        if unit < self._op_count:
            given, returned = _span(self._inputs, unit), _span(self._made, unit)
            bound, wish, fields = self._op(unit, inner)
        else:
            call = unit - self._op_count
            given, returned = _span(self._given, call), _span(self._returned, call)
            bound, wish, fields = self._call(call, inner)
        count = min(len(bound.paths), len(given))  # a form out of a file may promise more than there is
        paths: Sequence[str] = bound.paths[:count]
        args = bound.fill([self._source(value)[2] for value in given[:count]])
        read = given[count:]
        if inner:
            read = read + self._also_read(unit, inner, given)
        if read:
            extra = self._extra_names(read, args)
            paths = [*paths, *extra]
            args.update(zip(extra, [self._source(value)[2] for value in read], strict=True))
            given = given[:count] + read
        op, kind, module, source, phase, target, info = fields
        id = self._new_node((self._names.new(wish), op, kind, args, module, source, phase, target, info))
        self._node_of_unit[unit] = id
        metas, meta, holder = self._data.metas, self._meta, self._holder
        for path, value in zip(paths, given, strict=True):
            node, slot, _ = holder[value]
            self._edges.append(Edge(node, id, slot, path, metas[meta[value]]))
        name, outputs = self._rows[id][0], self._outputs[id]
        for at, value in enumerate(returned):
            holder[value] = (id, at, Ref(name, at))
            outputs.append(metas[meta[value]])

    def _op(self, op: int, inner: list[int]) -> tuple[Arguments, str, _Fields]:
        known = self._known.get((self._name[op], self._form[op]))
        if known is None:
            known = self._known[self._name[op], self._form[op]] = self._described(op)
        bound, wish, short, target = known
        facts = self._facts
        source = facts.source_of_op(op)  # before the info, which says where on the line
        info = facts.op_info(op, inner, _span(self._made, op))
        phase = PHASES[self._phase[op]]
        return bound, wish, (short, "call", facts.path_of_op(op), source, phase, target, info)

    def _described(self, op: int) -> tuple[Arguments, str, str, str]:
        """What all ops of this name and form have in common: arguments, wish for a name, name and target."""
        text, level = self._data.names[self._name[op]], LEVELS[self._data.ops.level[op]]
        schema = self._data.schemas.get(text, ())
        form = self._data.forms[self._form[op]]
        short = op_name(text, level)
        bound = op_arguments(text, level, self._index.ops[op].flavour, form, schema)
        return bound, word(short, level), short, full_name(text, level)

    def _call(self, call: int, inner: list[int]) -> tuple[Arguments, str, _Fields]:
        form = int(self._data.calls.input_form[call])
        bound = self._bound.get(form)
        if bound is None:
            bound = self._bound[form] = call_arguments(self._data.forms[form])
        module = self._data.modules[self._data.calls.module[call]]
        path = self._facts.path_of_call(call)
        phase = PHASES[self._data.calls.phase[call]]
        target = f"{module.type_module}.{module.type}"
        info = self._facts.call_info(call, inner, _span(self._returned, call))
        fields = (module.type, "call", path, self._facts.source_of_call(call), phase, target, info)
        return bound, path or module.type, fields

    def _also_read(self, unit: int, inner: Iterable[int], given: list[int]) -> list[int]:
        """What the ops inside read that the unit was not given and did not make."""
        known = set(given)
        made: set[int] = set()
        found: list[int] = []
        constant = KINDS.index("constant")
        for op in inner:
            for value in _span(self._inputs, op):
                if value in known or value in made:
                    continue
                producer = self._producer[value]
                if producer >= 0 and self._units[producer] == unit:
                    continue
                if self._kind[value] == constant and unit < self._op_count:
                    continue  # a number the op wrapped for itself
                known.add(value)
                found.append(value)
            made.update(_span(self._made, op))
        return found

    def _extra_names(self, values: list[int], args: dict[str, Any]) -> list[str]:
        """What to call tensors that were read but not given: parameters have their own names."""
        taken = set(args)
        found: list[str] = []
        for value in values:
            own = self._index.name(int(self._data.values.name[value])).rpartition(".")[2]
            name = own if own and own not in taken else f"also_{len(found)}"
            taken.add(name)
            found.append(name)
        return found

    def _new_node(self, row: _Row) -> int:
        self._rows.append(row)
        self._outputs.append([])
        return len(self._rows) - 1

    # -- where a value comes from ----------------------------------------------------------------

    def _source(self, value: int) -> tuple[int, int, Ref]:
        """The node that holds a value now, which output of it the value is, and how that is said."""
        found = self._holder.get(value)
        if found is None:
            found = self._holder[value] = self._find(value)
        return found

    def _find(self, value: int) -> tuple[int, int, Ref]:
        producer = self._producer[value]
        if producer >= 0:
            node = self._node_of_unit.get(self._units[producer])
            if node is not None:  # made inside it, and not handed out: a cached cast, a written-through view
                self._outputs[node].append(self._data.metas[self._meta[value]])
                slot = len(self._outputs[node]) - 1
                return node, slot, Ref(self._rows[node][0], slot)
            first = self._first_version(value)
            return self._source(first) if first != value else self._add_source(value)
        kind = KINDS[self._kind[value]]
        if kind in ("activation", "gradient", "external"):
            for other in (self._base[value], self._previous[value]):
                if other >= 0:
                    return self._source(other)
        return self._add_source(value)

    def _first_version(self, value: int) -> int:
        """Of a parameter that an optimizer changed, which is not shown here, the parameter itself."""
        first = value
        while self._previous[first] >= 0:
            first = self._previous[first]
        return first if KINDS[self._kind[first]] in _KINDS else value

    def _add_source(self, value: int) -> tuple[int, int, Ref]:
        kind = KINDS[self._kind[value]]
        name = self._index.name(int(self._data.values.name[value]))
        shown = _KINDS.get(kind, "input")
        if name and (shown, name) in self._named:
            id = self._named[shown, name]
            return id, 0, Ref(self._rows[id][0])
        producer = self._producer[value]
        label = name or self._facts.input_name(value)
        if not label and producer >= 0:
            label = op_name(self._data.names[self._data.ops.name[producer]], "api")
        owner = self._facts.owner(name) if shown in ("parameter", "buffer") else ""
        info = {"value": kind} if kind not in (shown, "input") else {}
        unique = self._names.new(label or shown)
        id = self._new_node((unique, label or shown, shown, {}, owner, "", "forward", "", info))
        self._outputs[id].append(self._data.metas[self._meta[value]])
        if name:
            self._named[shown, name] = id
        return id, 0, Ref(unique)

    # -- results ---------------------------------------------------------------------------------

    def _add_outputs(self) -> None:
        """An output for what each root module call returned and nobody read later, and for other dead ends.

        A dead end inside a module is a leaf; one in the user's own lines around it is a result.
        """
        used = {edge.source for edge in self._edges}
        wanted: list[tuple[int, dict[str, int]]] = []
        returned: set[int] = set()
        for call, paths in self._facts.root_results():
            values = _span(self._returned, call)
            last = int(self._data.calls.end_op[call])
            left = {
                path: value
                for path, value in zip(paths, values, strict=False)
                if value in self._holder and not self._read_after(value, last)
            }
            if left:
                wanted.append((last, left))
                returned.update(self._holder[value][0] for value in left.values())
        for unit, node in self._node_of_unit.items():
            if node in used or node in returned or not self._outputs[node] or self._facts.in_call(unit):
                continue
            values = _span(self._made, unit) if unit < self._op_count else []
            wanted.append((unit, {f"[{at}]" if at else "": value for at, value in enumerate(values)}))
        for _, left in sorted(wanted, key=lambda item: item[0]):
            self._add_output(left)

    def _read_after(self, value: int, end: int) -> bool:
        return any(op >= end and self._units[op] in self._included for op in self._index.consumers(value))

    def _add_output(self, values: dict[str, int]) -> None:
        sources = {
            path or "result": self._holder[value] for path, value in values.items() if value in self._holder
        }
        if not sources:
            return
        args = {path: ref for path, (_, _, ref) in sources.items()}
        id = self._new_node((self._names.new("output"), "output", "output", args, "", "", "forward", "", {}))
        for path, (node, slot, _) in sources.items():
            self._edges.append(Edge(node, id, slot, path, self._outputs[node][slot]))


def _span(column: tuple[list[int], list[int]], row: int) -> list[int]:
    offsets, flat = column
    return flat[offsets[row] : offsets[row + 1]]
