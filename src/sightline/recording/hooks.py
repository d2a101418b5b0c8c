"""The process's one pair of global module hooks, and of optimizer hooks.

They are in place while anything records, whatever number of recordings there are. Dynamo guards on the
keys and functions of these hooks, so both are the same in every recording: a compiled function is compiled
once more for all of them, and not once for each.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from threading import get_ident
from typing import Any, Final

from torch.utils.hooks import RemovableHandle

from sightline.recording.lanes import FORWARD, OPTIMIZER, OptimizerStep
from sightline.recording.registry import active, lanes_here
from sightline.recording.torchapi import is_dynamo_compiling, module_hooks, optimizer_hooks, quiet

_getframe = sys._getframe
_KEY: Final = RemovableHandle(OrderedDict()).id  # a number no other hook will have


def install_hooks() -> None:
    """Put the hooks in place: what torch's ``register_…`` functions do, under a key of our own."""
    module_hooks._global_forward_pre_hooks[_KEY] = enter_module
    module_hooks._global_forward_hooks[_KEY] = leave_module
    module_hooks._global_forward_hooks_with_kwargs[_KEY] = True
    module_hooks._global_forward_hooks_always_called[_KEY] = True
    optimizer_hooks._global_optimizer_pre_hooks[_KEY] = before_step
    optimizer_hooks._global_optimizer_post_hooks[_KEY] = after_step


def remove_hooks() -> None:
    """Take them out again."""
    for table in (
        module_hooks._global_forward_pre_hooks,
        module_hooks._global_forward_hooks,
        module_hooks._global_forward_hooks_with_kwargs,
        module_hooks._global_forward_hooks_always_called,
        optimizer_hooks._global_optimizer_pre_hooks,
        optimizer_hooks._global_optimizer_post_hooks,
    ):
        table.pop(_KEY, None)


def enter_module(module: Any, args: tuple[Any, ...]) -> None:
    """Before a module's ``forward``."""
    if is_dynamo_compiling():  # Dynamo inlines this function, and knows this call to be true
        return
    for lane in active.get(get_ident()) or lanes_here():
        lane.enter(module, args, _getframe(1))


def leave_module(module: Any, args: tuple[Any, ...], *rest: Any) -> None:
    """After it. torch passes (kwargs, result), or on an exception the result alone."""
    if is_dynamo_compiling():
        return
    for lane in active.get(get_ident()) or lanes_here():
        lane.leave(module, args, rest, _getframe(1))


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before an optimizer's step: its phase begins."""
    for lane in lanes_here():
        session, frame = lane.session, _getframe(1)
        try:
            with quiet():
                session.label_gradients()
                session.label_state(optimizer)
            lane.push(OptimizerStep.at(frame, session.stack(lane, frame)))
            lane.phase = OPTIMIZER
        except Exception as error:
            session.fault(error)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """After it: the state it has made by now gets its names."""
    for lane in lanes_here():
        session = lane.session
        try:
            if isinstance(lane.top, OptimizerStep):
                lane.pop()
            lane.phase = FORWARD
            with quiet():
                session.label_state(optimizer)
        except Exception as error:
            session.fault(error)
