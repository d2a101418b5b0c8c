"""JSON for nested plain data and for the rows of the small tables, without loss.

A row of a table is a list of its fields, in the order of its dataclass.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeVar

from sightline.data import trace_data as d
from sightline.data.forms import SLOT, Elided, Form, Record, Symbol
from sightline.store.bundle_schema import MAX_DEPTH
from sightline.store.damage import Damage, quoted

# `json.dumps` makes an encoder for every text.
_text_of: Final = json.JSONEncoder(separators=(",", ":")).encode
_strict_text_of: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

_WIDE: Final = 1 << 63


def dumps(item: Any) -> str:
    """An item as JSON text, ASCII only.

    >>> dumps((1, [2.5, SLOT], float("inf")))
    '{"t":[1,[2.5,{}],{"f":"7ff0000000000000"}]}'
    """
    return _strict_text_of(_encode(item, 0))


def loads(text: str) -> Any:
    """The item of a JSON text.

    >>> loads('{"t":[1,[2.5,{}],{"f":"7ff0000000000000"}]}')
    (1, [2.5, SLOT], inf)
    """
    return _decode(parse_json(text), 0)


def dump_form(form: Form) -> str:
    """A form as JSON: its arguments, and the named ones or null."""
    kwargs = None if form.kwargs is None else _pairs(form.kwargs, 0)
    arguments = [_encode(item, 0) for item in form.args]
    return _strict_text_of([arguments, kwargs])


def load_form(text: str) -> Form:
    """The form of a JSON text.

    >>> load_form(dump_form(Form((SLOT, 1), {"dim": -1})))
    Form(args=(SLOT, 1), kwargs={'dim': -1})
    """
    parts = parse_json(text)
    if not isinstance(parts, list) or len(parts) != 2 or not isinstance(parts[0], list):
        raise Damage(f"{quoted(text)} is no form of a call")
    args = tuple(_decode(item, 0) for item in parts[0])
    return Form(args, None if parts[1] is None else _string_dict(parts[1], 0))


def parse_json(text: str) -> Any:
    """Parse JSON that may be anything: invalid, absurdly deep, with numbers of a million digits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damage(f"{quoted(text)} is not valid JSON ({type(error).__name__})") from None


def _encode(item: Any, depth: int) -> Any:
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
        return {"c": [_encode(item.real, depth + 1), _encode(item.imag, depth + 1)]}
    if kind is Symbol:
        return {"y": item.text}
    if kind is Elided:
        return {"e": item.count}
    if kind is Record:
        return {"r": [item.type, _pairs(item.fields, depth + 1)]}
    if isinstance(item, list):
        return [_encode(part, depth + 1) for part in item]
    if isinstance(item, tuple):
        return {"t": [_encode(part, depth + 1) for part in item]}
    if isinstance(item, dict):
        return {"d": _pairs(item, depth + 1)}
    return {"y": _text(item)}


def _pairs(items: dict[Any, Any], depth: int) -> list[list[Any]]:
    return [[_encode(key, depth), _encode(item, depth)] for key, item in items.items()]


def _text(item: Any) -> str:
    """The text of an item that is not plain data, which no recorder writes."""
    try:
        return repr(item)[:200]
    except Exception:  # noqa: BLE001  # the repr is foreign code
        return f"<{type(item).__name__}>"


def _decode(item: Any, depth: int) -> Any:
    if item is None or isinstance(item, str | bool | float):
        return item
    if isinstance(item, int):
        return _integer(item)
    if depth > MAX_DEPTH + 1:
        raise Damage("arguments are nested too deep")
    if isinstance(item, list):
        return [_decode(part, depth + 1) for part in item]
    if not item:
        return SLOT
    if len(item) == 1:
        [(tag, content)] = item.items()
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(content, depth + 1)
    raise Damage(f"{quoted(item)} has no meaning")


def _integer(item: Any) -> int:
    if type(item) is not int or not -_WIDE <= item < _WIDE:
        raise Damage(f"{quoted(item)} is no number")
    return item


def _items(item: Any, depth: int) -> list[Any]:
    if not isinstance(item, list):
        raise Damage(f"{quoted(item)} is no list")
    return [_decode(part, depth) for part in item]


def _string(item: Any, _depth: int = 0) -> str:
    if not isinstance(item, str):
        raise Damage(f"{quoted(item)} is no text")
    return item


