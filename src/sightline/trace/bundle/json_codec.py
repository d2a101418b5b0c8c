"""Nested plain data and the small tables of a trace as JSON, and back, exactly.

A row of a table is a list of its fields, in the order of its dataclass.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

from sightline.trace import data as d
from sightline.trace.bundle.schema import MAX_DEPTH, Damage, shown
from sightline.trace.forms import SLOT, Elided, Form, Record, Symbol

_WIDE: Final = 1 << 63


def dumps(item: Any) -> str:
    """An item as JSON text, ASCII only.

    >>> dumps((1, [2.5, SLOT], float("inf")))
    '{"t":[1,[2.5,{}],{"f":"7ff0000000000000"}]}'
    """
    return json.dumps(_encoded(item, 0), separators=(",", ":"), allow_nan=False)


def loads(text: str) -> Any:
    """The item of a JSON text.

    >>> loads('{"t":[1,[2.5,{}],{"f":"7ff0000000000000"}]}')
    (1, [2.5, SLOT], inf)
    """
    return _decoded(parsed(text), 0)


def dump_form(form: Form) -> str:
    """A form as JSON: its arguments, and the named ones or null."""
    kwargs = None if form.kwargs is None else _pairs(form.kwargs, 0)
    arguments = [_encoded(item, 0) for item in form.args]
    return json.dumps([arguments, kwargs], separators=(",", ":"), allow_nan=False)


def load_form(text: str) -> Form:
    """The form of a JSON text.

    >>> load_form(dump_form(Form((SLOT, 1), {"dim": -1})))
    Form(args=(SLOT, 1), kwargs={'dim': -1})
    """
    given = parsed(text)
    if not isinstance(given, list) or len(given) != 2 or not isinstance(given[0], list):
        raise Damage(f"{shown(text)} is no form of a call")
    args = tuple(_decoded(item, 0) for item in given[0])
    return Form(args, None if given[1] is None else _named(given[1], 0))


def parsed(text: str) -> Any:
    """JSON that may be anything: bad, absurdly deep, with numbers of a million digits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damage(f"{shown(text)} is not valid JSON ({type(error).__name__})") from None


def _encoded(item: Any, depth: int) -> Any:
    kind = type(item)
    if item is None or kind is bool:
        return item
    if kind is str:
        return item
    if kind is int:
        return item if -_WIDE <= item < _WIDE else {"i": hex(item)}
    if kind is float:
        return item if math.isfinite(item) else {"f": struct.pack(">d", item).hex()}
    if item is SLOT:
        return {}
    if depth >= MAX_DEPTH:
        return {"y": "…"}
    if kind is complex:
        return {"c": [_encoded(item.real, depth + 1), _encoded(item.imag, depth + 1)]}
    if kind is Symbol:
        return {"y": item.text}
    if kind is Elided:
        return {"e": item.count}
    if kind is Record:
        return {"r": [item.type, _pairs(item.fields, depth + 1)]}
    if isinstance(item, list):
        return [_encoded(part, depth + 1) for part in item]
    if isinstance(item, tuple):
        return {"t": [_encoded(part, depth + 1) for part in item]}
    if isinstance(item, dict):
        return {"d": _pairs(item, depth + 1)}
    return {"y": _text(item)}


def _pairs(items: dict[Any, Any], depth: int) -> list[list[Any]]:
    return [[_encoded(key, depth), _encoded(item, depth)] for key, item in items.items()]


def _text(item: Any) -> str:
    """What views would print of an item that is no plain data; a recorder makes none."""
    try:
        return repr(item)[:200]
    except Exception:  # noqa: BLE001  # somebody else's code, run only to be shown
        return f"<{type(item).__name__}>"


def _decoded(item: Any, depth: int) -> Any:
    if item is None or isinstance(item, str | bool | float):
        return item
    if isinstance(item, int):
        return _integer(item)
    if depth > MAX_DEPTH + 1:
        raise Damage("arguments are nested too deep")
    if isinstance(item, list):
        return [_decoded(part, depth + 1) for part in item]
    if not item:
        return SLOT
    if len(item) == 1:
        [(tag, held)] = item.items()
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(held, depth + 1)
    raise Damage(f"{shown(item)} means nothing")


