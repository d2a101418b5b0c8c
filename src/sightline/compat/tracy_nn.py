"""`Tracer` and `trace_model` as users of tracy_nn know them: a block per module call and operation, live.

    import sys, sightline.compat.tracy_nn
    sys.modules["tracy_nn"] = sightline.compat.tracy_nn

is enough for a script that is written for that package. The recorder says what happens and the live log
writes it, so every torch function is seen (``torch.cat`` too), what a module is set to comes from the module
itself, containers indent what runs inside them, and nothing in torch is replaced. The model has no block of
its own, unless it is a single module of torch; a bias is said where there is none.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Final

from sightline.api import Trace
from sightline.errors import UsageError
from sightline.recording.recorder import Asked, Recorder, check_model
from sightline.trace.events import CallHappened
from sightline.trace.source_files import torch_file
from sightline.views.live import LiveLog, WatchLog
from sightline.views.log_blocks import BlockStyle
from sightline.views.outline import Printer

__all__ = ["Tracer", "trace_model"]

_STYLE: Final = BlockStyle(margin="  ")


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

    The recording itself is ``tracer.recording``, for every other view. A tracer can be used again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._recorder: Recorder | None = None
        self._log: LiveLog | None = None

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

    def _start(self, model: Any, frame: FrameType) -> bool:
        """Whether it was not tracing yet, and now is."""
        if self.active:
            printer = Printer()
            printer.write(_STYLE.banner(f"Tracer {self.name} is already active"))
            printer.flush()
            return False
        check_model(model)
        log = LiveLog(title=self.name, root=False, style=_STYLE)
        recorder = Recorder(model, "api", self.name, asked=Asked(_Watch(log, model)))
        log.start()
        recorder.start(frame)
        self._recorder, self._log = recorder, log
        return True

    def _stop(self, error: BaseException | None) -> None:
        if self._recorder is None or self._log is None or not self.active:
            return
        self._recorder.stop(error)
        self._log.stop()


def trace_model(model: Any, name: str) -> Tracer:
    """A tracer with a name, not started yet; a ``with tracer.trace(model):`` block starts it.

    >>> import torch
    >>> trace_model(torch.nn.ReLU(), "My model")
    <Tracer 'My model', not tracing>
    """
    check_model(model)
    return Tracer(name)


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


class _Watch(WatchLog):
    """The live log with its banners; a model of the user's own without submodules is no leaf.

    A bias that is there is not said, as torch's own convolutions do not.
    """

    def __init__(self, log: LiveLog, model: Any) -> None:
        super().__init__("api")
        self._live = log
        module = sys.modules.get(type(model).__module__)
        self._own = not torch_file(getattr(module, "__file__", None) or "")

    def enter(self, event: CallHappened) -> None:
        super().enter(self._seen(event))

    def leave(self, event: CallHappened) -> None:
        super().leave(self._seen(event))

    def _seen(self, event: CallHappened) -> CallHappened:
        leaf = event.leaf and not (event.root and self._own)
        return replace(event, leaf=leaf, extra=event.extra.removesuffix(", bias=True"))
