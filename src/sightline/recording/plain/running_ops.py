"""An aten op or an API call from just before it runs until its row is written.

`modes` calls ``begin`` before it runs the function and ``end`` after it. Neither runs the function itself,
and an error in them is a fault of the recorder that does not reach the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

from sightline.data.trace_data import MUTATES, RAISED
from sightline.recording.compilations import COMPILED_NODE
from sightline.recording.observers import ObservedOp
from sightline.recording.operations import OpInfo, api_traits, aten_traits, without_end
from sightline.recording.plain.compiled_regions import compiled_backward
from sightline.recording.plain.row_streams import op_row
from sightline.recording.plain.thread_state import OpenOp, StackAnchor
from sightline.recording.stacks import is_hidden
from sightline.recording.torchapi import (
    FUNCTION_APPLY_CODE,
    Tensor,
    current_node,
    no_torch_function,
    sequence_number,
    storage_address,
)
from sightline.schema.streams import INHERITED

if TYPE_CHECKING:
    from sightline.recording.plain.session import PlainSession

_NO_NUMBER: Final = 1 << 62  # the sequence number of a node that accumulates into a leaf has all bits set


class RunningOp(ABC):
    """An aten op or an API call that is running."""

    info: OpInfo
    number = -1
    stack = -1
    form = -1
    start = 0
    spent = 0  #: recorder time before it

    def __init__(self, session: PlainSession, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.session, self.args, self.kwargs = session, args, kwargs
        self.state, self.node = session.current_state(), current_node()
        self.inputs: list[int] = []

    @classmethod
    def begin(
        cls,
        session: PlainSession,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
    ) -> Self | None:
        """The op that ``frame``, our handler's, is about to run; None if it is not recorded."""
        entered = session.now()
        try:
            op = cls(session, args, kwargs)
            if not op.is_recorded(function, frame):
                return None
            session.memory.examine()
            with no_torch_function():  # before it runs: it may change its inputs
                op.read(frame)
                op.form = session.arguments.read(op.info.forms, op.as_written(), kwargs, op.inputs)
            op.start = session.now()
            op.spent = op.state.spent = op.state.spent + op.start - entered
            return op
        except Exception as error:
            session.fault(error)
            return None

    def as_written(self) -> tuple[Any, ...]:
        """The arguments in the order in which the user wrote them."""
        if self.info.mirrored:
            return self.args[::-1]
        return without_end(self.args) if self.info.slices else self.args

    @abstractmethod
    def is_recorded(self, function: Any, frame: FrameType) -> bool:
        """Whether the call is recorded; if so, ``info`` is set."""

    @abstractmethod
    def read(self, frame: FrameType) -> None:
        """Find its stack, and anything else that comes before its arguments."""

    def end(self, result: Any, error: BaseException | None = None) -> None:
        """The function has returned, or raised ``error``."""
        end = self.session.now()
        try:
            self.write(result, end - self.start - (self.state.spent - self.spent), error)
            if error is not None:
                self.session.failure = id(error)
        except Exception as own:
            if error is None:
                self.session.fault(own)
            else:  # only the op's own exception reaches the program
                self.session.note_fault(own)
        self.state.spent += self.session.now() - end

    @abstractmethod
    def write(self, result: Any, duration: int, error: BaseException | None) -> None:
        """Write the row and notify the observer."""

    def opened(self) -> OpenOp:
        """The part of the row that is known when it begins."""
        return OpenOp(self.number, self.info.number, self.form, self.stack, self.start, self.inputs)

    def outcome(self, result: Any, mutates: bool, error: BaseException | None) -> tuple[list[int], int, int]:
        """The values and the form of the result, and the flags.

        New versions of tensors that were changed in place are outputs even if nothing is returned.
        """
        values, arguments = self.session.values, self.session.arguments
        if error is not None:
            return [], arguments.nothing, RAISED
        changed: list[int] = []
        if mutates:
            for tensor in arguments.at(self.info.mutates or ("out",), self.args, self.kwargs):
                old = values.find(tensor)
                changed.append(values.add(tensor, self.number, -1 if old is None else old))
        returned, form = arguments.results(result, self.output)
        others = [one for one in changed if one not in returned]
        return returned + others, form, MUTATES if mutates else 0

    def output(self, tensor: Any) -> int:
        """The value of a tensor that was returned."""
        return self.session.values.output(tensor, self.number)

    def notify(self, result: Any, raised: bool = False) -> None:
        """Notify the observer, if there is one, that it has ended."""
        if self.session.observer is not None:
            state, infos, node = self.state, self.session.infos, self.node
            self.session.observer.op(
                ObservedOp(
                    self.info, self.number, self.stack, self.session.phase(state),
                    None if node is None else node._sequence_nr(),
                    None if state.open_op is None else infos[state.open_op.operation],
                    [call.module for call in state.calls()], state is not self.session.state, self.inputs,
                    self.as_written(), self.kwargs, result, raised,
                )
            )  # fmt: skip


