"""What is derived from the schema is current, and a column is declared in one place."""

from pathlib import Path

import numpy as np
import pytest

from checks.schema import derived
from sightline.schema.columns import COLUMN_TABLES, all_columns
from sightline.schema.streams import CALL, OP, VALUE, RowLayout

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("path", derived(), ids=lambda path: path.name)
def test_what_is_written_from_the_schema_is_current(path: Path) -> None:
    assert path.read_text("utf-8") == derived()[path], "run `make schema`"


def test_every_reference_points_into_a_table_of_the_recording() -> None:
    tables = {*COLUMN_TABLES, "names", "forms", "metas", "codes", "modules", "storages"}
    assert {one.meaning.target for one in all_columns() if one.meaning.target} <= tables
    assert {f"{one.table}/{one.name}" for one in all_columns() if one.meaning.lists} == {
        f"{table}/{side}_offsets" for table in ("ops", "calls") for side in ("input", "output")
    }


def test_choices_and_flags_fit_their_dtypes() -> None:
    for one in all_columns():
        largest = max([len(one.meaning.choices) - 1, *(one.meaning.flags or {}).values()])
        if largest >= 0:
            assert largest <= np.iinfo(one.dtype).max, one.label


@pytest.mark.parametrize("layout", [OP, CALL, VALUE], ids=lambda layout: layout.name)
def test_a_layout_names_each_number_once(layout: RowLayout) -> None:
    assert len(set(layout.names)) == len(layout.names) == layout.width
    assert [layout.position(name) for name in layout.names] == list(range(layout.width))
