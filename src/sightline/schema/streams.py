"""The rows that an engine writes while it records: streams of integers that become columns later.

A row begins with its length and its id; then come the fields declared here, then lists of ids. Ops, module
calls and steps share one counter of ids. ``recording/native/row_layout.h`` is written from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from sightline.schema.columns import Columns
from sightline.schema.tables import CallColumns, OpColumns

#: The field ``bits`` of ops and calls is the phase in its lowest bits, then the flags, then the thread.
FLAG_SHIFT: Final = 4
THREAD_SHIFT: Final = 12
#: The end of a call that has not ended: larger than every id.
NO_END: Final = 1 << 60
#: Where the last batch ends: after every op, call and value, also after calls without an end.
END: Final = 1 << 62
#: A flag of a version of a value: it is not in the memory of the one before it.
MOVED: Final = 256
#: An offset that is the one of the value's base.
INHERITED: Final = -1


@dataclass(frozen=True, slots=True)
class Field:
    """A number of a row."""

    name: str
    about: str
    bits: int = 32  #: how wide the native engine keeps it until it is read


@dataclass(frozen=True)
class RowLayout:
    """The fields of a kind of row; with ``lists`` the ids of its inputs and outputs follow.

    >>> OP.position("info"), OP.width == len(OP.fields) + 3
    (2, True)
    """

    name: str
    fields: tuple[Field, ...]
    lists: bool = True

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each number of a row, up to its lists."""
        fields = (field.name for field in self.fields)
        return ("length", "id", *fields, *(("input_count",) if self.lists else ()))

    @cached_property
    def width(self) -> int:
        """The count of numbers in a row before its lists."""
        return len(self.names)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self.names)}

    def position(self, name: str) -> int:
        """The position of a number in a row."""
        return self._positions[name]


def _with_recorded(columns: type[Columns], *fields: Field | str) -> tuple[Field, ...]:
    """Fields, and all columns that an engine writes as they are; a text names the place of one of these."""
    recorded = {
        one.name: Field(one.name, one.meaning.about, 64 if one.dtype.endswith("8") else 32)
        for one in columns.declared.values()
        if one.meaning.recorded
    }
    placed = [recorded.pop(field) if isinstance(field, str) else field for field in fields]
    return (*placed, *recorded.values())


OP: Final = RowLayout("op", _with_recorded(
    OpColumns,
    Field("info", "the operation that was called, into `Tables.operations`"),
    "form",
    Field("result", "the form of its result; -1: a single tensor"),
    Field("stack", "the innermost source position"),
    Field("call", "the id of the module call it ran in"),
    Field("parent", "the id of the API call it came from"),
    Field("sequence", "the number of the autograd node that comes next", 64),
    Field("node", "the number of the autograd node that was running", 64),
    "start",
    Field("duration", "the time it took, the recorder's own included", 64),
    Field("bits", "phase, flags and thread"),
))  # fmt: skip
CALL: Final = RowLayout("call", _with_recorded(
    CallColumns,
    "module",
    Field("parent", "the id of the call around it"),
    Field("stack", "the source position that called it"),
    Field("bits", "phase, flags and thread"),
    "start",
    Field("duration", "the time it took, the recorder's own left out", 64),
    Field("end", "the first id after it; `NO_END` while it runs", 64),
    "input_form",
    "output_form",
))  # fmt: skip
VALUE: Final = RowLayout("value", (
    Field("meta", "shape, dtype and device"),
    Field("storage", "its address", 64),
    Field("offset", "elements from the start of the storage", 64),
    Field("kind", "a position in `KINDS`", 16),
    Field("producer", "the id of the op that made it"),
    Field("previous", "the id of the value it replaces"),
    Field("base", "the id of the value it is a view of"),
    Field("flags", "`VALUE_FLAGS` and `MOVED`", 16),
), lists=False)  # fmt: skip

(V_META, V_STORAGE, V_OFFSET, V_KIND, V_PRODUCER, V_PREVIOUS, V_BASE, V_FLAGS) = (
    VALUE.position(field.name) for field in VALUE.fields
)

#: The plain result of an op in storage of its own: value, metadata, op. These three, without a length.
FRESH_WIDTH: Final = 3
#: A storage that is seen first, changes its size or is freed: value, bytes (-1: freed), time.
MEMORY_WIDTH: Final = 3
#: Statistics of a value: min, max, mean, std, l2; and value, zeros, nans, infs and the fingerprint's lanes.
FLOATS: Final = 5
COUNTS: Final = 4
LANES: Final = 4
