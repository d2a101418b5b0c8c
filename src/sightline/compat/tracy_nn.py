"""`Tracer` and `trace_model` as users of tracy_nn know them: a block per module call and operation, live.

    import sys, sightline.compat.tracy_nn
    sys.modules["tracy_nn"] = sightline.compat.tracy_nn

is enough for a script that was written for that package. The recorder reports events and the live log writes
them, so every torch function is seen (``torch.cat`` too), the settings of a module come from the module
itself, containers indent their contents, and nothing in torch is replaced. A module of the user's own shows
the calls in it, even without submodules; the model has no block of its own, unless it is a single module of
torch; a bias is mentioned if there is none, and a dtype if it is not ``float32``.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from types import FrameType, TracebackType
from typing import Any, ClassVar, Final, Self

import torch

from sightline.api import Trace
from sightline.compat import FUSED_HINT
from sightline.data.file_owners import inside_torch, torch_file
from sightline.data.forms import SLOT, Record, Symbol
from sightline.data.live_events import LiveCallEvent, LiveOpEvent
from sightline.data.trace_data import TensorMeta
from sightline.errors import UsageError
from sightline.options import RecordingOptions
from sightline.recording.engine_choice import resolve_engine
from sightline.recording.recorder import Recorder, check_model
from sightline.views.live import LiveLog, LogWatcher
from sightline.views.log_blocks import OK, BlockStyle, LogModule, LogOp, Part, tensor_block_text
from sightline.views.rendering import Printer

__all__ = ["Color", "Tracer", "trace_model"]

#: Ops that torch runs in place of the modules of its own attention layers, in eval mode without gradients.
_FUSED: Final = re.compile(r"_transformer_encoder_layer_fwd|_native_multi_head_attention")
_FUSED_MODULES: Final = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
_LONGEST_LABEL: Final = 30


class Color:
    """Whether blocks are coloured on a terminal: ``Color.disable()`` turns it off for tracers started later.

    >>> Color.disable(); Color.enabled
    False
    >>> Color.enable(); Color.enabled
    True
    """

    enabled: ClassVar = True

    @classmethod
    def disable(cls) -> None:
        """Write no colours."""
        cls.enabled = False

    @classmethod
    def enable(cls) -> None:
        """Write colours where there is a terminal."""
        cls.enabled = True


def _color() -> bool | None:
    """The ``color`` of a printer: False, or None to decide by the stream."""
    return None if Color.enabled else False


def _tensor_text(meta: TensorMeta) -> str:
    """A tensor, with its dtype if that is not float32: ``Tensor [2, 3] int64 @ cpu``."""
    text = tensor_block_text(meta)
    return text if meta.dtype == "float32" else text.replace("] @", f"] {meta.dtype} @")


class _Blocks(BlockStyle):
    """Blocks whose modules show all arguments and results: ``[Tensor [2] @ cpu, None, int, str]``."""

    def _inputs(self, event: LogModule | LogOp, *, named: bool) -> list[Part]:
        if isinstance(event, LogOp):
            return super()._inputs(event, named=named)
        texts = map(self.tensor, event.inputs)
        args = [_item_text(item, texts) for item in event.form.args]
        positional = args[0] if len(args) == 1 else f"[{', '.join(args)}]"
        parts = [Part("Input", positional, "shape")] if args else []
        for key, item in (event.form.kwargs or {}).items():
            parts.append(Part(f"Input {key}", _item_text(item, texts), "shape"))
        return parts

    def _results(self, event: LogModule | LogOp) -> list[Part]:
        if isinstance(event, LogOp) or event.state != OK:
            return super()._results(event)
        texts = map(self.tensor, event.outputs)
        items = [_item_text(item, texts) for item in event.result.args]
        return [Part("Output", ", ".join(items) or "None", "shape")]


def _item_text(item: Any, tensors: Iterator[str]) -> str:
    """An argument or a result: the text of a tensor, None, or the type of anything else."""
    if item is SLOT:
        return next(tensors, "Tensor")
    if isinstance(item, list | tuple):
        return f"[{', '.join(_item_text(part, tensors) for part in item)}]"
    fields = item.fields if isinstance(item, Record) else item
    if isinstance(fields, dict):
        return f"{{{', '.join(f'{key}: {_item_text(part, tensors)}' for key, part in fields.items())}}}"
    return "None" if item is None else repr(item) if isinstance(item, Symbol) else type(item).__name__


_STYLE: Final = _Blocks(_tensor_text, margin="  ")


class Tracer:
    """Print the calls in a model between ``start(model)`` and ``stop()``, or in a ``trace(model)`` block.

    >>> import torch
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.ones(1, 3)
    >>> tracer = Tracer("Tiny")
    >>> with tracer.trace(model):
    ...     y = model(x)
      ● TRACING Tiny STARTED
      │
      ● 0 (Linear) (in_features: 3, out_features: 2)
      ├─ Input: Tensor [1, 3] @ cpu
      └─ Output: Tensor [1, 2] @ cpu
      │
      ● TRACING Tiny COMPLETE

    ``with tracer:`` traces the model that `trace_model` was given, or everything. The recording itself is
    ``tracer.recording``, for every other view. A tracer can be used again.
    """

    def __init__(self, name: str = "Neural Network", model: Any = None) -> None:
        self.name = name
        self._model = model
        self._recorder: Recorder | None = None
        self._log: LiveLog | None = None
        self._started: list[bool] = []  # whether each open ``with tracer:`` block started it

    def __repr__(self) -> str:
        return f"<Tracer {self.name!r}, {'tracing' if self.active else 'not tracing'}>"

    @property
    def active(self) -> bool:
        """Whether it is tracing."""
        return self._recorder is not None and self._recorder.running

    @property
    def recording(self) -> Trace:
        """The last recording, or the one that is running.

        >>> import torch
        >>> tracer, model, x = Tracer("Tiny"), torch.nn.Linear(3, 2), torch.ones(1, 3)
        >>> tracer.start(model); y = model(x); tracer.stop()  # doctest: +ELLIPSIS
          ● TRACING Tiny STARTED
          ...
        >>> [op.name for op in tracer.recording.ops]
        ['F.linear']
        """
        if self._recorder is None:
            raise UsageError("This tracer has not been started; call start(model) first.")
        return Trace(self._recorder.index)

    def start(self, model: Any) -> None:
        """Begin to trace a model; an active tracer prints that it is active and goes on."""
        self._start(model, sys._getframe(1))

    def stop(self) -> None:
        """Stop tracing; does nothing if the tracer is not active."""
        self._stop(None)

    def trace(self, model: Any) -> _TraceBlock:
        """Trace a model while a block runs: ``with tracer.trace(model) as tracer:``."""
        return _TraceBlock(self, model)

    def __enter__(self) -> Self:
        self._started.append(self._start(self._model, sys._getframe(1)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._started.pop():  # a tracer that was active before the block stays so
            self._stop(error)

    def _start(self, model: Any, frame: FrameType) -> bool:
        """Start, unless it is active already; returns whether it was started."""
        if self.active:
            printer = Printer(color=_color())
            printer.write(_STYLE.banner(f"Tracer {self.name} is already active"))
            printer.flush()
            return False
        check_model(model)
        # The plain engine sees fused modules only as aten ops.
        fuses = model is not None and any(isinstance(part, _FUSED_MODULES) for part in model.modules())
        level = "both" if fuses and resolve_engine("auto") == "python" else "api"
        log = LiveLog(title=self.name, root=model is None, style=_STYLE, color=_color())
        recorder = Recorder(
            model, RecordingOptions(ops=level, name=self.name), watcher=_BlockWatcher(log, model)
        )
        log.start()
        recorder.start(frame)
        self._recorder, self._log = recorder, log
        return True

    def _stop(self, error: BaseException | None) -> None:
        if self._recorder is None or self._log is None or not self.active:
            return
        self._recorder.stop(error)
        self._log.stop()


def trace_model(model: Any, name: str = "Quick Trace") -> Tracer:
    """A tracer of a model, not started yet: ``with tracer:`` or ``with tracer.trace(model):`` starts it.

    >>> import torch
    >>> trace_model(torch.nn.ReLU(), "My model"), trace_model(torch.nn.ReLU())
    (<Tracer 'My model', not tracing>, <Tracer 'Quick Trace', not tracing>)
    """
    check_model(model)
    return Tracer(name, model)


class _TraceBlock:
    """The block of ``with tracer.trace(model):``."""

    def __init__(self, tracer: Tracer, model: Any) -> None:
        self._tracer = tracer
        self._model = model
        self._started = False

    def __enter__(self) -> Tracer:
        self._started = self._tracer._start(self._model, sys._getframe(1))
        return self._tracer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._started:  # a tracer that was active before the block stays so
            self._tracer._stop(error)


class _BlockWatcher(LogWatcher):
    """The live log as tracy_nn writes it: a user's own model is never a leaf, bias=True is left out."""

    def __init__(self, log: LiveLog, model: Any) -> None:
        super().__init__("api")
        self._live = log
        module = sys.modules.get(type(model).__module__)
        self._own_model = model is not None and not torch_file(getattr(module, "__file__", None) or "")

    def enter(self, event: LiveCallEvent) -> None:
        super().enter(self._adapted(event))

    def leave(self, event: LiveCallEvent) -> None:
        super().leave(self._adapted(event))

    def op(self, event: LiveOpEvent) -> None:
        if event.level == "aten" and _FUSED.search(event.name):  # it comes without an API call
            event = replace(event, level="api", flavour="function", name=f"torch.{event.name}")
        super().op(event)

    def caller(self, event: LiveOpEvent) -> str:
        """The function that called an op: a module of torch, or the user's own function."""
        for frame in reversed(event.chain):
            if not torch_file(frame.file):
                return frame.function
            if (inside_torch(frame.file) or "").startswith("nn/modules/") and frame.function[:1].isupper():
                if not frame.function.startswith("Module."):
                    return frame.function
        return ""

    def note(self, event: LiveOpEvent) -> str:
        """A hint where torch ran a whole module as one op."""
        return FUSED_HINT if _FUSED.search(event.name) else ""

    def labels(self, event: LiveOpEvent) -> tuple[str, str, str]:
        """The names in ``scores = q @ k``: ``Q``, ``K`` and ``Scores``."""
        frame = next((one for one in reversed(event.chain) if not torch_file(one.file)), None)
        if event.flavour != "operator" or frame is None or frame.columns is None:
            return super().labels(event)
        return _labels_in(frame.code, frame.columns[0] - frame.indent, frame.columns[1] - frame.indent)

    def _adapted(self, event: LiveCallEvent) -> LiveCallEvent:
        leaf = event.leaf and event.library and not (event.root and self._own_model)
        extra = event.extra.removesuffix(", bias=True")
        return replace(event, leaf=leaf, extra=_named_settings(event.type, extra) if event.library else extra)


