"""Which value somebody means: a row, an id, a parameter, a module, a variable or the key of a capture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sightline.analysis.select import nearest
from sightline.analysis.variable_names import Assignment, assignments, returned_assignments
from sightline.argument_checks import argument_text
from sightline.errors import NothingMatched, UsageError
from sightline.trace.index import Frame, Index, Module, ModuleCall, Op, Row, Value

_ID = re.compile(r"\$(\d{1,18})")  # Python refuses to read a number of thousands of digits


@dataclass(frozen=True, slots=True)
class FoundValue:
    """The value that is meant, and the line that set it where it is a variable of a script or function."""

    value: Value
    set_by: Frame | None = None


def found_value(index: Index, wanted: Any) -> Value:
    """The value that is meant; where a name was given to several, the last of them."""
    return find_value(index, wanted).value


def find_value(index: Index, wanted: Any) -> FoundValue:
    """The value that is meant, and how.

    A row is looked up in the recording it came from: inside the block every snapshot has its own.
    """
    if isinstance(wanted, Row):
        return FoundValue(_of_row(wanted))
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return FoundValue(_of_id(index, wanted))
    if not isinstance(wanted, str):
        raise UsageError(
            f"{argument_text(wanted)} is no value of a trace; give a row of t.values or t.ops, an id like "
            "'$12' "
            "or a name."
        )
    number = _ID.fullmatch(wanted)
    if number:
        return FoundValue(_of_id(index, int(number[1])))
    for look in (_captured, _named, _returned):
        found = look(index, wanted)
        if found >= 0:
            return FoundValue(index.values[found])
    known = _assigned(index, wanted)
    if known is None:
        raise NothingMatched(_no_value(index, wanted))
    outside = "." not in wanted  # of no module that was named
    return FoundValue(index.values[known.value], index.frames[known.frame] if outside else None)


def _no_value(index: Index, wanted: str) -> str:
    """The sentence about a name that means no value: a module that gave none, or what is near."""
    for module in index.modules:
        if wanted in module.aliases or (not module.path and wanted == module.type):
            if module.calls:
                return f"{wanted!r} is a module that returned no tensor."
            return f"{wanted!r} is a module that was never called in this recording: there is no value of it."
    names = nearest(wanted, (name for name in _known(index) if name != wanted))
    return f"{wanted!r} names no value, module or variable of this trace{names}"


def _of_row(row: Row) -> Value:
    if isinstance(row, Value):
        return row
    calls = row.calls[-1:] if isinstance(row, Module) else [row]
    for made in calls:
        if isinstance(made, Op | ModuleCall) and len(made.outputs):
            return made.outputs[0]
    raise NothingMatched(f"{row!r} returned no tensor.")


def _of_id(index: Index, id: int) -> Value:
    count = len(index.values)
    if not 0 <= id < count:
        there = f"its values are $0 … ${count - 1}" if count else "it has no values"
        raise NothingMatched(f"There is no value ${id} in this trace; {there}.")
    return index.values[id]


def _captured(index: Index, key: str) -> int:
    return next((each.value for each in reversed(index.raw.captures) if each.key == key), -1)


def _named(index: Index, name: str) -> int:
    """The parameter, gradient or state of this name, as it was at the end of the recording."""
    names, values = index.raw.names, index.raw.values
    if name not in names:
        return -1
    found = np.flatnonzero(values.name == names.index(name))
    if not len(found):
        return -1
    newest = int(found[-1])
    for version in np.flatnonzero(values.previous >= 0).tolist():  # a version is later than what it replaces
        if values.previous[version] == newest:
            newest = version
    return newest


def _returned(index: Index, path: str) -> int:
    """What the last call of a module returned."""
    for module in index.modules:
        if path in module.aliases or (not module.path and path == module.type):
            for call in reversed(module.calls):
                if len(call.outputs):
                    return call.outputs[0].id
    return -1


def _assigned(index: Index, name: str) -> Assignment | None:
    """A variable of a function that ran in a module, ``blocks.0.attn.q``, or outside all, ``loss``.

    One that no module is named for may also be of any function: the last value it had counts.
    """
    variables = list(_variables(index))
    found = [each for each, names in variables if name in names]
    if not found and "." not in name:
        found = [each for each, _ in variables if each.name == name]
        found += [each for each in returned_assignments(index) if each.name == name]
    return max(found, key=lambda each: each.value, default=None)


def _variables(index: Index) -> Iterator[tuple[Assignment, list[str]]]:
    """Each assignment to a variable, and the names that go by: ``blocks.0.attn.q``, ``Net.q``."""
    for each in assignments(index):
        paths = _paths(index.module_calls[each.call] if each.call >= 0 else None)
        yield each, [f"{path}.{each.name}" if path else each.name for path in paths]


def _paths(call: ModuleCall | None) -> tuple[str, ...]:
    """What the module of a call may be called; nothing for the model itself and outside of it."""
    if call is None:
        return ("",)
    module = call.module
    return module.aliases if module.path else (*module.aliases, module.type)


def _known(index: Index) -> Iterator[str]:
    """Every name that would have been understood."""
    yield from (module.path for module in index.modules if module.calls)
    yield from (index.name(id) for id in np.unique(index.raw.values.name).tolist())
    for each, names in _variables(index):
        yield from (*names, each.name)
    yield from (each.name for each in returned_assignments(index))
    yield from (each.key for each in index.raw.captures)
