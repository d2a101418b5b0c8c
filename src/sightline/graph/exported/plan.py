"""A `Plan`: the nodes of an exported program as steps that are ready to run, made once per graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from sightline.errors import UsageError
from sightline.graph.exported.flattening import MODES, OBJECT, Mode

#: Arguments that an op changes although its schema does not say so, with the flags that make it do so.
_UNDECLARED: Final = dict.fromkeys(("running_mean", "running_var"), ("training", "use_input_stats"))
#: Written as in place, but the numbers stay the same.
_HARMLESS: Final = frozenset({"aten::detach_", "aten::requires_grad_"})


@dataclass
class Step:
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
class Hole:
    """Where the value of a step goes."""

    step: int


class Plan:
    """The steps of a graph, in order."""

    def __init__(self, module: GraphModule, graph: FxGraph) -> None:
        nodes = list(graph.nodes)
        self.index = {node.name: position for position, node in enumerate(nodes)}
        last: dict[int, int] = {}
        self.steps: list[Step] = []
        for position, node in enumerate(nodes):
            step = self._step(module, node)
            last.update(dict.fromkeys(step.sources, position))
            self.steps.append(step)
        for source, position in last.items():
            self.steps[position].frees += (source,)
        self.in_place = any(step.writes for step in self.steps)
        self.inputs = [i for i, step in enumerate(self.steps) if step.kind == "input"]

    def _step(self, module: GraphModule, node: FxNode) -> Step:
        if node.op == "placeholder":
            return Step(node.name, "input")
        if node.op == "get_attr":
            found = node.meta.get(OBJECT) or operator.attrgetter(str(node.target))(module)
            return Step(node.name, "call", lambda: found)
        if node.op not in ("call_function", "output"):
            raise UsageError(f"The node {node.name} is a {node.op}, which torch.export does not make.")
        index = self.index
        args = _filled(node.args, index)
        kwargs = _filled(node.kwargs, index)
        holes = tuple((i, arg.step) for i, arg in enumerate(args) if isinstance(arg, Hole))
        sources = tuple(index[one.name] for one in _nodes_in((node.args, node.kwargs)))
        kind = "output" if node.op == "output" else "call"
        target = node.target if kind == "call" else None
        writes = tuple(index[one.name] for one in _written(node)) if kind == "call" else ()
        nested = len(holes) < len(sources)
        modes = node.meta.get(MODES, ())
        return Step(node.name, kind, target, args, kwargs, holes, nested, sources, writes, modes)


def _filled(value: Any, index: dict[str, int]) -> Any:
    """Arguments with holes for nodes; fx's own immutable lists become plain ones."""
    if isinstance(value, FxNode):
        return Hole(index[value.name])
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
    if kind is Hole:
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


def _nodes_in(value: Any) -> Iterator[FxNode]:
    if isinstance(value, FxNode):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _nodes_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _nodes_in(part)
    elif isinstance(value, slice):
        yield from _nodes_in((value.start, value.stop, value.step))


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
