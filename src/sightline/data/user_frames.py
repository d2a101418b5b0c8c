"""The user's line of an op, and the frames a reader wants to see.

A frame belongs to torch, to another installed package, or to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.file_owners import installed_file, torch_file
from sightline.data.rows import Frame, Op
from sightline.data.table import linked_row
from sightline.data.trace_data import FLAVOURS, I32, I64, PHASES, TraceData

_BACKWARD, _OPAQUE = PHASES.index("backward"), FLAVOURS.index("opaque")
#: The function of torch below which the nodes of a backward pass run.
_ENGINE: Final = "_engine_run_backward"


def user_frame_in_backward(data: TraceData, op: int) -> int:
    """The frame of the user's own code that ran an op during the backward pass; -1 for torch's own ops.

    Such code is the ``backward`` of an ``autograd.Function`` or the hook of a tensor. It is on the stack
    inside autograd's engine, or on one of the engine's threads.
    """
    if data.ops.phase[op] != _BACKWARD or data.ops.flavour[op] == _OPAQUE:
        return -1
    chain: list[int] = []
    at = int(data.ops.frame[op])
    while at >= 0:
        chain.append(at)
        at = int(data.frames.parent[at])
    codes = [data.codes[int(data.frames.code[frame])] for frame in chain]
    stack = [(code.file, code.function) for code in codes]
    at = engine_callback_index(stack, worker=data.ops.thread[op] > 0)
    return chain[at] if at >= 0 else -1


def engine_callback_index(stack: Iterable[tuple[str, str]], *, worker: bool) -> int:
    """The position of the user's code that autograd called in a stack of (file, function), innermost first.

    -1 if autograd called none. ``worker`` says that the stack is that of an autograd thread.

    >>> engine = ("/lib/site-packages/torch/autograd/graph.py", "_engine_run_backward")
    >>> engine_callback_index([("net.py", "Root.backward"), engine, ("net.py", "main")], worker=False)
    0
    >>> engine_callback_index([engine, ("net.py", "main")], worker=False)
    -1
    """
    innermost = -1
    for at, (file, function) in enumerate(stack):
        if torch_file(file):
            if function == _ENGINE:
                return innermost
        elif innermost < 0:
            innermost = at
    return innermost if worker else -1


def user_frame(op: Op) -> Frame | None:
    """The innermost frame of an op outside torch; torch's own if there is no other.

    A backward op has the frame of its forward op, unless the user's own code ran it.
    """
    index = op._data
    frame: Frame | None = linked_row("frames", index, index.line_frames[index.op_frames[op.id]])
    return frame


def first_user_index(files: Iterable[str]) -> int:
    """The position where a chain of frames, outermost first, reaches the user's code; 0 if it never does.

    The frames further out are of a test runner, a notebook or a thread.

    >>> first_user_index(["/lib/python3.12/threading.py", "/home/me/net.py", "/lib/site-packages/lib/a.py"])
    1
    """
    return next((at for at, file in enumerate(files) if not installed_file(file)), 0)


def op_frames(data: TraceData, ids: I64 | None = None) -> I32:
    """The frame each op (or each of ``ids``) is shown under: its own, for a backward op its forward op's.

    An op that the user's own code ran in the backward pass is shown under that code.
    """
    ops = data.ops
    if ids is None:
        ids = np.arange(len(ops))
    own: I32 = ops.frame[ids]
    if not len(own):
        return own
    forward = ops.forward[ids]
    of_forward = ops.frame[np.maximum(forward, 0)]
    linked = (forward >= 0) & (ops.phase[ids] == _BACKWARD) & (of_forward >= 0)
    at = np.flatnonzero(linked)
    # Ops of one frame and thread have one answer.
    keys = own[at].astype(np.int64) * 256 + ops.thread[ids[at]]
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    in_user_code = [user_frame_in_backward(data, op) >= 0 for op in ids[at[first]].tolist()]
    linked[at] = ~np.array(in_user_code, dtype=np.bool_)[group]
    return np.where(linked, of_forward, own)


def user_frames(data: TraceData) -> I32:
    """For each frame the innermost one on its stack outside torch, or -1; one entry more, for frame -1."""
    torch_code = np.array([torch_file(code.file) for code in data.codes] or [False], dtype=np.bool_)
    in_torch = np.append(torch_code[data.frames.code], False)
    parents = np.append(data.frames.parent, np.int32(-1))
    nearest = np.append(np.arange(len(data.frames), dtype=np.int32), np.int32(-1))
    while (climbing := in_torch[nearest]).any():
        nearest[climbing] = parents[nearest[climbing]]
    return nearest


@dataclass(frozen=True)
class FrameChains:
    """The visible part of every frame's stack, derived once per frame.

    ``hidden`` says whether a file is left out; ``hidden_frames`` is a mask of further frames to leave out.
    """

    data: TraceData
    hidden: Callable[[str], bool]
    hidden_frames: NDArray[np.bool_] | None = None

    @cached_property
    def _visible(self) -> list[bool]:
        by_code = np.array([not self.hidden(code.file) for code in self.data.codes], dtype=np.bool_)
        mask = by_code[self.data.frames.code]
        if self.hidden_frames is not None:
            mask &= ~self.hidden_frames
        visible: list[bool] = mask.tolist()
        return visible

    @cached_property
    def _full(self) -> dict[int, tuple[int, ...]]:
        return {-1: ()}

    @cached_property
    def _trimmed(self) -> dict[int, tuple[int, ...]]:
        return {}

    def of(self, frame: int) -> tuple[int, ...]:
        """The ids of the visible frames that led to this one, outermost first, from the user's code on."""
        chain = self._trimmed.get(frame)
        if chain is None:
            full, at = self._full, frame
            path: list[int] = []
            while at not in full:
                path.append(at)
                at = int(self.data.frames.parent[at])
            chain = full[at]
            for each in reversed(path):
                chain = full[each] = (*chain, each) if self._visible[each] else chain
            codes, code = self.data.codes, self.data.frames.code
            chain = self._trimmed[frame] = chain[first_user_index(codes[code[each]].file for each in chain) :]
        return chain
