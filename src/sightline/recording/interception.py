"""How events reach a session: a dispatch mode and a function mode on the thread's own stacks.

Modes are pushed on torch's thread-local stacks, without the module globals that ``with mode:`` writes, so
that recordings may overlap in threads and stop in any order. Each mode holds its handler as a method bound
once: a handler is a closure, which spares it twenty attribute look-ups per op.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from types import CodeType, MethodType
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.recording import torchapi as api
from sightline.recording.compiled import COMPILED_NODE, compiled_backward, leave_region
from sightline.recording.hotpath import aten_recorder
from sightline.recording.lanes import BACKWARD, NO_OP, Lane, Mark, OpenOp
from sightline.recording.operations import OpInfo
from sightline.recording.session import FLAG_SHIFT, Session, clock
from sightline.recording.torchapi import Tensor, compiler, current_node, is_dynamo_compiling, jit_tracing
from sightline.trace.data import MUTATES, RAISED

Handler = Callable[..., Any]
_getframe = sys._getframe
_function_depth = api.function_depth


class DispatchMode(TorchDispatchMode):
    """Sees every aten op of its thread, and of the autograd threads working for it."""

    supports_higher_order_operators = True

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.__torch_dispatch__ = MethodType(dispatch_handler(session), self)  # type: ignore[method-assign]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code stays compiled

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # our frames are skipped by `torchapi.skip_in_dynamo`, which costs nothing per call


class FunctionMode(TorchFunctionMode):
    """Sees every torch function, method and operator of its thread."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.__torch_function__ = MethodType(function_handler(session), self)  # type: ignore[method-assign]


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function during which reading tensors passes no function mode: neither ours nor the user's."""

    def quiet(*args: Any) -> Any:
        with api.quiet():
            return function(*args)

    return quiet


