"""What of a recorded script is the model: not what builds it, nor what a trainer does around it.

A script that is run from its first line also builds the model, fills its weights and hands it to a trainer of
an installed package, which calls it twenty frames further down. Views leave that out unless everything is
asked for. Where no module was called nothing is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.trace.data import I32, PHASES, TraceData
from sightline.trace.index import Index
from sightline.trace.source_files import installed_file, torch_file

Bools = NDArray[np.bool_]

#: Functions that build a model and fill its weights.
_BUILDERS: Final = frozenset(
    "__init__ reset_parameters init_weights _init_weights _initialize_weights initialize_weights".split()
)
_FORWARD, _BACKWARD, _OPTIMIZER = (PHASES.index(name) for name in ("forward", "backward", "optimizer"))


@dataclass(frozen=True)
class ModelPart:
    """Ops that build, ops that installed packages run around the model, and frames that only lead to it."""

    building: Bools
    around: Bools
    hidden_frames: Bools

    @property
    def left_out(self) -> Bools:
        """Ops that are not the model."""
        both: Bools = self.building | self.around
        return both

    def told(self, mask: Bools, more: str) -> str:
        """What is not shown of the chosen ops, in one line; empty where all of them are."""
        building, around = int((self.building & mask).sum()), int((self.around & mask).sum())
        builds = f"{building:,} op{' that builds' if building == 1 else 's that build'} the model"
        runs = f"{around:,} op{'' if around == 1 else 's'} that installed packages run around it"
        told = [text for text, count in ((builds, building), (runs, around)) if count]
        return f"left out: {', '.join(told)}; {more}" if told else ""


#: How everything is asked for.
SHOWS_ALL: Final = "everything=True shows them"


def model_part(index: Index) -> ModelPart:
    """What is left out of a recording.

    Of installed packages only in training: what ``generate`` does between two calls of the model is wanted.
    """
    data = index.raw
    ops, calls = data.ops, data.calls
    nothing = np.zeros(len(ops), dtype=np.bool_)
    if not (len(calls) and len(ops) and len(data.frames)):
        return ModelPart(nothing, nothing, np.zeros(len(data.frames), dtype=np.bool_))
    builds, theirs, theirs_inside = _frames(data)
    outside = (ops.call < 0) & (ops.phase == _FORWARD)
    frames = index.op_frames
    known = frames >= 0
    building = outside & known & builds[frames]
    trains = bool(np.isin(ops.phase, (_BACKWARD, _OPTIMIZER)).any())
    around = outside & known & theirs_inside[frames] & ~building if trains else nothing
    linked = (ops.phase == _BACKWARD) & (ops.forward >= 0)
    building = building | (linked & building[np.maximum(ops.forward, 0)])
    around = around | (linked & around[np.maximum(ops.forward, 0)])
    hidden = np.zeros(len(theirs), dtype=np.bool_)
    if trains:
        roots = calls.frame[calls.parent < 0]
        above = _with_parents(data, np.unique(np.concatenate([roots, frames[ops.call < 0]])))
        hidden = above & theirs
    return ModelPart(building, around, hidden)


def _frames(data: TraceData) -> tuple[Bools, Bools, Bools]:
    """Per frame: whether it builds, whether it is of another's package, and whose the op inside it is."""
    builds = [code.function.rpartition(".")[2] in _BUILDERS for code in data.codes]
    torchs = [torch_file(code.file) for code in data.codes]
    theirs = [not torchs[at] and installed_file(code.file) for at, code in enumerate(data.codes)]
    parents, codes = data.frames.parent.tolist(), data.frames.code.tolist()
    made = np.zeros((3, len(codes) + 1), dtype=np.bool_)  # the last one is of what has no parent
    for frame, (parent, code) in enumerate(zip(parents, codes, strict=True)):
        made[0, frame] = builds[code] or made[0, parent]
        made[1, frame] = theirs[code]
        made[2, frame] = made[2, parent] if torchs[code] else theirs[code]
    return made[0, :-1], made[1, :-1], made[2, :-1]


def _with_parents(data: TraceData, frames: I32) -> Bools:
    """These frames and all above them."""
    found = np.zeros(len(data.frames.parent), dtype=np.bool_)
    at = frames[frames >= 0]
    while len(at):
        at = np.unique(at[~found[at]])
        found[at] = True
        at = data.frames.parent[at]
        at = at[at >= 0]
    return found
