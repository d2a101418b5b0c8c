"""Limits on reading: the memory that one file may take, and the text that its rows may expand to."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.data.forms import Form, Record, Symbol
from sightline.data.trace_data import TraceData
from sightline.store.bundle_schema import FREE_BYTES, GROWTH, MAX_LINKS
from sightline.store.checks import chain_lengths
from sightline.store.damage import TooLarge

FREE: Final = 4 * FREE_BYTES  #: bytes that the smallest file may take
_NODE: Final = 64  #: bytes of Python objects per comma or bracket of JSON


class Budget:
    """The memory that may be used for a file of some size.

    >>> budget = Budget(1000)
    >>> budget.take("its names", 5000)
    >>> budget.take("its ops", 1 << 40)
    Traceback (most recent call last):
    sightline.store.damage.TooLarge: its ops would take more memory than a file of 1000 bytes may
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: dict[str, int] = {}
        self.left = FREE + GROWTH * size

    def take(self, part: str, count: int) -> None:
        """Use bytes for a part of the file; reading the same part again is free."""
        more = count - self._taken.get(part, 0)
        if more > self.left:
            raise TooLarge(f"{part} would take more memory than a file of {self._size} bytes may")
        if more > 0:
            self._taken[part] = count
            self.left -= more


def inflate(data: bytes, size: int) -> bytes | None:
    """Decompress data that must have exactly this size; None for any other.

    >>> inflate(zlib.compress(b"abc"), 3), inflate(zlib.compress(b"abc"), 2), inflate(b"abc", 3)
    (b'abc', None, None)
    """
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(data, size + 1)
    except zlib.error:
        return None
    return content if len(content) == size and reader.eof else None


def json_cost(text: str | bytes) -> int:
    """About how many bytes a JSON text takes when parsed.

    >>> json_cost('[[], [1, 2]]') > 12
    True
    """
    if isinstance(text, str):
        nodes = text.count(",") + text.count("[") + text.count("{")
    else:
        nodes = text.count(b",") + text.count(b"[") + text.count(b"{")
    return 2 * len(text) + _NODE * nodes


#: Characters per byte of the file, for one column; real recordings have about ten.
_GROWTH: Final = 32
#: Columns whose rows are printed as texts of a table, and the table.
_TABLES: Final[dict[tuple[str, str], str]] = {
    ("ops", "name"): "names",
    ("ops", "form"): "forms",
    ("ops", "result"): "forms",
    ("values", "name"): "names",
    ("values", "meta"): "metas",
    ("calls", "module"): "modules",
    ("calls", "input_form"): "forms",
    ("calls", "output_form"): "forms",
    ("frames", "code"): "codes",
}
#: Columns of values, each of which is printed as a tensor.
_TENSORS: Final = frozenset(
    {("ops", "inputs"), ("ops", "outputs"), ("calls", "inputs"), ("calls", "outputs")}
)
_SIZES: Final[dict[str, Callable[[Any], int]]] = {
    "names": len,
    "forms": lambda form: form_size(form),  # noqa: PLW0108  # it is defined below
    "metas": lambda meta: 4 + 8 * len(meta.shape) + len(meta.dtype) + len(meta.device) + len(meta.layout),
    "modules": lambda module: len(module.path) + len(module.type) + len(module.extra),
    "codes": lambda code: len(code.file) + len(code.function),
}


def check_text_size(data: TraceData, kind: str, name: str, column: NDArray[Any], size: int) -> None:
    """Raise `TooLarge` if a column would print far more text than a file of ``size`` bytes can hold."""
    table = _TABLES.get((kind, name))
    if table is not None:
        sizes = _sizes(data, table)
        ids = column[column >= 0]
    elif (kind, name) in _TENSORS:
        sizes = _sizes(data, "metas")
        ids = data.values.meta[column]
    else:
        return
    if len(ids) and int(sizes[ids].sum()) > FREE_BYTES + _GROWTH * size:
        raise TooLarge(f"{kind}/{name} would print more text than a file of {size} bytes may")
    if (kind, name) == ("calls", "module"):
        depths = chain_lengths(np.array([module.parent for module in data.modules], dtype=np.int64))
        if int(depths[ids].sum()) > MAX_LINKS + _GROWTH * size:
            raise TooLarge("its module calls are too deep in the tree of modules to be followed")


def _sizes(data: TraceData, table: str) -> NDArray[np.int64]:
    sizes = data.__dict__.get(f"_sizes_of_{table}")
    if sizes is None:
        size_of = _SIZES[table]
        sizes = np.array([size_of(row) for row in getattr(data, table)], dtype=np.int64)
        data.__dict__[f"_sizes_of_{table}"] = sizes  # the dataclass is frozen
    return sizes


def form_size(form: Form) -> int:
    """About how many characters the arguments of a call print as.

    >>> form_size(Form((1, "abc"), {"dim": [2, 3]}))
    24
    """
    return sum(map(_size, form.args)) + sum(
        len(key) + _size(item) for key, item in (form.kwargs or {}).items()
    )


def _size(item: Any) -> int:
    if isinstance(item, str):
        return 2 + len(item)
    if isinstance(item, Symbol):
        return len(item.text)
    if isinstance(item, int):
        return 4 + item.bit_length() // 3
    if isinstance(item, list | tuple):
        return 4 + sum(map(_size, item))
    if isinstance(item, dict):
        return 4 + sum(_size(key) + _size(part) for key, part in item.items())
    if isinstance(item, Record):
        return len(item.type) + sum(len(key) + _size(part) for key, part in item.fields.items())
    return 4
