"""`Table`: a sequence of light rows over columns.

A row is two words, the data and its id; every property reads a column when asked. A slice of a table and a
``where`` are tables again.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from sightline.errors import UsageError

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
            id = int(self._ids[index])
        except IndexError:
            raise IndexError(f"there are {len(self)} {self._row.__name__} rows, none at {index}") from None
        return self._row(self._data, id)

    def where(self, test: Callable[[R], bool] | None = None, **equal: Any) -> Table[R]:
        """The rows for which ``test(row)`` holds and whose properties equal the given ones, exactly.

        ``t.ops.where(level="aten", phase="backward")``, ``t.ops.where(lambda op: op.duration > 1e6)``
        """
        for name in equal:
            if not hasattr(self._row, name):
                near = difflib.get_close_matches(name, dir(self._row), 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise UsageError(f"{self._row.__name__} rows have no property {name!r}{hint}")
        kept = [
            row.id
            for row in self
            if all(getattr(row, name) == wanted for name, wanted in equal.items())
            and (test is None or test(row))
        ]
        return Table(self._data, self._row, kept)

    def __repr__(self) -> str:
        shown = ", ".join(repr(row) for row in self[:4])
        return f"<{len(self)} {self._row.__name__} rows: {shown}{', …' if len(self) > 4 else ''}>"
