"""`sl.export` and `sl.load_graph`: an `ExportedGraph` from a model, a cache folder or an archive."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from sightline.argument_checks import argument_text, check_arguments
from sightline.errors import ExportError, UsageError
from sightline.graph.exported.archive import ExportCache, NoCacheKey, cache_key, read_archive
from sightline.graph.exported.dynamic import read_dimensions
from sightline.graph.exported.exported_graph import ExportedGraph, make_graph
from sightline.graph.exported.inputs import input_names, parameter_names
from sightline.graph.exported.program import ProgramInfo, user_inputs
from sightline.graph.exported.torch_export import run_export
from sightline.graph.exported.torchapi import children_of, guards_of, pytree


@check_arguments
def export(
    model: torch.nn.Module,
    args: tuple[Any, ...] | list[Any] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic: Literal["auto"] | dict[str, Any] | tuple[Any, ...] | list[Any] | None = "auto",
    strict: bool = False,
    cache: str | os.PathLike[str] | None = None,
) -> ExportedGraph:
    """The graph of a model for inputs like these, through `torch.export`.

    Sizes are dynamic where the model allows it: ``print(g.dynamic)`` says which are, and which line fixed the
    others. ``dynamic=None`` fixes all; torch's own ``dynamic_shapes`` can be given instead. ``cache`` is a
    folder in which exports are kept: the next one of the same code, model and kinds of inputs is read from
    it, with the weights of the model given. It is private to its owner, as loading an archive can run code.

    It prints nothing but, every ten seconds, how long it has taken and at which line. The model is not
    changed, and is exported as it is, in train or eval mode. A model that torch cannot export raises
    `ExportError`, which names the line.

    >>> g = export(torch.nn.Linear(3, 2), torch.randn(4, 3))
    >>> [node.name for node in g], g["p_weight"].kind
    (['p_weight', 'p_bias', 'input', 'linear', 'output'], 'parameter')
    >>> g.run(torch.randn(7, 3)).output.shape
    torch.Size([7, 2])
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"export takes a torch.nn.Module, not a {type(model).__name__}.")
    positional, keywords = _example_inputs(model, args, kwargs)
    if isinstance(dynamic, str) and dynamic != "auto":
        raise UsageError(
            f'dynamic={argument_text(dynamic)} is not a choice; it is "auto", None for fixed sizes, or what '
            "torch calls dynamic_shapes."
        )
    options = {"dynamic": dynamic if dynamic is None or dynamic == "auto" else str(dynamic), "strict": strict}
    archives, key, reason = None if cache is None else ExportCache(cache), "", ""
    if archives is not None:
        try:
            key = cache_key(model, positional, keywords, options)
        except NoCacheKey as error:
            reason = str(error)
        entry = archives.load(key) if key else None
        if entry is not None:
            return _warn_about_training(make_graph(*entry, model))
    program, info = _export_program(model, positional, keywords, dynamic, strict)
    if archives is not None:
        reason = reason or archives.store(key, program, info)
        if reason:
            info.info["not_cached"] = reason
    return _warn_about_training(make_graph(program, info, model))


def _example_inputs(model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example as positional and keyword inputs, if ``forward`` takes it: torch would blame the model."""
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UsageError(f"kwargs must be a dict of keyword arguments, not a {type(kwargs).__name__}.")
    if not isinstance(args, torch.Tensor | tuple | list):
        raise UsageError(f"args must be a tuple of the model's inputs, not {argument_text(args)}.")
    positional = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    keywords = dict(kwargs or {})
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is not Python
        return positional, keywords
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise UsageError(
            f"{type(model).__name__}.forward cannot be called with the example inputs: {error}; give them as "
            "export(model, (x, y), {name: z})."
        ) from None
    return positional, keywords


def _warn_about_training(graph: ExportedGraph) -> ExportedGraph:
    """The graph itself, after a warning if an op in it behaves differently in eval mode."""
    for node in graph.nodes if graph.info["training"] else ():
        args = node.args
        rate = args.get("dropout_p", args.get("p", args.get("dropout", 1.0)))
        modes = (args.get("train"), args.get("training"), args.get("use_input_stats"))
        if rate and ("dropout_p" in args or True in modes):
            warnings.warn(
                "The model is exported in train mode, with dropout or batch statistics: call model.eval() "
                "first if that is not meant.",
                stacklevel=3,
            )
            break
    return graph


@check_arguments
def load_graph(path: str | os.PathLike[str], model: torch.nn.Module | None = None) -> ExportedGraph:
    """Read an archive that ``g.save("m.pt2")`` or `torch.export.save` wrote.

    **Only archives you trust**: it is torch's format, and loading it can run code. With ``model`` the graph
    computes with the model's own weights instead of the saved ones, and `verify` can compare.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(torch.nn.ReLU(), torch.ones(2, 3)).save(f"{folder}/m.pt2")
    ...     print(load_graph(f"{folder}/m.pt2").run(-torch.ones(1, 3)).output)
    tensor([[0., 0., 0.]])
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {argument_text(model)}.")
    return make_graph(*read_archive(Path(path)), model)


def _export_program(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Any, strict: bool
) -> tuple[torch.export.ExportedProgram, ProgramInfo]:
    """Export with dynamic sizes, or with fixed ones where only those work."""
    notes = []
    if dynamic != "auto":
        result = run_export(model, args, kwargs, dynamic, strict)
    else:
        every = torch.export.ShapesCollection()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                every[leaf] = dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO)
        try:
            result = run_export(model, args, kwargs, every if len(every) else None, strict)
        except ExportError as error:
            result = run_export(model, args, kwargs, None, strict)  # if it fails too, sizes are not why
            notes.append(
                f"With dynamic sizes: {str(error).partition('. A recorded run')[0]}. All sizes are fixed."
            )
    program, log = result.program, result.log
    names = parameter_names(model, len(args))
    leaves = tuple(input_names(names, args, kwargs))
    examples = [example for _, example in user_inputs(program)]
    fakes = [(name, one) for name, one in zip(leaves, examples, strict=True) if isinstance(one, torch.Tensor)]
    ranges = {} if dynamic == "auto" else _user_ranges(program)
    fixed_by = "" if dynamic == "auto" else f"dynamic={'None' if dynamic is None else '…'}, as requested"
    guards = guards_of(fakes[0][1]) if fakes else []
    sizes = read_dimensions(fakes, guards, log.guard_lines, [*notes, *log.notes], ranges, fixed_by)
    info = {"model": type(model).__name__, "training": model.training, "torch": torch.__version__}
    left_out = result.output_structure.left_out
    if left_out:
        info["left_out"] = [f"output{path} ({kind})" for path, kind in left_out.items()]
    by_keyword = tuple(children_of(program.call_spec.in_spec)[1].context or ())
    return program, ProgramInfo(sizes, result.output_structure, tuple(names), by_keyword, leaves, info)


def _user_ranges(program: torch.export.ExportedProgram) -> dict[str, tuple[int | None, int | None]]:
    """The bounds of each symbol; None where they are torch's own, from 2 up."""
    ranges: dict[str, tuple[int | None, int | None]] = {}
    for symbol, bounds in program.range_constraints.items():
        low, high = (
            int(one) if one.is_finite and abs(one) < 2**62 else None for one in (bounds.lower, bounds.upper)
        )
        ranges[str(symbol)] = (low if low is not None and low > 2 else None, high)
    return ranges
