"""Which ops and module calls of a recording a view shows: those its filters select.

    module="blocks.*.attn"   a glob over path segments: ``*`` is one segment, ``**`` any number;
                             a module matches together with everything inside it
    op="*matmul*"            a glob over op names; ``mul`` alone also means ``mul.Tensor``
    phase="backward"         one of the four phases
    depth=2                  modules at most this deep; the model itself has depth 0
    tail=20                  the last ones of those

A filter that matches nothing is an error that offers the nearest names, never an empty view.

Without ``all=True`` views also leave out ops that are not the model's (`model_part`). A script that is
recorded from its first line builds the model, initialises its weights and passes it to a trainer of an
installed package, which calls it twenty frames further down. Where no module was called nothing is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sightline.analysis.value_names import ModuleNames
from sightline.argument_checks import argument_text
from sightline.data.file_owners import installed_file, torch_file
from sightline.data.index import Index
from sightline.data.trace_data import FLAVOURS, LEVELS, PHASES, ModuleInfo, TraceData
from sightline.errors import NothingMatched, UsageError
from sightline.hints import Hint
from sightline.patterns import (
    choices_text,
    did_you_mean,
    module_matches,
    no_module_matched,
    op_matches,
    path_matches,
)

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Selection:
    """The common filters of a view, checked when made and applied to any trace.

    >>> Selection(tail=0)
    Traceback (most recent call last):
    ...
    sightline.errors.UsageError: tail=0 must be a whole number from 1 up.
    """

    module: str | None = None
    op: str | None = None
    phase: str | None = None
    depth: int | None = None
    tail: int | None = None

    def __post_init__(self) -> None:
        for name in ("module", "op", "phase"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise UsageError(f"{name}={argument_text(value)} must be a string.")
        if self.phase is not None and self.phase not in PHASES:
            raise UsageError(
                f"{Hint.option('phase', self.phase)} is no phase; choose {choices_text(PHASES)}."
            )
        for name, least in (("depth", 0), ("tail", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(f"{name}={argument_text(value)} must be a whole number from {least} up.")

    @property
    def filters(self) -> dict[str, str | int]:
        """The filters that were set."""
        values = {name: getattr(self, name) for name in ("module", "op", "phase", "depth", "tail")}
        return {name: value for name, value in values.items() if value is not None}

    def ops(self, index: Index, level: str | None = None) -> Mask:
        """Which ops are selected, as a mask over all of them; ``level`` keeps "api" or "aten" ones only."""
        ops = index.raw.ops
        if level is None:
            mask = np.ones(len(ops), dtype=np.bool_)
        elif level in LEVELS:
            mask = _at_level(index, LEVELS.index(level))
        else:
            raise UsageError(f"{Hint.option('level', level)} is no level; choose {choices_text(LEVELS)}.")
        if not self.filters:
            return mask
        if not mask.any():
            raise NothingMatched(
                f"{self._text()} matches nothing: this trace has no {level or 'recorded'} ops."
            )
        if self.module is not None or self.depth is not None:
            # An op in no module call has call -1: the appended entry.
            mask &= np.append(self._inside(index), self.module is None)[ops.call]
        if self.op is not None:
            mask &= _op_mask(index, self.op, level)
        if self.phase is not None:
            mask &= _phase_mask(ops.phase, self.phase, "op")
        if not mask.any():
            raise NothingMatched(f"{self._text()} matches no {_kind(level)} of this trace.")
        return _last(mask, self.tail)

    def calls(self, index: Index) -> Mask:
        """Which module calls are selected; with ``op``, those a matching op ran in."""
        calls = index.raw.calls
        mask = np.ones(len(calls), dtype=np.bool_)
        if not self.filters:
            return mask
        if not len(calls):
            raise NothingMatched(f"{self._text()} matches nothing: this trace has no module calls.")
        mask &= self._inside(index)
        if self.op is not None:
            mask &= _calls_around(index, _op_mask(index, self.op, None))
        if self.phase is not None:
            mask &= _phase_mask(calls.phase, self.phase, "module call")
        if not mask.any():
            raise NothingMatched(f"{self._text()} matches no module call of this trace.")
        return _last(mask, self.tail)

    def _inside(self, index: Index) -> Mask:
        """The calls inside the selected modules that are not too deep."""
        modules, calls = index.raw.modules, index.raw.calls
        mask = np.ones(len(calls), dtype=np.bool_)
        if self.module is not None:
            matched = matching_modules(index, self.module)
            inside: list[bool] = []
            for module, parent in zip(calls.module.tolist(), calls.parent.tolist(), strict=True):
                inside.append(matched[module] or (parent >= 0 and inside[parent]))  # a parent comes first
            mask = np.array(inside, dtype=np.bool_)
        if self.depth is not None:
            depths = np.array([module_depth(modules, id) for id in range(len(modules))], dtype=np.int32)
            mask &= depths[calls.module] <= self.depth
        return mask

    def _text(self) -> str:
        texts = [f"{Hint.option(name, value)}" for name, value in self.filters.items()]
        return texts[0] if len(texts) == 1 else f"The combination {', '.join(texts)}"


def matching_modules(index: Index, pattern: str) -> list[bool]:
    """Which modules match a pattern by their paths, or else by the names that the program has for them.

    Raises NothingMatched where neither does.
    """
    modules = index.raw.modules
    matched = [module_matches(pattern, module) for module in modules]
    if not any(matched):
        names = ModuleNames(index)
        matched = [path_matches(pattern, names.label(id)) for id in range(len(modules))]
    if not any(matched):
        raise no_module_matched(pattern, modules)
    return matched


def module_depth(modules: Sequence[ModuleInfo], id: int) -> int:
    """How deep a module is in its model, which has depth 0 itself, whatever its path begins with."""
    path, root = modules[id].path, modules[modules[id].root].path
    return _segments(path) - _segments(root)


def _segments(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _op_mask(index: Index, pattern: str, level: str | None) -> Mask:
    """The ops whose names match a glob; an error with the nearest names if there are none."""
    ops = index.raw.ops
    matched = np.zeros(len(ops), dtype=np.bool_)
    all_names: list[str] = []
    for number, kind in enumerate(LEVELS):
        if level not in (None, kind):
            continue
        at_level = _at_level(index, number)
        ids = np.unique(ops.name[at_level])
        names = [index.raw.names[id] for id in ids.tolist()]
        all_names += names
        matches = [op_matches(pattern, name, kind) for name in names]
        matched |= at_level & np.isin(ops.name, ids[np.array(matches, dtype=np.bool_)])
    if not matched.any():
        raise NothingMatched(
            f"{Hint.option('op', pattern)} matches no {_kind(level)} of this trace"
            f"{did_you_mean(pattern, all_names)}"
        )
    return matched


def _phase_mask(column: NDArray[np.int8], phase: str, kind: str) -> Mask:
    mask: Mask = column == PHASES.index(phase)
    if not mask.any():
        present = ", ".join(repr(PHASES[number]) for number in np.unique(column).tolist())
        raise NothingMatched(
            f"{Hint.option('phase', phase)} matches no {kind} of this trace; it has {present}."
        )
    return mask


def _at_level(index: Index, level: int) -> Mask:
    """The ops of a level; an opaque op counts at every level."""
    ops = index.raw.ops
    mask: Mask = (ops.level == level) | (ops.flavour == FLAVOURS.index("opaque"))
    return mask


def _calls_around(index: Index, ops: Mask) -> Mask:
    """The calls that some ops ran in, directly or deeper."""
    mask = np.zeros(len(index.raw.calls) + 1, dtype=np.bool_)
    mask[index.raw.ops.call[ops]] = True
    around = mask[:-1].tolist()
    parents = index.raw.calls.parent.tolist()
    for call in range(len(around) - 1, -1, -1):
        if around[call] and parents[call] >= 0:
            around[parents[call]] = True
    return np.array(around, dtype=np.bool_)


def _last(mask: Mask, count: int | None) -> Mask:
    if count is None:
        return mask
    last = np.zeros_like(mask)
    last[np.flatnonzero(mask)[-count:]] = True
    return last


def _kind(level: str | None) -> str:
    return f"{level} op" if level else "op"


#: Functions that build a model and initialise its weights.
_BUILDERS: Final = frozenset(
    "__init__ reset_parameters init_weights _init_weights _initialize_weights initialize_weights".split()
)
_FORWARD, _BACKWARD, _OPTIMIZER = (PHASES.index(name) for name in ("forward", "backward", "optimizer"))


@dataclass(frozen=True)
class ModelPart:
    """Ops that build, ops that installed packages run around the model, and frames that only lead to it."""

    building: Mask
    around: Mask
    hidden_frames: Mask

    @property
    def excluded(self) -> Mask:
        """Ops that are not the model's."""
        both: Mask = self.building | self.around
        return both

    def excluded_text(self, mask: Mask) -> str:
        """Which of the chosen ops are left out, and what shows them; empty without any."""
        building, around = int((self.building & mask).sum()), int((self.around & mask).sum())
        builds = f"{building:,} op{' that builds' if building == 1 else 's that build'} the model"
        runs = f"{around:,} op{'' if around == 1 else 's'} that installed packages run around it"
        texts = [text for text, count in ((builds, building), (runs, around)) if count]
        return f"left out: {', '.join(texts)}; {Hint.option('all')} shows them" if texts else ""


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
    in_builder, installed, from_installed, decorates = _frame_kinds(data)
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
        leading = np.zeros(len(data.frames), dtype=np.bool_)  # to a model's call, or to an op outside calls
        at = np.concatenate([calls.frame[calls.parent < 0], frames[ops.call < 0]])
        while len(at := np.unique(at[at >= 0])):
            at = at[~leading[at]]
            leading[at] = True
            at = data.frames.parent[at]
        hidden |= leading & installed
    return ModelPart(building, around, hidden)


def _frame_kinds(data: TraceData) -> tuple[Mask, Mask, Mask, Mask]:
    """For each frame: whether it builds a model, is in an installed package, is called by one, or decorates.

    Calls through torch count as the package's. Decorators are functions inside functions of packages.
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
