"""What was asked of a recording and did not come about: globs that matched nothing, tensors left out.

A glob with a typing error in it is not refused when the recording begins, since a module may be made while
the model runs. It is told afterwards, by whatever shows the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np

from sightline.patterns import PathPattern, bare_name, close_names, op_matches, segments_of
from sightline.trace.data import LEVELS, TraceData

#: How each glob is written in the call, by what ``info["asked"]`` calls it.
_WRITTEN: Final = {
    ("capture", "modules"): "Capture(modules={})", ("capture", "ops"): "Capture(ops={})",
    ("capture", "names"): "Capture(names={})", ("stats", "modules"): "Stats(modules={})",
    ("stats", "ops"): "Stats(ops={})", ("check", "allow"): "Check(allow={})",
}  # fmt: skip
_NEAR: Final = 2


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A glob that matched nothing: ``Capture(modules='blocks.*.atn')``."""

    written: str
    near: tuple[str, ...]  #: what it may have meant

    def __str__(self) -> str:
        near = f"; near: {', '.join(self.near)}" if self.near else ""
        return f"{self.written} matched nothing{near}"


def unmatched(data: TraceData) -> list[Unmatched]:
    """Every glob of a recording that matched nothing; none of one that an exception has cut short."""
    asked = data.info.get("asked")
    if not isinstance(asked, Mapping) or data.info.get("exception"):
        return []
    found = []
    for (who, what), written in _WRITTEN.items():
        globs = _part(asked, who).get(what)
        for glob in globs if isinstance(globs, list | tuple) else ():
            names, matches = _there_is(data, asked, who, what)
            if isinstance(glob, str) and not any(matches(glob, name) for name in names):
                near = close_names(glob, filter(None, names), _NEAR)
                found.append(Unmatched(written.format(repr(glob)), tuple(near)))
    return found


def unmatched_allow(data: TraceData, globs: Iterable[str]) -> list[Unmatched]:
    """Which globs of what may make a NaN match no op and no module of a recording."""
    names, matches = _there_is(data, {}, "check", "allow")
    wrong = [glob for glob in globs if not any(matches(glob, name) for name in names)]
    return [Unmatched(repr(glob), tuple(close_names(glob, names, _NEAR))) for glob in wrong]


def left_out_text(info: Mapping[str, Any]) -> str:
    """``3 left out by max_bytes=4,096``; empty where every tensor that was asked for was kept."""
    count = info.get("left_out")
    if not isinstance(count, int) or not count:
        return ""
    limit = _part(_part(info, "asked"), "capture").get("max_bytes")
    return f"{count:,} left out" + (f" by max_bytes={limit:,}" if isinstance(limit, int) else "")


def measured_nothing(data: TraceData) -> str:
    """Why a recording has no statistics: none were asked for, or none of what was meant is there."""
    wrong = [str(each) for each in unmatched(data) if each.written.startswith("Stats")]
    return "; ".join(wrong) or 'record with stats=True or check="nonfinite"'


def capture_text(data: TraceData) -> str:
    """What a reader of the captured tensors must know: which were left out, and which glob is wrong."""
    wrong = [str(each) for each in unmatched(data) if each.written.startswith("Capture")]
    return "; ".join(text for text in (left_out_text(data.info), *wrong) if text)


def _there_is(
    data: TraceData, asked: Mapping[str, Any], who: str, what: str
) -> tuple[list[str], Callable[[str, str], bool]]:
    """The names a glob is matched against, and how."""
    capture = _part(asked, "capture")
    if what == "names":
        return [name for name in capture.get("spied") or () if isinstance(name, str)], _is_name
    if what == "ops":
        return _op_names(data), _is_op
    if who == "capture" and not capture.get(
        "ops"
    ):  # what is kept is what a module returns: it must be called
        return _paths(data, np.unique(data.calls.module).tolist()), _is_module
    paths = _paths(data, range(len(data.modules)))
    if what == "modules":
        return paths, _is_inside
    labels = [module.type for module in data.modules if not module.path]
    return [*_op_names(data), *filter(None, paths), *labels], _is_op_or_inside


def _paths(data: TraceData, modules: Iterable[int]) -> list[str]:
    infos = [data.modules[module] for module in modules]
    return [path for info in infos for path in info.aliases or (info.path,)]


def _op_names(data: TraceData) -> list[str]:
    """Every op of the run as people say it, and in full."""
    found: dict[str, None] = {}
    for number, level in enumerate(LEVELS):
        for name in np.unique(data.ops.name[data.ops.level == number]).tolist():
            found |= dict.fromkeys((bare_name(data.names[name], level), data.names[name]))
    return list(found)


def _is_name(glob: str, name: str) -> bool:
    return fnmatchcase(name, glob)


def _is_op(glob: str, name: str) -> bool:
    return any(op_matches(glob, name, level) for level in LEVELS)


def _is_module(glob: str, path: str) -> bool:
    return PathPattern(glob).exactly(segments_of(path))


def _is_inside(glob: str, path: str) -> bool:
    return PathPattern(glob)(segments_of(path))


def _is_op_or_inside(glob: str, name: str) -> bool:
    return _is_op(glob, name) or _is_inside(glob, name)


def _part(held: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = held.get(name)
    return part if isinstance(part, Mapping) else {}
