"""`Table`: a sequence of light rows over columns, and the tests behind ``table.where(…)``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from sightline.argument_checks import argument_text
from sightline.data.trace_data import FLAVOURS, KINDS, LEVELS, PHASES
from sightline.errors import UsageError
from sightline.notation import dtype_name
from sightline.patterns import choices_text, close_names, module_matches, no_module_matched
from sightline.text_encoding import for_output

if TYPE_CHECKING:
    from sightline.data.index import Index


RowTest = Callable[[Any], bool]

#: The class of the rows of each table.
_ROWS: Final[dict[str, type[Row]]] = {}

#: The properties that only take certain values.
CHOICES: Final = {"level": LEVELS, "phase": PHASES, "flavour": FLAVOURS, "kind": KINDS}

_SHAPE: Final = re.compile(r"\s*(\w*)\s*\[([0-9\s,]*)\](?:@(\S+))?\s*")


def row_test(row: type, data: Index, name: str, value: Any) -> RowTest:
    """The test of ``where(name=value)``; an error if no row can ever pass it."""
    if name == "module" and isinstance(value, str) and (hasattr(row, "module") or hasattr(row, "producer")):
        return _module_test(data, value)
    if not hasattr(row, name):
        near = close_names(name, (each for each in dir(row) if each[0] != "_"), 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(f"{row.__name__} rows have no property {name!r}{hint}")
    choices = CHOICES.get(name)
    if choices is not None and not (isinstance(value, str) and value in choices):
        raise UsageError(f"{name}={argument_text(value)} is no {name}; choose {choices_text(choices)}.")
    if name == "shape":
        return _shape_test(value)
    if name == "dtype":
        dtype = dtype_name(str(value))
        return lambda row: dtype_name(row.dtype) == dtype
    if name == "name" and isinstance(value, str):
        return lambda row: row.name == value or (bool(row.name) and fnmatchcase(row.name, value))
    return lambda row: bool(getattr(row, name) == value)


def _module_test(data: Index, pattern: str) -> RowTest:
    modules = data.raw.modules
    inside = {
        id
        for id, module in enumerate(modules)
        if module_matches(pattern, module) or modules[module.root].type == pattern
    }
    if not inside:
        raise no_module_matched(pattern, modules)
    owned = {info.path for id in inside for info in modules[id].parameters}

    def test(row: Any) -> bool:
        module = row.module if hasattr(row, "module") else row.producer and row.producer.module
        if module is None:  # no op made it: a parameter belongs to its owner
            return getattr(row, "kind", "") in ("parameter", "buffer") and row.name in owned
        return module.id in inside

    return test


def _shape_test(value: Any) -> RowTest:
    if isinstance(value, str):
        match = _SHAPE.fullmatch(value)
        if match:
            dtype, device = dtype_name(match[1]), match[3]
            shape = tuple(int(size) for size in match[2].replace(",", " ").split())
            return lambda row: (
                tuple(row.shape) == shape
                and (not dtype or dtype_name(row.dtype) == dtype)
                and (device is None or row.device == device)
            )
    elif isinstance(value, list | tuple) and all(type(size) is int for size in value):
        sizes = tuple(value)
        return lambda row: tuple(row.shape) == sizes
    raise UsageError(f'shape={argument_text(value)} is no shape; write (2, 8), [2, 8] or "f32[2, 8]".')


class Row:
    """The base of all rows; two are equal when they are the same row of the same recording.

    ``class Op(Row, table="ops")`` are the rows that ids of this table stand for.
    """

    __slots__ = ("_data", "id")

    def __init_subclass__(cls, table: str = "") -> None:
        if table:
            _ROWS[table] = cls

    def __init__(self, data: Index, id: int) -> None:
        self._data = data
        self.id = id

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.id == self.id and other._data is self._data

    def __hash__(self) -> int:
        return hash((type(self), self.id))


R = TypeVar("R", bound=Row)


class Table(Sequence[R], Generic[R]):
    """A sequence of rows; a slice or a ``where`` is a table again.

    >>> table = Table(None, Row, range(3))
    >>> len(table), [row.id for row in table[1:]]
    (3, [1, 2])
    """

    __slots__ = ("_data", "_ids", "_row")

    def __init__(self, data: Any, row: type[R], ids: Sequence[int]) -> None:
        self._data = data
        self._row = row
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[R]:
        return (self._row(self._data, int(id)) for id in self._ids)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Table[R]: ...
    def __getitem__(self, index: int | slice) -> R | Table[R]:
        if isinstance(index, slice):
            return Table(self._data, self._row, self._ids[index])
        try:
            id = int(self._ids[operator.index(index)])
        except TypeError:
            raise UsageError(
                f"[…] takes a position or a slice here, not {argument_text(index)}; "
                "`.where(name=…)` finds by name."
            ) from None
        except IndexError:
            raise IndexError(f"there are {len(self)} {self._row.__name__} rows, none at {index}") from None
        return self._row(self._data, id)

    def _of(self, ids: Sequence[int]) -> Table[R]:
        """The rows of these ids."""
        return Table(self._data, self._row, ids)

    def where(self, test: Callable[[R], bool] | None = None, **properties: Any) -> Table[R]:
        """The rows for which ``test(row)`` holds and whose properties have these values.

        ``t.ops.where(level="aten", phase="backward")``, ``t.ops.where(lambda op: op.duration > 1e6)``,
        ``t.values.where(module="blocks.*.attn", shape="f32[2, 8]")``, ``t.values.where(name="*.weight")``.
        Modules and names are globs; see `sightline.data.table`.
        """
        tests: list[Callable[[R], bool]] = [
            row_test(self._row, self._data, name, value) for name, value in properties.items()
        ]
        if test is not None:
            given: object = test  # a caller may ignore the annotation
            if not callable(given) or isinstance(given, type):
                raise UsageError(
                    f"where({argument_text(test)}) takes a function of a row, or names: where(name=…)."
                )
            tests.append(test)
        return self._of([row.id for row in self if all(test(row) for test in tests)])

    def __repr__(self) -> str:
        shown = ", ".join(repr(row) for row in self[:4])
        rows = f"{len(self)} {self._row.__name__} row{'' if len(self) == 1 else 's'}"
        return for_output(f"<{rows}: {shown}{', …' if len(self) > 4 else ''}>" if shown else f"<{rows}>")


def linked_row(table: str, data: Index, id: Any) -> Any:
    """The row that a column points to; None for -1."""
    return _ROWS[table](data, int(id)) if id >= 0 else None


def linked_rows(table: str, data: Index, ids: Sequence[int]) -> Table[Any]:
    """The rows of some ids."""
    return Table(data, _ROWS[table], ids)
