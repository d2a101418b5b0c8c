"""Whose code a frame is, and which line an op is shown under.

A frame belongs to torch, to another installed package, or to the user. Views show a chain of frames
with those hidden that the reader did not write and did not ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sightline.trace.data import I32, I64, PHASES, TraceData
from sightline.trace.file_owners import installed_file, torch_file
from sightline.trace.origins import line_in_backward

__all__ = ["Chains", "first_own", "installed_file", "shown_frames", "torch_file"]


def first_own(files: Iterable[str]) -> int:
    """Where a chain reaches the user's code: what is further out is a test runner, a notebook, a thread.

    0 where the user has no part in it.

    >>> first_own(["/lib/python3.12/threading.py", "/home/me/net.py", "/lib/site-packages/lib/a.py"])
    1
    """
    return next((at for at, file in enumerate(files) if not installed_file(file)), 0)


def shown_frames(data: TraceData, ids: I64 | None = None) -> I32:
    """The frame each op, or each of those asked for, is shown under: its own, or that of its forward op.

    What the user's own code runs in the backward pass is shown under that code.
    """
    ops = data.ops
    if ids is None:
        ids = np.arange(len(ops))
    own: I32 = ops.frame[ids]
    if not len(own):
        return own
    forward = ops.forward[ids]
    theirs = ops.frame[np.maximum(forward, 0)]
    linked = (forward >= 0) & (ops.phase[ids] == PHASES.index("backward")) & (theirs >= 0)
    at = np.flatnonzero(linked)
    _, first, same = np.unique(
        own[at].astype(np.int64) * 256 + ops.thread[ids[at]], return_index=True, return_inverse=True
    )
    written = [line_in_backward(data, op) >= 0 for op in ids[at[first]].tolist()]
    linked[at] = ~np.array(written, dtype=np.bool_)[same]
    return np.where(linked, theirs, own)


@dataclass(frozen=True)
class Chains:
    """The visible part of every frame's chain, worked out once per frame.

    ``hidden`` says which files are left out, ``hidden_frames`` which frames beside those.
    """

    data: TraceData
    hidden: Callable[[str], bool]
    hidden_frames: NDArray[np.bool_] | None = None

    @cached_property
    def _visible(self) -> list[bool]:
        by_code = np.array([not self.hidden(code.file) for code in self.data.codes], dtype=np.bool_)
        visible = by_code[self.data.frames.code]
        found: list[bool] = (
            visible if self.hidden_frames is None else visible & ~self.hidden_frames
        ).tolist()
        return found

    @cached_property
    def _known(self) -> dict[int, tuple[int, ...]]:
        return {-1: ()}

    @cached_property
    def _began(self) -> dict[int, tuple[int, ...]]:
        return {}

    def of(self, frame: int) -> tuple[int, ...]:
        """The ids of the visible frames that led to this one, outermost first, from the user's code on."""
        chain = self._began.get(frame)
        if chain is None:
            chain = self._whole(frame)
            codes, code = self.data.codes, self.data.frames.code
            chain = self._began[frame] = chain[first_own(codes[code[each]].file for each in chain) :]
        return chain

    def _whole(self, frame: int) -> tuple[int, ...]:
        known = self._known
        parents, visible = self.data.frames.parent, self._visible
        path: list[int] = []
        while frame not in known:
            path.append(frame)
            frame = int(parents[frame])
        chain = known[frame]
        for each in reversed(path):
            chain = (*chain, each) if visible[each] else chain
            known[each] = chain
        return chain
