"""Every error sightline raises on purpose.

    SightlineError
    ├── UsageError              a wrong call: one sentence that says the fix
    │   ├── NativeUnavailable   the native engine was requested and cannot be built or loaded here
    │   ├── NothingMatched      a view filter that matches nothing in this trace
    │   ├── NoSuchNode          a graph has no node of this name (also a ``KeyError``)
    │   ├── NotCaptured         a tensor that was not captured (also a ``KeyError``)
    │   └── TorchMissing        recording needs torch, which is not installed
    ├── CaptureError            tensors could not be written: a full disk, an unwritable folder
    ├── DamagedFile             a file of a recording is cut short, altered or not what it claims to be
    ├── ExportError             torch.export cannot export a model: the line and the reason
    ├── InvalidGraph            a graph contradicts itself (``Graph.lint``)
    ├── NonFiniteError          an op made a NaN or an infinity under ``check="nonfinite"``
    ├── UnsupportedTorch        a private torch name this version relies on is gone
    └── InvalidTrace            a recording breaks its own invariants (``Trace.validate``)

Errors of the traced program are never wrapped: they keep their type and gain a note.
"""

from __future__ import annotations

from sightline.text_encoding import for_output


class SightlineError(Exception):
    """The base of all errors raised by sightline.

    >>> issubclass(UsageError, SightlineError)
    True
    """

    def __str__(self) -> str:
        return for_output(Exception.__str__(self))  # programs print it, to any stream

    def __repr__(self) -> str:
        return for_output(Exception.__repr__(self))


class UsageError(SightlineError, ValueError):
    """A wrong call; the message says what to write instead.

    >>> import sightline as sl
    >>> try:
    ...     sl.trace("resnet")
    ... except sl.UsageError as error:
    ...     print(type(error).__name__)
    UsageError
    """


class NothingMatched(UsageError):
    """A filter of a view matched no op and no module call of the trace.

    >>> issubclass(NothingMatched, UsageError)
    True
    """


class NotCaptured(UsageError, KeyError):
    """No tensor was captured under this name; the message offers the nearest names.

    >>> issubclass(NotCaptured, KeyError), str(NotCaptured("There is no 'q'."))
    (True, "There is no 'q'.")
    """


class NativeUnavailable(UsageError):
    """The native engine cannot be used here; the message says why, and what would change that.

    >>> issubclass(NativeUnavailable, UsageError)
    True
    """


class TorchMissing(UsageError, ImportError):
    """Recording needs torch, viewing does not; torch is not installed here.

    >>> issubclass(TorchMissing, ImportError)
    True
    """


class CaptureError(SightlineError):
    """Captured tensors, or a recording, could not be written; the message says which, where and why.

    >>> issubclass(CaptureError, UsageError)
    False
    """


class DamagedFile(SightlineError):
    """A file of a recording cannot be trusted; the message names the file and what is wrong with it.

    >>> issubclass(DamagedFile, SightlineError)
    True
    """


class NonFiniteError(SightlineError, ArithmeticError):
    """An op made a NaN or an infinity; the message names it, its line, its module and its inputs.

    >>> import torch, sightline as sl
    >>> try:
    ...     with sl.trace(check="nonfinite"):
    ...         torch.tensor([-1.0, 1.0]).log()
    ... except sl.NonFiniteError as error:
    ...     print(str(error).splitlines()[0])  # doctest: +ELLIPSIS
    log made 1 NaN of 2 in f32[2], ...
    """


class ExportError(SightlineError):
    """A model cannot be exported; the message names the line and the reason, and what works instead.

    >>> issubclass(ExportError, SightlineError)
    True
    """


class NoSuchNode(UsageError, KeyError):
    """A graph has no node of this name; the message offers the nearest ones.

    >>> issubclass(NoSuchNode, KeyError), issubclass(NoSuchNode, UsageError)
    (True, True)
    """


class InvalidGraph(SightlineError):
    """A graph contradicts itself; the message names the first contradiction.

    >>> issubclass(InvalidGraph, SightlineError)
    True
    """


class UnsupportedTorch(SightlineError):
    """This torch lacks a private name that the recorder needs.

    >>> issubclass(UnsupportedTorch, UsageError)
    False
    """


class InvalidTrace(SightlineError):
    """A recording contradicts itself; the message lists the first contradictions.

    >>> issubclass(InvalidTrace, SightlineError)
    True
    """
