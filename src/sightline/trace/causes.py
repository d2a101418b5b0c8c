"""Why an op could not run: where the size, the dtype or the device that does not fit first appears.

For the note of an exception. Each function looks at the failed op's inputs, finds the two that do not go
together, and follows what differs back through the run to the line that made it so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from sightline.notation import dtype_name
from sightline.trace.op_groups import VIEWS
from sightline.trace.rows import Op, Value
from sightline.trace.user_frames import api_call_of, short_name, user_frame, with_location

_FARTHEST: Final = 400  #: ops that a size is followed back
_MATRICES: Final = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
}
_CONVOLUTIONS: Final = frozenset(
    "convolution _convolution mkldnn_convolution thnn_conv2d _slow_conv2d_forward".split()
)
#: Ops whose results hold numbers that were there before.
KEEPING: Final = VIEWS | frozenset(
    "flatten unflatten index narrow chunk clone contiguous lift lift_fresh lift_fresh_copy _to_copy copy_ "
    "stack cat swapaxes gather index_select repeat roll".split()
)
#: What is said of errors that no tensor explains.
_ONE_ROW: Final = (
    "BatchNorm has one row to take a mean over, which is often the last batch of an epoch: give the "
    "DataLoader drop_last=True, or call model.eval() first"
)
_ADVICE: Final = ((r"Expected more than 1 value per channel when training", _ONE_ROW),)


def cause_lines(op: Op, message: str) -> list[str]:
    """What explains that an op failed: at most a few lines, none where nothing is found."""
    inputs = list(op.inputs)
    for find in (_devices, _dtypes, _sizes, _numbers_said):
        found = find(op, inputs, message)
        if found:
            return found
    return []


def advice(message: str) -> list[str]:
    """What helps where the message alone says what is wrong."""
    return [text for pattern, text in _ADVICE if re.search(pattern, message)]


# -- sizes -------------------------------------------------------------------------------------------------


def _sizes(op: Op, inputs: list[Value], message: str) -> list[str]:
    pair = _mismatch(op, inputs) if re.search(r"size|shape|dimension", message) else None
    if pair is None:
        return []
    (one, at), (other, where) = pair
    size, wanted = one.shape[at], other.shape[where]
    if _is_given(one) and not _is_given(other):
        (one, at, size), (other, where, wanted) = (other, where, wanted), (one, at, size)
    return [f"{size_text(one, at, size)}; {size_text(other, where, wanted, short=True)}"]


def _mismatch(op: Op, inputs: list[Value]) -> tuple[tuple[Value, int], tuple[Value, int]] | None:
    """Two inputs, and a dimension of each, that should be of one size."""
    name = op.name.partition(".")[0]
    if name in _MATRICES:
        one, other = _MATRICES[name]
        if len(inputs) > other and len(inputs[one].shape) >= 1 and len(inputs[other].shape) >= 1:
            left, right = inputs[one], inputs[other]
            inner = max(0, len(right.shape) - 2)
            if left.shape and left.shape[-1] != right.shape[inner]:
                return (left, len(left.shape) - 1), (right, inner)
        return None
    if name in _CONVOLUTIONS and len(inputs) > 1:
        given, weight = inputs[0], inputs[1]
        if len(given.shape) == len(weight.shape) > 1 and given.shape[1] != weight.shape[1]:
            return (given, 1), (weight, 1)
        return None
    if name in ("cat", "stack"):
        first = inputs[0]
        for each in inputs[1:]:
            if len(each.shape) == len(first.shape):
                for at, (a, b) in enumerate(zip(first.shape, each.shape, strict=True)):
                    if a != b and at != _dimension(op):
                        return (each, at), (first, at)
        return None
    for number, given in enumerate(inputs):
        for beside in inputs[number + 1 :]:
            for back in range(1, min(len(given.shape), len(beside.shape)) + 1):
                sizes = given.shape[-back], beside.shape[-back]
                if sizes[0] != sizes[1] and 1 not in sizes:
                    return (given, len(given.shape) - back), (beside, len(beside.shape) - back)
    return None


def _numbers_said(op: Op, inputs: list[Value], message: str) -> list[str]:
    """Where the two sizes come from that a message names, where one of them is of no input."""
    said = re.search(r"\((\d+)\) must match the existing size \((\d+)\)", message)
    if said is None:
        return []
    lines: list[str] = []
    for size in (int(said[2]), int(said[1])):
        found = next(((one, one.shape.index(size)) for one in _around(op, inputs) if size in one.shape), None)
        if found is not None:
            lines.append(size_text(*found, size, short=bool(lines)))
    return ["; ".join(lines)] if lines else []


def _around(op: Op, inputs: list[Value]) -> Iterator[Value]:
    """What an op was given, and what the module calls around it were, from the innermost outwards."""
    yield from inputs
    call = op.call
    while call is not None:
        yield from call.inputs
        call = call.parent


def _dimension(op: Op) -> int:
    """The dimension along which a ``cat`` joins."""
    found = op.args.get("dim", 0)
    rank = len(op.inputs[0].shape)
    return found % rank if type(found) is int and rank else 0


def _is_given(value: Value) -> bool:
    """Whether a tensor was there before any op: its size is what the others should have."""
    return _settled(value).kind in ("parameter", "buffer", "state")


def _settled(value: Value) -> Value:
    """What a view made inside the same call is a view of."""
    while value.base is not None and value.kind not in ("parameter", "buffer"):
        value = value.base
    return value


def size_text(value: Value, dimension: int, size: int, short: bool = False) -> str:
    """Where a size comes from: ``size 61 in dimension 1 first appears at unfold, net.py:17 …``."""
    head = f"{size}" if short else f"size {size} in dimension {dimension}"
    source, maker = first_seen(value, lambda one: size in one.shape)
    if maker is None or source.kind in ("parameter", "buffer", "state"):
        return f"{head} is {_part_text(source, size)}{_made_text(source)}"
    shown = api_call_of(maker)
    given = ", ".join(dict.fromkeys(str(one) for one in maker.inputs if one.shape))
    given = f", from {given}" if given else ""
    return f"{head} first appears at {with_location(short_name(shown), shown, short=True)}{given}"


def _part_text(value: Value, size: int) -> str:
    """Whose size it is."""
    name = f"{value.kind} {value.name}" if value.name else f"{value.kind} {value}"
    named = f"the size of {name}" if value.kind in ("parameter", "buffer") else f"a size of {name}"
    return named if size in value.shape else name


def _made_text(value: Value) -> str:
    """Where a parameter was made, if the recording began before that."""
    op = _making(value)
    frame = user_frame(op) if op is not None else None
    return f", made at {frame.position}" if frame is not None else ""


def _making(value: Value) -> Op | None:
    at: Value | None = value
    for _ in range(_FARTHEST):
        if at is None:
            return _first_in(value)
        if at.producer is not None:
            return at.producer
        at = at.previous or at.base
    return None


def _first_in(value: Value) -> Op | None:
    """The op that made the first tensor in the memory of a value: what ``nn.Parameter`` was given."""
    values = value._data.raw.values
    if value.storage < 0:
        return None
    first = int(values.producer[np.flatnonzero(values.storage == value.storage)[0]])
    return value._data.ops[first] if first >= 0 else None


def first_seen(value: Value, has: Callable[[Value], bool]) -> tuple[Value, Op | None]:
    """The earliest tensor behind a value of which something holds, and the op that made it so, if any."""
    for _ in range(_FARTHEST):
        if value.kind in ("parameter", "buffer", "state"):
            return value, None
        maker = value.producer
        if maker is None:
            before = value.previous or value.base
            if before is None or not has(before):
                return value, _named(value)
            value = before
            continue
        before = next(_behind(maker, value, has), None)
        call = api_call_of(maker)  # may have been given what its ops have taken apart: ``linear`` flattens
        if before is None and call.id != maker.id:
            before = next(_behind(call, value, has), None)
        if before is None:
            return value, maker
        value = before
    return value, value.producer


def _named(value: Value) -> Op | None:
    """The call that gave out a tensor which no op has made: ``torch.tensor`` of numbers."""
    return next((op for op in value.consumers if value.id in {one.id for one in op.outputs}), None)


def _behind(maker: Op, value: Value, has: Callable[[Value], bool]) -> Iterator[Value]:
    """The inputs of an op of which the same holds: those that flow before those that were given."""
    inputs = [one for one in maker.inputs if has(one) and one.id != value.id]
    yield from sorted(inputs, key=lambda one: one.kind in ("parameter", "buffer", "state"))


# -- dtypes and devices ------------------------------------------------------------------------------------


def _dtypes(op: Op, inputs: list[Value], message: str) -> list[str]:
    said = (
        "dtype" in message or "scalar type" in message or "must be floating" in message or "Long" in message
    )
    odd = _odd_one(inputs, lambda value: value.dtype) if said else None
    if odd is None and said:
        name = op.name.partition(".")[0]
        if name.startswith("nll_loss") and len(inputs) > 1 and not inputs[1].dtype.startswith("int"):
            line = _property_text(inputs[1], dtype_name(inputs[1].dtype), lambda one: one.dtype)
            return [f"{line}; the classes of a target are whole numbers: give it as target.long()"]
    if odd is None:
        return []
    one, other = odd
    line = _property_text(one, dtype_name(one.dtype), lambda value: value.dtype)
    if op.name.startswith("nll_loss"):
        return [f"{line}; the classes of a target are whole numbers: give it as target.long()"]
    return [f"{line}; {dtype_name(other.dtype)} is the dtype of {_name_text(other)}"]


def _devices(_op: Op, inputs: list[Value], _message: str) -> list[str]:
    odd = _odd_one([one for one in inputs if one.shape], lambda value: value.device)
    if odd is None:
        return []
    one, other = odd
    line = _property_text(one, one.device, lambda value: value.device)
    return [f"{line}; {other.device} is the device of {_name_text(other)}"]


def _odd_one(inputs: list[Value], of: Callable[[Value], str]) -> tuple[Value, Value] | None:
    """An input that differs from a parameter, or from the first; and that one."""
    known = [one for one in inputs if _is_given(one)] or inputs
    for one in inputs:
        if known and of(one) != of(known[0]):
            return one, known[0]
    return None


def _property_text(value: Value, text: str, of: Callable[[Value], Any]) -> str:
    """``f32 first appears at Tensor.float, data.py:12 in load, from u8[2, 3]``."""
    source, maker = first_seen(value, lambda one: of(one) == of(value))
    if maker is None:
        return f"{text} is of {_name_text(source)}{_made_text(source)}"
    shown = api_call_of(maker)
    given = ", ".join(dict.fromkeys(str(one) for one in maker.inputs))
    given = f", from {given}" if given else ""
    return f"{text} first appears at {with_location(short_name(shown), shown, short=True)}{given}"


def _name_text(value: Value) -> str:
    value = _settled(value)
    return f"{value.kind} {value.name}" if value.name else f"{value.kind} {value}"


# -- numbers -----------------------------------------------------------------------------------------------


def numbers_origin(value: Value) -> str:
    """Where the numbers of a tensor were made, past what only moves them: ``from add, data.py:12``."""
    maker: Op | None = None
    for _ in range(_FARTHEST):
        producer = value.producer
        if producer is None:
            before = value.previous or value.base
            if before is None:
                maker = _named(value)
                break
            value = before
            continue
        maker = producer
        bare = producer.name.partition(".")[0]
        sources = [one for one in producer.inputs if one.dtype == value.dtype or bare == "_to_copy"]
        if bare not in KEEPING or not sources:
            break
        value = sources[-1] if bare == "copy_" else sources[0]
    if maker is None:
        name = f" {value.name}" if value.name else ""
        return f"from {value.kind}{name} {value}"
    shown = api_call_of(maker)
    return f"from {with_location(short_name(shown), shown, short=True)}"
