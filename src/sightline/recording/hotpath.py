"""What is done once per op. Microseconds count here: measure every change with ``bench/overhead.py``.

Each handler is a method of its mode and one long function on purpose; what it works with is one tuple. A
call costs as much as three look-ups, and a local variable costs nothing, so the common cases (plain tensors
in, one plain tensor out) are written out here and everything else is handed to `Session`, `Values` and
`Arguments`. Whatever goes wrong in here is caught and counted; the op itself runs exactly once, outside every
``try`` that could hide its exception.
"""

from __future__ import annotations

import sys
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

from sightline.recording.arguments import PLAIN
from sightline.recording.compiled import COMPILED_NODE, compiled_backward, leave_region
from sightline.recording.failures import failed_call, failed_op
from sightline.recording.lanes import BACKWARD, NO_OP, Mark
from sightline.recording.layout import FLAG_SHIFT, O_WIDTH
from sightline.recording.operations import OpInfo
from sightline.recording.session import clock
from sightline.recording.torchapi import (
    Parameter,
    Tensor,
    compiler,
    current_node,
    function_depth,
    is_dynamo_compiling,
    jit_tracing,
    quiet,
    sequence_number,
    storage_address,
)
from sightline.recording.values import ACTIVATION, Ref
from sightline.trace.assembly.layout import INHERITED, V_WIDTH
from sightline.trace.data import MUTATES
from sightline.trace.forms import SLOT

if TYPE_CHECKING:
    from sightline.recording.session import Session

_getframe = sys._getframe
_NO_NUMBER = 1 << 62  # a node that accumulates into a leaf has no sequence number, but all bits set
_MUTATES = MUTATES << FLAG_SHIFT


def dispatch_state(session: Session) -> tuple[Any, ...]:
    """What `dispatch` works with."""
    values, arguments, lane = session.values, session.arguments, session.lane
    return (
        session, lane.ident, lane, session.aten, session.fault, values, arguments, values.refs,
        values.meta_ids, arguments.types, session.ops.write, values.stream.write, values.fresh.write,
        session.stacks.known, session.op_ids.__next__, values.ids.__next__, session.begin,
    )  # fmt: skip


