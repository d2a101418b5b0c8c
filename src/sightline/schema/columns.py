"""Declarations of tables of columns: dataclasses of arrays whose fields state the meaning of their numbers.

A column is a field whose annotation is its dtype and whose default, from a function below, is its meaning:

    @table("ops", "API calls and aten ops, in the order they began")
    class OpColumns(Columns):
        phase: I8 = choice(PHASES, "forward, backward, recompute, optimizer")
        call: I32 = ref("calls", "the module call it ran in", optional=True)
        start: I64 = number("since the recording began", unit="ns")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Self, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F64 = NDArray[np.float64]

#: The dtype of a column by the name its annotation has.
_DTYPES: Final = {"I8": "<i1", "I32": "<i4", "I64": "<i8", "U64": "<u8", "F64": "<f8"}


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of the numbers of a column."""

    about: str  #: one phrase, for documents and docstrings
    target: str = ""  #: the table that the ids point into
    choices: tuple[str, ...] = ()  #: the names that the numbers stand for
    flags: Mapping[str, int] | None = None  #: the bit of each flag
    optional: bool = False  #: -1 means none
    earlier: bool = False  #: the ids point at earlier rows of the same table, so that following them ends
    chain: bool = False  #: and views print whole chains of them
    unit: str = ""
    lists: str = ""  #: of a column of offsets: the column that it cuts into lists
    row: bool = True  #: rows have a property of this name
    recorded: bool = False  #: an engine writes the number itself, in a field of this name of its row
    since: int = 1  #: the revision of the format that brought it; older recordings have -1 in every row


@dataclass(frozen=True, slots=True)
class Column:
    """A declared column."""

    table: str
    name: str
    dtype: str
    meaning: Meaning

    @property
    def is_flat(self) -> bool:
        """Whether it has a length of its own, given by the offsets that cut it into lists."""
        return self.name in ("inputs", "outputs")

    @property
    def is_reference(self) -> bool:
        return bool(self.meaning.target or self.meaning.choices)

    @property
    def lowest(self) -> int:
        """The smallest number that a reference may have."""
        return -1 if self.meaning.optional or self.meaning.since > 1 else 0

    @property
    def label(self) -> str:
        """Its name in messages: ``producer of value``."""
        return f"{self.name} of {self.table.removesuffix('s').replace('_', ' ')}"


def _declare(meaning: Meaning) -> Any:
    return field(metadata={"meaning": meaning})


def number(
    about: str,
    *,
    unit: str = "",
    optional: bool = False,
    row: bool = True,
    recorded: bool = False,
    since: int = 1,
) -> Any:
    """A column of plain numbers; if it is ``optional``, a negative number stands for a missing one."""
    return _declare(Meaning(about, unit=unit, optional=optional, row=row, recorded=recorded, since=since))


def ref(
    target: str, about: str, *, optional: bool = False, earlier: bool = False, chain: bool = False,
    row: bool = True, recorded: bool = False, since: int = 1,
) -> Any:  # fmt: skip
    """A column of ids of another table, or of earlier rows of its own."""
    return _declare(Meaning(
        about, target=target, optional=optional, earlier=earlier, chain=chain, row=row, recorded=recorded,
        since=since,
    ))  # fmt: skip


def choice(names: tuple[str, ...], about: str, *, recorded: bool = False, since: int = 1) -> Any:
    """A column of positions in a tuple of names."""
    return _declare(Meaning(about, choices=names, recorded=recorded, since=since))


def bits(flags: Mapping[str, int], about: str, *, since: int = 1) -> Any:
    """A column of bits, each with a name."""
    return _declare(Meaning(about, flags=flags, since=since))


def offsets(column: str, about: str) -> Any:
    """A column of positions that cut another column of the table into lists, one more than there are rows."""
    return _declare(Meaning(about, lists=column))


class Columns:
    """A table as columns: the base of dataclasses whose fields are arrays, all with one entry per row."""

    #: The columns by name, set by `table`.
    declared: ClassVar[dict[str, Column]]

    @classmethod
    def dtypes(cls) -> dict[str, str]:
        """The dtype of each column.

        >>> from sightline.schema.tables import FrameColumns, OpColumns
        >>> FrameColumns.dtypes()["line"], OpColumns.dtypes()["input_offsets"]
        ('<i4', '<i8')
        """
        return {one.name: one.dtype for one in cls.declared.values()}

    @classmethod
    def none(cls) -> Self:
        """No rows. Offsets have one entry more than there are rows."""
        return cls(**{
            name: np.zeros(int(name.endswith("_offsets")), dtype) for name, dtype in cls.dtypes().items()
        })  # fmt: skip

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))


_Class = TypeVar("_Class", bound=type[Columns])

#: The class of each table of columns, and a phrase about its rows, by the name it has in `TraceData`.
COLUMN_TABLES: Final[dict[str, type[Columns]]] = {}
ABOUT: Final[dict[str, str]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(number, ref, choice, bits, offsets))
def table(name: str, about: str) -> Callable[[_Class], _Class]:
    """Declare a class of columns as a table."""

    def declare(columns: _Class) -> _Class:
        dataclass(frozen=True)(columns)  # in place
        columns.declared = {
            one.name: Column(name, one.name, _DTYPES[str(one.type)], one.metadata["meaning"])
            for one in fields(columns)  # type: ignore[arg-type]  # it is a dataclass now
        }
        COLUMN_TABLES[name], ABOUT[name] = columns, about
        return columns

    return declare


def column_of(table: str, name: str) -> Column | None:
    """A declared column; None where a table has no columns, or none of this name."""
    return COLUMN_TABLES[table].declared.get(name) if table in COLUMN_TABLES else None


def all_columns() -> Iterator[Column]:
    """Every column of every table."""
    return (column for columns in COLUMN_TABLES.values() for column in columns.declared.values())
