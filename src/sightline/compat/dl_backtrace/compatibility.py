"""What of a model would not export, or would not be in its graph, in words."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from sightline.compat.dl_backtrace.example_inputs import call_arguments, eval_mode
from sightline.errors import ExportError
from sightline.graph.exported import ExportedGraph, export


def diagnose_model_compatibility(
    model: torch.nn.Module, input_for_graph: Any, dynamic_shapes: Any = None
) -> dict[str, Any]:
    """Say what of a model would not export and why, with the line, before it is traced.

    Prints it and returns ``{"model_type", "issues", "warnings", "forward_params"}``: an issue is why there
    would be no graph; a warning is what the graph would not do, such as take inputs of another size.

    >>> found = diagnose_model_compatibility(torch.nn.Linear(3, 2), torch.randn(4, 3))  # doctest: +ELLIPSIS
    Linear(input) can be traced: 5 nodes
      warning: input: dimension 1 is fixed at 3 by ...
    >>> found["issues"], len(found["warnings"])
    ([], 1)
    """
    args, kwargs = call_arguments(model, input_for_graph)
    exported, problem = None, None
    with eval_mode(model):
        try:
            exported = export(
                model, args, kwargs, dynamic="auto" if dynamic_shapes is None else dynamic_shapes
            )
        except ExportError as error:
            problem = error
    return diagnosis(model, exported, problem)


def diagnosis(
    model: torch.nn.Module, exported: ExportedGraph | None, problem: ExportError | None
) -> dict[str, Any]:
    """Print and return what is to say about a model: its graph, or why there is none."""
    parameters = inspect.signature(model.forward).parameters
    issues = [] if problem is None else [export_reason(problem)]
    notes = [] if exported is None else list(_surprises(exported))
    name = f"{type(model).__name__}({', '.join(parameters)})"
    write_line(
        f"{name} cannot be traced" if exported is None else f"{name} can be traced: {len(exported)} nodes"
    )
    for text in [*(f"issue: {one}" for one in issues), *(f"warning: {one}" for one in notes)]:
        write_line(f"  {text}")
    return {
        "model_type": type(model).__name__,
        "issues": issues,
        "warnings": notes,
        "forward_params": parameters,
    }


def _surprises(exported: ExportedGraph) -> Iterator[str]:
    """What a graph does not do though the model does."""
    for dimension in exported.dynamic.fixed:
        yield f"{dimension.input}: {dimension}"
    for condition in exported.dynamic.conditions:
        yield f"made for {condition.text}" + (f" ({condition.by})" if condition.by else "")
    yield from exported.dynamic.notes
    for output in exported.info.get("left_out", ()):
        yield f"{output} is left out of the graph"


def export_reason(error: ExportError) -> str:
    """Why a model cannot be exported, without what is said around it."""
    return str(error).removeprefix("The model cannot be exported: ").partition(". A recorded run")[0]


def write_line(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
