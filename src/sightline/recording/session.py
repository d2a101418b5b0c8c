"""One recording of the plain engine: the tables and streams that are written while the model runs.

`Session` knows nothing of how events are intercepted (`modes`, `module_calls`) and nothing of how they will
be shown. A fault in here is caught where the event was intercepted, counted, and never reaches the run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np

from sightline.recording.arguments import Arguments, Forms
from sightline.recording.atomic import at_once
from sightline.recording.calibration import HandlerOverhead, handler_overhead
from sightline.recording.compiled_code import CompiledRegion, close_region, leave_region
from sightline.recording.memory import Storages
from sightline.recording.modules import Modules
from sightline.recording.operations import OpInfo, OpTraits
from sightline.recording.row_streams import Stream, call_row, op_row
from sightline.recording.session_base import SessionBase, clock
from sightline.recording.stacks import Stacks
from sightline.recording.thread_state import OpenCall, OptimizerStep, StackAnchor, ThreadState
from sightline.recording.torchapi import FUNCTION_MODES, compiler, current_node, jit_tracing
from sightline.recording.values import KIND, Values
from sightline.trace.assembly.arrays import IntArray
from sightline.trace.assembly.layout import BACKWARD, FORWARD, NO_END, OPTIMIZER
from sightline.trace.data import RAISED, UNFINISHED

_CONSTANT: Final = KIND["constant"]


class Session(SessionBase):
    """The mutable state behind one `sightline.trace` that records through modes."""

    values: Values
    stacks: Stacks
    memory: Storages

    def __init__(
        self, model: Any, name: str, level: str, caller: FrameType | None, above: bool = True
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
        self._infos: dict[Any, OpInfo] = {}  # by how they are read, and function
        self.failure: int | None = None  #: id of the exception the last failed op raised
        base = StackAnchor(caller, -1)
        if caller is not None and above:
            found = self.stacks.find(caller, None, -1)
            base.above = -1 if found is None else found
        self._states: dict[int, ThreadState] = {}
        self.state = self._new_state(base)  #: of the thread it was started on

    def state_here(self) -> ThreadState:
        """The state of this thread; one of autograd's workers gets its own when it is first met."""
        found = self._states.get(threading.get_ident())
        return self._new_state(StackAnchor(None, -1)) if found is None else found

    def _new_state(self, base: StackAnchor) -> ThreadState:
        ident = threading.get_ident()
        state = self._states[ident] = ThreadState(self, ident, len(self._states), base)
        return state

    @property
    def threads(self) -> int:
        """How many threads have worked for the recording."""
        return len(self._states)

    @property
    def handler_overhead(self) -> HandlerOverhead:
        """What torch adds to what passes a mode."""
        return handler_overhead()

    @property
    def ident(self) -> int:
        """The thread it was started on."""
        return self.state.ident

    def next_id(self) -> int:
        """A number in the order of ops and calls."""
        return next(self._ids)

    def raised_by(self, error: BaseException) -> bool:
        """Whether an exception came out of the last op that failed."""
        return id(error) == self.failure

    def now(self) -> int:
        """Nanoseconds since the recording began."""
        return clock() - self.begin

    def info(self, read: Callable[[Any], OpTraits], function: Any) -> OpInfo:
        """What is known of an operation; it is read when the operation is first met."""
        try:
            found = self._infos.get((read, function))
        except TypeError:  # a callable that cannot be hashed gets a new entry each time
            found = None
        if found is None:
            found = OpInfo(read(function), len(self.infos))
            self.infos.append(found)
            with suppress(TypeError):
                self._infos[read, function] = found
        return found

    # -- where a thread is -------------------------------------------------------------------------------

    def is_recorded(self, state: ThreadState, frame: FrameType | None) -> bool:
        """Whether what ``frame`` runs is recorded: not inside compiled code, and not while torch traces."""
        if state.off and not leave_region(self, state, frame):
            return False
        return not compiler._is_compiling_flag and jit_tracing() is None

    def phase(self, state: ThreadState) -> int:
        """The phase of what a thread runs now."""
        return state.phase if current_node() is None else BACKWARD

    def stack(self, state: ThreadState, frame: FrameType | None) -> int:
        """The stack of a frame; marks that are no longer on it are closed."""
        while (found := self.stacks.find(frame, state.top.frame, state.top.above)) is None:
            if state.top.up is None:  # the block's own caller has returned: walk to the top from now on
                state.top = StackAnchor(None, -1)
            else:
                self._close_top(state, RAISED)
        if isinstance(state.top, OptimizerStep):
            state.phase = FORWARD if state.top.is_in_closure(frame) else OPTIMIZER
        return found

    def close_inside(self, state: ThreadState, mark: StackAnchor) -> bool:
        """Close as raised what an exception has left open inside a mark; False if that is not there."""
        if mark not in state.marks():
            return False
        while state.top is not mark:
            self._close_top(state, RAISED)
        return True

    def _close_top(self, state: ThreadState, flags: int) -> None:
        """What the innermost mark stands for is over, though it has not said so."""
        mark = state.top
        if isinstance(mark, OpenCall):
            self.close_call(state, mark, flags)
        elif isinstance(mark, CompiledRegion):
            close_region(self, state)
        else:
            state.pop()

    # -- module calls ------------------------------------------------------------------------------------

    def read_inputs(self, call: OpenCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """What went into a module call."""
        inputs: list[int] = []
        call.args_key = id(args)
        form = self.arguments.read(self.arguments.known, args, kwargs, inputs)
        call.inputs, call.input_form = inputs, form

    def close_call(
        self, state: ThreadState, call: OpenCall, flags: int, outputs: list[int] | None = None,
        result: int | None = None, now: int | None = None,
    ) -> None:  # fmt: skip
        """The innermost call has ended: write its row and restore what was current before it."""
        now = self.now() if now is None else now
        self.put_function_mode_back(call)
        result = self.arguments.nothing if result is None else result
        self.memory.look_since(call.start)
        row = call_row(state, call, now, outputs or [], result, flags, self.next_id())
        # Written and over in one step: an interrupt in between would write it twice, or never.
        at_once(partial(self.calls.write, row), *state.popping())

    def take_function_mode(self, call: OpenCall) -> None:
        """Take the function mode off this thread's stack, if it is on it, while a call runs."""
        for mode in FUNCTION_MODES.from_top():
            if getattr(mode, "session", None) is self:
                call.taken_mode = mode  # before it is off: an interrupt must not lose it
                mode.take_off()
                return

    def put_function_mode_back(self, call: OpenCall) -> None:
        """However a call ended that ran without it; a stopped session wants it no more."""
        if call.taken_mode is not None and self.running and not call.taken_mode.is_on:
            call.taken_mode.put_on()
        call.taken_mode = None

    # -- what a thread does ------------------------------------------------------------------------------

    def where(self) -> tuple[list[int], int]:
        """The modules whose calls are open on this thread, outermost first, and the phase."""
        state = self.state_here()
        return [call.module for call in state.calls()], state.phase

    def leave_out(self, taken: int) -> None:
        """So many nanoseconds of what is open on this thread are no part of the run."""
        state = self._states.get(threading.get_ident())
        if state is not None:
            state.spent += taken

    def begin_optimizer_step(self, frame: FrameType, closure: CodeType | None) -> None:
        """An optimizer steps, called by ``frame``."""
        self.memory.look_at_all()
        state = self.state_here()
        state.push(OptimizerStep(frame, self.stack(state, frame), closure))
        state.phase = OPTIMIZER

    def end_optimizer_step(self) -> None:
        """It has stepped."""
        self.memory.look_at_all()
        state = self.state_here()
        if isinstance(state.top, OptimizerStep):
            state.pop()

    # -- from start to stop ------------------------------------------------------------------------------

    def open_rows(self) -> tuple[IntArray, IntArray]:
        """Rows of the ops and calls that have begun and not ended."""
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
        """Record nothing more, on any thread."""
        self.note_end()
        self.memory.end()
        for state in list(self._states.values()):
            state.off = True

    def finish(self) -> None:
        """After the stop: close what is still open, and read what must be read while the model lives."""
        for state in list(self._states.values()):
            while state.top.up is not None:
                self._close_top(state, UNFINISHED)
        self.label_gradients(new=False)
        self.module_infos = self.modules.infos()

    def written(self) -> int:
        """How much has been written for ops and calls, and how many are open."""
        open_calls = sum(len(state.calls()) for state in list(self._states.values()))
        return len(self.ops) + len(self.calls) + open_calls

    # -- what a tensor is that no recorded op made -------------------------------------------------------

    def know_constants(self, args: tuple[Any, ...]) -> None:
        """Tensors that were just made from Python data."""
        for tensor in self.arguments.tensors(args, []):
            if self.values.known(tensor) is None:
                self.values.first_sight(tensor, _CONSTANT)

    def is_of_region(self, tensor: Any) -> bool:
        """Whether compiled code may have made a tensor: it was not there before."""
        held = self.before_region.get(id(tensor))
        return held is None or held() is not tensor
