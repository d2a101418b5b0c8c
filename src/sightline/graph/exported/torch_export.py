"""One call of `torch.export`: its messages are collected, state is restored, mode wrappers are flattened.

During a long export `Progress` prints to standard error how long it has taken, and where the time goes.
"""

from __future__ import annotations

import logging
import operator
import random
import re
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any, Final

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from sightline.data.file_owners import cell_name, inside_torch, layer_file, model_file
from sightline.errors import ExportError
from sightline.graph.exported.outputs import OutputStructure
from sightline.graph.exported.torchapi import GUARD_LOGGER, buffer_hooks, pytree
from sightline.notation import position_text
from sightline.threads import start_thread

_OURS: Final = str(Path(__file__).parents[2]) + "/"
Mode = Callable[[], AbstractContextManager[Any]]

#: Keys of a node's meta: the modes it runs in, and the object that a ``get_attr`` refers to.
MODES: Final = "sightline_modes"
OBJECT: Final = "sightline_object"

#: Ops that run a graph of their own in another mode, with how many of their arguments come before it.
_WRAPPERS: Final = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def flatten_modes(program: torch.export.ExportedProgram) -> FxGraph:
    """The graph of a program with the bodies of mode wrappers inlined; its own graph where it has none."""
    module = program.graph_module
    if not any(_is_wrapper(node) for node in module.graph.nodes):
        graph: FxGraph = module.graph
        return graph
    flattener = _Flattener(module)
    flattener.copy(module, {}, (), top=True)
    return flattener.graph


def _is_wrapper(node: FxNode) -> bool:
    if node.op != "call_function" or getattr(node.target, "__name__", "") not in _WRAPPERS:
        return False
    # Only the parts of its result are ever used; a wrapper used in another way stays a node.
    return all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)


class _Flattener:
    """Copies nested graphs into one new graph."""

    def __init__(self, module: GraphModule) -> None:
        self.graph = FxGraph()
        self._taken = {node.name for node in module.graph.nodes if not _is_inlined(node)}

    def copy(
        self, module: GraphModule, copies: dict[FxNode, Any], modes: tuple[Mode, ...], *, top: bool
    ) -> tuple[Any, ...]:
        """Copy the nodes of one graph and return its results; ``copies`` maps its nodes to the new ones."""
        results: dict[FxNode, tuple[Any, ...]] = {}
        for node in module.graph.nodes:
            if _is_wrapper(node):
                before = _WRAPPERS[node.target.__name__]
                body = operator.attrgetter(str(node.args[before].target))(module)
                inputs = [copies[arg] if isinstance(arg, FxNode) else arg for arg in node.args[before + 1 :]]
                inner = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
                settings: Any = node.args[:before]
                mode: Mode = partial(torch.set_grad_enabled, *settings)
                if before > 1:
                    device, dtype, enabled, cache = settings
                    mode = partial(torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=cache)
                results[node] = self.copy(body, inner, (*modes, mode), top=False)
            elif _is_inlined(node):
                if node.target is operator.getitem:
                    copies[node] = results[node.args[0]][node.args[1]]
            elif node.op == "output" and not top:
                return tuple(map_arg(node.args[0], copies.__getitem__))
            elif node not in copies:
                args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
                copied = copies[node] = self.graph.create_node(node.op, node.target, args, kwargs)
                name, number = node.name, 0
                while not top and name in self._taken:
                    number += 1
                    name = f"{node.name}_{number}"
                self._taken.add(name)
                copied.name = name
                copied.meta = {**node.meta, MODES: modes}
                if node.op == "get_attr":
                    copied.meta[OBJECT] = operator.attrgetter(str(node.target))(module)
        return ()


def _is_inlined(node: FxNode) -> bool:
    """Whether a node goes away with a wrapper: the wrapper, its graph, the parts of its result."""
    if _is_wrapper(node):
        return True
    if node.target is operator.getitem:
        return isinstance(node.args[0], FxNode) and _is_wrapper(node.args[0])
    return node.op == "get_attr" and bool(node.users) and all(map(_is_wrapper, node.users))


