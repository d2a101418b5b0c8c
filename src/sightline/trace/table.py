"""`Table`: a sequence of light rows over columns.

A row is two words, the data and its id; every property reads a column when asked. A slice of a table and a
``where`` are tables again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from sightline.errors import UsageError
from sightline.given import said
from sightline.trace.matching import matcher

if TYPE_CHECKING:
    from sightline.trace.tables import Index


class Row:
    """What all rows share: they are equal when they are the same row of the same recording."""

    __slots__ = ("_data", "id")

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
                f"[…] takes a position or a slice here, not {said(index)}; `.where(name=…)` finds by name."
            ) from None
        except IndexError:
            raise IndexError(f"there are {len(self)} {self._row.__name__} rows, none at {index}") from None
        return self._row(self._data, id)

    def _of(self, ids: Sequence[int]) -> Table[R]:
        """The rows of these ids."""
        return Table(self._data, self._row, ids)

    def where(self, test: Callable[[R], bool] | None = None, **asked: Any) -> Table[R]:
        """The rows for which ``test(row)`` holds and whose properties are the ones asked for.

        ``t.ops.where(level="aten", phase="backward")``, ``t.ops.where(lambda op: op.duration > 1e6)``,
        ``t.values.where(module="blocks.*.attn", shape="f32[2, 8]")``, ``t.values.where(name="*.weight")``.
        Modules and names are globs; see `sightline.trace.matching`.
        """
        tests: list[Callable[[R], bool]] = [
            matcher(self._row, self._data, name, wanted) for name, wanted in asked.items()
        ]
        if test is not None:
            tests.append(_a_test(test))
        kept = [row.id for row in self if all(holds(row) for holds in tests)]
        return Table(self._data, self._row, kept)

    def __repr__(self) -> str:
        shown = ", ".join(repr(row) for row in self[:4])
        rows = f"{len(self)} {self._row.__name__} row{'' if len(self) == 1 else 's'}"
        return f"<{rows}: {shown}{', …' if len(self) > 4 else ''}>" if shown else f"<{rows}>"


def optional(row: type[R], data: Index, id: Any) -> R | None:
    """The row a column points to; None where it points to none."""
    return row(data, int(id)) if id >= 0 else None


def _a_test(test: Any) -> Any:
    """What `Table.where` is given as a test, unless it is none."""
    if not callable(test) or isinstance(test, type):
        raise UsageError(f"where({said(test)}) takes a function of a row, or names: where(name=…).")
    return test