class AtenOp(RunningOp):
    """An op of the dispatcher."""

    def is_recorded(self, function: Any, frame: FrameType) -> bool:
        """Not if it is noise, or one of the kernels of a compiled backward pass."""
        session, state = self.session, self.state
        if not session.is_recorded(state, frame.f_back):
            return False
        self.info = session.info(aten_traits, function)
        if self.info.noise:
            return False
        if type(self.node).__name__ == COMPILED_NODE:
            compiled_backward(session, state, self.node, frame.f_back)
            return False
        return True

    def read(self, frame: FrameType) -> None:
        """Find its stack, and register inputs that were just made from Python data."""
        session, state = self.session, self.state
        if self.node is None and state.open_op is not None:  # below an API call the stack is known,
            self.stack = state.open_op.stack  # unless the user's code runs in a backward pass
        if self.stack < 0:
            self.stack = session.stack(state, frame.f_back)
        if self.info.constant:
            session.register_constants(self.args)

    def write(self, result: Any, duration: int, error: BaseException | None) -> None:
        session, state, node = self.session, self.state, self.node
        with no_torch_function():
            self.number = session.next_id()
            outputs, form, flags = self.outcome(result, bool(self.info.mutates), error)
            sequence = -1 if node is None else node._sequence_nr()
            row = op_row(
                state, self.opened(), duration, outputs, form, flags=flags, sequence=sequence_number(),
                phase=session.phase(state),
                node=sequence if sequence < _NO_NUMBER else -2,
                parent=-1 if state.open_op is None else state.open_op.number,
            )  # fmt: skip
            session.ops.write(row)
            state.aten_count += 1
            self.notify(result, raised=error is not None)

    def output(self, tensor: Any) -> int:
        """The value of a tensor that was returned; the schema says whether it may be a view."""
        values, info = self.session.values, self.info
        if type(tensor) is not Tensor or values.find(tensor) is not None:
            return values.output(tensor, self.number)
        if info.aliases < 0:
            return values.add(tensor, self.number, offset=0)
        base, offset = None, None
        try:
            source = self.args[info.aliases]
            tensor.stride()  # raises for sparse and nested tensors, whose storage is not tracked
            if not info.maybe or storage_address(source) == storage_address(tensor):
                base, offset = values.find(source), None if info.moves else INHERITED
        except (RuntimeError, NotImplementedError, AttributeError, IndexError, TypeError):
            pass  # no strides, no storage, or the argument is not a tensor
        return values.add(tensor, self.number, base=-1 if base is None else base, offset=offset)


class ApiCall(RunningOp):
    """A torch function, method or operator as the user wrote it."""

    anchor: StackAnchor | None = None  #: its frame may call the user's code, in a backward pass
    aten_count = 0  #: how many aten ops the thread had run before it

    def is_recorded(self, function: Any, frame: FrameType) -> bool:
        """Not if it is noise, inside another API call, or made by our own handler of aten ops."""
        self.info = self.session.info(api_traits, function)
        if self.info.noise or self.state.open_op is not None:
            return False
        caller = frame.f_back
        if caller is not None and caller.f_code is FUNCTION_APPLY_CODE:
            return False
        if caller is not None and self.info.overload:
            outer = caller.f_back
            if outer is not None and outer.f_code.co_name == "__torch_dispatch__" and is_hidden(outer.f_code):
                return False
        return self.session.is_recorded(self.state, caller)

    def read(self, frame: FrameType) -> None:
        """Find its stack and its number."""
        self.stack = self.session.stack(self.state, frame.f_back)
        self.number = self.session.next_id()
        self.aten_count = self.state.aten_count
        if self.info.backward:
            self.anchor = StackAnchor(frame, self.stack)

    def enter(self) -> None:
        """Make it the open API call of its thread."""
        self.state.open_op = self.opened()
        if self.anchor is not None:
            self.state.push(self.anchor)

    def write(self, result: Any, duration: int, error: BaseException | None) -> None:
        session, state = self.session, self.state
        if not session.running:  # it was stopped inside this very call
            return
        if self.anchor is not None:
            if session.close_open_inside(state, self.anchor):
                state.pop()
            self.anchor = (
                None  # it refers to our frame, and that to this call: a cycle that would hold tensors
            )
        alone = session.level == "api"  # else its aten ops have noted the changes
        with no_torch_function():
            mutates = alone and (
                bool(self.info.mutates) or ("out" in self.kwargs and session.values.find(result) is None)
            )
            outputs, form, flags = self.outcome(result, mutates, error)
        phase = session.phase(state) if error is None else state.phase
        ran_ops = state.aten_count != self.aten_count
        reads_data = type(result) is list or (alone and type(result) is not str)  # `tolist()`, not `type()`
        if error is not None or outputs or ran_ops or reads_data:
            session.ops.write(op_row(state, self.opened(), duration, outputs, form, flags=flags, phase=phase))
            if error is None:
                self.notify(result)
