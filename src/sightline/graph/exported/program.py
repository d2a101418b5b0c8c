"""From an exported program to the nodes and edges of a `Graph`, and between its tensors and the model's."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.export.graph_signature import InputSpec as InputSpecification
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from sightline.data.file_owners import layer_file, model_file
from sightline.data.forms import map_leaves
from sightline.data.op_groups import PYTHON_OPERATORS
from sightline.data.trace_data import TensorMeta
from sightline.graph.exported.dynamic import Dimension, Dynamic
from sightline.graph.exported.inputs import InputSpec
from sightline.graph.exported.outputs import OutputStructure
from sightline.graph.exported.torchapi import OpOverload, children_of, op_schema, pytree, size_hint
from sightline.graph.graph import Edge, Node, Ref
from sightline.notation import position_text, tensor_text

#: Results that are new values of existing tensors, not part of the model's output.
_MUTATIONS: Final = tuple(kind for kind in OutputKind if kind.name.endswith("_MUTATION"))


@dataclass(frozen=True)
class ProgramInfo:
    """Facts that an archive of torch does not hold: plain data stored beside the program."""

    dynamic: Dynamic
    output_structure: OutputStructure
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    names: tuple[str, ...]  #: of the inputs, one for each leaf
    info: dict[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "dynamic": self.dynamic.to_plain(),
            "returned": self.output_structure.to_plain(),
            "positional": list(self.positional),
            "keywords": list(self.keywords),
            "names": list(self.names),
            "info": self.info,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ProgramInfo:
        """The inverse of `to_plain`."""
        return cls(
            Dynamic.from_plain(plain["dynamic"]),
            OutputStructure.from_plain(plain["returned"]),
            tuple(plain["positional"]),
            tuple(plain["keywords"]),
            tuple(plain["names"]),
            dict(plain["info"]),
        )

    @classmethod
    def from_program(cls, program: torch.export.ExportedProgram) -> ProgramInfo:
        """The facts that can be read from an archive of another tool."""
        args, kwargs = children_of(program.call_spec.in_spec)
        names = tuple(name for name, _ in user_inputs(program))
        flat = [(name, fake) for name, fake in user_inputs(program) if isinstance(fake, torch.Tensor)]
        dimensions = tuple(
            Dimension(name, dim, size_hint(size), str(size) if type(size) is not int else "")
            for name, fake in flat
            for dim, size in enumerate(fake.shape)
        )
        dtypes = {name: str(fake.dtype).removeprefix("torch.") for name, fake in flat}
        note = "This archive was not written by sightline: it does not say which line fixed a size."
        positional = []
        leaf = 0
        for index, child in enumerate(children_of(args)):
            positional.append(names[leaf] if child.num_leaves == 1 else f"args[{index}]")
            leaf += child.num_leaves
        return cls(
            Dynamic(dimensions, (), dtypes, (note,)),
            OutputStructure(),
            tuple(positional),
            tuple(kwargs.context or ()),
            names,
        )


def user_inputs(program: torch.export.ExportedProgram) -> list[tuple[str, Any]]:
    """The placeholder of each leaf of the arguments and its example: a fake tensor, or a constant."""
    inputs = []
    for node, spec in _placeholders(program):
        if spec.kind is InputKind.USER_INPUT:
            example = spec.arg.value if isinstance(spec.arg, ConstantArgument) else node.meta["val"]
            inputs.append((node.name, example))
    return inputs


def _placeholders(program: torch.export.ExportedProgram) -> Iterator[tuple[FxNode, InputSpecification]]:
    """Each placeholder of a program with the input or tensor it stands for."""
    nodes = program.graph.find_nodes(op="placeholder")
    yield from zip(nodes, program.graph_signature.input_specs, strict=True)


def input_spec(program: torch.export.ExportedProgram, info: ProgramInfo) -> InputSpec:
    """The inputs a program must be called with."""
    examples = dict(zip(info.names, (example for _, example in user_inputs(program)), strict=True))
    devices = {name: str(value.device) for name, value in examples.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in examples.items() if name not in devices}
    spec = program.call_spec.in_spec
    return InputSpec(spec, info.positional, info.keywords, info.names, constants, devices, info.dynamic)


def state_tensors(program: torch.export.ExportedProgram, model: torch.nn.Module | None) -> dict[str, Any]:
    """The tensor of each placeholder that is not an input: the model's own where there is a model."""
    own = _model_tensors(model)
    tensors = {}
    for node, spec in _placeholders(program):
        if spec.kind is InputKind.USER_INPUT:
            continue
        target = spec.target or ""
        for source in (own, program.state_dict, program.constants):
            if target in source:
                tensors[node.name] = source[target]
                break
        else:
            tensors[node.name] = getattr(program.graph_module, target, None)
    return tensors


