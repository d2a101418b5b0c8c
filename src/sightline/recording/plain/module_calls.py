"""Module calls of the plain engine, intercepted by one pair of global hooks for the whole process.

The hooks are installed while anything records. They are the same in every recording, so that a compiled
function is compiled again once for all recordings, not for each.
"""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch

from sightline.data.trace_data import EVALUATION, NO_GRAD, RAISED, TRAINING
from sightline.recording.observers import ObservedCall
from sightline.recording.plain.compiled_regions import leave_region
from sightline.recording.plain.thread_state import OpenCall, ThreadState, all_states, current_states
from sightline.recording.torchapi import (
    ModuleHooks,
    Tensor,
    in_backward,
    is_dynamo_compiling,
    no_torch_function,
)
from sightline.schema.tables import FORWARD, OPTIMIZER

if TYPE_CHECKING:
    pass

module_hooks: Final = ModuleHooks()
#: These leave their eval fast path, and with it their exact results, when any function mode is active.
_FAST_PATHS: Final = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerEncoder,
)


def enter_module(module: Any, args: tuple[Any, ...]) -> None:
    """The hook before a module's ``forward``."""
    if is_dynamo_compiling():  # Dynamo inlines this function, and takes this call as true
        return
    states = current_states()
    for state in states:
        events = state.session.events
        if events.enter():
            try:
                begin_call(state, module, args, sys._getframe(1))
            finally:
                events.leave()
    if (
        not states and not in_backward()
    ):  # nothing records this thread: all recordings count the calls they miss
        for state in all_states():
            state.session.unrecorded_calls += 1
            state.session.unrecorded_module = state.session.unrecorded_module or type(module).__name__


def leave_module(module: Any, args: tuple[Any, ...], *rest: Any) -> None:
    """The hook after it. torch passes (kwargs, result), or on an exception the result alone."""
    if is_dynamo_compiling():
        return
    for state in current_states():
        events = state.session.events
        if events.enter():
            try:
                end_call(state, module, args, rest, sys._getframe(1))
            finally:
                events.leave()


def begin_call(state: ThreadState, module: Any, args: tuple[Any, ...], frame: FrameType) -> None:
    """A call begins; ``frame`` is torch's own that is about to call ``forward``."""
    session = state.session
    began = session.now()
    try:
        if not session.is_recorded(state, frame):
            return
        if state.top.call < 0:
            session.memory.examine_all()
        record = session.modules.record_of(module, session.context)
        outer = state.top
        if isinstance(outer, OpenCall) and outer.module == record.number and outer.key != id(module):
            return  # a compiled module counts as the module, and calls it
        stack, no_form = session.stack(state, frame), session.arguments.nothing
        outer_phase = state.phase
        if state.phase == OPTIMIZER:  # a module's work is no update, even if an optimizer calls it
            state.phase = FORWARD
        call = OpenCall(frame, stack, record.number, id(module), session.phase(state), no_form)
        session.values.unexplained = session.level == "none" and state.top.call >= 0
        with no_torch_function():  # now, since the module may change its arguments
            session.read_inputs(call, args, frame.f_locals.get("kwargs"))
        session.values.unexplained = session.level == "none"
        training = module.__dict__.get("training")
        call.mode = 0 if training is None else TRAINING if training else EVALUATION
        if not torch.is_grad_enabled():
            call.mode |= NO_GRAD
        call.call = session.next_id()
        call.start, call.spent = began, state.spent  # an observer may fail, and the call goes on
        state.push(call)
        call.outer_phase = outer_phase
        if (
            session.level in ("api", "both")
            and isinstance(module, _FAST_PATHS)
            and _may_take_fast_path(module)
        ):
            session.take_function_mode(call)
        if session.observer is not None:
            session.observer.enter(_event(state, call, args, frame.f_locals.get("kwargs")))
        call.start = session.now()
        state.spent += call.start - began
        call.spent = state.spent
    except Exception as error:
        session.fault(error)


def end_call(
    state: ThreadState, module: Any, args: tuple[Any, ...], rest: tuple[Any, ...], frame: FrameType
) -> None:
    """A call has ended; ``rest`` is (kwargs, result), or after an exception the result alone."""
    session = state.session
    began = session.now()
    try:
        if state.off:
            leave_region(session, state, frame)
        call = next((one for one in reversed(state.calls()) if one.key == id(module)), None)
        if call is None:
            return
        session.close_open_inside(state, call)  # calls that ended without their exit hook firing
        session.put_function_mode_back(call)
        raised = len(rest) != 2
        if raised:
            session.close_call(state, call, RAISED, now=began)
        else:
            kwargs, result = rest
            with no_torch_function():
                if id(args) != call.args_key:  # a hook of the module has replaced them
                    session.read_inputs(call, args, kwargs)
                # Where no ops are recorded, results may be new values.
                new = session.level == "none" and type(result) is not Tensor
                value = partial(session.values.output, op=-1) if new else None
                outputs, form = session.arguments.results(result, value)
            session.close_call(state, call, 0, outputs, form, began)
        if session.observer is not None:
            event = _event(state, call, args, None if raised else rest[0])
            event.result, event.raised = rest[-1], raised
            session.observer.leave(event)
    except Exception as error:
        session.fault(error)
    state.spent += session.now() - began


def _event(
    state: ThreadState, call: OpenCall, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> ObservedCall:
    """A call as observers see it."""
    depth = sum(one is not call for one in state.calls())
    return ObservedCall(call.module, call.call, call.phase, depth, args, kwargs, call.input_form)


def _may_take_fast_path(module: Any) -> bool:
    if not torch.backends.mha.get_fastpath_enabled():
        return False
    if all(part.training for part in module.modules() if isinstance(part, _FAST_PATHS)):
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))
