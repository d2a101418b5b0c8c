"""What DLBacktrace says of a node: its type, its layer's name, its hyperparameters.

Everything is read from the op's own schema and the export's signature; no table of arguments is kept.
Called by `DLBacktrace` only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from sightline.graph.exported.nodes import bound_arguments

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
    filled = ((name, _filled(value, lookup)) for name, value in bound_arguments(fx).items())
    found = {name: plain for name, plain in filled if plain is not COMPUTED}
    if "kernel_size" in found and found.get("stride") == ():
        found["stride"] = found["kernel_size"]  # what an empty stride means to every pooling op
    return found


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
