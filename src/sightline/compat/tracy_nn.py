"""`Tracer` and `trace_model` as users of tracy_nn know them: a block per module call and operation, live.

    import sys, sightline.compat.tracy_nn
    sys.modules["tracy_nn"] = sightline.compat.tracy_nn

is enough for a script that is written for that package. The recorder says what happens and the live log
writes it, so every torch function is seen (``torch.cat`` too), what a module is set to comes from the module
itself, containers indent what runs inside them, and nothing in torch is replaced. A module of the user's
own shows what runs in it, also where it has no submodules; the model has no block of its own, unless it is
a single module of torch; a bias is said where there is none, and a dtype where it is not ``float32``.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from functools import cache
from types import FrameType, TracebackType
from typing import Any, ClassVar, Final, Self

import torch

from sightline.api import Trace
from sightline.errors import UsageError
from sightline.recording.native.engine import resolve_engine
from sightline.recording.recorder import Recorder, RecordingOptions, check_model
from sightline.trace.data import TensorMeta
from sightline.trace.events import LiveCallEvent, LiveOpEvent
from sightline.trace.source_files import inside_torch, torch_file
from sightline.views.live import LiveLog, LogWatcher
from sightline.views.log_blocks import BlockStyle, tensor_block_text
from sightline.views.outline import Printer

__all__ = ["Color", "Tracer", "trace_model"]

#: What torch runs instead of the modules of its own attention layers, in eval mode and without gradients.
_FUSED: Final = re.compile(r"_transformer_encoder_layer_fwd|_native_multi_head_attention")
_FUSING: Final = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
_HINT: Final = (
    "torch ran the whole module as one fused op; torch.backends.mha.set_fastpath_enabled(False) shows inside"
)


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
    """What a printer is told: no colours, or those that suit the stream."""
    return None if Color.enabled else False


def _level(model: Any) -> str:
    """What is recorded: API calls; the plain engine sees only the aten ops of what torch fuses."""
    fuses = model is not None and any(isinstance(part, _FUSING) for part in model.modules())
    return "both" if fuses and resolve_engine("auto") == "python" else "api"


def _tensor_text(meta: TensorMeta) -> str:
    """A tensor, with its dtype where that is not the usual one: ``Tensor [2, 3] int64 @ cpu``."""
    text = tensor_block_text(meta)
    return text if meta.dtype == "float32" else text.replace("] @", f"] {meta.dtype} @")


_STYLE: Final = BlockStyle(_tensor_text, margin="  ")


class Tracer:
    """Print what happens in a model between ``start(model)`` and ``stop()``, or in a ``trace(model)`` block.

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

    ``with tracer:`` traces the model that `trace_model` was given, or whatever runs. The recording itself is
    ``tracer.recording``, for every other view. A tracer can be used again.
    """

    def __init__(self, name: str = "Model", model: Any = None) -> None:
        self.name = name
        self._model = model
        self._recorder: Recorder | None = None
        self._log: LiveLog | None = None
        self._began: list[bool] = []  # whether each open ``with tracer:`` block has started it

    def __repr__(self) -> str:
        return f"<Tracer {self.name!r}, {'tracing' if self.active else 'not tracing'}>"

    @property
    def active(self) -> bool:
        """Whether it is tracing."""
        return self._recorder is not None and self._recorder.running

    @property
    def recording(self) -> Trace:
        """What was recorded last, or is being recorded.

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
        """Begin to trace a model; a tracer that is tracing says so and goes on as it is."""
        self._start(model, sys._getframe(1))

    def stop(self) -> None:
        """Stop tracing; a tracer that is not tracing stays as it is."""
        self._stop(None)

    def trace(self, model: Any) -> _Block:
        """Trace a model while a block runs; the tracer is what ``as`` gives."""
        return _Block(self, model)

    def __enter__(self) -> Self:
        self._began.append(self._start(self._model, sys._getframe(1)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._began.pop():  # what was tracing before the block goes on after it
            self._stop(error)

    def _start(self, model: Any, frame: FrameType) -> bool:
        """Whether it was not tracing yet, and now is."""
        if self.active:
            printer = Printer(color=_color())
            printer.write(_STYLE.banner(f"Tracer {self.name} is already active"))
            printer.flush()
            return False
        check_model(model)
        log = LiveLog(title=self.name, root=model is None, style=_STYLE, color=_color())
        recorder = Recorder(model, _level(model), self.name, options=RecordingOptions(_Watch(log, model)))
        log.start()
        recorder.start(frame)
        self._recorder, self._log = recorder, log
        return True

    def _stop(self, error: BaseException | None) -> None:
        if self._recorder is None or self._log is None or not self.active:
            return
        self._recorder.stop(error)
        self._log.stop()


def trace_model(model: Any, name: str | None = None) -> Tracer:
    """A tracer of a model, not started yet: ``with tracer:`` or ``with tracer.trace(model):`` starts it.

    Without a name it has that of the model's class.

    >>> import torch
    >>> trace_model(torch.nn.ReLU(), "My model"), trace_model(torch.nn.ReLU())
    (<Tracer 'My model', not tracing>, <Tracer 'ReLU', not tracing>)
    """
    check_model(model)
    return Tracer(type(model).__name__ if name is None else name, model)


class _Block:
    """The block of ``with tracer.trace(model):``."""

    def __init__(self, tracer: Tracer, model: Any) -> None:
        self._tracer = tracer
        self._model = model
        self._began = False

    def __enter__(self) -> Tracer:
        self._began = self._tracer._start(self._model, sys._getframe(1))
        return self._tracer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._began:  # what was tracing before the block goes on after it
            self._tracer._stop(error)


class _Watch(LogWatcher):
    """The live log with its banners; a model of the user's own without submodules is no leaf.

    A bias that is there is not said, as torch's own convolutions do not.
    """

    def __init__(self, log: LiveLog, model: Any) -> None:
        super().__init__("api")
        self._live = log
        module = sys.modules.get(type(model).__module__)
        self._own = model is not None and not torch_file(getattr(module, "__file__", None) or "")

    def enter(self, event: LiveCallEvent) -> None:
        super().enter(self._seen(event))

    def leave(self, event: LiveCallEvent) -> None:
        super().leave(self._seen(event))

    def op(self, event: LiveOpEvent) -> None:
        if event.level == "aten" and _FUSED.search(event.name):  # there is no API call to be seen
            event = replace(event, level="api", flavour="function", name=f"torch.{event.name}")
        super().op(event)

    def caller(self, event: LiveOpEvent) -> str:
        """The module of torch in which an operation runs is its caller, if that is inside the user's code."""
        for place in reversed(event.chain):
            if not torch_file(place.file):
                return place.function
            if (inside_torch(place.file) or "").startswith("nn/modules/") and place.function[:1].isupper():
                if not place.function.startswith("Module."):
                    return place.function
        return ""

    def note(self, event: LiveOpEvent) -> str:
        """What torch has not run one by one."""
        return _HINT if _FUSED.search(event.name) else ""

    def _seen(self, event: LiveCallEvent) -> LiveCallEvent:
        leaf = event.leaf and event.library and not (event.root and self._own)
        event = replace(event, leaf=leaf, extra=event.extra.removesuffix(", bias=True"))
        return replace(event, extra=_named(event)) if event.library else event


def _named(event: LiveCallEvent) -> str:
    """What a module of torch is set to, each value with its name: ``in_channels=3, out_channels=8``."""
    parts = re.split(r", (?![^()]*\))", event.extra) if event.extra else []
    unnamed = sum("=" not in part for part in parts)
    names = _parameters(event.type)[:unnamed] if all("=" not in part for part in parts[:unnamed]) else []
    return ", ".join([*map("=".join, zip(names, parts, strict=False)), *parts[len(names) :]])


@cache
def _parameters(kind: str) -> list[str]:
    """The names of what a module of torch is made with; those of the base class where it passes them on."""
    for base in getattr(torch.nn, kind, torch.nn.Module).__mro__[:-1]:
        found = inspect.signature(base).parameters.values()
        if not any(one.kind is one.VAR_POSITIONAL for one in found):
            return [one.name for one in found if one.name not in ("mode",)]
    return []
