"""The user's line of an op, the visible frames of a stack, and the origin of a tensor as text.

A frame belongs to torch, to another installed package, or to the user. Views hide the frames that the user
did not write, unless they are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.trace.data import FLAVOURS, I32, I64, PHASES, TraceData
from sightline.trace.rows import Frame, Op, Value
from sightline.trace.source_files import installed_file, torch_file

_BACKWARD, _OPAQUE = PHASES.index("backward"), FLAVOURS.index("opaque")
#: The function of torch below which the nodes of a backward pass run.
_ENGINE: Final = "_engine_run_backward"


def line_in_backward(data: TraceData, op: int) -> int:
    """The frame of the user's code that ran an op during the backward pass; -1 for torch's own ops.

    Such code is the ``backward`` of an ``autograd.Function`` or a hook of a tensor: it is on the stack below
    the engine, or on one of the engine's threads.
    """
    if data.ops.phase[op] != _BACKWARD or data.ops.flavour[op] == _OPAQUE:
        return -1
    chain: list[int] = []
    at = int(data.ops.frame[op])
    while at >= 0:
        chain.append(at)
        at = int(data.frames.parent[at])
    codes = [data.codes[int(data.frames.code[frame])] for frame in chain]
    index = inside_engine([(code.file, code.function) for code in codes], worker=data.ops.thread[op] > 0)
    return chain[index] if index >= 0 else -1


def inside_engine(stack: Iterable[tuple[str, str]], *, worker: bool) -> int:
    """The index of the user's code that autograd called, in a stack of (file, function), innermost first.

    -1 where there is none. ``worker`` says that the stack is of one of autograd's threads.

    >>> engine = ("/lib/site-packages/torch/autograd/graph.py", "_engine_run_backward")
    >>> inside_engine([("net.py", "Root.backward"), engine, ("net.py", "main")], worker=False)
    0
    >>> inside_engine([engine, ("net.py", "main")], worker=False)
    -1
    """
    index = -1
    for at, (file, function) in enumerate(stack):
        if torch_file(file):
            if function == _ENGINE:
                return index
        elif index < 0:
            index = at
    return index if worker else -1


def user_frame(op: Op) -> Frame | None:
    """The innermost frame of an op that does not belong to torch.

    A backward op has the frame of its forward op, unless the user's own code ran it.
    """
    line = line_in_backward(op._data.raw, op.id)
    if line >= 0:
        return Frame(op._data, line)
    forward = op.forward if op.phase == "backward" else None
    own = forward.frame if forward is not None and forward.frame is not None else op.frame
    frame = own
    while frame is not None and torch_file(frame.file):
        frame = frame.parent
    return frame if frame is not None else own


def location_text(op: Op) -> str:
    """``net.py:9 in Net.forward (fc1)``; empty for an op without a Python line and a module.

    An op that the user's own code ran in the backward pass has two lines: that code's and its forward op's.
    """
    text, forward = _line_text(op), op.forward
    if forward is not None and line_in_backward(op._data.raw, op.id) >= 0:
        line = user_frame(forward)
        at = f" at {line.position} in {line.function}" if line is not None else ""
        text += f", backward of {bare_name(written_call(forward))}{at}"
    return text


def _line_text(op: Op) -> str:
    frame, module = user_frame(op), op.module
    parts = [f"{frame.position} in {frame.function}"] if frame is not None else []
    parts += [f"({module.label})"] if module is not None else []
    return " ".join(parts)


def with_location(text: str, op: Op, *, short: bool = False) -> str:
    """A text about an op, followed by its location: ``relu, net.py:8 in Net.forward (act)``."""
    location = _line_text(op) if short else location_text(op)
    if location.startswith("("):  # the line is unknown
        return f"{text} {location}"
    return f"{text}, {location}" if location else text


def written_call(op: Op) -> Op:
    """The API call that an op came from, if one was recorded, else the op.

    A backward op stands for itself: the user did not write what runs inside ``loss.backward()``.
    """
    parent = op.parent
    return parent if parent is not None and op.phase == parent.phase != "backward" else op


def bare_name(op: Op) -> str:
    """The name of an op without its namespace: ``relu`` for ``torch.relu``; aten names stay as they are."""
    return op.name.removeprefix("torch.").removeprefix("F.").removeprefix("Tensor.")


def backward_suffix(op: Op) -> str:
    """`` (backward of softmax)`` for a backward op whose forward op is known, else empty.

    Empty too where `location_text` says so already.
    """
    forward = op.forward if op.phase == "backward" else None
    if forward is not None and line_in_backward(op._data.raw, op.id) >= 0:
        return ""
    return f" (backward of {bare_name(written_call(forward))})" if forward is not None else ""


def argument_names(op: Op) -> list[str]:
    """The names of an op's tensor inputs: ``mat1`` by the schema, ``argument 0``, ``tensors[1]``."""
    schema = op._data.argument_names(op)
    return [_argument(path, schema) for path in op.form.slots()]


