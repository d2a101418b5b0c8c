"""One recording of the plain engine: the tables and streams that are written while the model runs.

`modes` and `module_calls` intercept events and call `PlainSession`. A fault in here is caught where the event
was intercepted, counted, and never reaches the run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, ClassVar, Final

import numpy as np

from sightline.data.arrays import IntArray
from sightline.data.trace_data import KIND, RAISED, UNFINISHED
from sightline.recording.arguments import Arguments, Forms
from sightline.recording.atomic import run_atomically
from sightline.recording.modules import Modules
from sightline.recording.operations import OpInfo, OpTraits, add_info
from sightline.recording.plain.compiled_regions import CompiledRegion, close_region, leave_region
from sightline.recording.plain.handler_overhead import handler_overhead
from sightline.recording.plain.row_streams import Stream, call_row, op_row
from sightline.recording.plain.stacks import Stacks
from sightline.recording.plain.storages import Storages
from sightline.recording.plain.thread_state import OpenCall, OptimizerStep, StackAnchor, ThreadState
from sightline.recording.plain.values import Values
from sightline.recording.session import HandlerOverhead, Session, clock
from sightline.recording.torchapi import FUNCTION_MODES, compiler, in_backward, jit_tracing
from sightline.schema.streams import NO_END
from sightline.schema.tables import BACKWARD, FORWARD, OPTIMIZER

_CONSTANT: Final = KIND["constant"]


class PlainSession(Session):
    """A recording that sees ops through modes, and writes their rows in Python."""

    engine: ClassVar = "python"
    values: Values
    stacks: Stacks
    memory: Storages
    ops: Stream
    calls: Stream

    def __init__(
        self, model: Any, name: str, level: str, caller: FrameType | None, outer_frames: bool = True
    ) -> None:
        super().__init__(name, level)
        self._ids = itertools.count()
        self.ops = Stream()
        self.calls = Stream()
        self.stacks = Stacks()
        self.values = Values()
        self.values.explain = self.explain
        self.memory = self.values.memory = Storages(self.now)
        self.arguments = Arguments(self.values, Forms())
        self.modules = Modules(model, self.values)
        self._infos: dict[Any, OpInfo] = {}  # by (reader, function)
        self.failure: int | None = None  #: id of the exception the last failed op raised
        base = StackAnchor(caller, -1)
        if caller is not None and outer_frames:
            stack = self.stacks.find(caller, None, -1)
            base.stack = -1 if stack is None else stack
        self._states: dict[int, ThreadState] = {}
        self.state = self._new_state(base)  #: of the thread it was started on

    def current_state(self) -> ThreadState:
        """The state of this thread; one of autograd's workers gets its own at its first event."""
        state = self._states.get(threading.get_ident())
        return self._new_state(StackAnchor(None, -1)) if state is None else state

    def _new_state(self, base: StackAnchor) -> ThreadState:
        ident = threading.get_ident()
        state = self._states[ident] = ThreadState(self, ident, len(self._states), base)
        return state

    @property
    def threads(self) -> int:
        return len(self._states)

    @property
    def handler_overhead(self) -> HandlerOverhead:
        """The time torch adds to an op or call for handing it to a mode."""
        return handler_overhead()

    @property
    def ident(self) -> int:
        return self.state.ident

    def next_id(self) -> int:
        return next(self._ids)

    def raised_by(self, error: BaseException) -> bool:
        return id(error) == self.failure

    def now(self) -> int:
        """Nanoseconds since the recording began."""
        return clock() - self.begin

    def info(self, read: Callable[[Any], OpTraits], function: Any) -> OpInfo:
        """The traits of an operation; they are read at its first call."""
        try:
            info = self._infos.get((read, function))
        except TypeError:  # a callable that cannot be hashed gets a new entry each time
            info = None
        if info is None:
            info = add_info(self.infos, read(function))
            with suppress(TypeError):
                self._infos[read, function] = info
        return info

    # -- the context of a thread -------------------------------------------------------------------------

    def is_recorded(self, state: ThreadState, frame: FrameType | None) -> bool:
        """Whether ops of ``frame`` are recorded: not inside compiled code, and not while torch traces."""
        if state.off and not leave_region(self, state, frame):
            return False
        return not compiler._is_compiling_flag and jit_tracing() is None

    def phase(self, state: ThreadState) -> int:
        """The phase that a thread is in."""
        return BACKWARD if in_backward() else state.phase

    def stack(self, state: ThreadState, frame: FrameType | None) -> int:
        """The stack of a frame; anchors that are no longer on it are closed."""
        while (stack := self.stacks.find(frame, state.top.frame, state.top.stack)) is None:
            if state.top.outer is None:  # the block's own caller has returned: walk to the top from now on
                state.top = StackAnchor(None, -1)
            else:
                self._close_top(state, RAISED)
        if isinstance(state.top, OptimizerStep):
            state.phase = FORWARD if state.top.is_in_closure(frame) else OPTIMIZER
        return stack

    def close_open_inside(self, state: ThreadState, anchor: StackAnchor) -> bool:
        """Close as raised the calls that an exception left open inside an anchor; False if it is closed."""
        if anchor not in state.anchors():
            return False
        while state.top is not anchor:
            self._close_top(state, RAISED)
        return True

    def _close_top(self, state: ThreadState, flags: int) -> None:
        """Close the innermost anchor, which ended without its exit hook firing."""
        anchor = state.top
        if isinstance(anchor, OpenCall):
            self.close_call(state, anchor, flags)
        elif isinstance(anchor, CompiledRegion):
            close_region(self, state)
        else:
            state.pop()

    # -- module calls ------------------------------------------------------------------------------------

    def read_inputs(self, call: OpenCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Read the arguments of a module call."""
        inputs: list[int] = []
        call.args_key = id(args)
        form = self.arguments.read(self.arguments.form_numbers, args, kwargs, inputs)
        call.inputs, call.input_form = inputs, form

    def close_call(
        self, state: ThreadState, call: OpenCall, flags: int, outputs: list[int] | None = None,
        result: int | None = None, now: int | None = None,
    ) -> None:  # fmt: skip
        """The innermost call has ended: write its row and restore the state before it."""
        now = self.now() if now is None else now
        self.put_function_mode_back(call)
        result = self.arguments.nothing if result is None else result
        self.memory.examine_since(call.start)
        row = call_row(state, call, now, outputs or [], result, flags, self.next_id())
        # Written and over in one step: an interrupt in between would write it twice, or never.
        run_atomically(partial(self.calls.write, row), *state.pop_steps())

    def take_function_mode(self, call: OpenCall) -> None:
        """Take the function mode off this thread's stack, if it is on it, while a call runs."""
        for mode in FUNCTION_MODES.from_top():
            if getattr(mode, "session", None) is self:
                call.taken_mode = mode  # before it is off: an interrupt must not lose it
                mode.take_off()
                return

    def put_function_mode_back(self, call: OpenCall) -> None:
        """Undo `take_function_mode`, however the call ended; a stopped session leaves the mode off."""
        if call.taken_mode is not None and self.running and not call.taken_mode.is_on:
            call.taken_mode.put_on()
        call.taken_mode = None

    def context(self) -> tuple[list[int], int]:
        state = self.current_state()
        return [call.module for call in state.calls()], state.phase

    def exclude_time(self, duration: int) -> None:
        state = self._states.get(threading.get_ident())
        if state is not None:
            state.spent += duration

    def begin_optimizer_step(self, frame: FrameType, closure: CodeType | None) -> None:
        self.memory.examine_all()
        state = self.current_state()
        state.push(OptimizerStep(frame, self.stack(state, frame), closure))
        state.phase = OPTIMIZER

    def end_optimizer_step(self) -> None:
        self.memory.examine_all()
        state = self.current_state()
        if isinstance(state.top, OptimizerStep):
            state.pop()

    # -- from start to stop ------------------------------------------------------------------------------

    def open_rows(self) -> tuple[IntArray, IntArray]:
        now, nothing = self.now(), self.arguments.nothing
        ops: list[int] = []
        calls: list[int] = []
        for state in list(self._states.values()):
            if (op := state.open_op) is not None:
                ops += op_row(state, op, 0, [], nothing, phase=FORWARD, flags=UNFINISHED)
            for call in reversed(state.calls()):
                calls += call_row(state, call, now, [], nothing, UNFINISHED, NO_END)
        return np.array(ops, dtype=np.int64), np.array(calls, dtype=np.int64)

    def halt(self) -> None:
        self.note_end()
        self.memory.end()
        for state in list(self._states.values()):
            state.off = True

    def finish(self) -> None:
        if self.module_infos is not None:
            return
        for state in list(self._states.values()):
            while state.top.outer is not None:
                self._close_top(state, UNFINISHED)
        self.label_gradients(new=False)
        self.module_infos = self.modules.infos()

    def written(self) -> int:
        open_calls = sum(len(state.calls()) for state in list(self._states.values()))
        return len(self.ops) + len(self.calls) + open_calls

    def note_error(self, error: BaseException) -> None:
        """Nothing to do: modes see how an op or call ends."""

    def refresh(self) -> None:
        """Nothing to do: all tables are here."""

    def note_written(self) -> None:
        """Nothing to do: no thread waits after a crash."""

    # -- tensors that no recorded op made ----------------------------------------------------------------

    def register_constants(self, args: tuple[Any, ...]) -> None:
        """Register the tensors that were just made from Python data."""
        for tensor in self.arguments.tensors(args, []):
            if self.values.find(tensor) is None:
                self.values.register(tensor, _CONSTANT)

    def is_of_region(self, tensor: Any) -> bool:
        """Whether compiled code may have made a tensor: it did not exist before."""
        reference = self.before_region.get(id(tensor))
        return reference is None or reference() is not tensor