def update_tensors(
    program: torch.export.ExportedProgram, model: torch.nn.Module | None
) -> torch.export.ExportedProgram:
    """The program itself, with the tensors that the model has now.

    They differ after ``load_state_dict(…, assign=True)``, and where the program comes from an archive.
    """
    own = _model_tensors(model)
    for tensors in (program.state_dict, program.constants):
        tensors.update({name: own[name] for name in tensors.keys() & own.keys()})
    return program


def _model_tensors(model: torch.nn.Module | None) -> dict[str, Any]:
    """The parameters and buffers of a model, under every name they have."""
    if model is None:
        return {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


class OutputBuilder:
    """Builds the model's output from the flat results of its graph."""

    def __init__(self, program: torch.export.ExportedProgram, structure: OutputStructure) -> None:
        self._kinds = [spec.kind for spec in program.graph_signature.output_specs]
        self._targets = [spec.target for spec in program.graph_signature.output_specs]
        self._spec = program.call_spec.out_spec
        self._structure = structure
        self._placeholders = {spec.target: node.name for node, spec in _placeholders(program)}

    def build(self, results: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """The model's output; tensors that the program changes get their new values."""
        leaves = []
        for kind, target, value in zip(self._kinds, self._targets, results, strict=True):
            if kind in _MUTATIONS:
                changed = inputs[self._placeholders.get(target) or str(target)]
                with torch.no_grad():
                    changed.copy_(value)
            elif kind is not OutputKind.TOKEN:
                leaves.append(value)
        return self._structure.restore(pytree.tree_unflatten(leaves, self._spec))


_KINDS: Final = {
    InputKind.USER_INPUT: "input",
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
}
_FRAME: Final = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


@dataclass
class GraphParts:
    """The nodes, edges and modules of a graph."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)


def graph_parts(program: torch.export.ExportedProgram, flat: FxGraph) -> GraphParts:
    """Every node of the flattened program as a `Node` of the same name, with the edges between them."""
    parts = GraphParts()
    specs = {node.name: spec for node, spec in _placeholders(program)}
    ids: dict[str, int] = {}
    for position, fx in enumerate(flat.nodes):
        ids[fx.name] = position
        spec = specs.get(fx.name) if fx.op == "placeholder" else None
        stack = module_calls(fx)
        parts.modules.update({path: kind.rpartition(".")[2] for path, kind, _ in stack})
        arguments = bound_arguments(fx)
        metas = _metas(fx.meta.get("val"))
        path = stack[-1][0] if stack else ""
        (op, target), kind = _op_names(fx), "call"
        if fx.op == "placeholder":
            kind = _KINDS.get(spec.kind, "constant") if spec is not None else "constant"
            if spec is not None and spec.target:
                op, path = spec.target, spec.target.rpartition(".")[0]
        elif fx.op == "get_attr":
            kind = "constant"
        elif fx.op == "output":
            kind, path, metas = "output", "", ()  # torch has their metadata only in archives
        plain = {name: _plain(value) for name, value in arguments.items()}
        if isinstance(plain.get("self"), Ref):
            plain["self"] = Ref(plain["self"].node, _slot(fx, "self"))
        parts.nodes.append(
            Node(
                position, fx.name, op, kind, plain, path, _source(fx, stack), metas, target=target,
                info=_symbolic_sizes(fx) if kind != "output" else {},
            )
        )  # fmt: skip
        for argument, other in _node_arguments(arguments):
            slot = _slot(fx, argument)
            outputs = parts.nodes[ids[other.name]].outputs
            meta = outputs[slot] if slot < len(outputs) else None
            parts.edges.append(Edge(ids[other.name], position, slot, argument, meta))
    return parts


def module_calls(fx: FxNode) -> list[tuple[str, str, str]]:
    """The path, the class and the call of each module around a node, the model first.

    torch marks a second call of one module with ``@1``: ``L__self__fc@1``; after loading, in the path too.
    """
    calls = []
    for key, (path, kind) in (fx.meta.get("nn_module_stack") or {}).items():
        if not key.startswith("_empty"):
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            calls.append((path.partition("@")[0], name, key))
    return calls


# -- arguments -----------------------------------------------------------------------------------


def bound_arguments(fx: FxNode) -> dict[str, Any]:
    """All arguments by their names in the schema of the op, defaults included."""
    if fx.op != "call_function":
        return {"result": fx.args[0]} if fx.op == "output" else {}
    schema = op_schema(fx.target)
    if schema is None:
        names = ("self", "index") if fx.target is operator.getitem else ()
        bound = {names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(fx.args)}
        return {**bound, **fx.kwargs}
    bound = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(fx.args) and not argument.kwarg_only:
            bound[argument.name] = fx.args[position]
        elif argument.name in fx.kwargs:
            bound[argument.name] = fx.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def _node_arguments(arguments: Any, path: str = "") -> Iterator[tuple[str, FxNode]]:
    """Each node among the arguments, after the path of its argument: ``tensors[0]``."""
    if isinstance(arguments, FxNode):
        yield path, arguments
    elif isinstance(arguments, dict):
        for name, value in arguments.items():
            yield from _node_arguments(value, f"{path}[{name!r}]" if path else name)
    elif isinstance(arguments, (list, tuple)):
        for index, value in enumerate(arguments):
            yield from _node_arguments(value, f"{path}[{index}]")
    elif isinstance(arguments, slice):
        for name in ("start", "stop", "step"):
            yield from _node_arguments(getattr(arguments, name), f"{path}.{name}")


def _slot(fx: FxNode, argument: str) -> int:
    """Which output of its source an edge carries; only ``getitem`` picks one."""
    if fx.target is operator.getitem and argument == "self" and isinstance(fx.args[1], int):
        return max(fx.args[1], 0)
    return 0


def _plain(value: Any) -> Any:
    """An argument as data without torch: tensors as `Ref`, torch's own constants by name."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, FxNode):
            return Ref(leaf.name)
        is_plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str))
        return leaf if is_plain else str(leaf).removeprefix("torch.")

    return map_leaves(value, plain)


