"""From an exported program to the nodes and edges of a `Graph`: names, bound arguments, modules, lines."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Graph as FxGraph
from torch.fx import Node as FxNode

from sightline.graph.exported.dynamic import size_of
from sightline.graph.exported.tracing import is_layers, is_users
from sightline.graph.graph import Edge, Node, Ref
from sightline.notation import position_text, tensor_text
from sightline.trace.data import TensorMeta

_KINDS: Final = {
    InputKind.USER_INPUT: "input",
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
}
_FRAME: Final = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_OPERATORS: Final = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "neg": "-",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "and_": "&", "or_": "|",
}  # fmt: skip


@dataclass
class Lowered:
    """The parts of a graph."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)


def lowered(program: torch.export.ExportedProgram, flat: FxGraph) -> Lowered:
    """Every node of the flattened program as one of ours, with the same name."""
    found = Lowered()
    specs = {getattr(spec.arg, "name", ""): spec for spec in program.graph_signature.input_specs}
    ids: dict[str, int] = {}
    for position, fx in enumerate(flat.nodes):
        ids[fx.name] = position
        spec = specs.get(fx.name) if fx.op == "placeholder" else None
        stack = module_stack(fx)
        found.modules.update({path: kind.rpartition(".")[2] for path, kind in stack})
        arguments = bound_arguments(fx)
        metas = _metas(fx.meta.get("val"))
        path = stack[-1][0] if stack else ""
        op, kind = _op(fx), "call"
        if fx.op == "placeholder":
            kind = _KINDS.get(spec.kind, "constant") if spec is not None else "constant"
            if spec is not None and spec.target:
                op, path = spec.target, spec.target.rpartition(".")[0]
        elif fx.op == "get_attr":
            kind = "constant"
        elif fx.op == "output":
            kind, path, metas = "output", "", ()  # torch tells its results only in archives
        plain = {name: _plain(value) for name, value in arguments.items()}
        if isinstance(plain.get("self"), Ref):
            plain["self"] = Ref(plain["self"].node, _slot(fx, "self"))
        found.nodes.append(
            Node(
                position, fx.name, op, kind, plain, path,
                _source(fx, stack), metas, target=_target(fx), info=_info(fx) if kind != "output" else {},
            )
        )  # fmt: skip
        for argument, other in _flows(arguments):
            slot = _slot(fx, argument)
            outputs = found.nodes[ids[other.name]].outputs
            meta = outputs[slot] if slot < len(outputs) else None
            found.edges.append(Edge(ids[other.name], position, slot, argument, meta))
    return found


def module_stack(fx: FxNode) -> list[tuple[str, str]]:
    """The path and the class of each module around a node, the model first.

    torch marks a second call of one module with ``@1``, in the key and, after loading, in the path.
    """
    stack = fx.meta.get("nn_module_stack") or {}
    found = []
    for key, (path, kind) in stack.items():
        if not key.startswith("_empty"):
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            found.append((path.partition("@")[0], name))
    return found


def module_calls(fx: FxNode) -> list[tuple[str, str]]:
    """The path of each module around a node, with which call of it this is: ``("fc", "L__self__fc@1")``."""
    stack = fx.meta.get("nn_module_stack") or {}
    return [(path.partition("@")[0], key) for key, (path, _) in stack.items() if not key.startswith("_empty")]


# -- arguments -----------------------------------------------------------------------------------


def bound_arguments(fx: FxNode) -> dict[str, Any]:
    """All arguments by the names of the op's own schema, defaults included."""
    if fx.op != "call_function":
        return {"result": fx.args[0]} if fx.op == "output" else {}
    schema = getattr(fx.target, "_schema", None)
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


def _flows(arguments: Any, path: str = "") -> Iterator[tuple[str, FxNode]]:
    """Each node among the arguments, and where it stands: ``tensors[0]``."""
    if isinstance(arguments, FxNode):
        yield path, arguments
    elif isinstance(arguments, dict):
        for name, value in arguments.items():
            yield from _flows(value, f"{path}[{name!r}]" if path else name)
    elif isinstance(arguments, (list, tuple)):
        for index, value in enumerate(arguments):
            yield from _flows(value, f"{path}[{index}]")
    elif isinstance(arguments, slice):
        for name in ("start", "stop", "step"):
            yield from _flows(getattr(arguments, name), f"{path}.{name}")


def _slot(fx: FxNode, argument: str) -> int:
    """Which output of its source an edge carries; only ``getitem`` picks one."""
    if fx.target is operator.getitem and argument == "self" and isinstance(fx.args[1], int):
        return max(fx.args[1], 0)
    return 0


def _plain(value: Any) -> Any:
    """An argument as data without torch: tensors as `Ref`, torch's own constants by name."""
    if isinstance(value, FxNode):
        return Ref(value.name)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else list(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    return str(value).removeprefix("torch.")


# -- what a node is -----------------------------------------------------------------------------------


def _op(fx: FxNode) -> str:
    if fx.op != "call_function":
        return str(fx.target)
    packet = getattr(fx.target, "overloadpacket", None)
    if packet is not None:
        return str(packet.__name__)
    name = str(getattr(fx.target, "__name__", fx.target))
    return _OPERATORS.get(name, name) if getattr(fx.target, "__module__", "") == "_operator" else name


def _target(fx: FxNode) -> str:
    if fx.op != "call_function":
        return str(fx.target)
    if isinstance(fx.target, torch._ops.OpOverload):
        return str(fx.target)
    module = getattr(fx.target, "__module__", "") or ""
    name = str(getattr(fx.target, "__name__", fx.target))
    return f"{module.lstrip('_')}.{name}" if module else name


def _metas(value: Any) -> tuple[TensorMeta, ...]:
    if isinstance(value, torch.Tensor):
        return (_meta(value),)
    if isinstance(value, (list, tuple)):
        return tuple(meta for part in value for meta in _metas(part))
    return ()


def _meta(fake: torch.Tensor) -> TensorMeta:
    strided = fake.layout is torch.strided
    return TensorMeta(
        tuple(map(size_of, fake.shape)),
        tuple(map(size_of, fake.stride())) if strided else None,
        str(fake.dtype).removeprefix("torch."),
        str(fake.device),
        str(fake.layout).removeprefix("torch."),
        fake.dtype.itemsize,
    )


def _info(fx: FxNode) -> dict[str, Any]:
    """Sizes as symbols, where they are not plain numbers."""
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


def _source(fx: FxNode, stack: list[tuple[str, str]]) -> str:
    """The line of the model that made a node: the innermost frame of its stack that is not torch's."""
    frames = _FRAME.findall(fx.meta.get("stack_trace") or "")
    own = [frame for frame in frames if is_users(frame[0])]
    chosen = (own or [frame for frame in frames if is_layers(frame[0])])[-1:]
    if not chosen:
        return ""
    file, line, function = chosen[0]
    classes = [kind for _, kind in stack if not kind.startswith("torch.")]
    if function == "forward" and own and classes:
        function = f"{classes[-1].rpartition('.')[2]}.forward"
    return f"{position_text(file, int(line))} in {function}"
