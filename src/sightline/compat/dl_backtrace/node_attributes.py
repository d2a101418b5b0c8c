"""The attributes of a node in `DLBacktrace`: type, names, arguments and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from sightline.graph.exported.program import bound_arguments
from sightline.graph.exported.torchapi import OpOverload

#: Marks an argument that another node computed: an input of the op, not a hyperparameter.
COMPUTED: Final = object()
#: From a node to its value, or to `COMPUTED`.
Lookup = Callable[[FxNode], Any]


def layer_type(fx: FxNode, kind: str, target: str) -> str:
    """The kind of a node; ``kind`` and ``target`` of a placeholder are those of the export's signature.

    >>> import torch
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
        if not isinstance(fx.target, OpOverload):
            return "Operation"
        if fx.target.namespace == "aten":
            return "ATen_Operation"
    return "CustomOp"


def layer_name(fx: FxNode, type_: str) -> str:
    """The name of a node: the op without its overload, or the kind of a node that is not a call.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> relu = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    >>> layer_name(relu, "ATen_Operation")
    'relu'
    """
    return func_name(fx) or type_


def func_name(fx: FxNode) -> str | None:
    """The name of a function without its overload: ``conv2d``; None for a node that is not a call."""
    if fx.op != "call_function":
        return None
    packet = getattr(fx.target, "overloadpacket", None)
    return str(getattr(packet or fx.target, "__name__", fx.target))


def func_module(fx: FxNode) -> str | None:
    """The module of a function: ``torch._ops.aten``; None for a node that is not a call."""
    return str(getattr(fx.target, "__module__", "")) if fx.op == "call_function" else None


def method_args(fx: FxNode) -> list[Any]:
    """The positional arguments that are not nodes; nodes inside lists by name."""
    return [map_arg(arg, lambda node: node.name) for arg in fx.args if not isinstance(arg, FxNode)]


def sources(fx: FxNode) -> list[str]:
    """The node of each input, in the order of the arguments; one that is used twice is listed twice."""
    names: list[str] = []
    map_arg((fx.args, fx.kwargs), lambda node: names.append(node.name))
    return names


def hyperparameters(fx: FxNode, lookup: Lookup) -> dict[str, Any] | None:
    """The arguments of an op that no node computed, by the names of its schema, defaults included.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> pool = graph.call_function(torch.ops.aten.max_pool2d.default, (graph.placeholder("x"), [2, 2]))
    >>> arguments = hyperparameters(pool, lambda node: COMPUTED)
    >>> arguments["kernel_size"], arguments["stride"], arguments["ceil_mode"]
    ((2, 2), (2, 2), False)
    """
    if fx.op != "call_function":
        return None
    filled = ((name, _fill_argument(value, lookup)) for name, value in bound_arguments(fx).items())
    arguments = {name: value for name, value in filled if value is not COMPUTED}
    if "kernel_size" in arguments and arguments.get("stride") == ():
        arguments["stride"] = arguments["kernel_size"]  # the meaning of an empty stride in every pooling op
    return arguments


def _fill_argument(value: Any, lookup: Lookup) -> Any:
    """An argument with the values of its nodes, lists as tuples; `COMPUTED` if any of them is."""
    if isinstance(value, FxNode):
        return lookup(value)
    if isinstance(value, (list, tuple)):
        parts = tuple(_fill_argument(part, lookup) for part in value)
        return COMPUTED if any(part is COMPUTED for part in parts) else parts
    return value