def _argument(path: str, schema: tuple[str, ...]) -> str:
    if not path.startswith("["):
        return path
    index, _, rest = path[1:].partition("]")
    return (schema[int(index)] if int(index) < len(schema) else f"argument {index}") + rest


def origin_text(value: Value, reader: Op) -> str:
    """The origin of an input of ``reader``: ``relu, net.py:8 in Net.forward (act)``."""
    # The base of a view made inside the same call (the transpose in a linear) says more than the view.
    while value.base is not None and (
        value.producer is None or (reader.parent is not None and value.producer.parent == reader.parent)
    ):
        value = value.base
    if value.kind in ("parameter", "buffer", "state"):
        return f"{value.kind} {value.name}"
    maker = value.producer
    if maker is None:
        return f"{value.kind}{' ' + value.name if value.name else ''}"
    shown = written_call(maker)
    return with_location(bare_name(shown) + backward_suffix(shown), shown, short=True)


def value_numbers_text(value: Value) -> str:
    """The statistics of a value: ``-1.2 … 3.4, mean 0.1, std 1``, or ``all NaN``; empty if not measured."""
    numbers = value.stats
    if numbers is None:
        return ""
    wrong = numbers.nans + numbers.infs
    if wrong and wrong == max(numbers.nans, numbers.infs) >= value.meta.numel:
        name = "NaN" if numbers.nans else "Inf"
        return f"all {name}" if value.meta.numel > 1 else name
    if wrong and (wrong >= value.meta.numel or numbers.min != numbers.min):  # none finite, or only counted
        return ", ".join(f"{n:,} {name}" for n, name in ((numbers.nans, "NaN"), (numbers.infs, "Inf")) if n)
    if not wrong and numbers.min == numbers.max and value.meta.numel > 1:
        return f"all {numbers}"
    return str(numbers)


__all__ = ["Chains", "installed_file", "shown_frames", "torch_file", "user_code_start"]


def user_code_start(files: Iterable[str]) -> int:
    """The index in a chain, outermost first, where the user's code begins; 0 if there is none.

    The frames before it are those of a test runner, a notebook or a thread.

    >>> user_code_start(["/lib/python3.12/threading.py", "/home/me/net.py", "/lib/site-packages/lib/a.py"])
    1
    """
    return next((at for at, file in enumerate(files) if not installed_file(file)), 0)


def shown_frames(data: TraceData, ids: I64 | None = None) -> I32:
    """The frame under which views show each op, or the ops ``ids``: its own, or that of its forward op.

    An op that the user's own code ran in the backward pass is shown under that code.
    """
    ops = data.ops
    if ids is None:
        ids = np.arange(len(ops))
    own: I32 = ops.frame[ids]
    if not len(own):
        return own
    forward = ops.forward[ids]
    forward_frames = ops.frame[np.maximum(forward, 0)]
    linked = (forward >= 0) & (ops.phase[ids] == PHASES.index("backward")) & (forward_frames >= 0)
    at = np.flatnonzero(linked)
    _, first, same = np.unique(
        own[at].astype(np.int64) * 256 + ops.thread[ids[at]], return_index=True, return_inverse=True
    )
    user_code = [line_in_backward(data, op) >= 0 for op in ids[at[first]].tolist()]
    linked[at] = ~np.array(user_code, dtype=np.bool_)[same]
    return np.where(linked, forward_frames, own)


@dataclass(frozen=True)
class Chains:
    """The visible part of every frame's chain, computed once per frame.

    ``hidden`` says which files are left out, ``hidden_frames`` which other frames.
    """

    data: TraceData
    hidden: Callable[[str], bool]
    hidden_frames: NDArray[np.bool_] | None = None

    @cached_property
    def _visible(self) -> list[bool]:
        by_code = np.array([not self.hidden(code.file) for code in self.data.codes], dtype=np.bool_)
        visible = by_code[self.data.frames.code]
        mask: list[bool] = (visible if self.hidden_frames is None else visible & ~self.hidden_frames).tolist()
        return mask

    @cached_property
    def _whole_chains(self) -> dict[int, tuple[int, ...]]:
        return {-1: ()}

    @cached_property
    def _user_chains(self) -> dict[int, tuple[int, ...]]:
        return {}

    def of(self, frame: int) -> tuple[int, ...]:
        """The ids of the visible frames that led to this one, outermost first, from the user's code on."""
        chain = self._user_chains.get(frame)
        if chain is None:
            chain = self._whole(frame)
            codes, code = self.data.codes, self.data.frames.code
            chain = self._user_chains[frame] = chain[
                user_code_start(codes[code[each]].file for each in chain) :
            ]
        return chain

    def _whole(self, frame: int) -> tuple[int, ...]:
        chains = self._whole_chains
        parents, visible = self.data.frames.parent, self._visible
        path: list[int] = []
        while frame not in chains:
            path.append(frame)
            frame = int(parents[frame])
        chain = chains[frame]
        for each in reversed(path):
            chain = (*chain, each) if visible[each] else chain
            chains[each] = chain
        return chain
