"""Values in the forms of JSON, CSV and databases that every reader takes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from sightline.data.forms import map_leaves
from sightline.views.rendering import printable

LONGEST_BYTES: Final = 4 << 20  #: of a text, where a length is limited
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=repr)
_SPACED: Final = json.JSONEncoder(allow_nan=False, default=repr)
_NUMBER: Final = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?")


def json_text(value: Any, *, spaced: bool = False) -> str:
    """Plain data as JSON that every parser takes: no NaN, and no half of a surrogate pair.

    >>> json_text({"a": [1, float("nan"), "\\ud800"]})
    '{"a":[1,null,"\\\\ufffd"]}'
    """
    encoder = _SPACED if spaced else _COMPACT
    try:
        text = encoder.encode(value)
    except (TypeError, ValueError):
        finite = map_leaves(value, lambda x: None if isinstance(x, float) and not math.isfinite(x) else x)
        text = encoder.encode(_with_text_keys(finite))
    return text if "\\ud" not in text else encoder.encode(_whole_unicode(json.loads(text)))


def _with_text_keys(value: Any) -> Any:
    """The value with texts for keys, as in JSON; a damaged file may have others."""
    if isinstance(value, dict):
        texts = {key if isinstance(key, str) else str(key): part for key, part in value.items()}
        return {key: _with_text_keys(part) for key, part in texts.items()}
    return [_with_text_keys(part) for part in value] if isinstance(value, list | tuple) else value


def _whole_unicode(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole_unicode(key): _whole_unicode(item) for key, item in value.items()}
    return [_whole_unicode(item) for item in value] if isinstance(value, list) else value


def csv_cell(value: Any) -> str:
    """A value as a cell of CSV: empty for None, the parts of a list one after the other.

    >>> csv_cell(None), csv_cell(True), csv_cell([1, "=2"])
    ('', 'true', "1; '=2")
    """
    if isinstance(value, str):
        return plain_cell(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "; ".join(map(csv_cell, value))
    if isinstance(value, Mapping):
        return " ".join(map(csv_cell, value.values()))
    return str(value)


def plain_cell(text: str) -> str:
    """A text that a spreadsheet shows and does not evaluate: a quote goes before the beginning of a formula.

    >>> plain_cell("=1+1"), plain_cell("relu"), plain_cell("@"), plain_cell("-1.5")
    ("'=1+1", 'relu', '@', '-1.5')
    """
    text = text if text.isprintable() else printable(text)
    harmless = len(text) < 2 or _NUMBER.fullmatch(text)  # an operator by itself, or a number
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and not harmless else text


def storable(item: Any) -> Any:
    """An item as any database takes it: whole Unicode, at most 64 bits, no text without end.

    >>> storable("a\\ud800"), storable(1 << 70)
    ('a?', 1.1805916207174113e+21)
    """
    if isinstance(item, str):
        return item[: LONGEST_BYTES // 4].encode("utf-8", "replace").decode()
    if isinstance(item, int) and not -(1 << 63) <= item < 1 << 63:
        return float(item)
    return item
