"""An aten op or an API call from just before it runs until its row is written.

`modes` calls ``begin`` before it runs the function and ``end`` after it. Neither ever runs the function
itself, and whatever goes wrong in them is a fault of the recorder that does not reach the run.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, Self

from sightline.recording.compiled import COMPILED_NODE, compiled_backward
from sightline.recording.operations import OpInfo
from sightline.recording.session_base import clock
from sightline.recording.thread_state import Mark, OpenOp, ThreadState
from sightline.recording.torchapi import Tensor, current_node, quiet, sequence_number, storage_address
from sightline.trace.assembly.layout import BACKWARD, INHERITED
from sightline.trace.data import MUTATES, RAISED

if TYPE_CHECKING:
    from sightline.recording.session import Session

_NO_NUMBER: Final = 1 << 62  # a node that accumulates into a leaf has no sequence number, but all bits set


class RunningOp:
    """What aten ops and API calls have in common. Its inputs are read before it changes them."""

    def __init__(
        self, session: Session, state: ThreadState, info: OpInfo, stack: int, args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        self.session, self.state, self.info = session, state, info
        self.stack, self.args, self.kwargs = stack, args, kwargs
        self.inputs: list[int] = []
        self.form = session.arguments.read(info.forms, args, kwargs, self.inputs)
        self.start = 0

    def opened(self, number: int) -> OpenOp:
        """The part of its row that is known when it begins."""
        return OpenOp(number, self.info.number, self.form, self.stack, self.start, self.inputs)

    def mutated(self, number: int, result: Any) -> tuple[list[int], int]:
        """New versions of what it changed in place; they are outputs even if it returns nothing."""
        session, values = self.session, self.session.values
        changed: list[int] = []
        for tensor in session.arguments.at(self.info.mutates or ("out",), self.args, self.kwargs):
            old = values.known(tensor)
            changed.append(values.produced(tensor, number, -1 if old is None else old))
        made, form = session.made(number, result)
        return [*made, *(one for one in changed if one not in made)], form

    def notify(self, node: Any, number: int, result: Any, raised: bool = False) -> None:
        """Tell the observer, if there is one, that it has ended."""
        if self.session.observer is not None:
            self.session.observer.op(
                self.state, self.info, node, self.stack, number, self.inputs, self.args, self.kwargs, result,
                raised,
            )  # fmt: skip

    def fault(self, own: Exception, error: BaseException | None) -> None:
        """Something went wrong in here; an exception of the op's own goes on, and no other takes its place."""
        if error is None:
            self.session.fault(own)
        else:
            self.session.note_fault(own)


class AtenOp(RunningOp):
    """An op of the dispatcher."""

    node: Any  #: the autograd node that runs it

    @classmethod
    def begin(
        cls, session: Session, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: FrameType | None,
    ) -> Self | None:  # fmt: skip
        """The op that ``frame`` is about to run; None if it is not to be recorded."""
        entered = clock()
        try:
            state = session.state_here()
            if not session.is_recorded(state, frame):
                return None
            info, node = session.aten_info(function), current_node()
            if info.noise:
                return None
            if type(node).__name__ == COMPILED_NODE:
                compiled_backward(session, state, node, frame)
                return None
            with quiet():
                if info.constant:
                    session.know_constants(args)
                op = cls(session, state, info, _stack(session, state, node, frame), args, kwargs)
            op.node = node
            op.start = clock()
            state.spent += op.start - entered
            return op
        except Exception as error:
            session.fault(error)
            return None

    def end(self, result: Any, error: BaseException | None = None) -> None:
        """It has returned, or raised."""
        end = clock()
        session, state, node = self.session, self.state, self.node
        try:
            with quiet():
                number = session.next_id()
                outputs, form, flags = [], session.arguments.nothing, RAISED
                if error is None:
                    outputs, form = self._results(number, result)
                    flags = MUTATES if self.info.mutates else 0
                sequence = -1 if node is None else node._sequence_nr()
                session.write_op(
                    state, self.opened(number), end - self.start, outputs, form, flags=flags,
                    phase=state.phase if node is None else BACKWARD, sequence=sequence_number(),
                    node=sequence if sequence < _NO_NUMBER else -2,
                    parent=-1 if state.open_op is None else state.open_op.number,
                )  # fmt: skip
                state.aten_count += 1
                if error is not None:
                    session.failure = id(error)
                self.notify(node, number, result, raised=error is not None)
        except Exception as own:
            self.fault(own, error)
        state.spent += clock() - end

    def _results(self, number: int, result: Any) -> tuple[list[int], int]:
        """The values and the form of its result; an aten op says of itself whether they are views."""
        if self.info.mutates:
            return self.mutated(number, result)
        values = self.session.values
        for tensor in result if type(result) in (tuple, list) else (result,):
            if type(tensor) is Tensor and values.known(tensor) is None:
                base, offset = self._place(tensor)
                values.produced(tensor, number, base=base, offset=offset)
        return self.session.made(number, result)

    def _place(self, tensor: Any) -> tuple[int, int | None]:
        """The value whose memory a result shows, or -1; and where in it, where that is known already."""
        if self.info.aliases < 0:
            return -1, 0
        try:
            base = self.args[self.info.aliases]
            tensor.stride()  # sparse and nested tensors have none, and are not followed
            if self.info.maybe and storage_address(base) != storage_address(tensor):
                return -1, None
        except (RuntimeError, NotImplementedError, AttributeError, IndexError):
            return -1, None
        known = self.session.values.known(base)
        return (-1 if known is None else known), (None if self.info.moves else INHERITED)


