"""Where an op is written and what a tensor came from, each told in one line.

For messages: the note of an exception, a NaN that was found. Whoever has rows may call it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from sightline.trace.rows import Frame, Op, Value

_TORCH = re.compile(r"/(site|dist)-packages/(torch|torchgen|functorch)/")
_OWN = str(Path(__file__).resolve().parent.parent).replace("\\", "/") + "/"


@lru_cache(maxsize=4096)
def torch_file(path: str) -> bool:
    """Whether a file is torch's own, or sightline's: nothing the user wrote or calls by name.

    >>> torch_file("/venv/lib/site-packages/torch/nn/modules/linear.py"), torch_file("/home/me/torch/net.py")
    (True, False)
    """
    path = path.replace("\\", "/")
    return bool(_TORCH.search(path)) or path.startswith((_OWN, "<frozen "))


def user_frame(op: Op) -> Frame | None:
    """The innermost frame of an op that is not torch's own; a backward op has that of its forward op."""
    forward = op.forward if op.phase == "backward" else None
    own = forward.frame if forward is not None and forward.frame is not None else op.frame
    frame = own
    while frame is not None and torch_file(frame.file):
        frame = frame.parent
    return frame if frame is not None else own


def place_text(op: Op) -> str:
    """``net.py:9 in Net.forward (fc1)``; empty for an op that no Python line and no module ran."""
    frame, module = user_frame(op), op.module
    parts = [f"{frame.position} in {frame.function}"] if frame is not None else []
    parts += [f"({module.label})"] if module is not None else []
    return " ".join(parts)


def placed(text: str, op: Op) -> str:
    """What is said about an op, followed by where it is: ``relu, net.py:8 in Net.forward (act)``."""
    place = place_text(op)
    if place.startswith("("):  # no line is known, only the module
        return f"{text} {place}"
    return f"{text}, {place}" if place else text


def written(op: Op) -> Op:
    """The call the user wrote that an op came from: its API call where one was recorded.

    What runs inside ``loss.backward()`` was written by nobody, so a backward op stands for itself.
    """
    parent = op.parent
    return parent if parent is not None and op.phase == parent.phase != "backward" else op


def bare_name(op: Op) -> str:
    """The name of an op without its namespace: ``relu`` for ``torch.relu``; aten names stay as they are."""
    return op.name.removeprefix("torch.").removeprefix("F.").removeprefix("Tensor.")


def backward_of(op: Op) -> str:
    """`` (backward of softmax)`` for a backward op the forward op of which is known, else empty."""
    forward = op.forward if op.phase == "backward" else None
    return f" (backward of {bare_name(written(forward))})" if forward is not None else ""


def argument_names(op: Op) -> list[str]:
    """What each tensor input of an op is called: ``mat1`` by the schema, ``argument 0``, ``tensors[1]``."""
    schema = op._data.raw.schemas.get(op.name, ()) if op.level == "aten" else ()
    return [_argument(path, schema) for path in op.form.slots()]


def _argument(path: str, schema: tuple[str, ...]) -> str:
    if not path.startswith("["):
        return path
    index, _, rest = path[1:].partition("]")
    return (schema[int(index)] if int(index) < len(schema) else f"argument {index}") + rest


def origin(value: Value, reader: Op) -> str:
    """What a tensor that ``reader`` was given came from: ``relu, net.py:8 in Net.forward (act)``."""
    # A view made inside the same call (the transpose in a linear) says less than what it is a view of.
    while value.base is not None and (
        value.producer is None or (reader.parent is not None and value.producer.parent == reader.parent)
    ):
        value = value.base
    if value.kind in ("parameter", "buffer", "state"):
        return f"{value.kind} {value.name}"
    maker = value.producer
    if maker is None:
        return f"{value.kind}{' ' + value.name if value.name else ''}"
    shown = written(maker)
    return placed(bare_name(shown) + backward_of(shown), shown)


def numbers_text(value: Value) -> str:
    """The statistics of a value, if they were taken: ``-1.2 … 3.4, mean 0.1, std 1``, or ``all NaN``."""
    numbers = value.stats
    if numbers is None:
        return ""
    wrong = numbers.nans + numbers.infs
    if wrong and wrong == max(numbers.nans, numbers.infs) >= value.meta.numel:
        return "all NaN" if numbers.nans else "all Inf"
    if wrong and (wrong >= value.meta.numel or numbers.min != numbers.min):  # none finite, or only counted
        return ", ".join(f"{n:,} {name}" for n, name in ((numbers.nans, "NaN"), (numbers.infs, "Inf")) if n)
    return str(numbers)
