"""`trace`: the one way to record. A block, a decorator, or ``start()`` and ``stop()``."""

from __future__ import annotations

import copy
import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

from sightline.api import Trace
from sightline.argument_checks import argument_text, check_arguments
from sightline.errors import UsageError
from sightline.options import Bundle, Capture, Check, RecordingOptions, Stats
from sightline.process_rank import path_of_rank

if TYPE_CHECKING:
    from sightline.data.live_events import Watcher
    from sightline.recording.recorder import Recorder

P = ParamSpec("P")
T = TypeVar("T")

OpsLevel = Literal["none", "api", "aten", "both"]


def _with_former_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Accept the arguments that `Bundle` has now, with a `DeprecationWarning`."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        former = {name: kwargs.pop(name) for name in ("source", "environment", "overwrite") if name in kwargs}
        if former:
            written = ", ".join(f"{name}={argument_text(value)}" for name, value in former.items())
            fix = f"path=sl.Bundle(…, {written})"
            path = kwargs.get("path")
            if path is None or isinstance(path, Bundle):
                raise UsageError(f"{written} says how path= is written: give {fix}, or say it to t.save().")
            warnings.warn(
                f"{written} is written {fix} now; the old form ends with the next version.",
                DeprecationWarning,
                stacklevel=2,
            )
            kwargs["path"] = Bundle(path, **former)  # type: ignore[arg-type]
        return function(*args, **kwargs)

    return wrapper