@dataclass
class ExportLog:
    """The messages of torch during an export."""

    guard_lines: dict[str, str] = field(default_factory=dict)  #: text of a guard -> the model's line
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add the first sentence of a message, unless it is there already."""
        first = _attribute_note(text) or " ".join(text.strip().split("\n\n")[0].split())
        if first and first not in self.notes:
            self.notes.append(first)


def _attribute_note(text: str) -> str:
    """Torch's long message about attributes that forward sets, as one sentence; "" for any other message."""
    match = re.match(r"The tensor attributes? (.+?) (?:was|were) assigned during export", text)
    if match is None:
        return ""
    names = sorted(name.removeprefix("self.") for name in match[1].split(", "))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"forward sets {names[0]}{more} on the model, which a graph does not: state that one call leaves "
        "for the next must be a buffer (register_buffer)."
    )


@dataclass(frozen=True)
class ExportResult:
    """A program, the messages of torch, and the structure of the model's output."""

    program: torch.export.ExportedProgram
    log: ExportLog
    output_structure: OutputStructure


def run_export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, strict: bool
) -> ExportResult:
    """Export without printing anything but progress; raise `ExportError` where torch cannot."""
    log = ExportLog()
    structure = OutputStructure()

    def simplify(module: Any, inputs: Any, output: Any) -> Any:  # noqa: ARG001 — a hook gets them
        return structure.simplify(output)

    with ExitStack() as stack:
        stack.enter_context(_state_restored((args, kwargs)))
        stack.enter_context(torch_messages(log))
        handle = model.register_forward_hook(simplify)
        stack.callback(handle.remove)
        try:
            with Progress(type(model).__name__, shapes is not None):
                program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=strict)
        except Exception as error:  # noqa: BLE001 — anything the model or torch raises is the reason
            failure = _export_error(error)
        else:
            return ExportResult(program, log, structure)
    raise failure


# -- torch's messages -----------------------------------------------------------------------------------


@contextmanager
def torch_messages(log: ExportLog) -> Iterator[None]:
    """Collect torch's warnings, log records and prints of this thread; those of other threads pass."""
    thread = threading.get_ident()
    guards = logging.getLogger(GUARD_LOGGER)
    disabled = max(guards.manager.disable, logging.CRITICAL if guards.disabled else 0)
    threshold = max(guards.getEffectiveLevel(), disabled + 1)

    def passes(record: logging.LogRecord) -> bool:
        if record.thread != thread:
            return record.name != GUARD_LOGGER or record.levelno >= threshold
        if record.name == GUARD_LOGGER and "[guard added]" in record.msg and isinstance(record.args, tuple):
            log.guard_lines.setdefault(str(record.args[1]), running_line(sys._getframe(2)))
        elif record.levelno >= logging.WARNING and "0/1 specialized" not in record.getMessage():
            log.note(record.getMessage())
        return False

    loggers = [
        logger
        for name, logger in dict(logging.root.manager.loggerDict).items()
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger)
    ]
    level = guards.level
    stderr = sys.stderr
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addFilter(passes)
        guards.setLevel(logging.INFO)
        before = {name: vars(guards)[name] for name in ("disabled", "manager")}
        # A program that turned logging off did so for its own output, and none of this is shown.
        vars(guards).update(disabled=False, manager=SimpleNamespace(disable=0))
        sys.stderr = _StreamWithoutTorch(stderr)
        try:
            yield
        finally:
            sys.stderr = stderr
            vars(guards).update(before)
            guards.setLevel(level)
            for logger in loggers:
                logger.removeFilter(passes)
    for warning in warned:
        if issubclass(warning.category, (DeprecationWarning, FutureWarning, PendingDeprecationWarning)):
            continue  # meant for the authors of torch's own code
        text = str(warning.message)
        if "_flat_weights" not in text:  # every LSTM causes it, and nothing follows from it
            log.note(text)


