"""Runs an exported graph node by node: every op through its own target, nothing re-implemented.

A `Plan` holds the nodes as steps that are ready to run; one is created per graph. It is not a
`torch.fx.Interpreter`, which costs two to three times as much per node, rewrites the model's exceptions and
cannot say which values an op overwrites.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_aggregate, map_arg

from sightline.argument_checks import argument_text
from sightline.errors import NoSuchNode, UsageError
from sightline.graph.exported.inputs import describe_value
from sightline.graph.exported.torch_export import MODES, OBJECT, Mode
from sightline.graph.exported.torchapi import op_schema, pytree, storage_key
from sightline.patterns import did_you_mean
from sightline.text_encoding import printable

#: Arguments that an op changes although its schema does not declare it, with the flags that make it do so.
_UNDECLARED_WRITES: Final = dict.fromkeys(("running_mean", "running_var"), ("training", "use_input_stats"))
#: In-place ops that leave the numbers as they are.
_HARMLESS: Final = frozenset({"aten::detach_", "aten::requires_grad_"})


@dataclass
class PlanStep:
    """One node, ready to run."""

    name: str
    kind: str  #: "input", "call" or "output"
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    slots: tuple[tuple[int, int], ...] = ()  #: (position in ``args``, step whose value goes there)
    nested: bool = False  #: whether there are slots deeper in ``args``, or in ``kwargs``
    sources: tuple[int, ...] = ()  #: the step of each input, in the order of the arguments
    writes: tuple[int, ...] = ()  #: steps whose value this one changes in place
    modes: tuple[Mode, ...] = ()  #: the grad modes and autocasts it runs in
    frees: tuple[int, ...] = ()  #: steps whose value is not needed after this one

    def call(self, values: list[Any]) -> Any:
        """The result of this step; ``values`` holds those of the steps before it."""
        if not self.modes:
            return self._call(values)
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode())
            return self._call(values)

    def _call(self, values: list[Any]) -> Any:
        if self.nested:
            return self.target(*fill_slots(self.args, values), **fill_slots(self.kwargs, values))
        args = list(self.args)
        for position, step in self.slots:
            args[position] = values[step]
        return self.target(*args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class ValueSlot:
    """Stands in the arguments of a step for the value of another."""

    step: int


class Plan:
    """The steps of a graph, in order."""

    def __init__(self, module: GraphModule, graph: FxGraph) -> None:
        nodes = list(graph.nodes)
        self.index = {node.name: position for position, node in enumerate(nodes)}
        last: dict[int, int] = {}
        self.steps: list[PlanStep] = []
        for position, node in enumerate(nodes):
            step = self._make_step(module, node)
            last.update(dict.fromkeys(step.sources, position))
            self.steps.append(step)
        for source, position in last.items():
            self.steps[position].frees += (source,)
        self.in_place = any(step.writes for step in self.steps)
        self.inputs = [i for i, step in enumerate(self.steps) if step.kind == "input"]

    def _make_step(self, module: GraphModule, node: FxNode) -> PlanStep:
        if node.op == "placeholder":
            return PlanStep(node.name, "input")
        if node.op == "get_attr":
            constant = node.meta.get(OBJECT) or operator.attrgetter(str(node.target))(module)
            return PlanStep(node.name, "call", lambda: constant)
        if node.op not in ("call_function", "output"):
            raise UsageError(f"The node {node.name} is a {node.op}, which torch.export does not make.")
        index = self.index
        arguments: Any = (node.args, node.kwargs)

        def slot(source: FxNode) -> Any:
            return ValueSlot(index[source.name])

        args, kwargs = map_arg(arguments, slot)
        slots = tuple((i, arg.step) for i, arg in enumerate(args) if isinstance(arg, ValueSlot))
        sources = tuple(index[source.name] for source in _nodes_in(arguments))
        kind = "output" if node.op == "output" else "call"
        target = node.target if kind == "call" else None
        writes = tuple(index[source.name] for source in _written_nodes(node)) if kind == "call" else ()
        nested = len(slots) < len(sources)
        modes = node.meta.get(MODES, ())
        return PlanStep(node.name, kind, target, args, kwargs, slots, nested, sources, writes, modes)


def fill_slots(arguments: Any, values: list[Any]) -> Any:
    """The arguments with the values of other steps in their slots."""

    def value_of(leaf: Any) -> Any:
        return values[leaf.step] if type(leaf) is ValueSlot else leaf

    return map_aggregate(arguments, value_of)


def _nodes_in(arguments: Any) -> list[FxNode]:
    """The nodes among the arguments, in order; one that is used twice is listed twice."""
    nodes: list[FxNode] = []
    map_arg(arguments, nodes.append)
    return nodes


def _written_nodes(node: FxNode) -> Iterator[FxNode]:
    """The nodes whose value an op changes in place."""
    schema = op_schema(node.target)
    if schema is None or schema.name in _HARMLESS:
        return
    bound = {}
    for position, argument in enumerate(schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        bound[argument.name] = value
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _nodes_in(value)
    for name, flags in _UNDECLARED_WRITES.items():
        if any(bound.get(flag) is True for flag in flags):
            yield from _nodes_in(bound.get(name))


class Snapshots:
    """Preserves recorded values where a later op overwrites a tensor in place."""

    def __init__(self, records: list[Any], inputs: list[Any]) -> None:
        self._records = records
        self._inputs = inputs
        self._holders: dict[int, list[int]] = {}  #: storage -> steps with a recorded tensor in it

    def add(self, position: int) -> None:
        """Note which storages the record of a step refers to."""
        holders = self._holders
        for value in (self._records[position], *self._inputs[position]):
            for tensor in (value,) if isinstance(value, torch.Tensor) else _tensors(value):
                holders.setdefault(storage_key(tensor), []).append(position)

    def before_write(self, step: PlanStep, values: list[Any]) -> tuple[Any, ...]:
        """Copy each recorded tensor that a step will overwrite; return the step's inputs as they are now."""
        inputs = tuple([values[source] for source in step.sources])
        written = [values[source] for source in step.writes]
        for storage in {storage_key(tensor) for tensor in _tensors(written)}:
            copy = _StorageCopier(storage)
            inputs = pytree.tree_map_only(torch.Tensor, copy, inputs)
            for position in self._holders.pop(storage, ()):
                for table in (self._records, self._inputs):
                    table[position] = pytree.tree_map_only(torch.Tensor, copy, table[position])
        return inputs


