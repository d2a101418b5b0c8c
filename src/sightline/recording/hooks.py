"""The process's one pair of global module hooks, and of optimizer hooks.

They are in place while anything records, whatever number of recordings there are, and find the recordings
of their thread through `installation.lanes_here`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from sightline.recording import torchapi as api
from sightline.recording.compiled import leave_region
from sightline.recording.lanes import FORWARD, OPTIMIZER, Lane, OpenCall, OptimizerStep
from sightline.recording.session import Session, clock
from sightline.recording.torchapi import compiler, is_dynamo_compiling, jit_tracing
from sightline.trace.data import RAISED

_getframe = sys._getframe
function_depth, quiet = api.function_depth, api.quiet
#: These leave their eval fast path, and with it their exact results, when any function mode is active.
_FAST_PATHS = (
    api.torch.nn.MultiheadAttention,
    api.torch.nn.TransformerEncoderLayer,
    api.torch.nn.TransformerEncoder,
)


class Hooks:
    """The hooks, and their removal."""

    def __init__(self, lanes_here: Callable[[], list[Lane]], take_function_mode: Callable[[Any], bool]) -> None:
        before, after = _module_hooks(lanes_here, take_function_mode)
        step_before, step_after = _optimizer_hooks(lanes_here)
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
            # torch's own handle forgets this entry
            api.module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)


def _module_hooks(
    lanes_here: Callable[[], list[Lane]], take_function_mode: Callable[[Any], bool]
) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter_module(module: Any, args: tuple[Any, ...]) -> None:
        if is_dynamo_compiling():  # Dynamo inlines this function, and knows this call to be true
            return
        for lane in lanes_here():
            enter(lane, module, args, _getframe(1))

    def leave_module(module: Any, args: tuple[Any, ...], *rest: Any) -> None:
        """torch passes (kwargs, result), or on an exception the result alone."""
        if is_dynamo_compiling():
            return
        for lane in lanes_here():
            leave(lane, module, args, rest, _getframe(1))

    def enter(lane: Lane, module: Any, args: tuple[Any, ...], frame: FrameType) -> None:
        began = clock()
        session = lane.session
        try:
            if (
                compiler._is_compiling_flag
                or jit_tracing() is not None
                or (lane.off and not leave_region(session, lane, frame))
            ):
                return
            if function_depth():
                with quiet():
                    call = session.open_call(lane, module, args, frame)
            else:
                call = session.open_call(lane, module, args, frame)
            if session.function_mode is not None and isinstance(module, _FAST_PATHS) and _may_go_fast(module):
                call.without_functions = take_function_mode(session.function_mode)
            if session.listener is not None:
                session.listener.enter(session, call)
            call.start = clock()
            lane.spent += call.start - began
            call.spent = lane.spent
        except Exception as error:
            session.fault(error)

    def leave(lane: Lane, module: Any, args: tuple[Any, ...], rest: tuple[Any, ...], frame: FrameType) -> None:
        began = clock()
        session = lane.session
        try:
            if lane.off:
                leave_region(session, lane, frame)
            call = session.find_call(lane, module)
            if call is None:
                return
            if call.without_functions:
                api.push_function_mode(session.function_mode)
            if function_depth():
                with quiet():
                    _close(session, lane, call, args, rest, began)
            else:
                _close(session, lane, call, args, rest, began)
            if session.listener is not None:
                session.listener.leave(session, call)
        except Exception as error:
            session.fault(error)
        lane.spent += clock() - began

    return enter_module, leave_module


def _close(
    session: Session, lane: Lane, call: OpenCall, args: tuple[Any, ...], rest: tuple[Any, ...], now: int
) -> None:
    if len(rest) != 2:
        session.close_call(lane, call, [], session.arguments.nothing, RAISED, now)
        return
    kwargs, result = rest
    if call.input_form < 0 or id(args) != call.args_key:  # or a hook of the module's own replaced them
        session.read_inputs(call, args, kwargs)
    outputs, form = session.made(-1, result) if session.level == "none" else session.arguments.results(result)
    session.close_call(lane, call, outputs, form, 0, now)


def _may_go_fast(module: Any) -> bool:
    if all(part.training for part in module.modules() if isinstance(part, _FAST_PATHS)):
        return False
    return not (api.torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


def _optimizer_hooks(
    lanes_here: Callable[[], list[Lane]],
) -> tuple[Callable[..., None], Callable[..., None]]:
    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        for lane in lanes_here():
            session, frame = lane.session, _getframe(1)
            try:
                with api.quiet():
                    session.label_gradients()
                    session.label_state(optimizer)
                lane.push(OptimizerStep(frame, session.stack(lane, frame)))
                lane.phase = OPTIMIZER
            except Exception as error:
                session.fault(error)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        for lane in lanes_here():
            session = lane.session
            try:
                if isinstance(lane.marks[-1], OptimizerStep):
                    lane.pop()
                lane.phase = FORWARD
                with api.quiet():
                    session.label_state(optimizer)
            except Exception as error:
                session.fault(error)

    return before_step, after_step
