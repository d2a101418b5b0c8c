"""The process's one pair of global module hooks, and of optimizer hooks.

They are in place while anything records, whatever number of recordings there are, and find the recordings
of their thread through `sessions_here`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sightline.recording import torchapi as api
from sightline.recording.compiled import leave_region
from sightline.recording.lanes import FORWARD, OPTIMIZER, OptimizerStep
from sightline.recording.session import Session, clock
from sightline.recording.torchapi import compiler, jit_tracing
from sightline.trace.data import RAISED

_getframe = sys._getframe
#: These leave their eval fast path, and with it their exact results, when any function mode is active.
_FAST_PATHS = (
    api.torch.nn.MultiheadAttention,
    api.torch.nn.TransformerEncoderLayer,
    api.torch.nn.TransformerEncoder,
)


class Hooks:
    """The hooks, and their removal."""

    def __init__(self, sessions_here: Callable[[], list[Session]], take_function_mode: Any) -> None:
        before, after = _module_hooks(sessions_here, take_function_mode)
        step_before, step_after = _optimizer_hooks(sessions_here)
        modules, optimizers = api.module_hooks, api.optimizer_hooks
        self._handles = [
            modules.register_module_forward_pre_hook(before),
            modules.register_module_forward_hook(after, with_kwargs=True, always_call=True),
            optimizers.register_optimizer_step_pre_hook(step_before),
            optimizers.register_optimizer_step_post_hook(step_after),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _module_hooks(sessions_here: Callable[[], list[Session]], take_function_mode: Any) -> tuple[Any, Any]:
    def enter_module(module: Any, args: tuple[Any, ...]) -> None:
        if compiler.is_compiling():
            return
        for session in sessions_here():
            _enter(session, module, args, _getframe(1), take_function_mode)

    def leave_module(module: Any, args: tuple[Any, ...], *rest: Any) -> None:
        """torch passes (kwargs, result), or on an exception the result alone."""
        if compiler.is_compiling():
            return
        for session in sessions_here():
            _leave(session, module, args, rest)

    return enter_module, leave_module


def _enter(session: Session, module: Any, args: tuple[Any, ...], frame: Any, take_function_mode: Any) -> None:
    began = clock()
    lane = session.lane_here()
    try:
        if jit_tracing() is not None or (lane.off and not leave_region(session, lane, frame)):
            return
        if api.function_depth():
            with api.quiet():
                call = session.open_call(lane, module, args, frame)
        else:
            call = session.open_call(lane, module, args, frame)
        if session.function_mode is not None and isinstance(module, _FAST_PATHS) and _may_go_fast(module):
            call.without_functions = take_function_mode(session.function_mode)
        if session.listener is not None:
            session.listener.enter(session, call)
        spent = call.start - began
        lane.spent += spent
        call.spent += spent
    except Exception as error:
        session.fault(error)


def _leave(session: Session, module: Any, args: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
    began = clock()
    lane = session.lane_here()
    try:
        if lane.off:
            leave_region(session, lane, _getframe(2))
        call = session.find_call(lane, module)
        if call is None:
            return
        if call.without_functions:
            api.push_function_mode(session.function_mode)
        with api.quiet():
            if len(rest) == 2:
                if id(args) != call.args_key:  # a hook of the module's own replaced its inputs
                    call.inputs = []
                    call.input_form = session.arguments.call_inputs(args, rest[0], call.inputs)
                read = session.made(-1, rest[1]) if session.level == "none" else session.arguments.results(rest[1])
                session.close_call(lane, call, *read, 0, began)
            else:
                session.close_call(lane, call, [], session.arguments.nothing, RAISED, began)
        if session.listener is not None:
            session.listener.leave(session, call)
    except Exception as error:
        session.fault(error)
    lane.spent += clock() - began


def _may_go_fast(module: Any) -> bool:
    if all(part.training for part in module.modules() if isinstance(part, _FAST_PATHS)):
        return False
    return not (api.torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


def _optimizer_hooks(sessions_here: Callable[[], list[Session]]) -> tuple[Any, Any]:
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        for session in sessions_here():
            try:
                lane, frame = session.lane_here(), _getframe(1)
                with api.quiet():
                    session.label_gradients()
                    session.label_state(optimizer)
                lane.push(OptimizerStep(frame, session.stack(lane, frame)))
                lane.phase = OPTIMIZER
            except Exception as error:
                session.fault(error)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        for session in sessions_here():
            try:
                lane = session.lane_here()
                if isinstance(lane.marks[-1], OptimizerStep):
                    lane.pop()
                lane.phase = FORWARD
                with api.quiet():
                    session.label_state(optimizer)
            except Exception as error:
                session.fault(error)

    return before_step, after_step
