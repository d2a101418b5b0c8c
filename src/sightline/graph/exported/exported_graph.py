"""`ExportedGraph`: the graph of a model that can be run, edited, checked against the model and saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sightline.argument_checks import argument_text, check_arguments
from sightline.errors import NoSuchNode, UsageError
from sightline.graph.exported.archive import write_archive
from sightline.graph.exported.dynamic import Dynamic
from sightline.graph.exported.inputs import InputSpec
from sightline.graph.exported.interpreter import MISSING, Interpreter, OnNode, Plan, Run
from sightline.graph.exported.outputs import OutputStructure
from sightline.graph.exported.program import (
    OutputBuilder,
    ProgramInfo,
    graph_parts,
    input_spec,
    state_tensors,
    update_tensors,
    user_inputs,
)
from sightline.graph.exported.torch_export import flatten_modes
from sightline.graph.exported.verification import Verification, module_outputs, verify_graph
from sightline.graph.graph import Graph
from sightline.patterns import PathPattern, did_you_mean, segments_of
from sightline.text_encoding import printable

Keep = str | Iterable[str] | Callable[[str], bool] | bool


@printable
@dataclass(frozen=True, eq=False, repr=False)
class ExportedGraph(Graph):
    """The graph of a model that can be run, edited, checked against the model and saved.

    It is a `Graph`: folding, cutting and every format work on it; their results are pictures and cannot
    run. It holds the model's own parameters and buffers, no copies: when training goes on, it computes with
    the new ones, and a run changes the buffers that the model changes in `forward`.
    """

    _program: torch.export.ExportedProgram = None  # type: ignore[assignment] # always given
    flat: torch.fx.Graph = None  # type: ignore[assignment] # mode wrappers inlined
    program_info: ProgramInfo = None  # type: ignore[assignment]
    model: torch.nn.Module | None = None  #: the exported model; None when loaded without

    @property
    def program(self) -> torch.export.ExportedProgram:
        """Torch's own program, with the tensors that the next run computes with: the model's own as they are.

        >>> from sightline.graph.exported import export
        >>> model = torch.nn.Linear(2, 2)
        >>> g = export(model, torch.zeros(3, 2))
        >>> model.weight = torch.nn.Parameter(torch.ones(2, 2))
        >>> g.program.state_dict["weight"] is model.weight
        True
        """
        return update_tensors(self._program, self.model)

    @property
    def dynamic(self) -> Dynamic:
        """Which sizes may differ from the example's, which may not, and which line fixed them."""
        return self.program_info.dynamic

    def __repr__(self) -> str:
        return f"<ExportedGraph {self.name}: {len(self.nodes)} nodes, {len(self.edges)} edges>"

    # -- pictures of it: they cannot run -----------------------------------------------------------------

    @cached_property
    def _picture(self) -> Graph:
        return Graph(self.nodes, self.edges, self.name, self.modules, self.info)

    def subgraph(self, module: str) -> Graph:
        return self._picture.subgraph(module)

    def fold(self) -> Graph:
        return self._picture.fold()

    def collapse(self, depth: int) -> Graph:
        return self._picture.collapse(depth)

    def prune(self, *what: str | Iterable[str]) -> Graph:
        return self._picture.prune(*what)

    # -- running -------------------------------------------------------------------------------------

    def run(
        self,
        *inputs: Any,
        keep: Keep = True,
        until: str | None = None,
        on_node: OnNode | None = None,
        edit: dict[str, Any] | None = None,
        given: Run | None = None,
        **kwargs: Any,
    ) -> Run:
        """Run the graph: the inputs and outputs of every node, and the model's output.

        Runs in the caller's grad mode. In-place ops, buffers that `forward` updates and inputs it writes to
        behave as in the model; each value is recorded as it was when its node returned it.

        - ``keep``: the nodes whose values stay, as a glob over node names and module paths, a list of them,
          or a callable of the name; ``()`` keeps none. Other values are freed when no longer needed.
        - ``until``: stop after this node, or after the last one of this module.
        - ``on_node(name, inputs, outputs)`` is called for every node that ran.
        - ``edit``: new values, ``{"relu_1": tensor}`` or ``{"blocks.*.mlp": lambda out: out * 0}``, by node
          name, module path (its output) or glob.
        - ``given``: an earlier run whose inputs and values are taken over; only what an edit changes runs
          again. A graph with in-place ops runs again as a whole.

        >>> from sightline.graph.exported import export
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU(), torch.nn.Tanh())
        >>> g = export(model, torch.zeros(2, 3))
        >>> io = g.run(torch.ones(4, 3))
        >>> io["relu"].outputs.shape, g.run(edit={"1": torch.zeros(4, 3)}, given=io).output.sum()
        (torch.Size([4, 3]), tensor(0.))
        """
        _check_options(keep, until, on_node, edit, given)
        plan = self._plan
        values = self._input_values(inputs, kwargs, given)
        named = {plan.steps[position].name: value for position, value in values.items()}
        edits = {}
        for pattern, value in (edit or {}).items():
            for position in self._positions(pattern, "edit", outputs=True):
                if plan.steps[position].kind == "output":
                    raise UsageError("The output itself cannot be edited: edit the node it comes from.")
                edits[position] = value
        run = Interpreter(
            plan,
            values,
            lambda results: self._output_builder.build(results, named),
            self._positions_to_keep(keep),
            None if until is None else max(self._positions(until, "until", outputs=False)),
            on_node,
            edits,
            given,
            self._location,
        ).run()
        run.left_out = self._left_out
        return run

    def verify(self, *inputs: Any, **kwargs: Any) -> Verification:
        """Compare a run with the model itself, within torch's usual tolerances.

        True where they agree; if not, ``print`` it: it names the first module, node and line that differ.

        >>> from sightline.graph.exported import export
        >>> print(export(torch.nn.ReLU(), torch.ones(2, 3)).verify(torch.randn(5, 3)))
        The graph computes what the model computes.
        """
        if self.model is None:
            raise UsageError(
                "This graph was loaded without its model, so there is nothing to compare it with: "
                "load_graph(path, model=model)."
            )
        self._input_spec.flatten(inputs, kwargs)  # raises an error where the inputs do not fit
        result = verify_graph(
            self.model,
            self.run,
            lambda output: OutputStructure().simplify(output),  # without parts that the graph cannot return
            self._outputs,
            lambda name: self[name].source,
            inputs,
            kwargs,
        )
        return replace(result, left_out=self._left_out)

    # -- on disk -------------------------------------------------------------------------------------

    @check_arguments
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph: ``.pt2`` is torch's archive, weights included, for `load_graph`; else a picture.

        Loading an archive can run code: people who load yours have to trust you.
        """
        if Path(path).suffix == ".pt2":
            write_archive(self.program, self.program_info, Path(path))
        else:
            super().save(path)

    # -- parts, created on first use ---------------------------------------------------------------

    @cached_property
    def _plan(self) -> Plan:
        return Plan(self._program.graph_module, self.flat)

    @cached_property
    def _input_spec(self) -> InputSpec:
        return input_spec(self._program, self.program_info)

    @cached_property
    def _output_builder(self) -> OutputBuilder:
        return OutputBuilder(self._program, self.program_info.output_structure)

    def _state(self) -> dict[int, Any]:
        """The tensors of the model as it is now: loading a checkpoint may put others in their place."""
        tensors = state_tensors(self._program, self.model)
        return {self._plan.index[name]: value for name, value in tensors.items()}

    @cached_property
    def _input_positions(self) -> list[int]:
        return [self._plan.index[name] for name, _ in user_inputs(self._program)]

    @cached_property
    def _outputs(self) -> dict[tuple[str, int], list[str]]:
        return module_outputs(list(self.flat.nodes))

    @property
    def _left_out(self) -> tuple[str, ...]:
        return tuple(self.info.get("left_out", ()))

    # -- options of a run ----------------------------------------------------------------------------

    def _input_values(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], given: Run | None
    ) -> dict[int, Any]:
        if given is None:
            leaves = self._input_spec.flatten(inputs, kwargs)
            return {**self._state(), **dict(zip(self._input_positions, leaves, strict=True))}
        if inputs or kwargs:
            raise UsageError("With `given=` the inputs are those of the earlier run: leave them out.")
        if given._plan is not self._plan:
            raise UsageError("`given=` is a run of another graph.")
        values = self._state()
        for position in self._input_positions:
            value = given._records[position]
            if value is MISSING:
                name = self._plan.steps[position].name
                raise UsageError(
                    f"The run in `given=` did not keep the input {name!r}, from which to run again."
                )
            copied = self._plan.in_place and isinstance(value, torch.Tensor)
            values[position] = value.clone() if copied else value
        return values

    def _positions_to_keep(self, keep: Keep) -> frozenset[int] | None:
        if keep is True:
            return None
        if callable(keep):
            return frozenset(position for name, position in self._plan.index.items() if keep(name))
        if keep is False:
            return frozenset()
        patterns = [keep] if isinstance(keep, str) else list(keep)
        return frozenset(
            position for pattern in patterns for position in self._positions(pattern, "keep", outputs=False)
        )

    def _positions(self, pattern: str, option: str, *, outputs: bool) -> list[int]:
        """The nodes that a name, module path or glob selects; of a module all nodes, or only its outputs."""
        index = self._plan.index
        if pattern in index:
            return [index[pattern]]
        matches = PathPattern(pattern)
        positions = [index[name] for name in index if fnmatchcase(name, pattern)]
        if not positions and outputs:
            for (path, _), names in self._outputs.items():
                if path and matches.exactly(segments_of(path)):
                    if len(names) != 1:
                        listed = ", ".join(names) or "none"
                        raise UsageError(
                            f"The module {path!r} has {len(names)} outputs in the graph ({listed}): "
                            "name one of them."
                        )
                    positions.append(index[names[0]])
        elif not positions:
            positions = [
                index[node.name] for node in self.nodes if node.module and matches(segments_of(node.module))
            ]
        if not positions:
            # Parameters come last: a misspelt name is seldom one of theirs.
            calls = [node.name for node in self.nodes if node.kind == "call"]
            candidates = dict.fromkeys([*calls, *self.modules, *index])
            raise NoSuchNode(
                f"`{option}=` names {pattern!r}, which this graph does not have"
                f"{did_you_mean(pattern, candidates)}"
            )
        return positions

    def _location(self, name: str) -> str:
        """The module and the line of a node, to add to an error in it."""
        node = self[name]
        return "".join(
            f", {part}" for part in (f"module {node.module}" if node.module else "", node.source) if part
        )


def _check_options(keep: Any, until: Any, on_node: Any, edit: Any, given: Any) -> None:
    """Raise `UsageError` for options that `ExportedGraph.run` cannot take."""
    globs = isinstance(keep, list | tuple | set | frozenset) and all(
        isinstance(pattern, str) for pattern in keep
    )
    if not (isinstance(keep, bool | str) or callable(keep) or globs):
        raise UsageError(
            f"keep={argument_text(keep)} is not a choice; it is True, False, a glob, a list of globs or a "
            "function of a name."
        )
    if until is not None and not isinstance(until, str):
        raise UsageError(f"until={argument_text(until)} must be the name of a node or a module.")
    if on_node is not None and not callable(on_node):
        raise UsageError(f"on_node={argument_text(on_node)} must be a function of name, inputs and outputs.")
    if edit is not None and not (isinstance(edit, dict) and all(isinstance(name, str) for name in edit)):
        raise UsageError(
            f"edit={argument_text(edit)} must be a dict from names of nodes or modules to new values."
        )
    if given is not None and not isinstance(given, Run):
        raise UsageError(f"given={argument_text(given)} must be a run of this graph: given=g.run(x).")


def make_graph(
    program: torch.export.ExportedProgram, info: ProgramInfo, model: torch.nn.Module | None
) -> ExportedGraph:
    """The graph of a program; with ``model`` it computes with the model's own tensors."""
    flat = flatten_modes(program)
    parts = graph_parts(program, flat)
    name = str(info.info.get("model", ""))
    nodes, edges = tuple(parts.nodes), tuple(parts.edges)
    return ExportedGraph(nodes, edges, name, parts.modules, dict(info.info), program, flat, info, model)
