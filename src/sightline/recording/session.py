"""One recording in progress: the streams and tables that are written while the model runs.

`Session` knows nothing of how events are intercepted (`interception`) and nothing of how they will be
shown. What happens once per op is in `hotpath`; here is what happens once per module call, or rarely.
A fault in here is caught by the interceptors, counted, and never reaches the run.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from sightline.recording.arguments import Arguments, Forms
from sightline.recording.buffers import Stream
from sightline.recording.calibration import Passage, passage
from sightline.recording.callpath import module_recorder
from sightline.recording.compiled import Region, close_region
from sightline.recording.lanes import BACKWARD, FORWARD, Lane, Mark, OpenCall, OpenOp, OptimizerStep
from sightline.recording.layout import C_WIDTH, FLAG_SHIFT, O_WIDTH
from sightline.recording.modules import Modules
from sightline.recording.observing import CallEvent, OpEvent
from sightline.recording.open_rows import open_rows
from sightline.recording.operations import OpInfo, api_facts, aten_facts
from sightline.recording.session_base import SessionBase
from sightline.recording.stacks import Stacks, variable_name
from sightline.recording.torchapi import FUNCTION_MODES, Tensor, quiet
from sightline.recording.values import ACTIVATION, EXTERNAL, INPUT, KIND, Values
from sightline.trace.assembly.numbers import Numbers
from sightline.trace.data import MUTATES, RAISED, UNFINISHED

_CONSTANT: Final = KIND["constant"]
clock = time.perf_counter_ns


class Session(SessionBase):
    """The mutable state behind one `sightline.trace` that records through modes."""

    values: Values
    stacks: Stacks

    def __init__(
        self, model: Any, name: str, level: str, caller: FrameType | None, above: bool = True
    ) -> None:
        super().__init__(name, level)
        self.op_ids = itertools.count()
        self.ops = Stream()
        self.calls = Stream()
        self.stacks = Stacks()
        self.values = Values()
        self.values.explain = self.explain
        self.arguments = Arguments(self.values, Forms())
        self.modules = Modules(model, self.values)
        self.aten: dict[int, OpInfo] = {}
        self.api: dict[Any, OpInfo] = {}
        self.failure: int | None = None  # id of the exception the last failed op raised
        base = Mark.at(caller, -1)
        if caller is not None and above:
            found = self.stacks.find(caller, None, -1)
            base.above = -1 if found is None else found
        self.lanes: dict[int, Lane] = {}
        self.lane = self._new_lane(threading.get_ident(), base)

    # -- lookups -----------------------------------------------------------------------------------

    def lane_here(self) -> Lane:
        """The lane of this thread; one of autograd's workers gets its own at first sight."""
        ident = threading.get_ident()
        found = self.lanes.get(ident)
        if found is None:
            found = self._new_lane(ident, Mark.at(None, -1))
        return found

    def _new_lane(self, ident: int, base: Mark) -> Lane:
        lane = self.lanes[ident] = Lane(self, ident, len(self.lanes), base)
        lane.enter, lane.leave = module_recorder(self, lane)
        return lane

    def aten_info(self, function: Any) -> OpInfo:
        """What is known of an aten op that this session meets for the first time."""
        began = clock()
        info = self.aten[id(function)] = OpInfo(aten_facts(function), len(self.infos))
        self.infos.append(info)
        self.lane_here().spent += clock() - began
        return info

    def api_info(self, function: Any) -> OpInfo:
        """What is known of an API function that this session meets for the first time."""
        began = clock()
        info = OpInfo(api_facts(function), len(self.infos))
        self.infos.append(info)
        self.lane_here().spent += clock() - began
        with suppress(TypeError):  # a callable that cannot be hashed gets a new entry each time
            self.api[function] = info
        return info

    @property
    def threads(self) -> int:
        """How many threads have worked for the recording."""
        return len(self.lanes)

    @property
    def passage(self) -> Passage:
        """What torch adds to what passes a mode."""
        return passage()

    @property
    def ident(self) -> int:
        """The thread it was started on."""
        return self.lane.ident

    def next_id(self) -> int:
        """A number in the order of ops and calls."""
        return next(self.op_ids)

    def raised_by(self, error: BaseException) -> bool:
        """Whether an exception came out of the last op that failed."""
        return id(error) == self.failure

    def open_rows(self, read: bool = True) -> tuple[Numbers, Numbers]:
        """Rows of the ops and calls that have begun and not ended."""
        return open_rows(self, read)

    # -- stacks ------------------------------------------------------------------------------------

    def stack(self, lane: Lane, frame: FrameType | None) -> int:
        """The stack of a frame; marks that are no longer on it are closed."""
        found = self.stacks.find(frame, lane.top.frame, lane.top.above)
        while found is None:
            self.drop_mark(lane)
            found = self.stacks.find(frame, lane.top.frame, lane.top.above)
        return found

    def unwind(self, lane: Lane, mark: Mark) -> None:
        """Take a mark off, and close whatever an exception has left open inside it."""
        if any(mark is one for one in lane.marks()):
            while lane.top is not mark:
                self.drop_mark(lane)
            lane.pop()

    def drop_mark(self, lane: Lane) -> None:
        """The innermost mark's call has ended without a word: close it as raised."""
        mark = lane.top
        if mark.up is None:  # the block's own caller has returned: walk to the top from now on
            lane.top = Mark.at(None, -1)
            return
        if isinstance(mark, OpenCall):
            self.close_call(lane, mark, [], self.arguments.nothing, RAISED)
            return
        lane.pop()
        if isinstance(mark, OptimizerStep):
            lane.phase = FORWARD

    # -- results -----------------------------------------------------------------------------------

    def made(self, op: int, result: Any) -> tuple[list[int], int]:
        """The values and the form of any result."""
        if result is None:
            return [], self.arguments.nothing
        values = self.values
        for tensor in self.arguments.tensors(result, []):
            if values.known(tensor) is None:
                values.produced(tensor, op)
        return self.arguments.results(result)

    def made_by(self, info: OpInfo, op: int, args: tuple[Any, ...], result: Any) -> tuple[list[int], int]:
        """The same for an aten op with several results, which says of itself whether they are views."""
        if type(result) not in (tuple, list) or not all(type(part) is Tensor for part in result):
            return self.made(op, result)
        values, refs = self.values, self.values.refs
        known = values.known(args[info.aliases]) if 0 <= info.aliases < len(args) else None
        base = -1 if known is None else known
        ids = []
        for tensor in result:
            held = refs.get(id(tensor))
            if held is not None and held() is tensor:
                ids.append(held.value)
            elif base < 0:
                ids.append(values.glimpse(tensor, op))
            else:
                ids.append(values.produced(tensor, op, -1, ACTIVATION, base))
        return ids, self.arguments.tuple_of_tensors(len(ids), type(result))

    def mutated(
        self, info: OpInfo, op: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> tuple[list[int], int]:
        """New versions of what an op changed in place; they are outputs even if it returns nothing."""
        values = self.values
        changed: list[int] = []
        for tensor in self.arguments.at(info.mutates or ("out",), args, kwargs):
            old = values.known(tensor)
            changed.append(values.produced(tensor, op, -1 if old is None else old))
        made, shape = self.made(op, result)
        if set(changed) <= set(made):
            return made, shape
        return [*made, *(one for one in changed if one not in made)], shape

    def api_result(
        self, info: OpInfo, op: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> tuple[list[int], int, int]:
        """Values, form and flags of an API call's result that is not one tensor known already."""
        with quiet():
            if self.level == "api" and (info.mutates or (kwargs and "out" in kwargs)):
                return *self.mutated(info, op, args, kwargs, result), MUTATES
            if type(result) is Tensor:
                return [self.values.produced(result, op)], -1, 0
            return *self.made(op, result), 0

    def constants(self, args: tuple[Any, ...]) -> None:
        """Tensors just made from Python data."""
        for tensor in self.arguments.tensors(args, []):
            if self.values.known(tensor) is None:
                self.values.first_sight(tensor, _CONSTANT)

    def write_op(
        self, lane: Lane, op: OpenOp, made: list[int], shape: int, duration: int, flags: int, phase: int,
        sequence: int = -1, node: int = -1, parent: int = -1,
    ) -> None:  # fmt: skip
        """Write down an API call, or an opaque region, that has ended."""
        number, info, form, stack, start, ids = op
        self.ops.write([
            O_WIDTH + len(ids) + len(made), number, info, form, shape, stack, lane.top.call, parent, sequence,
            node, start - self.begin, duration, lane.bits | phase | flags << FLAG_SHIFT, len(ids),
            *ids, *made,
        ])  # fmt: skip

    def take_function_mode(self) -> Any:
        """Take the function mode off this thread's stack for a while; None if it is not on it."""
        found = [mode for mode in FUNCTION_MODES.from_top() if getattr(mode, "session", None) is self]
        return found[0] if found and found[0].take_off() else None

    def put_function_mode_back(self, call: OpenCall) -> None:
        """However a call ended that ran without it; a stopped session wants it no more."""
        if call.taken_mode is not None and self.running:
            call.taken_mode.put_on()
        call.taken_mode = None

    def halt(self) -> None:
        """Record nothing more, on any thread."""
        self.running = False
        self.ended = clock()
        for lane in list(self.lanes.values()):
            lane.off = True

    def finish(self) -> None:
        """After the stop: close what is still open, and read what must be read while the model lives."""
        for lane in list(self.lanes.values()):
            while lane.top.up is not None:
                self._close_mark(lane)
        self.label_gradients(new=False)
        self.module_infos = self.modules.infos()

    def _close_mark(self, lane: Lane) -> None:
        mark = lane.top
        if isinstance(mark, OpenCall):
            self.close_call(lane, mark, [], self.arguments.nothing, UNFINISHED)
        elif isinstance(mark, Region):
            close_region(self, lane)
        else:
            lane.pop()

    def progress(self) -> int:
        """A number that changes when anything has been written, or the recording has ended."""
        open_calls = sum(len(lane.calls()) for lane in list(self.lanes.values()))
        return 2 * (len(self.ops) + len(self.calls) + open_calls) + (not self.running)

    # -- observers ---------------------------------------------------------------------------------

    def observe_op(
        self, lane: Lane, info: OpInfo, node: Any, stack: int, number: int, ids: list[int],
        args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool = False,
    ) -> None:  # fmt: skip
        """Tell of an op that has ended."""
        api = None if lane.open_op is None else self.infos[lane.open_op[1]]
        modules = [call.module for call in lane.calls()]
        phase, evaluated = (lane.phase, None) if node is None else (BACKWARD, node._sequence_nr())
        self.observer.op(
            OpEvent(
                info, number, stack, phase, evaluated, api, modules, lane is not self.lane, ids, args, kwargs,
                result, raised,
            )
        )  # fmt: skip

    def call_event(
        self, lane: Lane, call: OpenCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> CallEvent:
        """A module call, as observers see it."""
        depth = sum(one is not call for one in lane.calls())
        return CallEvent(call.module, call.call, call.phase, depth, args, kwargs, call.input_form)

    # -- module calls --------------------------------------------------------------------------------

    def read_inputs(self, call: OpenCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """What went into a module call. Read at its end, in-place changes since are undone by the build."""
        call.inputs = []
        call.args_key = id(args)
        call.input_form = self.arguments.read(self.arguments.known, args, kwargs, call.inputs)

    def find_call(self, lane: Lane, module: Any) -> OpenCall | None:
        """The innermost open call of a module; calls inside it that never ended are closed as raised."""
        key = id(module)
        for call in reversed(lane.calls()):
            if call.key == key:
                self._close_inside(lane, call)
                return call
        return None

    def _close_inside(self, lane: Lane, call: OpenCall) -> None:
        while lane.top is not call:
            if isinstance(lane.top, OpenCall):
                self.close_call(lane, lane.top, [], self.arguments.nothing, RAISED)
            else:
                lane.pop()

    def close_call(
        self, lane: Lane, call: OpenCall, outputs: list[int], form: int, flags: int, now: int | None = None
    ) -> None:
        """A module call has ended: write it down and restore what was current before it."""
        now = clock() if now is None else now
        if call.input_form < 0:  # it ended without its hook: its frame still knows what it was given
            local = call.frame.f_locals if call.frame is not None else {}
            self.read_inputs(call, local.get("args", ()), local.get("kwargs"))
        self._close_inside(lane, call)
        self.put_function_mode_back(call)
        lane.pop()
        duration = now - call.start - (lane.spent - call.spent)
        self.calls.write(self.call_row(call, outputs, form, flags, duration, next(self.op_ids)))

    def call_row(
        self, call: OpenCall, outputs: list[int], form: int, flags: int, duration: int, end_op: int
    ) -> list[int]:
        """How a call is written down; `callpath` writes those that end well."""
        inputs = call.inputs
        return [
            C_WIDTH + len(inputs) + len(outputs), call.call, call.module, call.up.call, call.above,
            call.phase | flags << FLAG_SHIFT, call.start - self.begin, duration, end_op,
            call.input_form, form, len(inputs), *inputs, *outputs,
        ]  # fmt: skip

    # -- what a tensor is that no recorded op made -----------------------------------------------------

    def explain(self, tensor: Any) -> tuple[int, str, int]:
        """Kind, name and producer of a tensor seen for the first time."""
        named = self.modules.tensor_name(tensor)
        if named is not None:
            return KIND[named[0]], named[1], -1
        lane = self.lane_here()
        if self.level == "none":  # the ops between modules were not watched
            return (ACTIVATION if lane.top.call >= 0 else INPUT), "", -1
        if self.regions:
            held = self.before_region.get(id(tensor))
            if held is None or held() is not tensor:
                return ACTIVATION, "", self.regions[-1]
        if lane.top.call < 0:
            return INPUT, "", -1
        name = self.modules.attribute_name(tensor, lane.calls()) or variable_name(tensor, lane.top.frame)
        if name:
            return _CONSTANT, name, -1
        if self.level == "api":
            # What runs in a backward pass shows only as the modules it calls.
            open_op = lane.open_op
            inside = open_op is not None and self.infos[open_op[1]].backward
            return (ACTIVATION if inside else EXTERNAL), "", -1
        # Every op is seen, so a scalar that none has made is one of torch's own (of a scripted function).
        return (_CONSTANT if tensor.dim() == 0 and not tensor.requires_grad else EXTERNAL), "", -1
