"""One call of `torch.export`: noise is collected, state is put back, grad-mode boxes are flattened."""

from __future__ import annotations

import logging
import operator
import random
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from sightline.errors import ExportError
from sightline.graph.exported.outputs import OutputStructure
from sightline.graph.exported.progress import Progress
from sightline.graph.exported.source_lines import is_users, running_line
from sightline.notation import position_text
from sightline.trace.source_files import cell_name, inside_torch

Mode = Callable[[], AbstractContextManager[Any]]

#: Under these a node's meta holds the modes it runs in, and the object a ``get_attr`` means.
MODES: Final = "sightline_modes"
OBJECT: Final = "sightline_object"

#: The boxes, and how many of their arguments come before the graph.
_BOXES: Final = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def flattened(program: torch.export.ExportedProgram) -> FxGraph:
    """The graph of a program without such boxes: its own where it has none."""
    module = program.graph_module
    if not any(_is_box(node) for node in module.graph.nodes):
        own: FxGraph = module.graph
        return own
    flat = _Flat(module)
    flat.copy(module, {}, (), top=True)
    return flat.graph


def _is_box(node: FxNode) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") not in _BOXES:
        return False
    # Nothing but the pieces of a box is ever asked for; were it otherwise, it would stay a node.
    return all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)


def _mode(node: FxNode) -> Mode:
    settings: Any = node.args[: _BOXES[node.target.__name__]]  # type: ignore[union-attr]
    if len(settings) == 1:
        return partial(torch.set_grad_enabled, settings[0])
    device, dtype, enabled, cache = settings
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=cache)


class _Flat:
    """A new graph, filled from the nested ones."""

    def __init__(self, module: GraphModule) -> None:
        self.graph = FxGraph()
        self._taken = {node.name for node in module.graph.nodes if not _vanishes(node)}

    def copy(
        self, module: GraphModule, known: dict[FxNode, Any], modes: tuple[Mode, ...], *, top: bool
    ) -> tuple[Any, ...]:
        """Copy the nodes of one graph; its results. ``known``: what its nodes are in the new graph."""
        pieces: dict[FxNode, tuple[Any, ...]] = {}
        for node in module.graph.nodes:
            if _is_box(node):
                before = _BOXES[node.target.__name__]
                box = operator.attrgetter(str(node.args[before].target))(module)
                given = [known[one] if isinstance(one, FxNode) else one for one in node.args[before + 1 :]]
                inner = dict(zip(box.graph.find_nodes(op="placeholder"), given, strict=True))
                pieces[node] = self.copy(box, inner, (*modes, _mode(node)), top=False)
            elif _vanishes(node):
                if node.target is operator.getitem:
                    known[node] = pieces[node.args[0]][node.args[1]]
            elif node.op == "output" and not top:
                return tuple(map_arg(node.args[0], lambda one: known[one]))
            elif node not in known:
                known[node] = self._copied(module, node, known, modes, top)
        return ()

    def _copied(
        self, module: GraphModule, node: FxNode, known: dict[FxNode, Any], modes: tuple[Mode, ...], top: bool
    ) -> FxNode:
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: known[one])
        made = self.graph.create_node(node.op, node.target, args, kwargs)
        made.name = node.name if top else self._free(node.name)
        made.meta = {**node.meta, MODES: modes}
        if node.op == "get_attr":
            made.meta[OBJECT] = operator.attrgetter(str(node.target))(module)
        return made

    def _free(self, name: str) -> str:
        """The name, or the first numbered one that nothing at the top has."""
        free, number = name, 0
        while free in self._taken:
            number += 1
            free = f"{name}_{number}"
        self._taken.add(free)
        return free


def _vanishes(node: FxNode) -> bool:
    """Whether only a box needs it: the box, its graph, its pieces."""
    if _is_box(node):
        return True
    if node.target is operator.getitem:
        return isinstance(node.args[0], FxNode) and _is_box(node.args[0])
    return node.op == "get_attr" and bool(node.users) and all(map(_is_box, node.users))


#: Where torch says which sizes it fixed; it speaks only at this level.
_GUARDS: Final = "torch.fx.experimental.symbolic_shapes"


