"""Running an exported graph node by node: every op through its own target, nothing re-implemented.

A `Plan` holds the nodes as steps that are ready to run; it is made once per graph.
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
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from sightline.argument_checks import argument_text
from sightline.errors import NoSuchNode, UsageError
from sightline.graph.exported.torch_export import MODES, OBJECT, Mode
from sightline.notation import tensor_text
from sightline.patterns import did_you_mean

#: Arguments that an op changes although its schema does not say so, with the flags that make it do so.
_UNDECLARED: Final = dict.fromkeys(("running_mean", "running_var"), ("training", "use_input_stats"))
#: Written as in place, but the numbers stay the same.
_HARMLESS: Final = frozenset({"aten::detach_", "aten::requires_grad_"})


@dataclass
class PlanStep:
    """One node, ready to run."""

    name: str
    kind: str  #: "input", "call" or "output"
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    holes: tuple[tuple[int, int], ...] = ()  #: positions of ``args`` that are values of other steps
    nested: bool = False  #: values also stand deeper than that
    sources: tuple[int, ...] = ()  #: the step of each input, in the order of the arguments
    writes: tuple[int, ...] = ()  #: steps whose value this one changes in place
    modes: tuple[Mode, ...] = ()  #: the grad modes and autocasts it runs in
    frees: tuple[int, ...] = ()  #: steps whose value nobody needs after this one

    def call(self, values: list[Any]) -> Any:
        """Run it on the values so far."""
        if not self.modes:
            return self._call(values)
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode())
            return self._call(values)

    def _call(self, values: list[Any]) -> Any:
        if self.nested:
            return self.target(*poured(self.args, values), **poured(self.kwargs, values))
        args = list(self.args)
        for position, step in self.holes:
            args[position] = values[step]
        return self.target(*args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class ValueSlot:
    """Where the value of a step goes."""

    step: int


class Plan:
    """The steps of a graph, in order."""

    def __init__(self, module: GraphModule, graph: FxGraph) -> None:
        nodes = list(graph.nodes)
        self.index = {node.name: position for position, node in enumerate(nodes)}
        last: dict[int, int] = {}
        self.steps: list[PlanStep] = []
        for position, node in enumerate(nodes):
            step = self._step(module, node)
            last.update(dict.fromkeys(step.sources, position))
            self.steps.append(step)
        for source, position in last.items():
            self.steps[position].frees += (source,)
        self.in_place = any(step.writes for step in self.steps)
        self.inputs = [i for i, step in enumerate(self.steps) if step.kind == "input"]

    def _step(self, module: GraphModule, node: FxNode) -> PlanStep:
        if node.op == "placeholder":
            return PlanStep(node.name, "input")
        if node.op == "get_attr":
            found = node.meta.get(OBJECT) or operator.attrgetter(str(node.target))(module)
            return PlanStep(node.name, "call", lambda: found)
        if node.op not in ("call_function", "output"):
            raise UsageError(f"The node {node.name} is a {node.op}, which torch.export does not make.")
        index = self.index
        args = _filled(node.args, index)
        kwargs = _filled(node.kwargs, index)
        holes = tuple((i, arg.step) for i, arg in enumerate(args) if isinstance(arg, ValueSlot))
        sources = tuple(index[one.name] for one in _nodes_in((node.args, node.kwargs)))
        kind = "output" if node.op == "output" else "call"
        target = node.target if kind == "call" else None
        writes = tuple(index[one.name] for one in _written(node)) if kind == "call" else ()
        nested = len(holes) < len(sources)
        modes = node.meta.get(MODES, ())
        return PlanStep(node.name, kind, target, args, kwargs, holes, nested, sources, writes, modes)


def _filled(value: Any, index: dict[str, int]) -> Any:
    """Arguments with holes for nodes; fx's own immutable lists become plain ones."""
    if isinstance(value, FxNode):
        return ValueSlot(index[value.name])
    if isinstance(value, tuple):
        return tuple(_filled(part, index) for part in value)
    if isinstance(value, list):
        return [_filled(part, index) for part in value]
    if isinstance(value, dict):
        return {key: _filled(part, index) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(_filled(part, index) for part in (value.start, value.stop, value.step)))
    return value


def poured(value: Any, values: list[Any]) -> Any:
    """Arguments with the values in their holes."""
    kind = type(value)
    if kind is ValueSlot:
        return values[value.step]
    if kind is list:
        return [poured(part, values) for part in value]
    if kind is tuple:
        return tuple([poured(part, values) for part in value])
    if kind is dict:
        return {key: poured(part, values) for key, part in value.items()}
    if kind is slice:
        return slice(*(poured(part, values) for part in (value.start, value.stop, value.step)))
    return value


