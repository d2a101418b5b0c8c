"""The small tables of a trace as JSON: a row is a list of its fields, in the order of its dataclass.

Fields that were added later, with a default, may be missing at the end of a row.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

from sightline.trace import data as d
from sightline.trace.bundle.plain import parsed
from sightline.trace.bundle.schema import Damage, shown

T = TypeVar("T")

_MOST_SIZES: Final = 1024


def dump(row: Any) -> str:
    """A row as JSON.

    >>> dump(d.CodeInfo("net.py", "Net.forward", 3))
    '["net.py","Net.forward",3]'
    """
    return json.dumps(_listed(row), separators=(",", ":"))


def load(kind: type[T], text: str) -> T:
    """The row of a JSON text, every field of the type it is said to have.

    >>> load(d.CodeInfo, '["net.py","Net.forward",3]')
    CodeInfo(file='net.py', function='Net.forward', first_line=3)
    """
    return _made(kind, parsed(text))


def _listed(row: Any) -> list[Any]:
    return [_field(getattr(row, field.name)) for field in dataclasses.fields(row)]


def _field(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_field(part) for part in value]
    return _listed(value) if dataclasses.is_dataclass(value) else value


def _made(kind: type[T], given: Any) -> T:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]  # every kind that is asked for is a dataclass
    needed = sum(field.default is dataclasses.MISSING and field.name != "parameters" for field in fields)
    if not isinstance(given, list) or not needed <= len(given) <= len(fields):
        raise Damage(f"{shown(given)} is no {kind.__name__}")
    made = {}
    for field, value in zip(fields, given, strict=False):
        reader = _READERS[str(field.type)]
        found = reader(value)
        if found is NotImplemented:
            raise Damage(f"a {kind.__name__} has the {field.name} {shown(value)}")
        made[field.name] = found
    return kind(**made)


def _exactly(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if type(value) is kind else NotImplemented


def is_integer(value: Any) -> bool:
    """Whether something is an integer of 64 bits; True is none."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _integers(value: Any) -> Any:
    if isinstance(value, list) and len(value) <= _MOST_SIZES and all(map(is_integer, value)):
        return tuple(value)
    return NotImplemented


def _strings(value: Any) -> Any:
    if isinstance(value, list) and all(type(part) is str for part in value):
        return tuple(value)
    return NotImplemented


def _parameters(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_made(d.ParameterInfo, part) for part in value)
    return NotImplemented


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "str": _exactly(str),
    "bool": _exactly(bool),
    "int": lambda value: value if is_integer(value) else NotImplemented,
    "tuple[int, ...]": _integers,
    "tuple[int, ...] | None": lambda value: None if value is None else _integers(value),
    "tuple[str, ...]": _strings,
    "tuple[ParameterInfo, ...]": _parameters,
}
