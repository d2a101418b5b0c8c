"""What is done once per op. Microseconds count here: measure every change with ``bench/overhead.py``.

`aten_recorder` returns one closure that writes an op that has just ended: its stack, inputs, form, outputs
and times. It is one long function on purpose. A call costs as much as three look-ups, and a closure's
variables cost nothing, so the common cases (plain tensors in, one plain tensor out) are written out here
and everything else is handed to `Session`, `Values` and `Arguments`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from sightline.recording.arguments import PLAIN
from sightline.recording.buffers import PACK_AT
from sightline.recording.lanes import BACKWARD, Lane
from sightline.recording.operations import OpInfo
from sightline.recording.session import FLAG_SHIFT, O_WIDTH
from sightline.recording.torchapi import Parameter, Tensor, sequence_number, storage_address
from sightline.recording.values import ACTIVATION, INHERITED, V_WIDTH, Ref
from sightline.trace.data import MUTATES
from sightline.trace.forms import SLOT

if TYPE_CHECKING:
    from sightline.recording.session import Session

_NO_NUMBER = 1 << 62  # a node that accumulates into a leaf has no sequence number, but all bits set


def aten_recorder(session: Session) -> Callable[..., int]:
    """The closure that writes down an aten op."""
    values, arguments = session.values, session.arguments
    refs, meta_ids, types = values.refs, values.meta_ids, arguments.types
    rows = session.ops.tail
    write, write_value, write_fresh = rows.extend, values.stream.tail.extend, values.fresh.tail.extend
    known_stacks = session.stacks.known
    next_op, next_value = session.op_ids.__next__, values.ids.__next__
    begin = session.begin

    def record(
        lane: Lane,
        info: OpInfo,
        node: Any,  # the autograd node being evaluated
        frame: FrameType | None,  # of the op's caller; None where the API call's stack is shared
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        ids: list[int],
        form: int,
        result: Any,
        start: int,
        end: int,
        flags: int,
    ) -> int:
        if node is None:
            stack, phase, evaluated = lane.api_stack, lane.phase, -1
        else:
            stack, phase, evaluated = -1, BACKWARD, node._sequence_nr()
            if evaluated > _NO_NUMBER:
                evaluated = -2
        if stack < 0:
            mark, at = lane.frame, frame
            path = [lane.above]
            while at is not mark and at is not None:
                path += (id(at.f_code), at.f_lasti)
                at = at.f_back
            stack = known_stacks.get(tuple(path), -2) if at is mark else -2
            if stack < -1:  # -1 is the empty stack of a thread without Python
                stack = session.stack(lane, frame)

        if form < 0:  # else they were read before the op ran
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
            shape_of_call = tuple(key)
            try:
                form = info.forms[shape_of_call]
            except (KeyError, TypeError):  # new, or with an argument that cannot be hashed
                form = arguments.form(info.forms, shape_of_call, args, kwargs)

        op = next_op()
        shape = -1
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
                        write_fresh((made, meta, op))
                    else:
                        base = args[info.aliases]
                        if info.maybe and storage_address(base) != storage_address(result):
                            source = -1
                        else:
                            held = refs.get(id(base))
                            source = held.value if held is not None else -1
                        offset = int(result.storage_offset()) if info.moves else INHERITED
                        write_value((V_WIDTH, made, meta, 0, offset, ACTIVATION, op, 0, -1, source, 0))
                    held = refs[id(result)] = Ref(result)
                    held.value = made
                except (RuntimeError, NotImplementedError, AttributeError, IndexError):
                    made = values.produced(result, op, 0)  # no strides, no storage, or no tensor there
            count = len(ids)
            row = [
                O_WIDTH + 1 + count, op, info.number, form, -1, stack, lane.call, lane.api, sequence_number(),
                evaluated, start - begin, end - start, lane.bits | phase | flags, count, *ids, made,
            ]  # fmt: skip
        else:
            if info.mutates and not flags:
                flags = MUTATES << FLAG_SHIFT
                many, shape = session.mutated(info, op, args, kwargs, result)
            else:
                many, shape = session.made_by(info, op, args, result)
            count = len(ids)
            row = [
                O_WIDTH + len(many) + count, op, info.number, form, shape, stack, lane.call, lane.api,
                sequence_number(), evaluated, start - begin, end - start, lane.bits | phase | flags, count,
                *ids, *many,
            ]  # fmt: skip
        lane.aten_count += 1
        write(row)
        if len(rows) > PACK_AT:
            session.pack()
        return op

    return record
