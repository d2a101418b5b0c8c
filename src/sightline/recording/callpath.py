"""What is done once per module call, written out like `hotpath` and for the same reason.

`module_recorder` returns the two closures a lane's module hooks run: one opens a call, one closes it.
Calls that end in any other way than through their hook are closed by `Session.close_call`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from sightline.recording.compiled import leave_region
from sightline.recording.lanes import BACKWARD, Lane, OpenCall
from sightline.recording.layout import C_WIDTH
from sightline.recording.torchapi import (
    WRAPPED_CALL,
    Tensor,
    compiler,
    current_node,
    function_depth,
    jit_tracing,
    quiet,
)
from sightline.trace.data import RAISED

if TYPE_CHECKING:
    from sightline.recording.session import Session

clock = time.perf_counter_ns
_getframe = sys._getframe
#: These leave their eval fast path, and with it their exact results, when any function mode is active.
_FAST_PATHS = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerEncoder,
)

Enter = Callable[[Any, tuple[Any, ...], FrameType], None]
Leave = Callable[[Any, tuple[Any, ...], tuple[Any, ...], FrameType], None]


def module_recorder(session: Session, lane: Lane) -> tuple[Enter, Leave]:
    """The closures ``enter(module, args, frame)`` and ``leave(module, args, rest, frame)`` of a lane."""
    by_id, arguments = session.modules.by_id, session.arguments
    known_stacks, refs = session.stacks.known, session.values.refs
    read, one_tensor, forms = arguments.read, arguments.one_tensor, arguments.known
    write, fault, glimpse = session.calls.write, session.fault, session.values.glimpse
    next_op, begin = session.op_ids.__next__, session.begin
    modules_only, with_functions = session.level == "none", session.level in ("api", "both")

    def enter(module: Any, args: tuple[Any, ...], frame: FrameType) -> None:
        """``frame`` is torch's own frame that is about to call ``forward``."""
        began = clock()
        try:
            if (
                (lane.off and not leave_region(session, lane, frame))
                or compiler._is_compiling_flag
                or jit_tracing() is not None
            ):
                return
            known = by_id.get(id(module))
            if known is None or known.ref() is not module:
                known = session.modules.place(module, lane.calls())
            top = lane.top
            mark = top.frame
            # This is called by the hook, that by `inner`, that by `_call_impl`, each of which need not become
            # a frame object: what is wanted is who called that.
            at: FrameType | None = _getframe(4)
            if at is not None and at.f_code is WRAPPED_CALL:
                at = at.f_back
            caller = at
            path: tuple[int, ...] = (top.above,)
            while at is not mark and at is not None:
                path += (id(at.f_code), at.f_lasti)
                at = at.f_back
            above = known_stacks.get(path, -1) if at is mark else -1
            if above < 0:
                above = session.stack(lane, caller)
                top = lane.top  # calls that have ended without a word were closed
            call = OpenCall()
            call.up = top
            call.frame = frame
            call.above = above
            call.module = known.number
            call.key = id(module)
            call.phase = lane.phase if current_node() is None else BACKWARD
            call.taken_mode = None
            call.input_form = -1
            if top.call < 0 or session.observer is not None:  # else they are read with its outputs
                session.values.glimpses = False
                session.read_inputs(call, args, frame.f_locals.get("kwargs"))
                session.values.glimpses = modules_only
            call.call = next_op()
            lane.top = call
            if with_functions and isinstance(module, _FAST_PATHS) and _may_go_fast(module):
                call.taken_mode = session.take_function_mode()
            if session.observer is not None:
                call.start, call.spent = began, lane.spent  # printing may fail, and the call goes on
                session.observer.enter(session.call_event(lane, call, args, frame.f_locals.get("kwargs")))
            call.start = now = clock()
            lane.spent += now - began
            call.spent = lane.spent
        except Exception as error:
            fault(error)

    def leave(module: Any, args: tuple[Any, ...], rest: tuple[Any, ...], frame: FrameType) -> None:
        """``rest`` is (kwargs, result), or after an exception the result alone."""
        began = clock()
        try:
            if lane.off:
                leave_region(session, lane, frame)
            top = lane.top
            if type(top) is OpenCall and top.key == id(module):
                call = top
            else:  # calls inside it have ended without their hook
                found = session.find_call(lane, module)
                if found is None:
                    return
                call = found
            if call.taken_mode is not None:
                session.put_function_mode_back(call)
            if len(rest) != 2:
                session.close_call(lane, call, [], arguments.nothing, RAISED, began)
            else:
                kwargs, result = rest
                if call.input_form < 0 or id(args) != call.args_key:  # a hook of the module's replaced them
                    held = refs.get(id(args[0])) if len(args) == 1 and not kwargs else None
                    if held is not None and held() is args[0]:
                        call.inputs, call.input_form = [held.value], one_tensor
                    else:
                        call.inputs = []
                        call.input_form = read(forms, args, kwargs, call.inputs)
                held = refs.get(id(result))
                if held is not None and held() is result:
                    outputs, form = [held.value], one_tensor
                elif modules_only and type(result) is Tensor and not function_depth():
                    outputs, form = [glimpse(result)], one_tensor
                elif modules_only:
                    outputs, form = _made_quietly(session, result)
                else:
                    outputs, form = arguments.results(result)
                up = lane.top = call.up
                duration = began - call.start - (lane.spent - call.spent)
                inputs = call.inputs
                write([
                    C_WIDTH + len(inputs) + len(outputs), call.call, call.module, up.call, call.above,
                    call.phase, call.start - begin, duration, next_op(), call.input_form, form, len(inputs),
                    *inputs, *outputs,
                ])  # fmt: skip
            if session.observer is not None:
                event = session.call_event(lane, call, args, rest[0] if len(rest) == 2 else None)
                event.result, event.raised = rest[-1], len(rest) != 2
                session.observer.leave(event)
        except Exception as error:
            fault(error)
        lane.spent += clock() - began

    return enter, leave


def _made_quietly(session: Session, result: Any) -> tuple[list[int], int]:
    with quiet():
        return session.made(-1, result)


def _may_go_fast(module: Any) -> bool:
    if all(part.training for part in module.modules() if isinstance(part, _FAST_PATHS)):
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))
