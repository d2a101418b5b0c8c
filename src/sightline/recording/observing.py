"""Who is told of every op and module call while it happens, with the tensors themselves at hand.

Live views, statistics, checks and captures are observers. Without one a recording pays one test per op. An
observer is called after the op has been written down, and what it does with torch passes no mode and makes
no autograd node. What it raises is a fault like any other of the recorder's, unless it is meant to stop the
run (`Session.fault`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from sightline.recording.torchapi import below_autograd, no_dispatch, quiet

if TYPE_CHECKING:
    from sightline.recording.lanes import Lane, OpenCall
    from sightline.recording.operations import OpInfo
    from sightline.recording.session import Session


class Spied(NamedTuple):
    """What ``sl.spy`` was told."""

    name: str
    value: Any
    module: Any  #: the module it belongs to, or None for the one that runs


class Observer:
    """Does nothing at every event; `silent` ones run where no mode and no autograd sees their ops."""

    silent: ClassVar = True

    def wants(self, info: OpInfo, ids: list[int], result: Any) -> bool:
        """Whether it would look at an op; asked first, since making silence costs microseconds."""
        return True

    def op(
        self, lane: Lane, info: OpInfo, node: Any, stack: int, number: int, ids: list[int],
        args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool = False,
    ) -> None:  # fmt: skip
        """An op has ended: row ``number``, whose inputs are the values ``ids``."""

    def enter(self, session: Session, call: OpenCall, args: tuple[Any, ...]) -> None:
        """A module call begins."""

    def leave(
        self, session: Session, call: OpenCall, args: tuple[Any, ...], result: Any, raised: bool
    ) -> None:
        """A module call has ended; on an exception without a result."""

    def spied(self, session: Session, lane: Lane, spied: Spied) -> None:
        """A value was named by ``sl.spy``."""

    def step(self, session: Session) -> None:
        """A step has begun or ended."""

    def finish(self, session: Session) -> None:
        """The recording has stopped; the model is still there."""

    def asked(self) -> dict[str, Any]:
        """What it was asked for, as plain data: views tell what of it did not come about."""
        return {}


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, observers: list[Observer]) -> None:
        self._loud = [one for one in observers if not one.silent]
        self._silent = [one for one in observers if one.silent]
        self.all = observers

    def op(
        self, lane: Lane, info: OpInfo, node: Any, stack: int, number: int, ids: list[int],
        args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool = False,
    ) -> None:  # fmt: skip
        """Tell each."""
        for one in self._loud:
            one.op(lane, info, node, stack, number, ids, args, kwargs, result, raised)
        asking = [] if raised else [one for one in self._silent if one.wants(info, ids, result)]
        if asking:
            with quiet(), no_dispatch(), below_autograd():
                for one in asking:
                    one.op(lane, info, node, stack, number, ids, args, kwargs, result)

    def enter(self, session: Session, call: OpenCall, args: tuple[Any, ...]) -> None:
        """Tell each."""
        for one in self._loud:
            one.enter(session, call, args)
        if self._silent:
            with quiet(), no_dispatch(), below_autograd():
                for one in self._silent:
                    one.enter(session, call, args)

    def leave(
        self, session: Session, call: OpenCall, args: tuple[Any, ...], result: Any, raised: bool
    ) -> None:
        """Tell each."""
        for one in self._loud:
            one.leave(session, call, args, result, raised)
        if self._silent:
            with quiet(), no_dispatch(), below_autograd():
                for one in self._silent:
                    one.leave(session, call, args, result, raised)

    def spied(self, session: Session, lane: Lane, spied: Spied) -> None:
        """Tell each."""
        with quiet(), no_dispatch(), below_autograd():
            for one in self.all:
                one.spied(session, lane, spied)

    def step(self, session: Session) -> None:
        """Tell each."""
        for one in self.all:
            one.step(session)

    def finish(self, session: Session) -> None:
        """Tell each, and the last one though the first fails."""
        for one in self.all:
            try:
                one.finish(session)
            except Exception as error:
                session.fault(error)

    def asked(self) -> dict[str, Any]:
        """Of each."""
        return {name: what for one in self.all for name, what in one.asked().items()}
