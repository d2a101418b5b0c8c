"""Module calls of the plain engine, intercepted by one pair of global hooks for the whole process.

The hooks are installed while anything records. Dynamo guards on the keys and functions of these hooks, so
both are the same in every recording: a compiled function is compiled again once for all recordings, not for
each.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from sightline.data.trace_data import EVALUATION, NO_GRAD, RAISED, TRAINING
from sightline.recording.observers import ObservedCall
from sightline.recording.plain.compiled_regions import leave_region
from sightline.recording.plain.thread_state import OpenCall, ThreadState, active, current_states
from sightline.recording.torchapi import (
    Tensor,
    in_backward,
    is_dynamo_compiling,
    module_hooks,
    no_torch_function,
)
from sightline.schema.tables import FORWARD, OPTIMIZER

if TYPE_CHECKING:
    from sightline.recording.plain.session import Session

_KEY: Final = RemovableHandle(OrderedDict()).id  # torch gives each number to one handle only
#: These leave their eval fast path, and with it their exact results, when any function mode is active.
_FAST_PATHS: Final = (
    torch.nn.MultiheadAttention,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerEncoder,
)


def _hooks() -> list[tuple[dict[int, Any], Any]]:
    """The hook tables of torch, and our entry in each."""
    return [
        (module_hooks._global_forward_pre_hooks, enter_module),
        (module_hooks._global_forward_hooks, leave_module),
        (module_hooks._global_forward_hooks_with_kwargs, True),
        (module_hooks._global_forward_hooks_always_called, True),
    ]


def install_hooks() -> None:
    """Add our hooks, as torch's ``register_…`` functions would, under a key of our own."""
    for table, hook in _hooks():
        table[_KEY] = hook


def remove_hooks() -> None:
    """Remove our hooks."""
    for table, _ in _hooks():
        table.pop(_KEY, None)


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
    if not states and not in_backward():
        _note_elsewhere(module)


def _note_elsewhere(module: Any) -> None:
    """A module is called on a thread that no recording is of: all that run note that they miss it."""
    for state in [state for states in list(active.values()) for state in states]:
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
            return  # what ``torch.compile`` returned for a module counts as the module, and calls it
        stack, no_form = session.stack(state, frame), session.arguments.nothing
        outer_phase = state.phase
        if state.phase == OPTIMIZER:  # a module's work is no update, even if an optimizer calls it
            state.phase = FORWARD
        call = OpenCall(frame, stack, record.number, id(module), session.phase(state), no_form)
        session.values.unexplained = session.level == "none" and state.top.call >= 0
        with no_torch_function():  # now, since the module may change its arguments
            session.read_inputs(call, args, frame.f_locals.get("kwargs"))
        session.values.unexplained = session.level == "none"
        call.mode = _mode(module)
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
                outputs, form = _outputs(session, result)
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


def _mode(module: Any) -> int:
    """The flags of a call: training or evaluation, gradients on or off."""
    training = module.__dict__.get("training")
    mode = 0 if training is None else TRAINING if training else EVALUATION
    return mode if torch.is_grad_enabled() else mode | NO_GRAD


def _outputs(session: Session, result: Any) -> tuple[list[int], int]:
    """The values and the form of what a module returned; they may be new where no ops are recorded."""
    if session.level != "none" or type(result) is Tensor:
        return session.arguments.results(result)
    return session.arguments.results(result, partial(session.values.output, op=-1))


def _may_take_fast_path(module: Any) -> bool:
    if not torch.backends.mha.get_fastpath_enabled():
        return False
    if all(part.training for part in module.modules() if isinstance(part, _FAST_PATHS)):
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))
