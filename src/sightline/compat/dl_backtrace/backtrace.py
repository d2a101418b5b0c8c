"""`DLBacktrace`: trace a model once, then get the inputs and outputs of every node for any inputs."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from sightline.errors import ExportError, UsageError
from sightline.graph.exported import ExportedGraph, Run, export
from sightline.graph.exported.program import bound_arguments, module_stack, state_tensors
from sightline.graph.exported.torchapi import OpOverload, pytree

if TYPE_CHECKING:
    import networkx as nx


#: Marks an argument that another node computed: an input of the op, not a hyperparameter.
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
        if not isinstance(fx.target, OpOverload):
            return "Operation"
        if fx.target.namespace == "aten":
            return "ATen_Operation"
    return "CustomOp"


def layer_name(fx: FxNode, type_: str) -> str:
    """The name of a node: the op without its overload, or the kind of a node that is not a call.

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


NodeValues = dict[str, Any]


class DLBacktrace:
    """The graph of a model, and the values of its nodes for the inputs of each `predict`.

    - ``input_for_graph``: a tensor, the positional inputs as a tuple or list, or keyword inputs as a dict.
    - ``dynamic_shapes``: torch's; without it every size is dynamic that the model allows to be.
    - ``device``: ``"cpu"`` or ``"cuda"``. Everything runs where the model is; it is not moved.
    - ``verbose``: print what was traced, and in `predict` every node.
    - ``strict_cpu`` and ``collect_node_module_map`` are accepted; a run is that of the model either way, and
      `fx_node_to_module` always exists.

    >>> dlb = DLBacktrace(model=torch.nn.Linear(3, 2), input_for_graph=torch.randn(4, 3))
    >>> dlb.layer_stack
    ['p_weight', 'p_bias', 'input', 'linear', 'output']
    >>> node_io = dlb.predict(torch.randn(7, 3))
    >>> node_io["linear"]["layer_name"], node_io["output"]["output_values"].shape
    ('linear', torch.Size([7, 2]))
    """

    def __init__(
        self,
        model: torch.nn.Module,
        input_for_graph: Any,
        dynamic_shapes: Any = None,
        device: str | torch.device = "cpu",
        verbose: bool = False,
        strict_cpu: bool = True,
        collect_node_module_map: bool = False,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"DLBacktrace takes a torch.nn.Module, not a {type(model).__name__}.")
        _check_device(device)
        self.model = model
        self.device = device
        self.verbose = verbose
        self.strict_cpu = strict_cpu
        self.collect_node_module_map = collect_node_module_map
        self.dynamic_shapes = dynamic_shapes
        args, kwargs = _call_arguments(model, input_for_graph)
        self.input_for_graph: Any = kwargs or args
        self.node_io: dict[str, NodeValues] = {}
        self._traces: list[tuple[Any, ExportedGraph]] = []
        self._select(self._trace(args, kwargs))
        if verbose:
            _print(f"{self.exported!r}\n{self.exported.dynamic}")

    # -- the graph ---------------------------------------------------------------------------------

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedGraph:
        dynamic: Any = "auto" if self.dynamic_shapes is None else self.dynamic_shapes
        with _eval_mode(self.model):
            exported = export(self.model, args, kwargs, dynamic=dynamic)
        self._traces.append(((args, kwargs), exported))
        return exported

    def _select(self, exported: ExportedGraph) -> None:
        """Make one of the traces the current one."""
        self.exported = exported
        self.tracer = exported.program.graph_module
        self._nodes: dict[str, FxNode] = {fx.name: fx for fx in exported.flat.nodes}
        self.layer_stack = list(self._nodes)
        self._weights = self.extracted_weights
        self.placeholder_to_real_name = {name: exported[name].op for name in self._weights}
        stacks = {name: module_stack(fx) for name, fx in self._nodes.items()}
        self.fx_node_to_module = {name: stack[-1] for name, stack in stacks.items() if stack}
        self._graph = self._make_graph()

    @property
    def exported_program(self) -> torch.export.ExportedProgram:
        """Torch's own program of the current trace."""
        return self.exported.program

    @property
    def extracted_weights(self) -> dict[str, Any]:
        """The tensor of each placeholder that is not an input, as the model has it now."""
        return state_tensors(self.exported.program, self.model)

    @property
    def graph(self) -> nx.DiGraph:
        """The nodes by name, with their attributes; weights are those that the model has now."""
        weights = self.extracted_weights
        if any(tensor is not self._weights[name] for name, tensor in weights.items()):
            self._weights = weights
            for name, fx in self._nodes.items():
                self._graph.nodes[name]["layer_hyperparams"] = hyperparameters(fx, self._static_value)
        return self._graph

    def _make_graph(self) -> nx.DiGraph:
        import networkx as nx

        graph = nx.DiGraph()
        for name, fx in self._nodes.items():
            node = self.exported[name]
            kind = layer_type(fx, node.kind, node.op)
            graph.add_node(
                name,
                parents=[other.name for other in fx.all_input_nodes],
                children=[other.name for other in fx.users],
                method_args=method_args(fx),
                node_type=fx.op,
                layer=fx.target,
                layer_type=kind,
                layer_name=layer_name(fx, kind),
                func_name=func_name(fx),
                func_module=func_module(fx),
                layer_hyperparams=hyperparameters(fx, self._static_value),
            )
        graph.add_edges_from(
            (other.name, fx.name) for fx in self._nodes.values() for other in fx.all_input_nodes
        )
        return graph

    def _static_value(self, fx: FxNode) -> Any:
        """A tensor of the model, a size as its symbol, or `COMPUTED` for what only a run gives."""
        if fx.name in self._weights:
            return self._weights[fx.name]
        value = fx.meta.get("val")
        return str(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else COMPUTED

    # -- a run -------------------------------------------------------------------------------------

    def predict(
        self, *inputs: Any, temperature: float = 1.0, debug: bool | None = None, **kwargs: Any
    ) -> dict[str, NodeValues]:
        """Run the model: the inputs and outputs of every node by name, in the order of the graph.

        Inputs may have other sizes than the example where those are dynamic. An op that fails raises, with
        its node and line. ``temperature`` divides what the model returns, if that is one tensor.

        >>> dlb = DLBacktrace(torch.nn.Softmax(dim=-1), torch.randn(2, 3))
        >>> node_io = dlb.predict(torch.zeros(5, 4))
        >>> node_io["softmax"]["input_sources"], node_io["softmax"]["layer_hyperparams"]["dim"]
        (['input'], -1)
        """
        if temperature <= 0:
            raise UsageError(f"temperature must be greater than 0, not {temperature}.")
        if len(inputs) == 1 and not kwargs and isinstance(self.input_for_graph, dict):
            inputs, kwargs = _call_arguments(self.model, inputs[0])
        with torch.no_grad():
            run = self._run(inputs, kwargs)
        graph = self.graph
        self.node_io = {name: self._values(name, graph.nodes[name], run) for name in self.layer_stack}
        if temperature != 1.0:
            self._scale(temperature)
        if self.verbose if debug is None else debug:
            for name, values in self.node_io.items():
                _print(
                    f"{name}: {values['layer_type']} ({values['layer_name']}) of {values['input_sources']}"
                )
        return self.node_io

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Run the trace that takes these inputs; torch fixes sizes of 1, so others need one more trace."""
        refusal: UsageError | None = None
        for _, exported in reversed(self._traces):
            try:
                run: Run = exported.run(*args, **kwargs)
            except UsageError as error:
                refusal = error
            else:
                if exported is not self.exported:
                    self._select(exported)
                return run
        assert refusal is not None
        example = self._traces[0][0]
        if self.dynamic_shapes is not None or not _grew_from_one(example, (args, kwargs)):
            raise refusal
        try:
            exported = self._trace(args, kwargs)
        except ExportError:
            raise refusal from None
        self._select(exported)
        return exported.run(*args, **kwargs)

    def _values(self, name: str, attributes: Mapping[str, Any], run: Run) -> NodeValues:
        fx, io = self._nodes[name], run[name]

        def value(other: FxNode) -> Any:
            if other.name in self._weights:
                return self._weights[other.name]
            output = run[other.name].outputs
            return output if isinstance(output, (bool, int, float)) else COMPUTED

        return {
            "input_sources": sources(fx),
            "input_values": io.inputs[0] if len(io.inputs) == 1 else io.inputs,
            "output_values": io.outputs,
            "layer_type": attributes["layer_type"],
            "node_type": attributes["node_type"],
            "method_args": attributes["method_args"],
            "layer": attributes["layer"],
            "layer_name": attributes["layer_name"],
            "func_name": attributes["func_name"],
            "func_module": attributes["func_module"],
            "output_children": attributes["children"],
            "layer_hyperparams": hyperparameters(fx, value),
        }

    def _scale(self, temperature: float) -> None:
        values = self.node_io[self.layer_stack[-1]]
        if not isinstance(values["output_values"], torch.Tensor):
            raise UsageError(
                f"temperature scales a model that returns one tensor; this one returns a "
                f"{type(values['output_values']).__name__}: divide what you need yourself."
            )
        values["output_values"] = values["output_values"] / temperature

    # -- pictures, and what is not offered ------------------------------------------------------------

    def visualize(self, save_path: str | os.PathLike[str] = "graph.png") -> None:
        """Draw the graph into a file, in the format of its suffix, or ``.png``."""
        path = Path(save_path)
        self.exported.save(path if path.suffix else path.with_suffix(".png"))

    def evaluation(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002  # any call gets the error
        """Raise `UsageError`: relevance is not offered."""
        raise UsageError(
            "sightline traces and runs models but computes no relevance: use `predict` for the values of "
            "every node, and the original dl_backtrace package for evaluation and its pictures."
        )

    visualize_dlbacktrace = evaluation
    visualize_dlbacktrace_with_modules = evaluation
    print_all_relevance_info = evaluation

    def __repr__(self) -> str:
        return f"<DLBacktrace {type(self.model).__name__}: {len(self.layer_stack)} nodes>"


def _check_device(device: str | torch.device) -> None:
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"device must be 'cpu' or 'cuda', not {str(device)!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        warnings.warn("There is no CUDA device here: the model runs where it is.", stacklevel=3)


def _call_arguments(model: torch.nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``input_for_graph`` stands for: a dict is keywords if `forward` has them all."""
    if isinstance(example, Mapping):
        parameters = inspect.signature(model.forward).parameters
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if all(isinstance(key, str) and (any_name or key in parameters) for key in example):
            return (), dict(example)
        return (example,), {}
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def _grew_from_one(example: Any, inputs: Any) -> bool:
    """Whether inputs differ from the example only in sizes, and a size of 1 has changed."""
    before, spec = pytree.tree_flatten(example)
    now, inputs_spec = pytree.tree_flatten(inputs)
    if spec != inputs_spec:
        return False
    pairs = [(a, b) for a, b in zip(before, now, strict=True) if isinstance(a, torch.Tensor)]
    if not all(isinstance(b, torch.Tensor) and (a.dtype, a.dim()) == (b.dtype, b.dim()) for a, b in pairs):
        return False
    return any(was == 1 != size for a, b in pairs for was, size in zip(a.shape, b.shape, strict=True))


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch the model to eval mode, and every module back to its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if any(training for _, training in modes):
            model.eval()
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.training = training


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