class ApiCall(RunningOp):
    """A torch function, method or operator as the user wrote it."""

    @classmethod
    def begin(
        cls, session: Session, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        frame: FrameType, dispatcher: CodeType,
    ) -> Self | None:  # fmt: skip
        """The call that ``frame``, our handler's, is about to make; None if it is not to be recorded.

        ``dispatcher`` is the handler of aten ops, whose own calls of an op are none of the user's.
        """
        entered = clock()
        try:
            state, caller = session.state_here(), frame.f_back
            info = session.api_info(function)
            if info.noise or state.open_op is not None:
                return None
            outer = None if caller is None else caller.f_back
            if info.overload and outer is not None and outer.f_code is dispatcher:
                return None
            if not session.is_recorded(state, caller):
                return None
            with quiet():
                call = cls(session, state, info, session.stack(state, caller), args, kwargs)
            call.number = session.next_id()
            call.mark = Mark(frame, call.stack) if info.backward else None
            call.aten_count = state.aten_count
            call.start = clock()
            call.spent = state.spent = state.spent + (call.start - entered)
            return call
        except Exception as error:
            session.fault(error)
            return None

    number: int
    mark: Mark | None  #: below which the user's code may run, in a backward pass
    aten_count: int  #: of the aten ops before it
    spent: int  #: recorder time before it

    def enter(self) -> None:
        """It is the one that runs now."""
        self.state.open_op = self.opened(self.number)
        if self.mark is not None:
            self.state.push(self.mark)

    def end(self, result: Any, error: BaseException | None = None) -> None:
        """It has returned, or raised."""
        end = clock()
        session, state = self.session, self.state
        if not session.running:  # it was stopped inside this very call
            return
        try:
            if self.mark is not None:
                session.unwind(state, self.mark)
            duration = end - self.start - (state.spent - self.spent)
            if error is not None:
                session.failure = id(error)
                self._write(duration, [], session.arguments.nothing, RAISED, state.phase)
                return
            with quiet():
                outputs, form, flags = self._results(result)
            # A call that ran no op and returned no tensor is none of interest: `x.type()`.
            alone = session.level == "api" and type(result) is not str
            if outputs or state.aten_count != self.aten_count or alone:
                self._write(duration, outputs, form, flags, session.phase(state))
                self.notify(current_node(), self.number, result)
        except Exception as own:
            self.fault(own, error)
        state.spent += clock() - end

    def _write(self, duration: int, outputs: list[int], form: int, flags: int, phase: int) -> None:
        op = self.opened(self.number)
        self.session.write_op(self.state, op, duration, outputs, form, flags=flags, phase=phase)

    def _results(self, result: Any) -> tuple[list[int], int, int]:
        """Values, form and flags; what an aten op has made or changed is known by now."""
        if self.session.level == "api":
            new = not isinstance(result, Tensor) or self.session.values.known(result) is None
            if self.info.mutates or ("out" in self.kwargs and new):
                return *self.mutated(self.number, result), MUTATES
        return *self.session.made(self.number, result), 0


def _stack(session: Session, state: ThreadState, node: Any, frame: FrameType | None) -> int:
    """Below an API call the stack is known, unless the user's code runs in a backward pass."""
    if node is None and state.open_op is not None and state.open_op.stack >= 0:
        return state.open_op.stack
    return session.stack(state, frame)