def _integer(held: Any) -> int:
    if type(held) is not int or not -_WIDE <= held < _WIDE:
        raise Damage(f"{shown(held)} is no number")
    return held


def _items(held: Any, depth: int) -> list[Any]:
    if not isinstance(held, list):
        raise Damage(f"{shown(held)} is no list")
    return [_decoded(part, depth) for part in held]


def _string(held: Any, _depth: int = 0) -> str:
    if not isinstance(held, str):
        raise Damage(f"{shown(held)} is no text")
    return held


def _dict(held: Any, depth: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for pair in held if isinstance(held, list) else ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise Damage(f"{shown(pair)} is no pair")
        key = _decoded(pair[0], depth)
        try:
            found[key] = _decoded(pair[1], depth)
        except TypeError:
            raise Damage(f"{shown(pair[0])} cannot be a key") from None
    if not isinstance(held, list) or len(found) != len(held):
        raise Damage(f"{shown(held)} is no dict")
    return found


def _named(held: Any, depth: int) -> dict[str, Any]:
    found = _dict(held, depth)
    if not all(type(key) is str for key in found):
        raise Damage(f"{shown(held)} has names that are no texts")
    return found


def _record(held: Any, depth: int) -> Record:
    if not isinstance(held, list) or len(held) != 2:
        raise Damage(f"{shown(held)} is no record")
    return Record(_string(held[0]), _named(held[1], depth))


def _complex(held: Any, depth: int) -> complex:
    parts = _items(held, depth)
    if len(parts) != 2 or not all(type(part) is float for part in parts):
        raise Damage(f"{shown(held)} is no complex number")
    return complex(*parts)


def _bits(held: Any, _depth: int) -> float:
    text = _string(held)
    try:
        (found,) = struct.unpack(">d", bytes.fromhex(text))
    except (ValueError, struct.error):
        raise Damage(f"{shown(text)} is no float") from None
    return float(found)


def _hex(held: Any, _depth: int) -> int:
    try:
        return int(_string(held), 16)
    except ValueError:
        raise Damage(f"{shown(held)} is no number") from None


_READERS: Final = {
    "t": lambda held, depth: tuple(_items(held, depth)),
    "d": _dict,
    "y": lambda held, _depth: Symbol(_string(held)),
    "e": lambda held, _depth: Elided(_integer(held)),
    "r": _record,
    "c": _complex,
    "f": _bits,
    "i": _hex,
}


T = TypeVar("T")

_MOST_SIZES: Final = 1024
_PLAIN: Final = frozenset((str, int, bool, float, type(None)))
_fields: Final[Callable[[Any], tuple[dataclasses.Field[Any], ...]]] = cache(dataclasses.fields)


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
    return [_field(getattr(row, field.name)) for field in _fields(type(row))]


def _field(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple):
        return [_field(part) for part in value]
    return _listed(value) if dataclasses.is_dataclass(value) else value


def _made(kind: type[T], given: Any) -> T:
    fields = _fields(kind)
    needed = sum(field.default is dataclasses.MISSING and field.name != "parameters" for field in fields)
    if not isinstance(given, list) or not needed <= len(given) <= len(fields):
        raise Damage(f"{shown(given)} is no {kind.__name__}")
    made = {}
    for field, value in zip(fields, given, strict=False):
        reader = _FIELD_READERS[str(field.type)]
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


_FIELD_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "str": _exactly(str),
    "bool": _exactly(bool),
    "int": lambda value: value if is_integer(value) else NotImplemented,
    "tuple[int, ...]": _integers,
    "tuple[int, ...] | None": lambda value: None if value is None else _integers(value),
    "tuple[str, ...]": _strings,
    "tuple[ParameterInfo, ...]": _parameters,
}
