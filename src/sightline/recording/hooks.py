"""The process's one pair of global module hooks, and of optimizer hooks.

They are in place while anything records, whatever number of recordings there are, and find the recordings
of their thread through `installation.lanes_here`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sightline.recording import torchapi as api
from sightline.recording.lanes import FORWARD, OPTIMIZER, Lane, OptimizerStep
from sightline.recording.torchapi import is_dynamo_compiling

_getframe = sys._getframe


class Hooks:
    """The hooks, and their removal."""

    def __init__(self, lanes_here: Callable[[], list[Lane]]) -> None:
        before, after = _module_hooks(lanes_here)
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
    lanes_here: Callable[[], list[Lane]],
) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter_module(module: Any, args: tuple[Any, ...]) -> None:
        if is_dynamo_compiling():  # Dynamo inlines this function, and knows this call to be true
            return
        for lane in lanes_here():
            lane.enter(module, args, _getframe(1))

    def leave_module(module: Any, args: tuple[Any, ...], *rest: Any) -> None:
        """Torch passes (kwargs, result), or on an exception the result alone."""
        if is_dynamo_compiling():
            return
        for lane in lanes_here():
            lane.leave(module, args, rest, _getframe(1))

    return enter_module, leave_module


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
                lane.push(OptimizerStep.at(frame, session.stack(lane, frame)))
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