def _nodes_in(value: Any) -> list[FxNode]:
    """Every node among some arguments, as often as it stands there."""
    nodes: list[FxNode] = []
    map_arg(value, nodes.append)
    return nodes


def _written(node: FxNode) -> Iterator[FxNode]:
    """The nodes whose value an op changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name in _HARMLESS:
        return
    bound = {}
    for position, argument in enumerate(schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        bound[argument.name] = value
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _nodes_in(value)
    for name, flags in _UNDECLARED.items():
        if any(bound.get(flag) is True for flag in flags):
            yield from _nodes_in(bound.get(name))


class Snapshots:
    """Keeps recorded values as they were, when ops change tensors in place."""

    def __init__(self, records: list[Any], inputs: list[Any]) -> None:
        self._records = records
        self._inputs = inputs
        self._holders: dict[int, list[int]] = {}  #: storage -> the steps whose record has a part in it

    def recorded(self, position: int) -> None:
        """Note which storages the record of a step lies in."""
        holders = self._holders
        for value in (self._records[position], *self._inputs[position]):
            for tensor in (value,) if isinstance(value, torch.Tensor) else _tensors(value):
                holders.setdefault(_storage(tensor), []).append(position)

    def before_write(self, step: PlanStep, values: list[Any]) -> tuple[Any, ...]:
        """Copy each recorded tensor in memory that a step writes; the step's inputs as they are now."""
        took = tuple([values[source] for source in step.sources])
        written = [values[source] for source in step.writes]
        for storage in {_storage(tensor) for tensor in _tensors(written)}:
            copied = _Copies(storage)
            took = pytree.tree_map_only(torch.Tensor, copied, took)
            for position in self._holders.pop(storage, ()):
                for table in (self._records, self._inputs):
                    table[position] = pytree.tree_map_only(torch.Tensor, copied, table[position])
        return took


class _Copies:
    """Copies the tensors of one storage, each once."""

    def __init__(self, storage: int) -> None:
        self._storage = storage
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # originals live on: ids stay theirs

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) != self._storage:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, tensor.detach().clone())
        return self._made[id(tensor)][1]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a sparse tensor has none
        return id(tensor)


#: Stands for a value that is not there; None is a value.
NOTHING: Final = object()


class NodeIO(NamedTuple):
    """What went into a node, in the order of its arguments, and what came out.

    >>> NodeIO((1, 2), 3).outputs
    3
    """

    inputs: tuple[Any, ...]
    outputs: Any


class Run(Mapping[str, NodeIO]):
    """What every node took and made in one run, in the order they ran; ``.output`` is the model's.

    >>> import torch
    >>> from sightline.graph.exported import export
    >>> io = export(torch.nn.ReLU(), torch.tensor([[-1.0, 2.0]])).run(torch.tensor([[3.0, -4.0]]))
    >>> list(io), io["relu"].outputs, io.output
    (['input', 'relu', 'output'], tensor([[3., 0.]]), tensor([[3., 0.]]))
    """

    #: What the model returns and ``output`` leaves out, as torch cannot take it apart: a cache, for example.
    left_out: tuple[str, ...] = ()

    def __init__(self, plan: Plan, records: list[Any], inputs: list[Any], output: Any, stopped: str) -> None:
        self._plan = plan
        self._records = records
        self._inputs = inputs
        self._output = output
        self._stopped = stopped

    @property
    def output(self) -> Any:
        """What the model returns, in its own structure."""
        if self._stopped:
            raise UsageError(
                f"This run stopped after {self._stopped!r}, as `until=` asked: it has no output."
            )
        return self._output

    def __getitem__(self, name: str) -> NodeIO:
        position = self._position(name)
        if position is None:
            raise NoSuchNode(
                f"This graph has no node {argument_text(name)}"
                f"{did_you_mean(argument_text(name), self._plan.index)}"
            )
        outputs = self._records[position]
        if outputs is NOTHING:
            raise NoSuchNode(f"The values of {name!r} were not kept: `keep=` and `until=` say which are.")
        inputs = self._inputs[position]
        if inputs is None:
            inputs = tuple(self._records[source] for source in self._plan.steps[position].sources)
        return NodeIO(inputs, outputs)

    def __iter__(self) -> Iterator[str]:
        for step, record in zip(self._plan.steps, self._records, strict=True):
            if record is not NOTHING:
                yield step.name

    def __len__(self) -> int:
        return sum(record is not NOTHING for record in self._records)

    def __contains__(self, name: object) -> bool:
        position = self._position(name)
        return position is not None and self._records[position] is not NOTHING

    def _position(self, name: object) -> int | None:
        return self._plan.index.get(name) if isinstance(name, str) else None

    def __repr__(self) -> str:
        stopped = f", stopped after {self._stopped!r}" if self._stopped else ""
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        return f"<Run: {len(self)} of {len(self._plan.steps)} nodes{stopped}{without}>"


