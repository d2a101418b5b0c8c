"""`find_value`: the value that a row, an id or a name stands for.

A name is the key of a capture, a parameter, a module (what it returned) or a variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sightline.analysis.variable_names import Assignment, assignments, returned_assignments
from sightline.argument_checks import argument_text
from sightline.errors import NothingMatched, UsageError
from sightline.patterns import did_you_mean
from sightline.trace.index import Frame, Index, Module, ModuleCall, Op, Row, Value

_ID = re.compile(r"\$(\d{1,18})")  # Python refuses to read a number of thousands of digits


@dataclass(frozen=True, slots=True)
class FoundValue:
    """A value, and the line that set it where it is a variable of a script or function."""

    value: Value
    set_by: Frame | None = None


def find_value(index: Index, reference: Any) -> FoundValue:
    """The value that a row, an id or a name stands for; where several have the name, the last of them.

    A row is looked up in the recording it came from: inside the block every snapshot has its own.
    """
    if isinstance(reference, Row):
        return FoundValue(_value_of_row(reference))
    if isinstance(reference, int) and not isinstance(reference, bool):
        return FoundValue(_value_of_id(index, reference))
    if not isinstance(reference, str):
        raise UsageError(
            f"{argument_text(reference)} is no value of a trace; give a row of t.values or t.ops, an id like "
            "'$12' or a name."
        )
    number = _ID.fullmatch(reference)
    if number:
        return FoundValue(_value_of_id(index, int(number[1])))
    for look_up in (_captured_value, _named_value, _returned_value):
        value = look_up(index, reference)
        if value >= 0:
            return FoundValue(index.values[value])
    variable = _assigned_variable(index, reference)
    if variable is None:
        raise NothingMatched(_no_value_text(index, reference))
    in_module = "." in reference
    return FoundValue(index.values[variable.value], None if in_module else index.frames[variable.frame])


def _no_value_text(index: Index, name: str) -> str:
    """The error for a name without a value: a module that returned none, or the nearest names."""
    for module in index.modules:
        if name in module.aliases or (not module.path and name == module.type):
            if module.calls:
                return f"{name!r} is a module that returned no tensor."
            return f"{name!r} is a module that was never called in this recording: there is no value of it."
    names = did_you_mean(name, (each for each in _all_names(index) if each != name))
    return f"{name!r} names no value, module or variable of this trace{names}"


def _value_of_row(row: Row) -> Value:
    if isinstance(row, Value):
        return row
    for call in row.calls[-1:] if isinstance(row, Module) else [row]:
        if isinstance(call, Op | ModuleCall) and len(call.outputs):
            return call.outputs[0]
    raise NothingMatched(f"{row!r} returned no tensor.")


def _value_of_id(index: Index, id: int) -> Value:
    count = len(index.values)
    if not 0 <= id < count:
        present = f"its values are $0 … ${count - 1}" if count else "it has no values"
        raise NothingMatched(f"There is no value ${id} in this trace; {present}.")
    return index.values[id]


def _captured_value(index: Index, key: str) -> int:
    return next((each.value for each in reversed(index.raw.captures) if each.key == key), -1)


def _named_value(index: Index, name: str) -> int:
    """The parameter, gradient or state of this name, as it was at the end of the recording."""
    names, values = index.raw.names, index.raw.values
    if name not in names:
        return -1
    ids = np.flatnonzero(values.name == names.index(name))
    if not len(ids):
        return -1
    newest = int(ids[-1])
    for version in np.flatnonzero(values.previous >= 0).tolist():  # a version is later than what it replaces
        if values.previous[version] == newest:
            newest = version
    return newest


def _returned_value(index: Index, path: str) -> int:
    """What the last call of a module returned."""
    for module in index.modules:
        if path in module.aliases or (not module.path and path == module.type):
            for call in reversed(module.calls):
                if len(call.outputs):
                    return call.outputs[0].id
    return -1


def _assigned_variable(index: Index, name: str) -> Assignment | None:
    """A variable of a function that ran in a module, ``blocks.0.attn.q``, or outside all, ``loss``.

    A name without a module may also be a variable of any function; the last value it had counts.
    """
    variables = list(_variables(index))
    matches = [each for each, names in variables if name in names]
    if not matches and "." not in name:
        matches = [each for each, _ in variables if each.name == name]
        matches += [each for each in returned_assignments(index) if each.name == name]
    return max(matches, key=lambda each: each.value, default=None)


def _variables(index: Index) -> Iterator[tuple[Assignment, list[str]]]:
    """Each assignment to a variable, and the names it goes by: ``blocks.0.attn.q``, ``Net.q``."""
    for each in assignments(index):
        paths = _module_names(index.module_calls[each.call] if each.call >= 0 else None)
        yield each, [f"{path}.{each.name}" if path else each.name for path in paths]


def _module_names(call: ModuleCall | None) -> tuple[str, ...]:
    """The names the module of a call goes by; the empty one for the model itself and outside of it."""
    if call is None:
        return ("",)
    module = call.module
    return module.aliases if module.path else (*module.aliases, module.type)


def _all_names(index: Index) -> Iterator[str]:
    """Every name that stands for a value."""
    yield from (module.path for module in index.modules if module.calls)
    yield from (index.name(id) for id in np.unique(index.raw.values.name).tolist())
    for each, names in _variables(index):
        yield from (*names, each.name)
    yield from (each.name for each in returned_assignments(index))
    yield from (each.key for each in index.raw.captures)