# -- nodes -----------------------------------------------------------------------------------


def _op_names(fx: FxNode) -> tuple[str, str]:
    """The short and the full name of an op: ``add`` and ``aten.add.Tensor``."""
    if fx.op != "call_function":
        return str(fx.target), str(fx.target)
    module = getattr(fx.target, "__module__", "") or ""
    name = str(getattr(fx.target, "__name__", fx.target))
    short = PYTHON_OPERATORS.get(name, name) if module == "_operator" else name
    packet = getattr(fx.target, "overloadpacket", None)
    if packet is not None:
        short = str(packet.__name__)
    if isinstance(fx.target, OpOverload):
        return short, str(fx.target)
    return short, f"{module.lstrip('_')}.{name}" if module else name


def _metas(value: Any) -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta(
            tuple(map(size_hint, fake.shape)),
            tuple(map(size_hint, fake.stride())) if fake.layout is torch.strided else None,
            str(fake.dtype).removeprefix("torch."),
            str(fake.device),
            str(fake.layout).removeprefix("torch."),
            fake.dtype.itemsize,
        )
        for fake in pytree.tree_leaves(value)
        if isinstance(fake, torch.Tensor)
    )


def _symbolic_sizes(fx: FxNode) -> dict[str, Any]:
    """The outputs with symbolic sizes, where a size is not a plain number."""
    value = fx.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    texts = [
        tensor_text(part.shape, str(part.dtype), str(part.device))
        if isinstance(part, torch.Tensor)
        else str(part)
        for part in parts
        if isinstance(part, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    ]
    symbolic = any(
        isinstance(part, torch.SymInt) or any(isinstance(size, torch.SymInt) for size in part.shape)
        for part in parts
        if isinstance(part, (torch.Tensor, torch.SymInt))
    )
    return {"symbolic": ", ".join(texts)} if symbolic else {}


def _source(fx: FxNode, stack: list[tuple[str, str, str]]) -> str:
    """The line of the model that a node comes from: the innermost frame of its stack outside torch."""
    frames = _FRAME.findall(fx.meta.get("stack_trace") or "")
    own = [frame for frame in frames if model_file(frame[0])]
    chosen = (own or [frame for frame in frames if layer_file(frame[0])])[-1:]
    if not chosen:
        return ""
    file, line, function = chosen[0]
    classes = [kind for _, kind, _ in stack if not kind.startswith("torch.")]
    if function == "forward" and own and classes:
        function = f"{classes[-1].rpartition('.')[2]}.forward"
    return f"{position_text(file, int(line))} in {function}"
