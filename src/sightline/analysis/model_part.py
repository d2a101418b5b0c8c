"""Which ops of a recorded script are the model's: not those that build it, nor those a trainer runs.

A script that is recorded from its first line also builds the model, initialises its weights and passes it
to a trainer of an installed package, which calls it twenty frames further down. Views leave that out unless
``everything=True``. Where no module was called nothing is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.trace.data import I32, PHASES, TraceData
from sightline.trace.file_owners import installed_file, torch_file
from sightline.trace.index import Index

Bools = NDArray[np.bool_]

#: Functions that build a model and initialise its weights.
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
    def excluded(self) -> Bools:
        """Ops that are not the model's."""
        both: Bools = self.building | self.around
        return both

    def excluded_text(self, mask: Bools, more: str) -> str:
        """Which of the chosen ops are left out, in one line that ends with ``more``; empty without any."""
        building, around = int((self.building & mask).sum()), int((self.around & mask).sum())
        builds = f"{building:,} op{' that builds' if building == 1 else 's that build'} the model"
        runs = f"{around:,} op{'' if around == 1 else 's'} that installed packages run around it"
        texts = [text for text, count in ((builds, building), (runs, around)) if count]
        return f"left out: {', '.join(texts)}; {more}" if texts else ""


#: The hint that ends such a line.
SHOWS_ALL: Final = "everything=True shows them"


def model_part(index: Index) -> ModelPart:
    """The parts of a recording that are not the model's.

    Ops that installed packages run between two calls count only in training: those of ``generate`` are shown.
    Hidden are also the frames of decorators in installed packages, which lead from a module to its forward.
    """
    data = index.raw
    ops, calls = data.ops, data.calls
    nothing = np.zeros(len(ops), dtype=np.bool_)
    if not (len(calls) and len(ops) and len(data.frames)):
        return ModelPart(nothing, nothing, np.zeros(len(data.frames), dtype=np.bool_))
    in_builder, installed, from_installed, decorates = _frames(data)
    outside = (ops.call < 0) & (ops.phase == _FORWARD)
    frames = index.op_frames
    has_frame = frames >= 0
    building = outside & has_frame & in_builder[frames]
    trains = bool(np.isin(ops.phase, (_BACKWARD, _OPTIMIZER)).any())
    before = np.arange(len(ops)) < int(np.argmax(ops.call >= 0))
    around = outside & has_frame & from_installed[frames] & ~building & (trains | before)
    linked = (ops.phase == _BACKWARD) & (ops.forward >= 0)
    building = building | (linked & building[np.maximum(ops.forward, 0)])
    around = around | (linked & around[np.maximum(ops.forward, 0)])
    hidden = decorates.copy()
    hidden[index.op_user_frames[index.op_user_frames >= 0]] = False
    if trains:
        roots = calls.frame[calls.parent < 0]
        above = _with_parents(data, np.unique(np.concatenate([roots, frames[ops.call < 0]])))
        hidden |= above & installed
    return ModelPart(building, around, hidden)


def _frames(data: TraceData) -> tuple[Bools, Bools, Bools, Bools]:
    """Per frame: whether it builds a model, is in an installed package, is called by one, or decorates.

    A package also calls what it calls through torch. Decorators are functions inside functions of packages.
    """
    builds = [code.function.rpartition(".")[2] in _BUILDERS for code in data.codes]
    in_torch = [torch_file(code.file) for code in data.codes]
    installed = [not in_torch[at] and installed_file(code.file) for at, code in enumerate(data.codes)]
    parents, codes = data.frames.parent.tolist(), data.frames.code.tolist()
    local = [installed[at] and "<locals>" in code.function for at, code in enumerate(data.codes)]
    building, own, caller, inner = np.zeros((4, len(codes) + 1), dtype=np.bool_)  # parent -1 reads the last
    for frame, (parent, code) in enumerate(zip(parents, codes, strict=True)):
        building[frame] = builds[code] or building[parent]
        own[frame] = installed[code]
        inner[frame] = local[code]
        caller[frame] = caller[parent] if in_torch[code] else installed[code]
    return building[:-1], own[:-1], caller[:-1], inner[:-1]


def _with_parents(data: TraceData, frames: I32) -> Bools:
    """These frames and all their callers."""
    mask = np.zeros(len(data.frames.parent), dtype=np.bool_)
    at = frames[frames >= 0]
    while len(at):
        at = np.unique(at[~mask[at]])
        mask[at] = True
        at = data.frames.parent[at]
        at = at[at >= 0]
    return mask
