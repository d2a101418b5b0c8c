"""What DLBacktrace says of a node: its type, its layer's name, its hyperparameters.

Everything is read from the op's own schema and the export's signature; no table of arguments is kept.
Called by `DLBacktrace` only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

#: Stands for the value of a node that another node computed: an input of the op, no hyperparameter of it.
COMPUTED: Final = object()
#: From a node to its value, or to `COMPUTED`.
Lookup = Callable[[FxNode], Any]


def layer_type(fx: FxNode, kind: str, target: str) -> str:
    """The kind of a node; ``kind`` and ``target`` of a placeholder are those of the export's signature.

    >>> graph = torch.fx.Graph()
    >>> layer_type(graph.placeholder("p_fc_weight"), "parameter", "fc.weight")
    'Weight'
    """
    if fx.op == "placeholder":
        if kind == "input":
            return "Placeholder"
        if kind == "constant":
            return "Constant"
        return (
            "_".join(part.capitalize() for part in target.rpartition(".")[2].split("_") if part)
            or "Parameter"
        )
    if fx.op == "output":
        return "Output"
    if fx.op == "call_function":
        if not isinstance(fx.target, torch._ops.OpOverload):
            return "Operation"
        if fx.target.namespace == "aten":
            return "ATen_Operation"
    return "CustomOp"


def layer_name(fx: FxNode, type_: str) -> str:
    """What a node is called: the op without its overload, or the kind of what is no call.

    >>> graph = torch.fx.Graph()
    >>> relu = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    >>> layer_name(relu, "ATen_Operation")
    'relu'
    """
    return func_name(fx) or type_


def func_name(fx: FxNode) -> str | None:
    """The name of a function without its overload: ``conv2d``; None of what is no call."""
    if fx.op != "call_function":
        return None
    packet = getattr(fx.target, "overloadpacket", None)
    return str(getattr(packet or fx.target, "__name__", fx.target))


def func_module(fx: FxNode) -> str | None:
    """Where a function is from: ``torch._ops.aten``; None of what is no call."""
    return str(getattr(fx.target, "__module__", "")) if fx.op == "call_function" else None


def method_args(fx: FxNode) -> list[Any]:
    """The positional arguments that are no nodes; nodes inside of lists by name."""
    return [map_arg(arg, _name) for arg in fx.args if not isinstance(arg, FxNode)]


def sources(fx: FxNode) -> list[str]:
    """The node of each input, in the order of the arguments; one used twice is there twice."""
    found: list[str] = []
    map_arg((fx.args, fx.kwargs), lambda node: found.append(node.name))
    return found


def hyperparameters(fx: FxNode, lookup: Lookup) -> dict[str, Any] | None:
    """All arguments of an op but those that were computed, by the names of its schema, defaults included.

    >>> graph = torch.fx.Graph()
    >>> pool = graph.call_function(torch.ops.aten.max_pool2d.default, (graph.placeholder("x"), [2, 2]))
    >>> found = hyperparameters(pool, lambda node: COMPUTED)
    >>> found["kernel_size"], found["stride"], found["ceil_mode"]
    ((2, 2), (2, 2), False)
    """
    if fx.op != "call_function":
        return None
    found = {}
    for name, value, length in _bound(fx):
        plain = _filled(value, lookup)
        if plain is COMPUTED:
            continue
        if length and isinstance(plain, int) and not isinstance(plain, bool):
            plain = (plain,) * length
        found[name] = plain
    if "kernel_size" in found and found.get("stride") == ():
        found["stride"] = found["kernel_size"]  # what an empty stride means to every pooling op
    return found


def _bound(fx: FxNode) -> Iterator[tuple[str, Any, int]]:
    """Each argument: its name, its value, and how many numbers it is if it is always as many."""
    schema = getattr(fx.target, "_schema", None)
    if schema is None:
        names = ("self", "index") if fx.target is operator.getitem else ()
        for position, value in enumerate(fx.args):
            yield names[position] if position < len(names) else f"arg{position}", value, 0
        for name, value in fx.kwargs.items():
            yield name, value, 0
        return
    for position, argument in enumerate(schema.arguments):
        length = argument.N or 0
        if position < len(fx.args) and not argument.kwarg_only:
            yield argument.name, fx.args[position], length
        elif argument.name in fx.kwargs:
            yield argument.name, fx.kwargs[argument.name], length
        elif argument.has_default_value():
            yield argument.name, argument.default_value, length


def _filled(value: Any, lookup: Lookup) -> Any:
    """An argument with the values of its nodes, lists as tuples; `COMPUTED` if any of them is."""
    if isinstance(value, FxNode):
        return lookup(value)
    if isinstance(value, (list, tuple)):
        parts = tuple(_filled(part, lookup) for part in value)
        return COMPUTED if any(part is COMPUTED for part in parts) else parts
    return value


def _name(node: FxNode) -> Any:
    return node.name