OnNode = Callable[[str, tuple[Any, ...], Any], None]
Edit = Callable[[Any], Any]


@dataclass
class Pass:
    """One pass over a plan, and what is asked of it."""

    plan: Plan
    starts: dict[int, Any]  #: the values of the input steps
    finish: Callable[[tuple[Any, ...]], Any]  #: from the flat results to the model's output
    keep: frozenset[int] | None = None  #: None: everything
    until: int | None = None
    on_node: OnNode | None = None
    edits: dict[int, Any] = field(default_factory=dict)
    given: Run | None = None
    explain: Callable[[str], str] = str  #: a node's name -> what to add to an error in it

    def run(self) -> Run:
        """Run what must be run, in order."""
        steps, keep = self.plan.steps, self.keep
        values: list[Any] = [NOTHING] * len(steps)
        records: list[Any] = [NOTHING] * len(steps)
        inputs: list[Any] = [None] * len(steps)
        wanted = self._reused(values, records, inputs)
        recorder = Snapshots(records, inputs) if self.plan.in_place else None
        explicit = keep is not None or recorder is not None  # inputs cannot be looked up afterwards
        frees = keep is not None and self.given is None
        on_node, edits, output = self.on_node, self.edits, None
        for position, step in enumerate(steps):
            if wanted is not None and position not in wanted:
                continue
            took = None
            if recorder is not None and step.writes:
                took = recorder.before_write(step, values)
            try:
                value, output = self._value(position, step, values, output)
            except Exception as error:
                error.add_note(self._note(step, values))
                raise
            if position in edits:
                value = _edited(edits[position], value, self.plan.in_place)
            values[position] = value
            kept = keep is None or position in keep
            if on_node is not None:
                shown = output if step.kind == "output" else value
                on_node(step.name, took or tuple([values[source] for source in step.sources]), shown)
            if kept:
                records[position] = output if step.kind == "output" else value
                if explicit:
                    inputs[position] = took or tuple([values[source] for source in step.sources])
                    if recorder is not None:
                        recorder.recorded(position)
            if frees:
                for source in step.frees:
                    values[source] = NOTHING
            if position == self.until:
                break
        stopped = "" if self.until is None or steps[self.until].kind == "output" else steps[self.until].name
        return Run(self.plan, records, inputs, output, stopped)

    def _value(self, position: int, step: PlanStep, values: list[Any], output: Any) -> tuple[Any, Any]:
        if step.kind == "call":
            edit = self.edits.get(position, NOTHING)
            if edit is not NOTHING and not callable(edit) and not step.writes:
                return None, output  # it will be replaced whatever it is
            return step.call(values), output
        if step.kind == "input":
            return self.starts[position], output
        results = tuple(poured(step.args[0], values))
        return results, self.finish(results)

    def _reused(self, values: list[Any], records: list[Any], inputs: list[Any]) -> set[int] | None:
        """Take over what an earlier run knows; which steps are left to run. None: all."""
        if self.given is None or self.plan.in_place:
            return None
        steps = self.plan.steps
        affected = set(self.edits)
        for position, step in enumerate(steps):
            if not affected.isdisjoint(step.sources):
                affected.add(position)
        affected.add(len(steps) - 1)
        wanted: set[int] = set()
        waiting = list(affected)
        while waiting:
            position = waiting.pop()
            if position not in wanted:
                wanted.add(position)
                waiting += [
                    source
                    for source in steps[position].sources
                    if source not in affected and self.given._records[source] is NOTHING
                ]
        for position in range(len(steps)):
            if position not in wanted:
                values[position] = self.given._records[position]
                if self.keep is None or position in self.keep:
                    records[position] = values[position]
                    inputs[position] = self.given._inputs[position]
        return wanted

    def _note(self, step: PlanStep, values: list[Any]) -> str:
        texts = ", ".join(_short(values[source]) for source in step.sources)
        place = self.explain(step.name)
        edited = [repr(self.plan.steps[source].name) for source in step.sources if source in self.edits]
        after = f"; {' and '.join(edited)} had been edited" if edited else ""
        return f"In the node {step.name!r} of the exported graph{place}, given {texts or 'nothing'}{after}."


def _edited(edit: Any, value: Any, in_place: bool) -> Any:
    """The value an edit puts in the place of another; a callable that returns None has only looked."""
    if callable(edit):
        new = edit(value)
        return value if new is None else new
    return edit.clone() if in_place and isinstance(edit, torch.Tensor) else edit


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_text(tuple(value.shape), str(value.dtype), str(value.device))
    text = repr(value)
    return text if len(text) < 40 else type(value).__name__