class _StreamWithoutTorch:
    """A stream that drops torch's own output."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if inside_torch(sys._getframe(1).f_code.co_filename) is not None:
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# -- state -----------------------------------------------------------------------------------


@contextmanager
def _state_restored(inputs: Any) -> Iterator[None]:
    """Restore random generators and the grad mode, which the model may change, and the leftovers of torch.

    A failed export leaves marks of dynamic sizes on the inputs, and in some versions of torch a global hook
    for buffers.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    restore: list[Callable[[], Any]] = [
        partial(_reset_dict, vars(tensor), dict(vars(tensor))) for tensor in tensors
    ]
    hooks = buffer_hooks()
    restore.append(partial(_reset_dict, hooks, dict(hooks)))
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
        for step in restore:
            step()


def _reset_dict(current: dict[Any, Any], before: dict[Any, Any]) -> None:
    current.clear()
    current.update(before)


# -- errors -----------------------------------------------------------------------------------


def _export_error(error: Exception) -> ExportError:
    """The error that names the line of the model and the reason."""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):  # it begins in this file
        if model_file(frame.filename):
            line = f" (`{frame.line}`)" if frame.line else ""
            where = f"{position_text(cell_name(frame.filename), frame.lineno or 0)} in {frame.name}{line}"
    located = f"{where}: {_reason(error)}" if where else _reason(error)
    failure = ExportError(
        f"The model cannot be exported: {located}. A recorded run has a graph too: "
        "`with sl.trace(model) as t: model(…)`, then `t.graph()`."
    )
    failure.__cause__ = error
    return failure


def _reason(error: Exception) -> str:
    text, kind = str(error), type(error).__name__
    first = " ".join(text.strip().split("\n\n")[0].split()).rstrip(".")
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return "it depends on the numbers in a tensor, which an export does not have"
    if "not a known type" in text and "output" in text:
        named = text.split("'")[1] if text.count("'") > 1 else "an object"
        return (
            f"forward returns {named}, which torch cannot take apart: return tensors, or register the class "
            "with torch.export.register_dataclass or torch.utils._pytree.register_pytree_node"
        )
    return f"{kind}: {first[:400]}" if first else kind


_PERIOD: Final = 10.0  #: seconds between lines, and before the first
_SAMPLES: Final = 50  #: of the exporting thread in that time


class Progress:
    """Prints every ten seconds that an export goes on, and which line has taken most of the time.

    With ``dynamic`` sizes the line adds that fixed ones are faster.
    """

    def __init__(self, model: str, dynamic: bool, period: float = _PERIOD) -> None:
        self._model = model
        self._dynamic = dynamic
        self._period = period
        self._exporting = threading.get_ident()
        self._done = threading.Event()
        self._lines: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._sample, name="sightline-export", daemon=True)

    def __enter__(self) -> None:
        start_thread(self._thread)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        """Count the lines that the exporting thread is at."""
        samples = 0
        while not self._done.wait(self._period / _SAMPLES):
            samples += 1
            line = running_line(sys._current_frames().get(self._exporting))
            if line:
                self._lines[line] += 1
            if samples % _SAMPLES == 0:
                self._print(self._period * samples / _SAMPLES)

    def _print(self, seconds: float) -> None:
        if sys.stderr is None:  # a program without a console
            return
        longest = [f", {count * self._period / _SAMPLES:.0f} s of it at {line}"
                   for line, count in self._lines.most_common(1)]  # fmt: skip
        hint = "; fixed sizes are faster: dynamic=None" if self._dynamic else ""
        sys.stderr.write(f"exporting {self._model}: {seconds:.0f} s{''.join(longest)}{hint}\n")
        sys.stderr.flush()


def running_line(frame: FrameType | None) -> str:
    """The line of the model at which a frame is: the innermost one that is neither torch's nor ours.

    "" where there is none.
    """
    layer = ""  # the line of torch.nn, where the model is one of its own layers
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        file = frame.f_code.co_filename
        text = f"{position_text(cell_name(file), frame.f_lineno)} in {frame.f_code.co_qualname}"
        if model_file(file):
            return text
        if not layer and layer_file(file) and frame.f_code.co_name == "forward":
            layer = text
        frame = frame.f_back
    return layer