def dispatch(
    mode: Any, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """The handler of aten ops. One op in, one row out."""
    (session, main_ident, main_lane, infos, fault, values, arguments, refs, meta_ids, types, write,
     write_value, write_fresh, known_stacks, next_op, next_value, begin) = mode.state  # fmt: skip
    del mode  # a traceback keeps this frame, and would keep the mode when its stack has let go of it
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
                form = arguments.read(info.forms, args, kwargs, ids)
    except Exception as error:
        info = None
        fault(error)
    if info is None:  # not to be recorded
        return func(*args, **(kwargs or {}))
    start = clock()
    try:
        result = func(*args, **kwargs) if kwargs else func(*args)
    except BaseException as error:
        failed_op(session, lane, info, node, _getframe().f_back, args, kwargs, start, error)
        raise
    end = clock()
    guard = None
    try:
        if function_depth():  # reading a tensor must pass no function mode, neither ours nor the user's
            guard = quiet()
            guard.__enter__()
        # -- where: below an API call the stack is known, unless the user's code runs in a backward pass
        stack, phase, evaluated = lane.api_stack, lane.phase, -1
        if node is not None:
            stack, phase, evaluated = -1, BACKWARD, node._sequence_nr()
            if evaluated > _NO_NUMBER:
                evaluated = -2
        if stack < 0:
            # `_getframe()` would make a frame object of our own; autograd workers have no other.
            frame = at = _getframe(1) if lane is main_lane else _getframe().f_back
            top = lane.top
            mark = top.frame
            path: tuple[int, ...] = (top.above,)
            while at is not mark and at is not None:
                path += (id(at.f_code), at.f_lasti)
                at = at.f_back
            stack = known_stacks.get(path, -2) if at is mark else -2
            if stack < -1:  # -1 is the empty stack of a thread without Python
                stack = session.stack(lane, frame)
        # -- what went in
        if form < 0:  # else it was read before the op ran
            if info.constant:
                session.constants(args)
            key: list[Any] = []
            for item in args:
                cls = type(item)
                if cls is Tensor or cls is Parameter:
                    held = refs.get(id(item))
                    ids.append(
                        held.value if held is not None and held() is item else values.first_sight(item)
                    )
                    key.append(SLOT)
                elif cls is int:
                    key.append(item)
                elif cls is list and item and type(item[0]) is int:  # schemas allow no mixed lists
                    key.append(tuple(item))
                else:
                    kind = types.get(cls)
                    if kind == PLAIN:  # 1, 1.0 and True are equal as keys, and so are 0.0 and -0.0
                        key += (cls, item or repr(item))
                    else:
                        arguments.extend(item, kind, key, ids)
            if kwargs:
                arguments.extend_kwargs(kwargs, key, ids)
            call_key = tuple(key)
            try:
                form = info.forms[call_key]
            except (KeyError, TypeError):  # new, or with an argument that cannot be hashed
                form = arguments.form(info.forms, call_key, args, kwargs)
        # -- what came out
        op = next_op()
        count = len(ids)
        bits = lane.bits | phase
        if type(result) is Tensor and not info.mutates:
            held = refs.get(id(result))
            if held is not None and held() is result:
                made = held.value
            else:
                try:
                    where = None if result.is_cpu else result.device  # a device costs as much as a shape
                    meta = meta_ids.get((result.shape, result.stride(), result.dtype, where))
                    if meta is None:
                        meta = values.describe(result)
                    made = next_value()
                    if info.aliases < 0:
                        write_fresh([made, meta, op])
                    else:
                        base = args[info.aliases]
                        if info.maybe and storage_address(base) != storage_address(result):
                            source = -1
                        else:
                            held = refs.get(id(base))
                            source = held.value if held is not None else -1
                        offset = int(result.storage_offset()) if info.moves else INHERITED
                        write_value([V_WIDTH, made, meta, 0, offset, ACTIVATION, op, -1, source, 0])
                    held = refs[id(result)] = Ref(result)
                    held.value = made
                except (RuntimeError, NotImplementedError, AttributeError, IndexError):
                    made = values.produced(result, op)  # no strides, no storage, or no tensor there
            write([
                O_WIDTH + 1 + count, op, info.number, form, -1, stack, lane.top.call, lane.api,
                sequence_number(), evaluated, start - begin, end - start, bits, count, *ids, made,
            ])  # fmt: skip
        else:
            if info.mutates:
                bits |= _MUTATES
                many, shape = session.mutated(info, op, args, kwargs, result)
            else:
                many, shape = session.made_by(info, op, args, result)
            write([
                O_WIDTH + len(many) + count, op, info.number, form, shape, stack, lane.top.call, lane.api,
                sequence_number(), evaluated, start - begin, end - start, bits, count, *ids, *many,
            ])  # fmt: skip
        lane.aten_count += 1
        if len(refs) > values.purge_at:
            values.purge()
        if session.observer is not None:
            session.observe_op(lane, info, node, stack, op, ids, args, kwargs, result)
    except Exception as error:
        fault(error)
    finally:
        if guard is not None:
            guard.__exit__(None, None, None)
    lane.spent += clock() - end
    return result


_DISPATCH = dispatch.__code__


def function_state(session: Session) -> tuple[Any, ...]:
    """What `function` works with."""
    return (
        session, session.lane.ident, session.lane, session.api, session.fault, session.arguments.read,
        session.values.refs, session.op_ids.__next__, session.stacks.known, session.ops.write, session.begin,
        session.level == "api",
    )  # fmt: skip


def function(
    mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """The handler of API calls."""
    if is_dynamo_compiling():  # Dynamo inlines this function, and knows this call to be true
        return func(*args, **(kwargs or {}))
    (session, main_ident, main_lane, infos, fault, read, refs, next_op, known_stacks, write, begin,
     lone) = mode.state  # fmt: skip
    del mode  # as above
    ids: list[int] = []
    number = stack = count = start = spent = -1
    lane, open_op = main_lane, NO_OP
    info: OpInfo | None = None
    mark = None
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
            or (info.overload and _getframe(2).f_code is _DISPATCH)  # an aten op's own call, in `dispatch`
            or (lane.off and not leave_region(session, lane, _getframe(1)))
            or compiler._is_compiling_flag
            or jit_tracing() is not None
        ):
            info = None
        else:
            entered = clock()
            frame = _getframe(1)
            at: FrameType | None = frame
            top = lane.top
            path: tuple[int, ...] = (top.above,)
            while at is not top.frame and at is not None:
                path += (id(at.f_code), at.f_lasti)
                at = at.f_back
            stack = known_stacks.get(path, -2) if at is top.frame else -2
            if stack < -1:
                stack = session.stack(lane, frame)
            form = read(info.forms, args, kwargs, ids)
            number = next_op()
            mark = Mark.at(_getframe(0), stack) if info.backward else None
            count = lane.aten_count
            start = clock()
            spent = lane.spent = lane.spent + (start - entered)
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
        failed_call(session, lane, open_op, mark, clock() - start - (lane.spent - spent), error)
        raise
    end = clock()
    lane.api, lane.api_stack, lane.open_op = -1, -1, None
    if not session.running:  # it was stopped inside this very call
        return result
    try:
        if mark is not None:
            session.unwind(lane, mark)
        held = refs.get(id(result)) if not (lone and info.mutates) else None
        if held is not None and held() is result:
            made, shape, flags = [held.value], -1, 0
        else:
            made, shape, flags = session.api_result(info, number, args, kwargs, result)
        # Else it ran no op and returned no tensor: `x.type()`.
        if made or lane.aten_count != count or (lone and type(result) is not str):
            phase = lane.phase if current_node() is None else BACKWARD
            write([
                O_WIDTH + len(ids) + len(made), number, info.number, open_op[2], shape, stack,
                lane.top.call, -1, -1, -1, start - begin, end - start - (lane.spent - spent),
                lane.bits | phase | flags << FLAG_SHIFT, len(ids), *ids, *made,
            ])  # fmt: skip
            if session.observer is not None:
                session.observe_op(lane, info, current_node(), stack, number, ids, args, kwargs, result)
    except Exception as error:
        fault(error)
    lane.spent += clock() - end
    return result
