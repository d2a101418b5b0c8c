"""Requested data that was never recorded: globs that matched nothing, tensors over the size limit.

A misspelt glob cannot be rejected when the recording begins, since modules may be created while the model
runs. The views of the recording report it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np

from sightline.data.trace_data import LEVELS, TraceData
from sightline.hints import Hint
from sightline.patterns import PathPattern, bare_name, close_names, op_matches, segments_of

#: How each glob is written in the user's call, by its keys in ``info["asked"]``.
_ARGUMENTS: Final = {
    ("capture", "modules"): Hint("Capture(modules={})", "--capture {}"),
    ("capture", "ops"): "Capture(ops={})",
    ("capture", "names"): "Capture(names={})",
    ("stats", "modules"): Hint("Stats(modules={})", "--module {}"),
    ("stats", "ops"): "Stats(ops={})",
    ("check", "allow"): "Check(allow={})",
}
_MAX_NEAR: Final = 2
_CHECK: Final = Hint('check="nonfinite"', "--check")


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A glob that matched nothing: ``Capture(modules='blocks.*.atn')``."""

    option: str  #: "capture", "stats" or "check"
    written: str
    near: tuple[str, ...]  #: similar names

    def __str__(self) -> str:
        near = f"; near: {', '.join(self.near)}" if self.near else ""
        return f"{self.written} matched nothing{near}"


def unmatched(data: TraceData) -> list[Unmatched]:
    """Every glob of a recording that matched nothing; empty if an exception ended the run early."""
    options = data.info.get("asked")
    if not isinstance(options, Mapping) or data.info.get("exception"):
        return []
    wrong = []
    for (option, argument), text in _ARGUMENTS.items():
        globs = _mapping(options, option).get(argument)
        for glob in globs if isinstance(globs, list | tuple) else ():
            names, matches = _candidates(data, options, option, argument)
            if isinstance(glob, str) and not any(matches(glob, name) for name in names):
                near = close_names(glob, filter(None, names), _MAX_NEAR)
                wrong.append(Unmatched(option, str(text).format(repr(glob)), tuple(near)))
    return wrong


def unmatched_allow(data: TraceData, globs: Iterable[str]) -> list[Unmatched]:
    """Which globs of ``Check(allow=…)`` match no op and no module of a recording."""
    names, matches = _candidates(data, {}, "check", "allow")
    wrong = [glob for glob in globs if not any(matches(glob, name) for name in names)]
    return [Unmatched("check", repr(glob), tuple(close_names(glob, names, _MAX_NEAR))) for glob in wrong]


def left_out_text(info: Mapping[str, Any]) -> str:
    """``3 left out by max_bytes=4,096``; empty where every selected tensor was captured."""
    count = info.get("left_out")
    if not isinstance(count, int) or not count:
        return ""
    limit = _mapping(_mapping(info, "asked"), "capture").get("max_bytes")
    return f"{count:,} left out" + (f" by max_bytes={limit:,}" if isinstance(limit, int) else "")


def missing_statistics_text(data: TraceData) -> str:
    """Why a recording has no statistics: none were requested, or their globs matched nothing."""
    wrong = [str(each) for each in unmatched(data) if each.option == "stats"]
    return "; ".join(wrong) or f"record with {Hint.recording('stats')} or {_CHECK}"


def capture_text(data: TraceData) -> str:
    """Which captured tensors are missing, and why: the size limit, or a glob that matched nothing."""
    wrong = [str(each) for each in unmatched(data) if each.option == "capture"]
    return "; ".join(text for text in (left_out_text(data.info), *wrong) if text)


def _candidates(
    data: TraceData, options: Mapping[str, Any], option: str, argument: str
) -> tuple[list[str], Callable[[str, str], bool]]:
    """The names a glob is matched against, and the function that matches."""
    capture = _mapping(options, "capture")
    if argument == "names":
        spied = [name for name in capture.get("spied") or () if isinstance(name, str)]
        return spied, lambda glob, name: fnmatchcase(name, glob)
    if argument == "ops":
        return _op_names(data), _is_op
    if option == "capture" and not capture.get("ops"):  # outputs are captured: the module must be called
        called = _paths(data, np.unique(data.calls.module).tolist())
        return called, lambda glob, path: PathPattern(glob).exactly(segments_of(path))
    paths = _paths(data, range(len(data.modules)))
    if argument == "modules":
        return paths, _is_inside
    labels = [module.type for module in data.modules if not module.path]
    names = [*_op_names(data), *filter(None, paths), *labels]
    return names, lambda glob, name: _is_op(glob, name) or _is_inside(glob, name)


def _paths(data: TraceData, modules: Iterable[int]) -> list[str]:
    infos = [data.modules[module] for module in modules]
    return [path for info in infos for path in info.aliases or (info.path,)]


def _op_names(data: TraceData) -> list[str]:
    """The bare and the full name of every op of the run."""
    names: dict[str, None] = {}
    for number, level in enumerate(LEVELS):
        for name in np.unique(data.ops.name[data.ops.level == number]).tolist():
            names |= dict.fromkeys((bare_name(data.names[name], level), data.names[name]))
    return list(names)


def _is_op(glob: str, name: str) -> bool:
    return any(op_matches(glob, name, level) for level in LEVELS)


def _is_inside(glob: str, path: str) -> bool:
    return PathPattern(glob)(segments_of(path))


def _mapping(info: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    item = info.get(name)
    return item if isinstance(item, Mapping) else {}
