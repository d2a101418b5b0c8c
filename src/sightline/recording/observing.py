"""Who is told of every op and module call while it happens, with the tensors themselves at hand.

Live views, statistics, checks and captures are observers. Without one a recording pays one test per op. An
observer is called after the op has been written down, and what it does with torch passes no mode and makes
no autograd node. What it raises is a fault like any other of the recorder's, unless it is meant to stop the
run (`SessionBase.fault`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sightline.recording.torchapi import below_autograd, no_dispatch, quiet

if TYPE_CHECKING:
    from sightline.recording.operations import OpInfo
    from sightline.recording.session_base import SessionBase
    from sightline.trace.forms import Form


@dataclass(slots=True)
class OpEvent:
    """An op, or an API call, that has ended."""

    info: OpInfo
    number: int  #: of its row
    stack: int
    phase: int  #: a position in ``PHASES``
    node: int | None  #: the number of the autograd node that runs it; None outside a backward pass
    api: OpInfo | None  #: the API call an op is part of
    modules: list[int]  #: whose calls are open, outermost first
    worker: bool  #: one of autograd's own threads runs it
    ids: list[int]  #: the values of its inputs
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    result: Any
    raised: bool = False
    form: Form | None = None  #: of the arguments and of the result, where the engine knows them already
    result_form: Form | None = None
    odd: bool = False  #: the native engine has found something in it that is not finite


@dataclass(slots=True)
class CallEvent:
    """A module call that has begun, or ended; on an exception without a result."""

    module: int
    number: int
    phase: int
    depth: int  #: how many calls are open around it
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    form: int  #: of what it was given
    result: Any = None
    raised: bool = False


@dataclass(slots=True)
class Spied:
    """What ``sl.spy`` was told."""

    name: str
    value: Any
    module: Any  #: the module it belongs to, or None for the one that runs
    modules: list[int]  #: whose calls are open, outermost first
    phase: int


class Observer:
    """Does nothing at every event; `silent` ones run where no mode and no autograd sees their ops."""

    silent: ClassVar = True
    ops: bool = True  #: whether it wants to hear of ops
    api: bool = True  #: whether it wants to hear of API calls
    calls: bool = True  #: whether it wants to hear of every module call

    def wants(self, event: OpEvent) -> bool:
        """Whether it would look at an op; asked first, since making silence costs microseconds."""
        return True

    def op(self, event: OpEvent) -> None:
        """An op has ended."""

    def enter(self, call: CallEvent) -> None:
        """A module call begins."""

    def leave(self, call: CallEvent) -> None:
        """A module call has ended."""

    def spied(self, spied: Spied) -> None:
        """A value was named by ``sl.spy``."""

    def step(self) -> None:
        """A step has begun or ended."""

    def finish(self) -> None:
        """The recording has stopped; the model is still there."""

    def asked(self) -> dict[str, Any]:
        """What it was asked for, as plain data: views tell what of it did not come about."""
        return {}


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, session: SessionBase, observers: list[Observer]) -> None:
        self._session = session
        self._loud = [one for one in observers if not one.silent]
        self._silent = [one for one in observers if one.silent]
        self.all = observers
        self.ops = any(one.ops for one in observers)
        self.api = any(one.api for one in observers)
        self.calls = any(one.calls for one in observers)

    def op(self, event: OpEvent) -> None:
        """Tell each."""
        for one in self._loud:
            one.op(event)
        asking = [] if event.raised else [one for one in self._silent if one.wants(event)]
        if asking:
            with quiet(), no_dispatch(), below_autograd():
                for one in asking:
                    one.op(event)

    def enter(self, call: CallEvent) -> None:
        """Tell each."""
        for one in self._loud:
            one.enter(call)
        if self._silent:
            with quiet(), no_dispatch(), below_autograd():
                for one in self._silent:
                    one.enter(call)

    def leave(self, call: CallEvent) -> None:
        """Tell each."""
        for one in self._loud:
            one.leave(call)
        if self._silent:
            with quiet(), no_dispatch(), below_autograd():
                for one in self._silent:
                    one.leave(call)

    def spied(self, spied: Spied) -> None:
        """Tell each."""
        with quiet(), no_dispatch(), below_autograd():
            for one in self.all:
                one.spied(spied)

    def step(self) -> None:
        """Tell each."""
        for one in self.all:
            one.step()

    def finish(self) -> None:
        """Tell each, and the last one though the first fails."""
        for one in self.all:
            try:
                one.finish()
            except Exception as error:
                self._session.fault(error)

    def asked(self) -> dict[str, Any]:
        """Of each."""
        return {name: what for one in self.all for name, what in one.asked().items()}