@dataclass
class Noise:
    """What torch said while it exported."""

    places: dict[str, str] = field(default_factory=dict)  #: text of a guard -> the model's line
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep the first sentence of something torch said, once."""
        first = _assigned(text) or " ".join(text.strip().split("\n\n")[0].split())
        if first and first not in self.notes:
            self.notes.append(first)


def _assigned(text: str) -> str:
    """What torch says at length of attributes that forward sets, in a sentence; "" for anything else."""
    found = re.match(r"The tensor attributes? (.+?) (?:was|were) assigned during export", text)
    if found is None:
        return ""
    names = sorted(name.removeprefix("self.") for name in found[1].split(", "))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"forward sets {names[0]}{more} on the model, which a graph does not: what one call leaves for the "
        "next must be a buffer (register_buffer)."
    )


@dataclass(frozen=True)
class Traced:
    """A program, and what was noticed while it was made."""

    program: torch.export.ExportedProgram
    noise: Noise
    returned: OutputStructure


def traced(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, strict: bool
) -> Traced:
    """Export, quietly; raise `ExportError` where torch cannot."""
    noise = Noise()
    returned = OutputStructure()

    def fit(module: Any, inputs: Any, output: Any) -> Any:  # noqa: ARG001 — a hook gets them
        return returned.fit(output)

    with ExitStack() as stack:
        stack.enter_context(_everything_put_back((args, kwargs)))
        stack.enter_context(heard(noise))
        handle = model.register_forward_hook(fit)
        stack.callback(handle.remove)
        try:
            with Progress(type(model).__name__, shapes is not None):
                program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)
        except Exception as error:  # noqa: BLE001 — anything the model or torch raises is the reason
            failure = _explained(error)
        else:
            return Traced(program, noise, returned)
    raise failure


# -- what torch says -----------------------------------------------------------------------------------


@contextmanager
def heard(noise: Noise) -> Iterator[None]:
    """A stretch in which nothing torch says on this thread reaches the user; what other threads say does."""
    here = threading.get_ident()
    guards = logging.getLogger(_GUARDS)
    disabled = max(guards.manager.disable, logging.CRITICAL if guards.disabled else 0)
    threshold = max(guards.getEffectiveLevel(), disabled + 1)

    def keep(record: logging.LogRecord) -> bool:
        if record.thread != here:
            return record.name != _GUARDS or record.levelno >= threshold
        if record.name == _GUARDS and "[guard added]" in record.msg and isinstance(record.args, tuple):
            noise.places.setdefault(str(record.args[1]), running_line(sys._getframe(2)))
        elif record.levelno >= logging.WARNING and "0/1 specialized" not in record.getMessage():
            noise.note(record.getMessage())
        return False

    known = dict(logging.root.manager.loggerDict)
    named = [one for name, one in known.items() if name.partition(".")[0] == "torch"]
    loggers = [one for one in named if isinstance(one, logging.Logger)]  # the others are not used yet
    level = guards.level
    stderr = sys.stderr
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addFilter(keep)
        guards.setLevel(logging.INFO)
        before = {name: vars(guards)[name] for name in ("disabled", "manager")}
        # A program that has turned logging off does so for its own output, and this is none.
        vars(guards).update(disabled=False, manager=SimpleNamespace(disable=0))
        sys.stderr = _WithoutTorch(stderr)
        try:
            yield
        finally:
            sys.stderr = stderr
            vars(guards).update(before)
            guards.setLevel(level)
            for logger in loggers:
                logger.removeFilter(keep)
    for warning in warned:
        if issubclass(warning.category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning)):
            continue  # about torch's own code, to those who write it
        text = str(warning.message)
        if "_flat_weights" not in text:  # an LSTM's own doing, of no consequence
            noise.note(text)


class _WithoutTorch:
    """A stream that lets through what anyone but torch prints."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if inside_torch(sys._getframe(1).f_code.co_filename) is not None:
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- what is put back -----------------------------------------------------------------------------------


@contextmanager
def _everything_put_back(inputs: Any) -> Iterator[None]:
    """Random generators and the grad mode, which code of the model may have changed, and what torch leaves.

    When it fails it forgets to take off what it noted on the inputs themselves, the sizes that are dynamic,
    and in some versions a hook for every buffer that any model sets.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    restore: list[Callable[[], Any]] = [partial(_put_back, vars(one), dict(vars(one))) for one in tensors]
    hooks = getattr(torch.nn.modules.module, "_global_buffer_registration_hooks", {})
    restore.append(partial(_put_back, hooks, dict(hooks)))
    python, cpu, grad = random.getstate(), torch.get_rng_state(), torch.is_grad_enabled()
    restore += [lambda: random.setstate(python), lambda: torch.set_rng_state(cpu)]
    restore.append(lambda: torch.set_grad_enabled(grad))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        restore.append(lambda: numpy.random.set_state(state))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all()
        restore.append(lambda: torch.cuda.set_rng_state_all(devices))
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _put_back(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    held.clear()
    held.update(before)


# -- what went wrong -----------------------------------------------------------------------------------


def _explained(error: Exception) -> ExportError:
    """The one error, with the line of the model and the reason in a sentence."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):  # it begins in this file
        if is_users(frame.filename):
            line = f" (`{frame.line}`)" if frame.line else ""
            where = f"{position_text(cell_name(frame.filename), frame.lineno or 0)} in {frame.name}{line}"
    reason = _reason(error)
    place = f"{where}: {reason}" if where else reason
    failure = ExportError(
        f"The model cannot be exported: {place}. A recorded run has a graph too: "
        "`with sl.trace(model) as t: model(…)`, then `t.graph()`."
    )
    failure.__cause__ = error
    return failure


def _reason(error: Exception) -> str:
    text, kind = str(error), type(error).__name__
    first = " ".join(text.strip().split("\n\n")[0].split()).rstrip(".")
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return "what happens there depends on the numbers in a tensor, which an export does not have"
    if "not a known type" in text and "output" in text:
        named = text.split("'")[1] if text.count("'") > 1 else "an object"
        return (
            f"forward returns {named}, which torch cannot take apart: return tensors, or register the class "
            "with torch.export.register_dataclass or torch.utils._pytree.register_pytree_node"
        )
    return f"{kind}: {first[:400]}" if first else kind
