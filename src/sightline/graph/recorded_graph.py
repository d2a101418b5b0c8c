"""The graph of a recorded run: `graph(index)`, with branches and loops as they were taken.

A node stands for a unit: an API call with the aten ops inside it, an aten op, or a module call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from sightline.analysis.producers import written_calls
from sightline.analysis.select import ModelPart, model_part
from sightline.data.index import Index
from sightline.data.not_recorded import other_threads
from sightline.data.trace_data import FLAVOURS, I64, KINDS, LEVELS, PHASES, TensorMeta
from sightline.errors import UsageError
from sightline.graph.arguments import Arguments, call_arguments, op_arguments
from sightline.graph.context import GraphContext
from sightline.graph.graph import Edge, Graph, Node, Ref, gc_paused
from sightline.graph.node_names import UniqueNames, base_name, full_name, op_name
from sightline.hints import Hint
from sightline.patterns import choices_text

API, ATEN = LEVELS.index("api"), LEVELS.index("aten")
_OPAQUE: Final = FLAVOURS.index("opaque")
_BACKWARD: Final = PHASES.index("backward")
#: The phases each choice of ``phase=`` shows.
PHASES_SHOWN: Final = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
    "both": ("forward", "backward", "recompute"),
}


def unit_of_op(index: Index, level: str) -> I64:
    """The unit of each op; -1 for an op that is not shown at this level."""
    ops = index.raw.ops
    count = len(ops)
    units = np.arange(count, dtype=np.int64)
    if not count:
        return units
    if level == "aten":
        units[(ops.level == API) & (ops.flavour != _OPAQUE)] = -1
        return units
    # The ops of a backward pass are nodes of their own, not parts of the call ``loss.backward()``.
    backward = ops.phase == _BACKWARD
    written = written_calls(index.raw)
    units = np.where(written >= 0, written, units)
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
    codes = [PHASES.index(phase) for phase in phases]
    shown = dict.fromkeys(units[(units >= 0) & np.isin(ops.phase, codes)].tolist())
    # A call that ran inside backward (a recomputation) belongs to the phase of its ops.
    if level != "module":
        return sorted(shown)
    count = len(ops)
    starts = {unit: unit if unit < count else int(calls.first_op[unit - count]) for unit in shown}
    leaf = leaf_calls(index) & np.isin(calls.phase, codes)
    for call in np.flatnonzero(leaf).tolist():  # including those that ran no op
        starts.setdefault(count + call, int(calls.first_op[call]))
    # The first op of a call that ran none is the next op after it.
    return sorted(starts, key=lambda unit: (starts[unit], unit < count, unit))


_LEVELS: Final = ("api", "aten", "module")
#: Fields of a node: name, op, kind, arguments, module, source, phase, target, info.
_Row = tuple[str, str, str, dict[str, Any], str, str, str, str, dict[str, Any]]
#: The same without name and arguments.
_Fields = tuple[str, str, str, str, str, str, dict[str, Any]]
#: Kinds of values that have a node of their own kind; all others are inputs.
_SOURCE_KINDS: Final = {
    "parameter": "parameter",
    "buffer": "buffer",
    "state": "buffer",
    "constant": "constant",
}


def graph(
    index: Index,
    *,
    level: str | None = None,
    depth: int | None = None,
    fold: bool = True,
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
    of modules that call no other, and the ops between them). ``module`` is a glob: only the ops in there.
    Ops that build the model, and in training those of installed packages around it, are left out unless
    ``everything=True``; ``info["left_out"]`` says how many, and ``info["not_recorded"]`` which calls ran on
    other threads. ``prune``, ``fold`` and ``depth`` are `Graph.prune`, `Graph.fold` and `Graph.collapse`, in
    this order.
    """
    if phase not in PHASES_SHOWN:
        raise UsageError(
            f"{Hint.option('phase', phase)} is not shown as a graph; choose {choices_text(PHASES_SHOWN)}."
        )
    if level is not None and level not in _LEVELS:
        raise UsageError(
            f"{Hint.option('level', level)} is no level of a graph; choose {choices_text(_LEVELS)}."
        )
    with gc_paused():
        part = None if everything else model_part(index)
        if level is None:
            levels = index.raw.ops.level
            level = "module" if not len(levels) else "api" if bool((levels == API).any()) else "aten"
        result = _GraphBuilder(index, level, PHASES_SHOWN[phase], part).build()
    if module is not None:
        result = result.subgraph(module)
    pruned = (prune,) if isinstance(prune, str) else tuple(prune)
    if pruned:
        result = result.prune(*pruned)
    if fold:
        result = result.fold()
    return result if depth is None else result.collapse(depth)


