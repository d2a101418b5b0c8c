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
    if item is None or kind is bool or kind is str:
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
    try:  # not plain data, which no recorder writes
        return {"y": repr(item)[:200]}
    except Exception:  # noqa: BLE001  # the repr is foreign code
        return {"y": f"<{type(item).__name__}>"}


def _pairs(items: dict[Any, Any], depth: int) -> list[list[Any]]:
    return [[_encode(key, depth), _encode(item, depth)] for key, item in items.items()]


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
        if tag in _TAGS:
            return _decode_tagged(tag, content, depth + 1)
    raise Damage(f"{quoted(item)} has no meaning")


_TAGS: Final = frozenset("tdyercfi")


def _decode_tagged(tag: str, content: Any, depth: int) -> Any:
    """A tuple, a dict, or a value that JSON lacks."""
    if tag == "t":
        return tuple(_items(content, depth))
    if tag == "d":
        return _dict(content, depth)
    if tag == "e":
        return Elided(_integer(content))
    if tag == "c":
        parts = _items(content, depth)
        if len(parts) != 2 or not all(type(part) is float for part in parts):
            raise Damage(f"{quoted(content)} is no complex number")
        return complex(*parts)
    if tag == "r":
        if not isinstance(content, list) or len(content) != 2:
            raise Damage(f"{quoted(content)} is no record")
        return Record(_string(content[0]), _string_dict(content[1], depth))
    text = _string(content)
    if tag == "y":
        return Symbol(text)
    try:
        return struct.unpack(">d", bytes.fromhex(text))[0] if tag == "f" else int(text, 16)
    except (ValueError, struct.error):
        raise Damage(f"{quoted(text)} is no {'float' if tag == 'f' else 'number'}") from None


def _integer(item: Any) -> Any:
    if not is_integer(item):
        raise Damage(f"{quoted(item)} is no number")
    return item


def _items(item: Any, depth: int) -> list[Any]:
    if not isinstance(item, list):
        raise Damage(f"{quoted(item)} is no list")
    return [_decode(part, depth) for part in item]


def _string(item: Any) -> str:
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


T = TypeVar("T")

_MOST_SIZES: Final = 1024
_PLAIN: Final = frozenset((str, int, bool, float, type(None)))


def dump(row: Any) -> str:
    """A row as JSON.

    >>> dump(d.CodeInfo("net.py", "Net.forward", 3))
    '["net.py","Net.forward",3]'
    """
    return _text_of(_plain_values(_fields_of(row.__class__)(row)))


def load(kind: type[T], text: str) -> T:
    """The row of a JSON text; every field must have its declared type.

    >>> load(d.CodeInfo, '["net.py","Net.forward",3]')
    CodeInfo(file='net.py', function='Net.forward', first_line=3)
    """
    row: T = _row(kind, parse_json(text))
    return row


@cache  # there are few kinds of rows, and many rows
def _fields_of(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """The function that returns all fields of a row."""
    names = [field.name for field in dataclasses.fields(kind)]
    return attrgetter(*names) if len(names) > 1 else lambda row: tuple(getattr(row, name) for name in names)


def _plain_values(values: tuple[Any, ...]) -> list[Any]:
    """Values for JSON: tuples and rows inside them become lists."""
    plain: list[Any] = []
    for value in values:
        if type(value) in _PLAIN:
            plain.append(value)
        elif isinstance(value, tuple):
            plain.append(_plain_values(value))
        else:
            is_row = dataclasses.is_dataclass(value)
            plain.append(_plain_values(_fields_of(value.__class__)(value)) if is_row else value)
    return plain


def _row(kind: Any, items: Any) -> Any:
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


@cache
def _readers(kind: Any) -> tuple[int, tuple[tuple[str, Callable[[Any], Any]], ...]]:
    """The number of fields that a row must have, and the reader of each."""
    fields = dataclasses.fields(kind)
    needed = sum(field.default is dataclasses.MISSING and field.name != "parameters" for field in fields)
    return needed, tuple((field.name, _FIELD_READERS[str(field.type)]) for field in fields)


def _exactly(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if type(value) is kind else NotImplemented


def is_integer(value: Any) -> bool:
    """Whether something is a 64-bit integer; bools are not."""
    return type(value) is int and -_WIDE <= value < _WIDE


def _tuple_of(fits: Callable[[Any], bool], value: Any) -> Any:
    return tuple(value) if isinstance(value, list) and all(map(fits, value)) else NotImplemented


def _sizes(value: Any) -> Any:
    sizes = _tuple_of(is_integer, value)
    return sizes if sizes is NotImplemented or len(sizes) <= _MOST_SIZES else NotImplemented


_FIELD_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "str": _exactly(str),
    "bool": _exactly(bool),
    "int": lambda value: value if is_integer(value) else NotImplemented,
    "tuple[int, ...]": _sizes,
    "tuple[int, ...] | None": lambda value: None if value is None else _sizes(value),
    "tuple[str, ...]": lambda value: _tuple_of(lambda part: type(part) is str, value),
    "tuple[ParameterInfo, ...]": lambda value: (
        tuple(_row(d.ParameterInfo, part) for part in value) if isinstance(value, list) else NotImplemented
    ),
}