class _StorageCopier:
    """Copies the tensors of one storage, each once."""

    def __init__(self, storage: int) -> None:
        self._storage = storage
        #: By id: the original, kept alive so that its id stays its own, and the copy.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) != self._storage:
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = (tensor, tensor.detach().clone())
        return self._copies[id(tensor)][1]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


#: Marks a value that is absent; None is a value.
MISSING: Final = object()


class NodeIO(NamedTuple):
    """The inputs of a node, in the order of its arguments, and its outputs.

    >>> NodeIO((1, 2), 3).outputs
    3
    """

    inputs: tuple[Any, ...]
    outputs: Any


@printable
class Run(Mapping[str, NodeIO]):
    """The inputs and outputs of every node in one run, in the order they ran; ``.output`` is the model's.

    >>> import torch
    >>> from sightline.graph.exported import export
    >>> io = export(torch.nn.ReLU(), torch.tensor([[-1.0, 2.0]])).run(torch.tensor([[3.0, -4.0]]))
    >>> list(io), io["relu"].outputs, io.output
    (['input', 'relu', 'output'], tensor([[3., 0.]]), tensor([[3., 0.]]))
    """

    #: Parts of the model's output that ``output`` lacks, because torch cannot flatten them: a cache, say.
    left_out: tuple[str, ...] = ()

    def __init__(self, plan: Plan, records: list[Any], inputs: list[Any], output: Any, stopped: str) -> None:
        self._plan = plan
        self._records = records
        self._inputs = inputs
        self._output = output
        self._stopped = stopped

    @property
    def output(self) -> Any:
        """The model's output, in its own structure."""
        if self._stopped:
            raise UsageError(f"This run stopped after {self._stopped!r}, as `until=` says: it has no output.")
        return self._output

    def __getitem__(self, name: str) -> NodeIO:
        position = self._position(name)
        if position is None:
            raise NoSuchNode(
                f"This graph has no node {argument_text(name)}"
                f"{did_you_mean(argument_text(name), self._plan.index)}"
            )
        outputs = self._records[position]
        if outputs is MISSING:
            raise NoSuchNode(f"The values of {name!r} were not kept: `keep=` and `until=` say which are.")
        inputs = self._inputs[position]
        if inputs is None:
            inputs = tuple(self._records[source] for source in self._plan.steps[position].sources)
        return NodeIO(inputs, outputs)

    def __iter__(self) -> Iterator[str]:
        for step, record in zip(self._plan.steps, self._records, strict=True):
            if record is not MISSING:
                yield step.name

    def __len__(self) -> int:
        return sum(record is not MISSING for record in self._records)

    def __contains__(self, name: object) -> bool:
        position = self._position(name)
        return position is not None and self._records[position] is not MISSING

    def _position(self, name: object) -> int | None:
        return self._plan.index.get(name) if isinstance(name, str) else None

    def __repr__(self) -> str:
        stopped = f", stopped after {self._stopped!r}" if self._stopped else ""
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        return f"<Run: {len(self)} of {len(self._plan.steps)} nodes{stopped}{without}>"