@lru_cache(maxsize=1024)
def _labels_in(code: str, column: int, end_column: int) -> tuple[str, str, str]:
    """The names of a line that assigns the operator at these columns; generic ones without a name.

    >>> _labels_in("scores = q @ k.mT", 9, 17), _labels_in("return q @ k", 7, 12)
    (('Q', 'K.mT', 'Scores'), ('Left', 'Right', 'Output'))
    """
    try:
        statement = ast.parse(code).body[0]
    except (SyntaxError, ValueError, IndexError):  # a part of a statement
        return "Left", "Right", "Output"
    match statement:
        case ast.Assign([ast.Name(result)], ast.BinOp(left=left, right=right) as value) if (
            value.col_offset, value.end_col_offset
        ) == (column, end_column):  # fmt: skip
            return _label(left, "Left"), _label(right, "Right"), result[:1].upper() + result[1:]
    return "Left", "Right", "Output"


def _label(operand: ast.expr, otherwise: str) -> str:
    """A variable, or a short expression that begins with one: ``K``, ``K.transpose(-2, -1)``."""
    name = operand
    while isinstance(name, ast.Attribute | ast.Call):
        name = name.func if isinstance(name, ast.Call) else name.value
    text = ast.unparse(operand).removeprefix("self.")
    if not isinstance(name, ast.Name) or len(text) > _LONGEST_LABEL:
        return otherwise
    return text[:1].upper() + text[1:]


def _named_settings(kind: str, extra: str) -> str:
    """The settings of a module of torch, each value with its name: ``in_channels=3, out_channels=8``."""
    parts = re.split(r", (?![^()]*\))", extra) if extra else []
    unnamed = sum("=" not in part for part in parts)
    unnamed_first = all("=" not in part for part in parts[:unnamed])
    names = _constructor_parameters(kind)[:unnamed] if unnamed_first else []
    return ", ".join([*map("=".join, zip(names, parts, strict=False)), *parts[len(names) :]])


@cache
def _constructor_parameters(kind: str) -> list[str]:
    """The parameters of a torch module's constructor; the base class's if it takes ``*args``."""
    for base in getattr(torch.nn, kind, torch.nn.Module).__mro__[:-1]:
        parameters = inspect.signature(base).parameters.values()
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            return [parameter.name for parameter in parameters if parameter.name != "mode"]
    return []
