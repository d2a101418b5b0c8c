"""Why an op failed: the line where a size, a dtype or a device that does not fit first appears.

The note of an exception shows it. Each function finds the two inputs of the failed op that do not fit each
other, and follows their size, dtype or device back through the run to the line where it first appears.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from sightline.analysis.op_text import api_call_of, short_name, with_location
from sightline.analysis.producers import creator
from sightline.analysis.size_origins import makes_size, size_origin
from sightline.data.op_groups import CONVOLUTIONS, VIEWS
from sightline.data.rows import Op, Value
from sightline.data.user_frames import user_frame
from sightline.notation import dtype_name

_FARTHEST: Final = 400  #: ops that a size is followed back
_MATRICES: Final = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
}
#: Ops whose results only move or copy numbers.
_MOVING_OPS: Final = VIEWS | frozenset(
    "flatten unflatten index narrow chunk clone contiguous lift lift_fresh lift_fresh_copy _to_copy copy_ "
    "stack cat swapaxes gather index_select repeat roll".split()
)
#: Advice for errors that no tensor explains.
_ONE_ROW: Final = (
    "BatchNorm has one row to take a mean over, which is often the last batch of an epoch: give the "
    "DataLoader drop_last=True, or call model.eval() first"
)
_ADVICE: Final = ((r"Expected more than 1 value per channel when training", _ONE_ROW),)


def cause_lines(op: Op, message: str) -> list[str]:
    """At most a few lines that explain why an op failed; none if there is no explanation."""
    inputs = list(op.inputs)
    for explain in (_device_lines, _dtype_lines, _size_lines, _message_size_lines, _probability_lines):
        lines = explain(op, inputs, message)
        if lines:
            return lines
    return []


def advice(message: str) -> list[str]:
    """Advice for messages that need no look at the tensors."""
    return [text for pattern, text in _ADVICE if re.search(pattern, message)]


# -- sizes -------------------------------------------------------------------------------------------------


def _size_lines(op: Op, inputs: list[Value], message: str) -> list[str]:
    pair = _mismatch(op, inputs) if re.search(r"size|shape|dimension", message) else None
    if pair is None:
        return []
    (one, at), (other, where) = pair
    size, other_size = one.shape[at], other.shape[where]
    if _is_lasting(one) and not _is_lasting(other):
        (one, at, size), (other, where, other_size) = (other, where, other_size), (one, at, size)
    return [f"{size_text(one, at, size)}; {size_text(other, where, other_size, short=True)}"]


def _mismatch(op: Op, inputs: list[Value]) -> tuple[tuple[Value, int], tuple[Value, int]] | None:
    """Two inputs and a dimension of each that should have the same size."""
    name = op.name.partition(".")[0]
    if name in _MATRICES:
        one, other = _MATRICES[name]
        if len(inputs) > other and len(inputs[one].shape) >= 1 and len(inputs[other].shape) >= 1:
            left, right = inputs[one], inputs[other]
            inner = max(0, len(right.shape) - 2)
            if left.shape and left.shape[-1] != right.shape[inner]:
                return (left, len(left.shape) - 1), (right, inner)
        return None
    if name in CONVOLUTIONS and len(inputs) > 1:
        images, weight = inputs[0], inputs[1]
        if len(images.shape) == len(weight.shape) > 1 and images.shape[1] != weight.shape[1]:
            return (images, 1), (weight, 1)
        return None
    if name in ("cat", "stack"):
        first, dim = inputs[0], op.args.get("dim", 0)
        rank = len(first.shape)
        joined = dim % rank if type(dim) is int and rank else 0
        for each in inputs[1:]:
            if len(each.shape) == rank:
                for at, (a, b) in enumerate(zip(first.shape, each.shape, strict=True)):
                    if a != b and at != joined:
                        return (each, at), (first, at)
        return None
    for number, left in enumerate(inputs):
        for right in inputs[number + 1 :]:
            for back in range(1, min(len(left.shape), len(right.shape)) + 1):
                sizes = left.shape[-back], right.shape[-back]
                if sizes[0] != sizes[1] and 1 not in sizes:
                    return (left, len(left.shape) - back), (right, len(right.shape) - back)
    return None


def _message_size_lines(op: Op, inputs: list[Value], message: str) -> list[str]:
    """The origin of the size that a message calls existing, and a tensor that has the other one.

    The other size is a number among the arguments: an equal one nearby may be its source, or not.
    """
    match = re.search(
        r"\((\d+)\) must match the existing size \((\d+)\) at non-singleton dimension (\d+)", message
    )
    target = re.search(r"Target sizes: \[([\d, ]+)\]", message)
    if match is None or target is None or not inputs:
        return []
    wanted, existing = int(match[1]), int(match[2])
    back = len(target[1].split(",")) - int(match[3])
    source = next((one for one in inputs if one.shape[-back:][:1] == (existing,)), None)
    if source is None:
        return []
    text = size_text(source, len(source.shape) - back, existing)
    nearby, call = list(inputs), op.call
    while call is not None:  # the inputs of the module calls around the op, from the innermost outwards
        nearby += call.inputs
        call = call.parent
    alike = next((one for one in nearby if wanted in one.shape), None)
    return [f"{text}; {wanted} is also a size of {_name_text(alike)}" if alike is not None else text]


def _is_lasting(value: Value) -> bool:
    """Whether a tensor is a weight or optimizer state, whose size the others should have."""
    return _view_base(value).kind in ("parameter", "buffer", "state")


def _view_base(value: Value) -> Value:
    """The base of a view, back to a parameter or a tensor that is not a view."""
    while value.base is not None and value.kind not in ("parameter", "buffer"):
        value = value.base
    return value


def size_text(value: Value, dimension: int, size: int, short: bool = False) -> str:
    """The origin of a size: ``size 61 in dimension 1 first appears at unfold, net.py:17 …``."""
    head = f"{size}" if short else f"size {size} in dimension {dimension}"
    source, _, maker = size_origin(value, dimension)
    maker = maker or _returning_call(source)
    if maker is None or source.kind in ("parameter", "buffer", "state"):
        name = f"{source.kind} {source.name or source}"
        if size in source.shape:
            name = f"{'the' if source.kind in ('parameter', 'buffer') else 'a'} size of {name}"
        return f"{head} is {name}{_creation_text(source)}"
    verb = "first appears at" if makes_size(maker, size) else "comes out of"
    return f"{head} {verb} {_call_text(maker, [one for one in maker.inputs if one.shape])}"


def _call_text(maker: Op, inputs: Sequence[Value]) -> str:
    """A call with its line and inputs: ``unfold, net.py:17 in f, from f32[2, 3]``."""
    shown = api_call_of(maker)
    given = ", ".join(dict.fromkeys(map(str, inputs)))
    return with_location(short_name(shown), shown, short=True) + (f", from {given}" if given else "")


def _creation_text(value: Value) -> str:
    """The line that created a parameter, if that was recorded."""
    op = creator(value)
    frame = user_frame(op) if op is not None else None
    return f", made at {frame.position}" if frame is not None else ""


def first_seen(value: Value, has: Callable[[Value], bool]) -> tuple[Value, Op | None]:
    """The earliest ancestor of a value for which ``has`` holds without a gap, and the op that made it."""
    for _ in range(_FARTHEST):
        if value.kind in ("parameter", "buffer", "state"):
            return value, None
        maker = value.producer
        if maker is None:
            before = value.previous or value.base
            if before is None or not has(before):
                return value, _returning_call(value)
            value = before
            continue
        before = next(_sources(maker, value, has), None)
        call = api_call_of(maker)  # its inputs may differ from those of its ops: ``linear`` flattens
        if before is None and call.id != maker.id:
            before = next(_sources(call, value, has), None)
        if before is None:
            return value, maker
        value = before
    return value, value.producer


def _returning_call(value: Value) -> Op | None:
    """The call that returned a tensor without a producer: ``torch.tensor`` of numbers."""
    return next((op for op in value.consumers if value.id in {one.id for one in op.outputs}), None)


def _sources(maker: Op, value: Value, has: Callable[[Value], bool]) -> Iterator[Value]:
    """The inputs of an op for which ``has`` holds: activations before parameters."""
    inputs = [one for one in maker.inputs if has(one) and one.id != value.id]
    yield from sorted(inputs, key=lambda one: one.kind in ("parameter", "buffer", "state"))


# -- dtypes and devices ------------------------------------------------------------------------------------


def _dtype_lines(op: Op, inputs: list[Value], message: str) -> list[str]:
    about_dtypes = re.search(r"dtype|scalar type|must be floating|Long", message)
    odd = _odd_one(inputs, lambda value: value.dtype) if about_dtypes else None
    if odd is None and about_dtypes:
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
    cast, wanted = f".to(torch.{other.dtype})", f".to(torch.{one.dtype})"
    fix = f"cast one of them: {cast} or {wanted}"
    if _is_lasting(other):
        fix = f"cast the input, {cast}, or the model, {wanted}"
    return [f"{line}; {dtype_name(other.dtype)} is the dtype of {_name_text(other)}", fix]


def _device_lines(_op: Op, inputs: list[Value], _message: str) -> list[str]:
    odd = _odd_one([one for one in inputs if one.shape], lambda value: value.device)
    if odd is None:
        return []
    one, other = odd
    line = _property_text(one, one.device, lambda value: value.device)
    fix = f"move the first there, .to({other.device!r}), or make it there"
    return [f"{line}; {other.device} is the device of {_name_text(other)}", fix]


def _odd_one(inputs: list[Value], of: Callable[[Value], str]) -> tuple[Value, Value] | None:
    """An input that differs from a parameter, or from the first input; and the other one."""
    references = [one for one in inputs if _is_lasting(one)] or inputs
    for one in inputs:
        if references and of(one) != of(references[0]):
            return one, references[0]
    return None


def _property_text(value: Value, text: str, of: Callable[[Value], Any]) -> str:
    """``f32 first appears at Tensor.float, data.py:12 in load, from u8[2, 3]``."""
    source, maker = first_seen(value, lambda one: of(one) == of(value))
    if maker is None:
        return f"{text} is of {_name_text(source)}{_creation_text(source)}"
    return f"{text} first appears at {_call_text(maker, maker.inputs)}"


def _name_text(value: Value) -> str:
    value = _view_base(value)
    return f"{value.kind} {value.name or value}"


# -- numbers -----------------------------------------------------------------------------------------------


def _probability_lines(_op: Op, inputs: list[Value], message: str) -> list[str]:
    """The origin of the probabilities or targets of a binary cross entropy."""
    match = re.search(r"all elements of (input|target) should be between 0 and 1", message)
    at = 0 if match is None or match[1] == "input" else 1
    if match is None or len(inputs) <= at:
        return []
    if at:
        return [f"the targets are {numbers_origin(inputs[1])}; scale them to 0 … 1"]
    fix = "apply a sigmoid, or give logits to binary_cross_entropy_with_logits"
    return [f"the probabilities are {numbers_origin(inputs[0])}; {fix}"]


def numbers_origin(value: Value) -> str:
    """The op that computed a tensor's numbers, past ops that only move them: ``from add, data.py:12``."""
    maker: Op | None = None
    for _ in range(_FARTHEST):
        producer = value.producer
        if producer is None:
            before = value.previous or value.base
            if before is None:
                maker = _returning_call(value)
                break
            value = before
            continue
        maker = producer
        bare = producer.name.partition(".")[0]
        sources = [one for one in producer.inputs if one.dtype == value.dtype or bare == "_to_copy"]
        if bare not in _MOVING_OPS or not sources:
            break
        value = sources[-1] if bare == "copy_" else sources[0]
    if maker is None:
        name = f" {value.name}" if value.name else ""
        return f"from {value.kind}{name} {value}"
    shown = api_call_of(maker)
    return f"from {with_location(short_name(shown), shown, short=True)}"