OnNode = Callable[[str, tuple[Any, ...], Any], None]


@dataclass
class Interpreter:
    """One run of a plan, with the options it runs under."""

    plan: Plan
    input_values: dict[int, Any]  #: by position of the input step
    build_output: Callable[[tuple[Any, ...]], Any]  #: from the flat results to the model's output
    keep: frozenset[int] | None = None  #: None: everything
    until: int | None = None
    on_node: OnNode | None = None
    edits: dict[int, Any] = field(default_factory=dict)
    given: Run | None = None
    location: Callable[[str], str] = str  #: from a node's name to its module and line, for errors in it

    def run(self) -> Run:
        """Run the steps in order, without those whose values an earlier run has."""
        steps, keep = self.plan.steps, self.keep
        values: list[Any] = [MISSING] * len(steps)
        records: list[Any] = [MISSING] * len(steps)
        inputs: list[Any] = [None] * len(steps)
        pending = self._reuse(values, records, inputs)
        snapshots = Snapshots(records, inputs) if self.plan.in_place else None
        explicit = keep is not None or snapshots is not None  # inputs cannot be read off the records
        frees = keep is not None and self.given is None
        on_node, edits, output = self.on_node, self.edits, None
        for position, step in enumerate(steps):
            if pending is not None and position not in pending:
                continue
            inputs_before = None
            if snapshots is not None and step.writes:
                inputs_before = snapshots.before_write(step, values)
            try:
                value, output = self._value(position, step, values, output)
            except Exception as error:
                texts = ", ".join(describe_value(values[source]) for source in step.sources) or "nothing"
                where = self.location(step.name)
                edited = " and ".join(repr(steps[source].name) for source in step.sources if source in edits)
                after = f"; {edited} had been edited" if edited else ""
                error.add_note(
                    f"In the node {step.name!r} of the exported graph{where}, given {texts}{after}."
                )
                raise
            if position in edits:
                value = _apply_edit(edits[position], value, self.plan.in_place)
            values[position] = value
            if on_node is not None:
                shown = output if step.kind == "output" else value
                on_node(step.name, inputs_before or tuple([values[source] for source in step.sources]), shown)
            if keep is None or position in keep:
                records[position] = output if step.kind == "output" else value
                if explicit:
                    inputs[position] = inputs_before or tuple([values[source] for source in step.sources])
                    if snapshots is not None:
                        snapshots.add(position)
            if frees:
                for source in step.frees:
                    values[source] = MISSING
            if position == self.until:
                break
        stopped = "" if self.until is None or steps[self.until].kind == "output" else steps[self.until].name
        return Run(self.plan, records, inputs, output, stopped)

    def _value(self, position: int, step: PlanStep, values: list[Any], output: Any) -> tuple[Any, Any]:
        """The value of a step, and the model's output, which the output step brings."""
        if step.kind == "call":
            edit = self.edits.get(position, MISSING)
            if edit is not MISSING and not callable(edit) and not step.writes:
                return None, output  # not computed: it will be replaced
            return step.call(values), output
        if step.kind == "input":
            return self.input_values[position], output
        results = tuple(fill_slots(step.args[0], values))
        return results, self.build_output(results)

    def _reuse(self, values: list[Any], records: list[Any], inputs: list[Any]) -> set[int] | None:
        """Copy the values of the earlier run that hold; the steps left to run, or None for all."""
        if self.given is None or self.plan.in_place:
            return None
        steps = self.plan.steps
        affected = set(self.edits)
        for position, step in enumerate(steps):
            if not affected.isdisjoint(step.sources):
                affected.add(position)
        affected.add(len(steps) - 1)
        pending: set[int] = set()
        waiting = list(affected)
        while waiting:
            position = waiting.pop()
            if position not in pending:
                pending.add(position)
                waiting += [
                    source
                    for source in steps[position].sources
                    if source not in affected and self.given._records[source] is MISSING
                ]
        for position in range(len(steps)):
            if position not in pending:
                values[position] = self.given._records[position]
                if self.keep is None or position in self.keep:
                    records[position] = values[position]
                    inputs[position] = self.given._inputs[position]
        return pending


def _apply_edit(edit: Any, value: Any, in_place: bool) -> Any:
    """The new value of a node; a callable that returns None leaves the value as it is."""
    if callable(edit):
        new = edit(value)
        return value if new is None else new
    return edit.clone() if in_place and isinstance(edit, torch.Tensor) else edit
