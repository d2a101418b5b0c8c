"""`spy` and `step`: names for tensors and for stretches of a run. Outside a recording they do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final, Protocol, TypeVar

from sightline.argument_checks import argument_text
from sightline.errors import UsageError

T = TypeVar("T")


class MarkerListener(Protocol):
    """What receives the marks: the recorder, once it has been imported."""

    def spied(self, name: str, value: Any, module: Any) -> None: ...
    def stepped(self, begins: bool) -> None: ...


listeners: Final[list[MarkerListener]] = []
#: The open steps of each thread, outermost first; kept without a recording too, since one may start.
_open: Final[dict[int, list[str]]] = {}


def spy(name: str, value: T, module: Any = None) -> T:
    """Name a tensor (or anything that holds tensors), keep it if captures are on, and return it.

    >>> import torch, sightline as sl
    >>> with sl.trace(capture=True) as t:
    ...     y = sl.spy("q", torch.ones(2, 3))
    >>> t.tensors["q"][0].shape
    (2, 3)

    ``module`` is the module it belongs to; without it, the one whose ``forward`` is running. Outside a
    recording it does nothing.
    """
    for listener in listeners:
        listener.spied(name, value, module)
    return value


@contextmanager
def step(name: str) -> Iterator[None]:
    """Name a stretch of the run; what is captured in it has the name in its key.

    >>> import torch, sightline as sl
    >>> with sl.trace() as t, sl.step("step0"):
    ...     y = torch.ones(2).relu()
    >>> [step.name for step in t.steps], len(t.steps[0].ops.where(level="aten"))
    (['step0'], 2)

    Steps may nest: ``epoch1`` and in it ``step0`` is ``epoch1.step0``.
    """
    check_name("step", name)
    names = _open.setdefault(get_ident(), [])
    names.append(name)
    for listener in listeners:
        listener.stepped(begins=True)
    try:
        yield
    finally:
        for listener in listeners:
            listener.stepped(begins=False)
        names.pop()
        if not names:
            _open.pop(get_ident(), None)


def current_step() -> str:
    """The steps this thread is in: ``epoch1.step0``; empty outside of any."""
    return ".".join(_open.get(get_ident(), ()))


def check_name(what: str, name: object) -> None:
    """Refuse a name that cannot be part of a key or of a file's name."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"sl.{what}(name) takes a text that is not empty, not {argument_text(name)}.")
    if "/" in name or "\\" in name or ".." in name or "\0" in name:
        raise UsageError(
            f"sl.{what}({name!r}): a name holds no '/', '\\' or '..', since it becomes part of a key."
        )