class _GraphBuilder:
    """Walks the units in the order they ran and tracks which node each value comes from."""

    def __init__(self, index: Index, level: str, phases: tuple[str, ...], part: ModelPart | None) -> None:
        data = index.raw
        self._index, self._data, self._level = index, data, level
        units = unit_of_op(index, level)
        self._left_out = ""
        if part is not None:
            shown = (units == np.arange(len(units))) & np.isin(
                data.ops.phase, list(map(PHASES.index, phases))
            )
            self._left_out = part.excluded_text(shown)
            units = np.where(part.excluded, -1, units)
        self._order = ordered_units(index, units, level, phases)
        self._included = set(self._order)
        self._units: list[int] = units.tolist()
        self._op_count = len(data.ops)
        self._context = GraphContext(index)
        self._names = UniqueNames()
        self._op_templates: dict[
            tuple[int, int], tuple[Arguments, str, str, str]
        ] = {}  # by name and form: arguments, base of node names, name and target
        self._call_arguments: dict[int, Arguments] = {}  # by form
        self._rows: list[_Row] = []  # of the nodes, whose outputs may grow until the end
        self._edges: list[Edge] = []
        self._outputs: list[list[TensorMeta]] = []
        self._sources: dict[int, tuple[int, int, Ref]] = {}  # value -> node, slot, and its reference
        self._node_of_unit: dict[int, int] = {}
        self._named_nodes: dict[tuple[str, str], int] = {}  # all versions of a parameter are one node
        # Lists, because single items are read faster from them than from arrays.
        values, ops, calls = data.values, data.ops, data.calls
        self._producer: list[int] = values.producer.tolist()
        self._meta: list[int] = values.meta.tolist()
        self._kind: list[int] = values.kind.tolist()
        self._base: list[int] = values.base.tolist()
        self._previous: list[int] = values.previous.tolist()
        self._name: list[int] = ops.name.tolist()
        self._form: list[int] = ops.form.tolist()
        self._phase: list[int] = ops.phase.tolist()
        self._op_inputs = (ops.input_offsets.tolist(), ops.inputs.tolist())
        self._op_outputs = (ops.output_offsets.tolist(), ops.outputs.tolist())
        self._call_inputs = (calls.input_offsets.tolist(), calls.inputs.tolist())
        self._call_outputs = (calls.output_offsets.tolist(), calls.outputs.tolist())
        self._inner: dict[int, list[int]] = {}  # the ops inside each unit
        for op, unit in enumerate(self._units):
            if unit != op and unit >= 0:
                self._inner.setdefault(unit, []).append(op)

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
        info: dict[str, Any] = {"level": self._level, "calls": self._context.calls()}
        if self._left_out:
            info["left_out"] = self._left_out
        if elsewhere := other_threads(self._data):
            info["not_recorded"] = elsewhere
        name = str(self._data.info.get("name") or "")
        return Graph(tuple(nodes), tuple(self._edges), name, self._context.modules(), info)

    # -- nodes -----------------------------------------------------------------------------------

    def _add_unit(self, unit: int) -> None:
        inner = self._inner.get(unit, [])
        if unit < self._op_count:
            inputs, results = _span(self._op_inputs, unit), _span(self._op_outputs, unit)
            arguments, base, fields = self._op(unit, inner)
        else:
            call = unit - self._op_count
            inputs, results = _span(self._call_inputs, call), _span(self._call_outputs, call)
            arguments, base, fields = self._call(call, inner)
        count = min(len(arguments.paths), len(inputs))  # a damaged file may have too few inputs
        paths: Sequence[str] = arguments.paths[:count]
        args = arguments.fill([self._source(value)[2] for value in inputs[:count]])
        extra = inputs[count:]
        if inner:
            extra = extra + self._inner_reads(unit, inner, inputs)
        if extra:
            # These tensors are not in the call: parameters go by their own names.
            names: list[str] = []
            taken = set(args)
            for value in extra:
                own = self._index.name(int(self._data.values.name[value])).rpartition(".")[2]
                names.append(own if own and own not in taken else f"also_{len(names)}")
                taken.add(names[-1])
            paths = [*paths, *names]
            args.update(zip(names, [self._source(value)[2] for value in extra], strict=True))
            inputs = inputs[:count] + extra
        op, kind, module, source, phase, target, info = fields
        id = self._new_node((self._names.new(base), op, kind, args, module, source, phase, target, info))
        self._node_of_unit[unit] = id
        metas, meta, sources = self._data.metas, self._meta, self._sources
        for path, value in zip(paths, inputs, strict=True):
            node, slot, _ = sources[value]
            self._edges.append(Edge(node, id, slot, path, metas[meta[value]]))
        name, outputs = self._rows[id][0], self._outputs[id]
        for at, value in enumerate(results):
            sources[value] = (id, at, Ref(name, at))
            outputs.append(metas[meta[value]])

    def _op(self, op: int, inner: list[int]) -> tuple[Arguments, str, _Fields]:
        """The arguments of an op, the base of its node's name, and its fields."""
        key = (self._name[op], self._form[op])
        template = self._op_templates.get(key)
        if template is None:
            text, level = self._data.names[key[0]], LEVELS[self._data.ops.level[op]]
            schema, form = self._data.schemas.get(text, ()), self._data.forms[key[1]]
            short = op_name(text, level)
            arguments = op_arguments(text, level, self._index.ops[op].flavour, form, schema)
            template = arguments, base_name(short, level), short, full_name(text, level)
            self._op_templates[key] = template
        arguments, base, short, target = template
        context = self._context
        source = context.source_of_op(op)  # before the info, which has the columns of that line
        info = context.op_info(op, inner, _span(self._op_outputs, op))
        phase = PHASES[self._phase[op]]
        return arguments, base, (short, "call", context.path_of_op(op), source, phase, target, info)

    def _call(self, call: int, inner: list[int]) -> tuple[Arguments, str, _Fields]:
        """The same for a module call."""
        form = int(self._data.calls.input_form[call])
        arguments = self._call_arguments.get(form)
        if arguments is None:
            arguments = self._call_arguments[form] = call_arguments(self._data.forms[form])
        module = self._data.modules[self._data.calls.module[call]]
        path = self._context.path_of_call(call)
        phase = PHASES[self._data.calls.phase[call]]
        target = f"{module.type_module}.{module.type}"
        info = self._context.call_info(call, inner, _span(self._call_outputs, call))
        fields = (module.type, "call", path, self._context.source_of_call(call), phase, target, info)
        return arguments, path or module.type, fields

    def _inner_reads(self, unit: int, inner: Iterable[int], inputs: list[int]) -> list[int]:
        """The values that the ops inside a unit read and that are neither its inputs nor its own results."""
        seen = set(inputs)
        extra: list[int] = []
        constant = KINDS.index("constant")
        for op in inner:
            for value in _span(self._op_inputs, op):
                if value in seen:
                    continue
                producer = self._producer[value]
                if producer >= 0 and self._units[producer] == unit:
                    continue
                if self._kind[value] == constant and unit < self._op_count:
                    continue  # a number that the op wrapped in a tensor
                seen.add(value)
                extra.append(value)
            seen.update(_span(self._op_outputs, op))
        return extra

    def _new_node(self, row: _Row) -> int:
        self._rows.append(row)
        self._outputs.append([])
        return len(self._rows) - 1

    # -- the sources of values ----------------------------------------------------------------

    def _source(self, value: int) -> tuple[int, int, Ref]:
        """The node that a value comes from, which of its outputs it is, and a reference to that."""
        source = self._sources.get(value)
        if source is None:
            source = self._sources[value] = self._find_source(value)
        return source

    def _find_source(self, value: int) -> tuple[int, int, Ref]:
        producer = self._producer[value]
        if producer >= 0:
            node = self._node_of_unit.get(self._units[producer])
            if node is not None:  # computed inside, not returned: a cached cast, a view written to
                self._outputs[node].append(self._data.metas[self._meta[value]])
                slot = len(self._outputs[node]) - 1
                return node, slot, Ref(self._rows[node][0], slot)
            first = value
            while self._previous[first] >= 0:
                first = self._previous[first]
            # The original version of a parameter: the optimizer that changed it is not shown.
            known = first != value and KINDS[self._kind[first]] in _SOURCE_KINDS
            return self._source(first) if known else self._add_source(value)
        kind = KINDS[self._kind[value]]
        if kind in ("activation", "gradient", "external"):
            for other in (self._base[value], self._previous[value]):
                if other >= 0:
                    return self._source(other)
        return self._add_source(value)

    def _add_source(self, value: int) -> tuple[int, int, Ref]:
        kind = KINDS[self._kind[value]]
        name = self._index.name(int(self._data.values.name[value]))
        shown = _SOURCE_KINDS.get(kind, "input")
        if name and (shown, name) in self._named_nodes:
            id = self._named_nodes[shown, name]
            return id, 0, Ref(self._rows[id][0])
        producer = self._producer[value]
        label = name or self._context.input_name(value)
        if not label and producer >= 0:
            label = op_name(self._data.names[self._data.ops.name[producer]], "api")
        owner = self._context.owner(name) if shown in ("parameter", "buffer") else ""
        info = {"value": kind} if kind not in (shown, "input") else {}
        unique = self._names.new(label or shown)
        id = self._new_node((unique, label or shown, shown, {}, owner, "", "forward", "", info))
        self._outputs[id].append(self._data.metas[self._meta[value]])
        if name:
            self._named_nodes[shown, name] = id
        return id, 0, Ref(unique)

    # -- results ---------------------------------------------------------------------------------

    def _add_outputs(self) -> None:
        """Add outputs for tensors that root module calls returned and nothing read later, and unused results.

        An unused result inside a module is a leaf; one in the user's own lines around it is an output.
        """
        used = {edge.source for edge in self._edges}
        outputs: list[tuple[int, dict[str, int]]] = []
        returned: set[int] = set()
        for call, paths in self._context.root_results():
            last = int(self._data.calls.end_op[call])
            unread = {}
            for path, value in zip(paths, _span(self._call_outputs, call), strict=False):
                if value not in self._sources:
                    continue
                later = [self._units[op] for op in self._index.consumers(value) if op >= last]
                if self._included.isdisjoint(later):
                    unread[path] = value
            if unread:
                outputs.append((last, unread))
                returned.update(self._sources[value][0] for value in unread.values())
        for unit, node in self._node_of_unit.items():
            if node in used or node in returned or not self._outputs[node] or self._context.in_call(unit):
                continue
            values = _span(self._op_outputs, unit) if unit < self._op_count else []
            outputs.append((unit, {f"[{at}]" if at else "": value for at, value in enumerate(values)}))
        for _, named in sorted(outputs, key=lambda item: item[0]):
            sources = {path or "result": self._sources[v] for path, v in named.items() if v in self._sources}
            if not sources:
                continue
            args = {path: ref for path, (_, _, ref) in sources.items()}
            name = self._names.new("output")
            id = self._new_node((name, "output", "output", args, "", "", "forward", "", {}))
            for path, (node, slot, _) in sources.items():
                self._edges.append(Edge(node, id, slot, path, self._outputs[node][slot]))


def _span(column: tuple[list[int], list[int]], row: int) -> list[int]:
    offsets, flat = column
    return flat[offsets[row] : offsets[row + 1]]
