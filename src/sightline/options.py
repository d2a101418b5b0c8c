"""Options of a recording: `Bundle`, `Capture`, `Stats`, `Check`, and ranges of steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sightline.argument_checks import argument_text
from sightline.errors import UsageError

Globs = str | Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Which tensors to capture.

    >>> Capture(modules="blocks.*.attn").modules
    ('blocks.*.attn',)

    ``modules`` are globs on module paths, segment by segment: ``blocks.*.attn``, ``**.mlp``; None means every
    module. ``inputs`` and ``outputs`` say whether those of the matching modules are captured. ``ops`` are
    globs on op names (``softmax``, ``torch.cat``) whose results are captured in the matching modules.
    ``names`` are globs on the names given to `sightline.spy`; without it every spied tensor is captured.
    ``gradients`` also captures the gradients of these tensors and of the modules' parameters.

    ``when(info)`` is called before each tensor, with ``info.module``, ``info.name``, ``info.call``,
    ``info.step`` and ``info.phase``. ``dtype`` and ``device`` say how to store it, ``sample`` how many of its
    elements (the same positions for every tensor of a size). ``max_bytes`` limits the total; tensors beyond
    it are left out and counted. ``format="pt"`` writes one file per tensor, for ``torch.load``. ``on_error``
    says what a full disk or an unwritable folder does: "raise" stops the run, "report" goes on without.
    """

    modules: Globs = None
    ops: Globs = ()
    names: Globs = None
    inputs: bool = False
    outputs: bool = True
    gradients: bool = False
    when: Callable[[Any], bool] | None = None
    dtype: Any = None
    device: Any = None
    max_bytes: int | None = None
    sample: int | None = None
    format: Literal["safetensors", "pt"] = "safetensors"
    on_error: Literal["raise", "report"] = "raise"

    def __post_init__(self) -> None:
        """Check the fields, and turn single globs into tuples."""
        for name in ("modules", "ops", "names"):
            object.__setattr__(self, name, _globs(f"Capture({name}=…)", getattr(self, name)))
        for name in ("max_bytes", "sample"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                raise UsageError(
                    f"Capture({name}={argument_text(number)}) takes a positive whole number, or None."
                )
        if self.when is not None and not callable(self.when):
            raise UsageError(
                f"Capture(when=…) takes a function of one argument, not {argument_text(self.when)}."
            )
        for name in ("inputs", "outputs", "gradients"):
            one_of(name, getattr(self, name), (True, False))
        one_of("format", self.format, ("safetensors", "pt"))
        one_of("on_error", self.on_error, ("raise", "report"))

    @classmethod
    def of(cls, argument: Any) -> Capture | None:
        """The options for ``capture=``: True, a glob, a list of globs, or a `Capture`."""
        if argument is None or argument is False:
            return None
        if argument is True:
            return cls()
        if isinstance(argument, cls):
            return argument
        if isinstance(argument, str | list | tuple):
            return cls(modules=argument)
        raise UsageError(
            f"capture={argument_text(argument)} is not a choice; it is True, a glob, a list of globs, "
            "or sl.Capture(…)."
        )


@dataclass(frozen=True)
class Bundle:
    """Where a recording is written while it runs, and what it holds of the program.

    >>> Bundle("run.sight", overwrite=True).source
    True

    ``source=False`` leaves the text of the source files out from the first byte on, ``environment=False``
    versions, host name and command line. A recording that is there is replaced only with ``overwrite=True``.
    """

    path: str | os.PathLike[str]
    source: bool = field(default=True, kw_only=True)
    environment: bool = field(default=True, kw_only=True)
    overwrite: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.path, str | os.PathLike):
            raise UsageError(f"path={argument_text(self.path)} must be a path, or sl.Bundle(…).")
        for name in ("source", "environment", "overwrite"):
            one_of(name, getattr(self, name), (True, False))

    @classmethod
    def of(cls, argument: Any) -> Bundle | None:
        """The options for ``path=``: a path or a `Bundle`."""
        return argument if argument is None or isinstance(argument, cls) else cls(argument)


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Which statistics to take of every floating tensor, and of the integers that modules are given.

    >>> Stats(fingerprint=False).fingerprint
    False

    ``fingerprint`` is a 64-bit number that is equal for equal bits, on every device and in every process.
    A view that shows its base in another order, such as a transpose, has one with ``fingerprint="views"``,
    which takes a pass over each of them; one that repeats elements (``expand``) has none. ``modules`` and
    ``ops`` are globs; without them every op is measured. Parameters and buffers of the modules that run
    are measured once each, and again after they have changed; ``parameters=False`` leaves them out.
    """

    fingerprint: bool | Literal["views"] = True
    parameters: bool = True
    modules: Globs = None
    ops: Globs = None

    def __post_init__(self) -> None:
        """Check the fields, and turn single globs into tuples."""
        one_of("fingerprint", self.fingerprint, (True, False, "views"))
        one_of("parameters", self.parameters, (True, False))
        for name in ("modules", "ops"):
            object.__setattr__(self, name, _globs(f"Stats({name}=…)", getattr(self, name)))

    @classmethod
    def of(cls, argument: Any) -> Stats | None:
        """The options for ``stats=``: True or a `Stats`."""
        if argument is None or argument is False:
            return None
        if argument is True:
            return cls()
        if isinstance(argument, cls):
            return argument
        raise UsageError(f"stats={argument_text(argument)} is not a choice; it is True or sl.Stats(…).")


@dataclass(frozen=True, kw_only=True)
class Check:
    """What to check during the run.

    >>> Check(allow="masked_softmax").allow
    ('masked_softmax',)

    ``nonfinite``: no op may make a NaN of inputs without, nor an infinity of finite ones. ``allow``
    are globs on op names and module paths that may. ``on="raise"`` raises `NonFiniteError` at the op (on a
    CPU) or at the next end of a module call (elsewhere); ``on="report"`` only records, for ``t.nonfinite()``.
    """

    nonfinite: bool = True
    allow: Globs = ()
    on: Literal["raise", "report"] = "raise"

    def __post_init__(self) -> None:
        """Check the fields, and turn single globs into tuples."""
        one_of("nonfinite", self.nonfinite, (True, False))
        object.__setattr__(self, "allow", _globs("Check(allow=…)", self.allow))
        one_of("on", self.on, ("raise", "report"))

    @classmethod
    def of(cls, argument: Any) -> Check | None:
        """The options for ``check=``: "nonfinite" or a `Check`."""
        if argument is None or argument is False:
            return None
        if isinstance(argument, str) and argument == "nonfinite":
            return cls()
        if isinstance(argument, cls):
            return argument if argument.nonfinite else None
        raise UsageError(
            f'check={argument_text(argument)} is not a choice; it is "nonfinite" or sl.Check(…).'
        )


_CHOICES: Final = {
    "ops": ("none", "api", "aten", "both"),
    "live": (None, "code", "log"),
    "compiled": ("opaque", "eager"),
    "time": ("host", "device"),
    "engine": ("auto", "native", "python"),
}


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    """The options of `sightline.trace`, as they are given there: checked, and turned into their classes.

    >>> RecordingOptions(capture="blocks.*").capture.modules
    ('blocks.*',)
    """

    ops: str = "both"
    live: str | None = None
    capture: Any = None  #: a `Capture` or None, from here on
    stats: Any = None  #: a `Stats` or None
    check: Any = None  #: a `Check` or None
    last: int | None = None
    path: Any = None  #: a `Bundle` or None
    name: str | None = None
    compiled: str = "opaque"
    time: str = "host"
    engine: str = "auto"

    def __post_init__(self) -> None:
        """Check each option, and which go together."""
        for name, choices in _CHOICES.items():
            one_of(name, getattr(self, name), choices)
        for name, kind in (("capture", Capture), ("stats", Stats), ("check", Check), ("path", Bundle)):
            object.__setattr__(self, name, kind.of(getattr(self, name)))
        if self.path is None and self.capture is not None and self.capture.format == "pt":
            raise UsageError('Capture(format="pt") writes files: say where with path="run.sight".')
        if self.last is not None and (type(self.last) is not int or self.last < 1):
            raise UsageError(
                f"last={argument_text(self.last)} is how many ops to keep: a whole number from 1 up."
            )
        if self.check is not None and self.ops == "none":
            raise UsageError('check="nonfinite" looks at ops: use ops="api", "aten" or "both" with it.')
        if self.time == "device" and self.ops == "none":
            raise UsageError('time="device" says what each op took: use ops="api", "aten" or "both" with it.')


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is not a choice, in one sentence."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise UsageError(f"{name}={argument_text(value)} is not a choice; {name} is one of {listed}.")


def _globs(what: str, argument: Any) -> tuple[str, ...] | None:
    if argument is None:
        return None
    if isinstance(argument, str):
        return (argument,)
    if isinstance(argument, Sequence) and all(isinstance(glob, str) for glob in argument):
        return tuple(argument)
    raise UsageError(f"{what} takes a glob or a list of globs, not {argument_text(argument)}.")


def step_range(text: str, what: str) -> range:
    """The steps of a text; ``what`` names the argument in an error.

    >>> step_range("3", "steps="), step_range("2:5", "steps=")
    (range(3, 4), range(2, 5))
    """
    first, colon, end = text.partition(":")
    try:
        text.encode("ascii")  # `int` takes the digits of any script
        start = int(first or 0)
        stop = (int(end) if end else sys.maxsize) if colon else start + 1
    except ValueError:
        raise UsageError(f"{what}{text!r} must be a step or a range of them: 3, 0:5, 10: or `:`.") from None
    if start < 0 or stop <= start:
        raise UsageError(f"{what}{text!r} means no step; count from 0, and end after the first: 0:5.")
    return range(start, stop)
