"""The filters every view takes: which ops and which module calls of a trace they select.

    module="blocks.*.attn"   a glob over path segments: ``*`` is one segment, ``**`` any number;
                             a module matches together with everything inside it
    op="*matmul*"            a glob over op names; ``mul`` alone also means ``mul.Tensor``
    phase="backward"         one of the four phases
    depth=2                  modules at most this deep; the model itself has depth 0
    tail=20                  the last ones of those

A filter that matches nothing is an error that offers the nearest names, never an empty view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sightline.argument_checks import argument_text
from sightline.errors import NothingMatched, UsageError
from sightline.patterns import choices_text, did_you_mean, module_matches, no_module_matched, op_matches
from sightline.trace.data import FLAVOURS, I32, LEVELS, PHASES, ModuleInfo
from sightline.trace.index import Index

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
            raise UsageError(f"phase={self.phase!r} is no phase; choose {choices_text(PHASES)}.")
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
        mask = _level_mask(index, level)
        if not self.filters:
            return mask
        if not mask.any():
            raise NothingMatched(
                f"{self._text()} matches nothing: this trace has no {level or 'recorded'} ops."
            )
        if self.module is not None or self.depth is not None:
            mask &= _ops_of_calls(ops.call, self._inside(index), outside=self.module is None)
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
        modules = index.raw.modules
        of = index.raw.calls.module
        mask = np.ones(len(of), dtype=np.bool_)
        if self.module is not None:
            matched = _module_mask(modules, self.module)
            mask = _with_descendants(matched[of], index.raw.calls.parent)
        if self.depth is not None:
            depths = np.array([_depth(module.path) for module in modules], dtype=np.int32)
            mask &= depths[of] <= self.depth
        return mask

    def _text(self) -> str:
        texts = [f"{name}={value!r}" for name, value in self.filters.items()]
        return texts[0] if len(texts) == 1 else f"The combination {', '.join(texts)}"


def _module_mask(modules: Sequence[ModuleInfo], pattern: str) -> Mask:
    matched = [module_matches(pattern, module) for module in modules]
    if not any(matched):
        raise no_module_matched(pattern, modules)
    return np.array(matched, dtype=np.bool_)


def _op_mask(index: Index, pattern: str, level: str | None) -> Mask:
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
            f"op={pattern!r} matches no {_kind(level)} of this trace{did_you_mean(pattern, all_names)}"
        )
    return matched


def _phase_mask(column: NDArray[np.int8], phase: str, what: str) -> Mask:
    mask: Mask = column == PHASES.index(phase)
    if not mask.any():
        present = ", ".join(repr(PHASES[number]) for number in np.unique(column).tolist())
        raise NothingMatched(f"phase={phase!r} matches no {what} of this trace; it has {present}.")
    return mask


def _level_mask(index: Index, level: str | None) -> Mask:
    if level is None:
        return np.ones(len(index.raw.ops), dtype=np.bool_)
    if level not in LEVELS:
        raise UsageError(f"ops={argument_text(level)} is no level; choose {choices_text(LEVELS)}.")
    return _at_level(index, LEVELS.index(level))


def _at_level(index: Index, level: int) -> Mask:
    """The ops of a level; an opaque op counts at every level."""
    ops = index.raw.ops
    mask: Mask = (ops.level == level) | (ops.flavour == FLAVOURS.index("opaque"))
    return mask


def _ops_of_calls(call: I32, calls: Mask, *, outside: bool) -> Mask:
    """The ops of some calls; ``outside`` says whether ops outside all modules are among them."""
    return np.append(calls, outside)[call]  # an op in no module call has call -1: the appended entry


def _with_descendants(calls: Mask, parents: I32) -> Mask:
    inside: list[bool] = []
    for own, parent in zip(calls.tolist(), parents.tolist(), strict=True):  # a parent always comes first
        inside.append(own or (parent >= 0 and inside[parent]))
    return np.array(inside, dtype=np.bool_)


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


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0
