"""The properties of rows, as Python text: ``op.phase`` reads a column of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sightline.schema import tables
from sightline.schema.columns import ABOUT, COLUMN_TABLES, Column

#: The class of rows of each table, and of the tables that columns refer to.
ROWS: Final = {"ops": "Op", "values": "Value", "calls": "ModuleCall", "frames": "Frame", "modules": "Module"}
_CHOICES: Final = {
    tables.LEVELS: "LEVELS",
    tables.PHASES: "PHASES",
    tables.FLAVOURS: "FLAVOURS",
    tables.KINDS: "KINDS",
}

_HEAD: Final = '''\
"""Properties of rows that are columns of the schema.

Written by ``make schema`` from ``sightline/schema/tables.py``; a test checks that it is current.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sightline.data.forms import Form
from sightline.data.table import Row, Table, linked_row, linked_rows
from sightline.data.trace_data import TensorMeta
from sightline.schema.tables import FLAVOURS, KINDS, LEVELS, PHASES

if TYPE_CHECKING:
    from sightline.data.rows import Frame, Module, ModuleCall, Op, Value
'''


def row_properties() -> str:
    """The text of ``data/row_properties.py``."""
    lines = [_HEAD]
    for table in ("frames", "values", "ops", "calls"):
        lines += [
            "",
            f"class {ROWS[table]}Properties(Row):",
            f'    """{_sentence(ABOUT[table])}"""',
            "",
            "    __slots__ = ()",
        ]
        for column in COLUMN_TABLES[table].declared.values():
            for text in _properties(column):
                lines += ["", "    @property", *(f"    {line}" for line in text)]
        lines.append("")
    return "\n".join(lines)


def _properties(column: Column) -> Iterator[list[str]]:
    """The properties of a column: none for offsets, one for each flag."""
    meaning, stored = column.meaning, f"self._data.raw.{column.table}.{column.name}"
    about = meaning.about + (f", in {meaning.unit}" if meaning.unit else "")
    if meaning.lists or not meaning.row:
        return
    if meaning.flags is not None:
        for name, bit in meaning.flags.items():
            yield [f"def {name}(self) -> bool:", f"    return bool({stored}[self.id] & {bit})"]
        return
    if column.is_flat:
        type, value = "Table[Value]", f'linked_rows("values", self._data, {stored}_of(self.id))'
    elif meaning.target in ROWS:
        row = ROWS[meaning.target]
        type = f"{row} | None" if meaning.optional else row
        value = f'linked_row("{meaning.target}", self._data, {stored}[self.id])'
    elif meaning.target == "names":
        type, value = "str", f"self._data.name({stored}[self.id])"
    elif meaning.target == "forms":
        type, value = "Form", f"self._data.raw.forms[int({stored}[self.id])]"
    elif meaning.target == "metas":
        type, value = "TensorMeta", f"self._data.raw.metas[int({stored}[self.id])]"
    elif meaning.choices:
        names = _CHOICES.get(meaning.choices) or repr(meaning.choices).replace("'", '"')
        type, value = "str", f"{names}[{stored}[self.id]]"
        if column.lowest < 0:
            type, value = "str | None", f"(None, *{names})[{stored}[self.id] + 1]"
    elif meaning.optional and not meaning.target:
        type, value = "int | None", f"number if (number := int({stored}[self.id])) >= 0 else None"
    else:
        type, value = "int", f"int({stored}[self.id])"
    lines = [f"    return {value}"]
    if value.startswith("linked_row("):
        lines = [f"    row: {type} = {value}", "    return row"]
    yield [f"def {column.name}(self) -> {type}:", f'    """{_sentence(about)}"""', *lines]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" if text[-1] in ".…" else f"{text[0].upper()}{text[1:]}."
