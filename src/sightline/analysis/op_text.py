"""Ops, and where their tensors come from, in one line: ``relu, net.py:8 in Net.forward (act)``."""

from __future__ import annotations

from typing import Final

from sightline.data.rows import Op, Value
from sightline.data.user_frames import user_frame, user_frame_in_backward

#: Aten ops by which a function copies an argument before it computes with it.
_COPIES: Final = frozenset("clone _unsafe_view contiguous".split())


def location_text(op: Op) -> str:
    """``net.py:9 in Net.forward (fc1)``; empty for an op without a Python line and a module.

    An op that the user's own code ran in the backward pass has two lines: that one, and its forward op's.
    """
    text, forward = _frame_text(op), op.forward
    if forward is not None and user_frame_in_backward(op._data.raw, op.id) >= 0:
        line = user_frame(forward)
        at = f" at {line.position} in {line.function}" if line is not None else ""
        text += f", backward of {short_name(api_call_of(forward))}{at}"
    return text


def _frame_text(op: Op) -> str:
    frame, module = user_frame(op), op.module
    parts = [f"{frame.position} in {frame.function}"] if frame is not None else []
    parts += [f"({module.label})"] if module is not None else []
    return " ".join(parts)


def with_location(text: str, op: Op, *, short: bool = False) -> str:
    """A text about an op followed by its location: ``relu, net.py:8 in Net.forward (act)``."""
    location = _frame_text(op) if short else location_text(op)
    if location.startswith("("):  # no line is known, only the module
        return f"{text} {location}"
    return f"{text}, {location}" if location else text


def api_call_of(op: Op) -> Op:
    """The API call that an op came from, or the op itself where none was recorded.

    Nobody wrote the ops inside ``loss.backward()``, so a backward op stands for itself.
    """
    parent = op.parent
    return parent if parent is not None and op.phase == parent.phase != "backward" else op


def short_name(op: Op) -> str:
    """The name of an op without its namespace: ``relu`` for ``torch.relu``; aten names stay as they are."""
    return op.name.removeprefix("torch.").removeprefix("F.").removeprefix("Tensor.")


def backward_suffix(op: Op) -> str:
    """`` (backward of softmax)`` for a backward op with a known forward op, else empty.

    Also empty if `location_text` already says so.
    """
    forward = op.forward if op.phase == "backward" else None
    if forward is not None and user_frame_in_backward(op._data.raw, op.id) >= 0:
        return ""
    return f" (backward of {short_name(api_call_of(forward))})" if forward is not None else ""


def argument_names(op: Op) -> list[str]:
    """The name of each tensor input of an op: ``mat1`` by the schema, ``argument 0``, ``tensors[1]``."""
    schema, names = op._data.argument_names(op), []
    for path in op.form.slots():
        if path.startswith("["):
            index, _, rest = path[1:].partition("]")
            path = (schema[int(index)] if int(index) < len(schema) else f"argument {index}") + rest
        names.append(path)
    return names


def origin_text(value: Value, reader: Op) -> str:
    """Where an input of ``reader`` came from: ``relu, net.py:8 in Net.forward (act)``.

    A view or a copy made inside the call of ``reader`` stands for its source: the transpose in a linear tells
    less than the weight it is a view of.
    """
    source: Value | None = value
    while source is not None:
        value, producer = source, source.producer
        source = value.base
        if producer is None:
            continue
        if reader.parent is None or producer.parent != reader.parent:
            break
        if value.base is None and producer.name.partition(".")[0] in _COPIES:
            source = next(iter(producer.inputs), None)
    if value.kind in ("parameter", "buffer", "state"):
        return f"{value.kind} {value.name}"
    if value.producer is None:
        return f"{value.kind}{' ' + value.name if value.name else ''}"
    call = api_call_of(value.producer)
    return with_location(short_name(call) + backward_suffix(call), call, short=True)


def statistics_text(value: Value) -> str:
    """The statistics of a value, empty without any: ``-1.2 … 3.4, mean 0.1, std 1``, or ``all NaN``."""
    numbers = value.stats
    if numbers is None:
        return ""
    nonfinite = numbers.nans + numbers.infs
    if nonfinite and nonfinite == max(numbers.nans, numbers.infs) >= value.meta.numel:
        name = "NaN" if numbers.nans else "Inf"
        return f"all {name}" if value.meta.numel > 1 else name
    if nonfinite and (nonfinite >= value.meta.numel or numbers.min != numbers.min):  # or only counted
        return ", ".join(f"{n:,} {name}" for n, name in ((numbers.nans, "NaN"), (numbers.infs, "Inf")) if n)
    if not nonfinite and numbers.min == numbers.max and value.meta.numel > 1:
        return f"all {numbers}"
    return str(numbers)
