"""Which value somebody means: a row, an id, a parameter, a module, a variable or the key of a capture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from sightline.analysis.names import value_names
from sightline.analysis.select import nearest
from sightline.errors import NothingMatched, UsageError
from sightline.given import said
from sightline.trace.tables import Index, Module, ModuleCall, Op, Row, Value

_ID = re.compile(r"\$(\d{1,18})")  # Python refuses to read a number of thousands of digits


def wanted_value(index: Index, wanted: Any) -> Value:
    """The value that is meant; where a name was given to several, the last of them.

    A row is looked up in the recording it came from: inside the block every snapshot has its own.
    """
    if isinstance(wanted, Row):
        return _of_row(wanted)
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        return _of_id(index, wanted)
    if not isinstance(wanted, str):
        raise UsageError(
            f"{said(wanted)} is no value of a trace; give a row of t.values or t.ops, an id like '$12' "
            "or a name."
        )
    number = _ID.fullmatch(wanted)
    if number:
        return _of_id(index, int(number[1]))
    found = _captured(index, wanted)
    for look in (_named, _returned, _assigned):
        found = look(index, wanted) if found < 0 else found
    if found < 0:
        names = nearest(wanted, _known(index))
        raise NothingMatched(f"{wanted!r} names no value, module or variable of this trace{names}")
    return index.values[found]


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


def _assigned(index: Index, name: str) -> int:
    """A variable of a function that ran in a module: ``blocks.0.attn.q``; outside all just ``loss``."""
    return max((value for value, names in _variables(index) if name in names), default=-1)


def _variables(index: Index) -> Iterator[tuple[int, list[str]]]:
    """Each value that was assigned to a variable, and the names that go by: ``blocks.0.attn.q``, ``Net.q``.

    A variable belongs to the module in the code of which the value was made, or to which it was returned.
    """
    calls = index.raw.calls
    returned: dict[int, list[ModuleCall | None]] = {}
    callers = np.repeat(np.arange(len(calls)), np.diff(calls.output_offsets))
    for value, call in zip(calls.outputs.tolist(), calls.parent[callers].tolist(), strict=True):
        returned.setdefault(value, []).append(index.module_calls[call] if call >= 0 else None)
    for value, variable in value_names(index).items():
        producer = index.values[value].producer
        around = [producer.call if producer is not None else None, *returned.get(value, ())]
        paths = dict.fromkeys(path for call in around for path in _paths(call))
        yield value, [f"{path}.{variable}" if path else variable for path in paths]


def _paths(call: ModuleCall | None) -> tuple[str, ...]:
    """What the module of a call may be called; nothing for the model itself and outside of it."""
    if call is None:
        return ("",)
    module = call.module
    return module.aliases if module.path else (*module.aliases, module.type)


def _known(index: Index) -> Iterator[str]:
    """Every name that would have been understood."""
    for module in index.modules:
        yield module.path
    yield from (index.name(id) for id in np.unique(index.raw.values.name).tolist())
    for _, names in _variables(index):
        yield from names
    yield from (each.key for each in index.raw.captures)
