"""Why a model cannot be exported, and the limits of its graph, in words."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from sightline.compat.dl_backtrace.example_inputs import call_arguments, eval_mode
from sightline.errors import ExportError
from sightline.graph.exported import ExportedGraph, export


def diagnose_model_compatibility(
    model: torch.nn.Module, input_for_graph: Any, dynamic_shapes: Any = None
) -> dict[str, Any]:
    """Report why a model cannot be exported, with the line, before it is traced.

    Prints the report and returns ``{"model_type", "issues", "warnings", "forward_params"}``: an issue is a
    reason why there would be no graph; a warning is a limit of the graph, such as a fixed size of an input.

    >>> report = diagnose_model_compatibility(torch.nn.Linear(3, 2), torch.randn(4, 3))  # doctest: +ELLIPSIS
    Linear(input) can be traced: 5 nodes
      warning: input: dimension 1 is fixed at 3 by ...
    >>> report["issues"], len(report["warnings"])
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
    """Print and return a report about a model: its graph, or the reason why there is none."""
    parameters = inspect.signature(model.forward).parameters
    issues = [] if problem is None else [export_reason(problem)]
    notes: list[str] = []  # limits of the graph that the model does not have
    if exported is not None:
        dynamic = exported.dynamic
        notes += [f"{dimension.input}: {dimension}" for dimension in dynamic.fixed]
        notes += [f"made for {condition.text}" + (f" ({condition.by})" if condition.by else "")
                  for condition in dynamic.conditions]  # fmt: skip
        notes += dynamic.notes
        notes += [f"{output} is left out of the graph" for output in exported.info.get("left_out", ())]
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


def export_reason(error: ExportError) -> str:
    """The reason why a model cannot be exported, without the advice around it."""
    return str(error).removeprefix("The model cannot be exported: ").partition(". A recorded run")[0]


def write_line(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