def _dict(item: Any, depth: int) -> dict[Any, Any]:
    decoded: dict[Any, Any] = {}
    for pair in item if isinstance(item, list) else ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise Damage(f"{quoted(pair)} is no pair")
        key = _decode(pair[0], depth)
        try:
            decoded[key] = _decode(pair[1], depth)
        except TypeError:
            raise Damage(f"{quoted(pair[0])} cannot be a key") from None
    if not isinstance(item, list) or len(decoded) != len(item):
        raise Damage(f"{quoted(item)} is no dict")
    return decoded


def _string_dict(item: Any, depth: int) -> dict[str, Any]:
    decoded = _dict(item, depth)
    if not all(type(key) is str for key in decoded):
        raise Damage(f"{quoted(item)} has names that are no texts")
    return decoded


def _record(item: Any, depth: int) -> Record:
    if not isinstance(item, list) or len(item) != 2:
        raise Damage(f"{quoted(item)} is no record")
    return Record(_string(item[0]), _string_dict(item[1], depth))


def _complex(item: Any, depth: int) -> complex:
    parts = _items(item, depth)
    if len(parts) != 2 or not all(type(part) is float for part in parts):
        raise Damage(f"{quoted(item)} is no complex number")
    return complex(*parts)


def _bits(item: Any, _depth: int) -> float:
    text = _string(item)
    try:
        (number,) = struct.unpack(">d", bytes.fromhex(text))
    except (ValueError, struct.error):
        raise Damage(f"{quoted(text)} is no float") from None
    return float(number)


def _hex(item: Any, _depth: int) -> int:
    try:
        return int(_string(item), 16)
    except ValueError:
        raise Damage(f"{quoted(item)} is no number") from None


_READERS: Final = {
    "t": lambda item, depth: tuple(_items(item, depth)),
    "d": _dict,
    "y": lambda item, _depth: Symbol(_string(item)),
    "e": lambda item, _depth: Elided(_integer(item)),
    "r": _record,
    "c": _complex,
    "f": _bits,
    "i": _hex,
}


T = TypeVar("T")

_MOST_SIZES: Final = 1024
_PLAIN: Final = frozenset((str, int, bool, float, type(None)))


def dump(row: Any) -> str:
    """A row as JSON.

    >>> dump(d.CodeInfo("net.py", "Net.forward", 3))
    '["net.py","Net.forward",3]'
    """
    return _text_of(_field_values(row))


def load(kind: type[T], text: str) -> T:
    """The row of a JSON text; every field must have its declared type.

    >>> load(d.CodeInfo, '["net.py","Net.forward",3]')
    CodeInfo(file='net.py', function='Net.forward', first_line=3)
    """
    return _row(kind, parse_json(text))


def _make_getter(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """What reads all fields of a row."""
    names = [field.name for field in dataclasses.fields(kind)]
    return attrgetter(*names) if len(names) > 1 else lambda row: tuple(getattr(row, name) for name in names)


#: There are few kinds of rows, and many rows.
_getter: Final[Callable[[Any], Callable[[Any], tuple[Any, ...]]]] = cache(_make_getter)


def _field_values(row: Any) -> list[Any]:
    return _plain_values(_getter(type(row))(row))


def _plain_values(values: tuple[Any, ...]) -> list[Any]:
    return [value if type(value) in _PLAIN else _field_value(value) for value in values]


def _field_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return _plain_values(value)
    return _field_values(value) if dataclasses.is_dataclass(value) else value


def _row(kind: type[T], items: Any) -> T:
    needed, readers = _readers(kind)
    if not isinstance(items, list) or not needed <= len(items) <= len(readers):
        raise Damage(f"{quoted(items)} is no {kind.__name__}")
    values = {}
    for (name, read), item in zip(readers, items, strict=False):
        value = read(item)
        if value is NotImplemented:
            raise Damage(f"a {kind.__name__} has the {name} {quoted(item)}")
        values[name] = value
    return kind(**values)


_FieldReaders = tuple[tuple[str, Callable[[Any], Any]], ...]


def _find_readers(kind: Any) -> tuple[int, _FieldReaders]:
    """How many fields a row must have, and what reads each."""
    fields = dataclasses.fields(kind)
    needed = sum(field.default is dataclasses.MISSING and field.name != "parameters" for field in fields)
    return needed, tuple((field.name, _FIELD_READERS[str(field.type)]) for field in fields)


_readers: Final[Callable[[Any], tuple[int, _FieldReaders]]] = cache(_find_readers)


def _exactly(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if type(value) is kind else NotImplemented


def is_integer(value: Any) -> bool:
    """Whether something is a 64-bit integer; bools are not."""
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
        return tuple(_row(d.ParameterInfo, part) for part in value)
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