def dispatch_handler(session: Session) -> Handler:
    """The handler of aten ops. One op in, one row out; the op itself runs exactly once."""
    main_ident, main_lane = session.lane.ident, session.lane
    infos, fault = session.aten, session.fault
    record = aten_recorder(session)
    quiet_record, read = _quietly(record), session.arguments.read

    def dispatch(
        mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ids: list[int] = []
        form, lane = -1, main_lane
        info: OpInfo | None = None
        node = None
        try:
            if get_ident() != main_ident:
                lane = session.lane_here()
            if not (
                (lane.off and not leave_region(session, lane, _getframe().f_back))
                or compiler._is_compiling_flag
                or jit_tracing() is not None
            ):
                info = infos.get(id(func)) or session.aten_info(func)
                node = current_node()
                if info.noise:
                    info = None
                elif node is not None and type(node).__name__ == COMPILED_NODE:
                    compiled_backward(session, lane, node, _getframe().f_back)
                    info = None
                elif info.mutates:  # afterwards the names of its inputs would mean the new versions
                    form = read(info.forms, args, kwargs, ids)
        except Exception as error:
            info = None
            fault(error)
        if info is None:  # not to be recorded
            return func(*args, **(kwargs or {}))
        start = clock()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            end = clock()
            try:
                failed = RAISED << FLAG_SHIFT
                quiet_record(
                    lane, info, node, _getframe().f_back, args, kwargs, ids, form, None, start, end, failed
                )
                session.failure = id(error)
                if session.listener is not None:
                    session.listener.op(lane, info, node, _getframe().f_back, args, kwargs, None, raised=True)
            except Exception as own:
                fault(own)
            raise
        end = clock()
        try:
            # Below an API call the stack is known, unless the user's own code runs in a backward pass.
            frame = None if node is None and lane.api_stack >= 0 else _getframe().f_back
            write = quiet_record if _function_depth() else record
            write(lane, info, node, frame, args, kwargs, ids, form, result, start, end, 0)
            if session.listener is not None:
                session.listener.op(lane, info, node, frame, args, kwargs, result)
        except Exception as error:
            fault(error)
        lane.spent += clock() - end
        return result

    return dispatch


def function_handler(session: Session) -> Handler:
    """The handler of API calls."""
    main_ident, main_lane = session.lane.ident, session.lane
    infos, fault, read = session.api, session.fault, session.arguments.read
    result_of = _result_reader(session)
    next_op, find = session.op_ids.__next__, session.stacks.find
    lone = session.level == "api"
    own_code = _handler_code(dispatch_handler, "dispatch")

    def function(
        mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_dynamo_compiling():  # Dynamo inlines this function, and knows this call to be true
            return func(*args, **(kwargs or {}))
        ids: list[int] = []
        number = stack = count = start = spent = -1
        lane, open_op = main_lane, NO_OP
        info: OpInfo | None = None
        frame = mark = None
        try:
            if get_ident() != main_ident:
                lane = session.lane_here()
            try:
                info = infos.get(func) or session.api_info(func)
            except TypeError:  # a callable that cannot be hashed
                info = session.api_info(func)
            if (
                info.noise
                or lane.api >= 0
                or (info.overload and _getframe(2).f_code is own_code)  # an aten op's own call, in `dispatch`
                or (lane.off and not leave_region(session, lane, _getframe(1)))
                or compiler._is_compiling_flag
                or jit_tracing() is not None
            ):
                info = None
            else:
                entered = clock()
                frame = _getframe(1)
                found = find(frame, lane.frame, lane.above)
                stack = session.stack(lane, frame) if found is None else found
                form = read(info.forms, args, kwargs, ids)
                number = next_op()
                mark = Mark.at(_getframe(0), stack) if info.backward else None
                count = lane.aten_count
                start = clock()
                lane.spent += start - entered
                spent = lane.spent
                open_op = (number, info.number, form, stack, start, ids)
        except Exception as error:
            info = None
            fault(error)
        if info is None:  # not to be recorded
            return func(*args, **(kwargs or {}))
        try:  # an interrupt may come at any line: what is set here is reset below
            lane.api, lane.api_stack, lane.open_op = number, stack, open_op
            if mark is not None:
                lane.push(mark)
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            _failed_call(session, lane, open_op, mark, clock() - start - (lane.spent - spent), error)
            raise
        end = clock()
        lane.api, lane.api_stack, lane.open_op = -1, -1, None
        if not session.running:  # it was stopped inside this very call
            return result
        try:
            if mark is not None:
                session.unwind(lane, mark)
            made, shape, flags = result_of(number, info, args, kwargs, result)
            ran = lane.aten_count != count or (lone and type(result) is not str)
            if made or ran:  # else it ran no op and returned no tensor: `x.type()`
                phase = lane.phase if current_node() is None else BACKWARD
                session.write_op(lane, open_op, made, shape, end - start - (lane.spent - spent), flags, phase)
                if session.listener is not None:
                    session.listener.op(lane, info, current_node(), frame, args, kwargs, result)
        except Exception as error:
            fault(error)
        lane.spent += clock() - end
        return result

    return function


def _handler_code(maker: Callable[..., Handler], name: str) -> CodeType:
    """The code of the handler a function makes, without making one."""
    return next(
        part for part in maker.__code__.co_consts if isinstance(part, CodeType) and part.co_name == name
    )


def _result_reader(session: Session) -> Callable[..., tuple[list[int], int, int]]:
    """Values, form and flags of an API call's result."""
    values = session.values
    refs = values.refs
    lone = session.level == "api"

    def result_of(
        op: int, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> tuple[list[int], int, int]:
        if type(result) is Tensor and not (lone and info.mutates):
            held = refs.get(id(result))
            if held is not None and held() is result:
                return [held.value], -1, 0
        return (
            unknown(op, info, args, kwargs, result)
            if _function_depth() == 0
            else quiet_unknown(op, info, args, kwargs, result)
        )

    def unknown(
        op: int, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> tuple[list[int], int, int]:
        if lone and (info.mutates or (kwargs and "out" in kwargs)):
            return *session.mutated(info, op, args, kwargs, result), MUTATES
        if type(result) is Tensor:
            return [values.produced(result, op, 0)], -1, 0
        return *session.made(op, result), 0

    quiet_unknown = _quietly(unknown)
    return result_of


def _failed_call(
    session: Session, lane: Lane, open_op: OpenOp, mark: Mark | None, duration: int, error: BaseException
) -> None:
    """An API call raised: keep it, and remember which exception it was if no aten op inside it did."""
    lane.api, lane.api_stack, lane.open_op = -1, -1, None
    if not session.running:
        return
    try:
        if mark is not None:
            session.unwind(lane, mark)
        session.write_op(lane, open_op, [], session.arguments.nothing, duration, RAISED, lane.phase)
        session.failure = id(error)
    except Exception as own:
        session.fault(own)