class trace:  # noqa: N801  # it is used like a function: `with sl.trace(model) as t:`
    """Record what runs, as a block, a decorator, or between ``start()`` and ``stop()``.

    >>> import torch, sightline as sl
    >>> model = torch.nn.Linear(3, 2)
    >>> with sl.trace(model) as t:
    ...     y = model(torch.ones(1, 3))
    >>> [call.module.type for call in t.module_calls]
    ['Linear']

    ``model`` names modules and parameters; without it any tensor code can be traced, and paths are relative
    to the first module called. ``ops`` chooses what is recorded: ``"api"`` — functions, methods and operators
    as the user wrote them; ``"aten"`` — dispatcher ops, backward and optimizer included; ``"both"``, each
    aten op knowing the API call it came from; ``"none"`` — module calls only, the cheapest. ``name`` is what
    views call the recording.

    ``capture`` keeps tensors: True for what every module returns, globs on module paths, or a `Capture`; they
    are ``t.tensors``. ``path="run.sight"`` writes the recording, and those tensors, while it runs: what it
    takes in memory does not grow, and a killed process leaves everything up to its last third of a second. A
    `Bundle` in its place says more about what is written: ``path=sl.Bundle("run.sight", overwrite=True)``.
    ``last=N`` keeps the last N ops, like a flight recorder. ``stats=True`` takes minimum, maximum, mean,
    deviation, norm, zeros, NaNs, infinities and a fingerprint of every floating result.
    ``check="nonfinite"`` raises `NonFiniteError` at the op that makes the first NaN or infinity.
    ``live="code"`` or ``live="log"`` prints while it runs. ``compiled="eager"`` looks inside compiled code
    by running it eagerly, in the whole process, while the block runs.

    ``time="device"`` adds what a CUDA device spent on each op, and when it had nothing to do.

    ``engine="native"`` observes from C++ and changes nothing of what runs; ``"python"`` is the plain
    recorder, which any machine can run; ``"auto"`` takes the first where it can be built.
    """

    @_with_former_arguments
    @check_arguments
    def __init__(
        self,
        model: Any = None,
        *,
        ops: OpsLevel = "both",
        live: Literal["code", "log"] | None = None,
        capture: bool | str | Sequence[str] | Capture | None = None,
        stats: bool | Stats | None = None,
        check: Literal["nonfinite"] | Check | None = None,
        last: int | None = None,
        path: str | os.PathLike[str] | Bundle | None = None,
        name: str | None = None,
        compiled: Literal["opaque", "eager"] = "opaque",
        time: Literal["host", "device"] = "host",
        engine: Literal["auto", "native", "python"] = "auto",
    ) -> None:
        options = RecordingOptions(
            ops=ops, live=live, capture=capture, stats=stats, check=check, last=last, path=path, name=name,
            compiled=compiled, time=time, engine=engine,
        )  # fmt: skip
        from sightline.recording.recorder import Recorder, check_model

        check_model(model)
        if time == "device":
            from sightline.recording.cuda_devices import check_device

            check_device()
        folder = None if options.path is None else path_of_rank(Path(options.path.path))
        self._make: Callable[[], Recorder] = lambda: Recorder(
            model, options, folder=folder, watcher=_watcher(live, ops)
        )

    _recorder: Recorder | None = None
    _in_block = False  #: between ``__enter__`` and ``__exit__``

    def __repr__(self) -> str:
        state = "recording" if self._recorder is not None and self._recorder.running else "not recording"
        return f"<sl.trace, {state}>"

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(Trace, name):
            raise AttributeError(
                f"sl.trace(...) is not a recording yet: write `with sl.trace(model) as t:`, then t.{name}."
            )
        raise AttributeError(f"'trace' object has no attribute {name!r}")

    def start(self) -> Trace:
        """Begin to record; the trace it returns is a snapshot of the run so far until ``stop()``."""
        return self._start(sys._getframe(1), is_block=False)

    def _start(self, frame: Any, outer_frames: bool = True, is_block: bool | None = None) -> Trace:
        if self._recorder is not None and self._recorder.running:
            raise UsageError("This trace is already recording; make a second one with sl.trace(...) to nest.")
        self._recorder = recorder = self._make()
        try:
            recorder.start(frame, outer_frames, is_block)
            return Trace(recorder.index)
        except BaseException:
            recorder.cancel()
            self._recorder = None
            raise

    def stop(self) -> Trace:
        """Stop recording and return the finished trace; stopping twice returns it again.

        Where it is interrupted, nothing records any more, and stopping again finishes the trace.
        """
        if self._recorder is None:
            raise UsageError(
                "This trace has not been started; call start() first, or use it in a with block."
            )
        self._recorder.stop()
        return Trace(self._recorder.index)

    def __enter__(self) -> Trace:
        self._in_block = True
        return self._start(sys._getframe(1))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._recorder is not None:
                self._recorder.stop(error)
        finally:  # `__del__` must not stop it a second time
            self._in_block = False

    def __del__(self) -> None:
        # An interrupt may come as `__exit__` begins, before any of it has run, and it is not called again.
        recorder = self._recorder if self._in_block else None
        if recorder is not None and not sys.is_finalizing():
            recorder.stop()

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Record every call of a function; the last recording is its attribute ``trace``."""
        if not callable(function):
            raise UsageError(f"sl.trace(...) decorates a function, not {type(function).__name__}.")

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> T:
            block = copy.copy(self)
            block._recorder = None
            block._in_block = True
            try:
                # The attribute of the function is the last recording.
                traced.trace = block._start(sys._getframe(1), is_block=True)  # type: ignore[attr-defined]
                result = function(*args, **kwargs)
            except BaseException as error:
                block.__exit__(type(error), error, None)
                raise
            block.__exit__(None, None, None)
            return result

        return traced


def _watcher(live: str | None, ops: str) -> Watcher | None:
    """The watcher that prints while the block runs."""
    if live is None:
        return None
    from sightline.views.live import CodeWatcher, LogWatcher

    return CodeWatcher(ops) if live == "code" else LogWatcher(ops)


def recorded(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Trace:
    """A recording of one forward of a model, with statistics, for `sightline.compare`."""
    from sightline.recording.recorder import run_once

    with trace(model, stats=Stats(parameters=True), name=name) as recording:
        run_once(model, args, kwargs)
    return recording
