"""What a word in ``table.where(…)`` asks of a row: globs for paths and names, one notation for shapes.

    module="blocks.*.attn"   a glob over path segments, as in every view; what is inside matches, too
    name="*.weight"          the name itself, or a glob
    shape=(2, 8)             also [2, 8], "[2, 8]" or "f32[2, 8]"
    dtype="f32"              also "float32" and torch.float32

Everything else is compared as it is. A word that no row can ever match is an error, not an empty table.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from sightline.errors import NothingMatched, UsageError
from sightline.given import said
from sightline.notation import dtype_name
from sightline.patterns import path_matches
from sightline.trace.data import FLAVOURS, KINDS, LEVELS, PHASES

if TYPE_CHECKING:
    from sightline.trace.rows import Module
    from sightline.trace.tables import Index

Test = Callable[[Any], bool]

#: The properties that only take certain values.
CHOICES: Final = {"level": LEVELS, "phase": PHASES, "flavour": FLAVOURS, "kind": KINDS}

_SHAPE: Final = re.compile(r"\s*(\w*)\s*\[([\d\s,]*)\](?:@(\S+))?\s*")


def matcher(row: type, data: Index, name: str, wanted: Any) -> Test:
    """The test that ``where(name=wanted)`` puts to a row; an error if no row can ever pass it."""
    if name == "module" and isinstance(wanted, str) and (hasattr(row, "module") or hasattr(row, "producer")):
        return _module_test(data, wanted)
    if not hasattr(row, name):
        near = difflib.get_close_matches(name, [each for each in dir(row) if each[0] != "_"], 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(f"{row.__name__} rows have no property {name!r}{hint}")
    choices = CHOICES.get(name)
    if choices is not None and not (isinstance(wanted, str) and wanted in choices):
        raise UsageError(f"{name}={said(wanted)} is no {name}; choose {_listed(choices)}.")
    if name == "shape":
        return _shape_test(wanted)
    if name == "dtype":
        dtype = dtype_name(str(wanted))
        return lambda row: dtype_name(row.dtype) == dtype
    if name == "name" and isinstance(wanted, str):
        return lambda row: row.name == wanted or (bool(row.name) and fnmatchcase(row.name, wanted))
    return lambda row: bool(getattr(row, name) == wanted)


def _module_test(data: Index, pattern: str) -> Test:
    modules = data.modules
    matched = [_module_matches(module, pattern) for module in modules]
    if not any(matched):
        paths = [path for module in modules for path in module.aliases if path]
        near = difflib.get_close_matches(pattern, paths, 3, 0.5)
        hint = f"; did you mean {_listed(near)}?" if near else "."
        raise NothingMatched(f"module={pattern!r} matches no module of this trace{hint}")
    inside = {module.id for module, yes in zip(modules, matched, strict=True) if yes}
    owned = {info.path for id in inside for info in data.raw.modules[id].parameters}

    def test(row: Any) -> bool:
        module = row.module if hasattr(row, "module") else row.producer and row.producer.module
        if module is None:  # what no op made: a parameter is where its owner is
            return getattr(row, "kind", "") in ("parameter", "buffer") and row.name in owned
        return module.id in inside

    return test


def _module_matches(module: Module, pattern: str) -> bool:
    paths = module.aliases or (module.path,)
    return any(path_matches(pattern, path) for path in paths) or module.root.type == pattern


def _shape_test(wanted: Any) -> Test:
    if isinstance(wanted, str):
        found = _SHAPE.fullmatch(wanted)
        if found:
            dtype, device = dtype_name(found[1]), found[3]
            shape = tuple(int(size) for size in found[2].replace(",", " ").split())
            return lambda row: (
                tuple(row.shape) == shape
                and (not dtype or dtype_name(row.dtype) == dtype)
                and (device is None or row.device == device)
            )
    elif isinstance(wanted, list | tuple) and all(type(size) is int for size in wanted):
        sizes = tuple(wanted)
        return lambda row: tuple(row.shape) == sizes
    raise UsageError(f'shape={said(wanted)} is no shape; write (2, 8), [2, 8] or "f32[2, 8]".')


def _listed(names: Sequence[str]) -> str:
    texts = [repr(name) for name in names]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
