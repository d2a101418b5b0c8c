"""Every error sightline raises on purpose.

    SightlineError
    ├── UsageError              a wrong call: the message is one sentence and says the fix
    │   ├── NothingMatched      a view filter that matches nothing in this trace
    │   └── TorchMissing        recording was asked for where torch is not installed
    ├── UnsupportedTorch        a private torch name this version relies on is gone
    └── InvalidTrace            a recording breaks its own invariants (``Trace.validate``)

Errors of the traced program are never wrapped: they keep their type and gain a note.
"""

from __future__ import annotations


class SightlineError(Exception):
    """The base of all errors raised by sightline.

    >>> issubclass(UsageError, SightlineError)
    True
    """


class UsageError(SightlineError, ValueError):
    """A call that cannot mean anything; the message says what to write instead.

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


class TorchMissing(UsageError, ImportError):
    """Recording needs torch, viewing does not; torch is not installed here.

    >>> issubclass(TorchMissing, ImportError)
    True
    """


class UnsupportedTorch(SightlineError):
    """This torch lacks a private name the recorder stands on.

    >>> issubclass(UnsupportedTorch, UsageError)
    False
    """


class InvalidTrace(SightlineError):
    """A recording contradicts itself; the message lists the first contradictions.

    >>> issubclass(InvalidTrace, SightlineError)
    True
    """
