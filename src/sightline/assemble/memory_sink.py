"""Assembled columns in memory, and the `TraceData` made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sightline.assemble.assembler import Assembler
from sightline.assemble.batch import Batch, LateRows, Tables
from sightline.data import trace_data as d
from sightline.data.arrays import IntArray, offsets_of
from sightline.data.trace_data import Store

Array = NDArray[Any]

#: The columns a sink gets, and their dtypes.
SINK_COLUMNS: Final[dict[str, dict[str, str]]] = {
    **{kind: table.dtypes() for kind, table in d.COLUMN_TABLES.items() if kind != "frames"},
    "versions": d.ValueColumns.dtypes(),
    "storages": {"nbytes": "<i8"},
}


class MemorySink:
    """A `Sink` that keeps the columns in memory."""

    def __init__(self) -> None:
        self._parts: defaultdict[tuple[str, str], list[Array]] = defaultdict(list)
        self._patches: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)

    def add(self, kind: str, columns: dict[str, Any]) -> None:
        """Append rows to a table."""
        for name, dtype in SINK_COLUMNS[kind].items():
            self._parts[kind, name].append(np.asarray(columns[name]).astype(dtype))

    def patch(self, kind: str, name: str, position: int, value: int) -> None:
        """Replace the number of a row that was added."""
        self._patches[kind, name][position] = value

    def column(self, kind: str, name: str) -> Array:
        """A whole column; for offsets the lengths."""
        parts = self._parts.pop((kind, name), [])
        dtype = SINK_COLUMNS[kind][name]
        column = (
            parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype)
        )
        patches = self._patches[kind, name]
        if patches:
            column[list(patches)] = list(patches.values())
        return column

    def columns(self, kind: str, values: int = 0) -> dict[str, Array]:
        """The columns of a table; references to new versions point after the first ``values`` values."""
        columns: dict[str, Array] = {}
        for name in SINK_COLUMNS[kind]:
            column = self.column(kind, name)
            if name.endswith("_offsets"):
                column = offsets_of(column)
            elif values and name in ("inputs", "previous"):
                column = resolve_versions(column, values)
            columns[name] = column
        return columns


def resolve_versions(column: Array, values: int) -> Array:
    """References to new versions as positions after all other values.

    >>> resolve_versions(np.array([3, -1, -2, -4]), 10).tolist()
    [3, -1, 10, 12]
    """
    return np.where(column < -1, values - 2 - column, column).astype(column.dtype)


def assemble(
    tables: Tables,
    segments: Iterable[tuple[list[Batch], bool]],
    late: LateRows,
    store: Store | None = None,
    *,
    sparse: bool = False,
) -> tuple[d.TraceData, Assembler]:
    """A whole recording in memory, from batches; each segment says whether it is the last.

    With ``sparse`` there is one batch, and many of its ids are unused.
    """
    sink = MemorySink()
    assembler = Assembler(tables, late, sink, sparse=sparse)
    for batches, last in segments:
        assembler.add(batches, last)
    count = assembler.values
    values, versions = sink.columns("values"), sink.columns("versions", max(count, 1))
    if len(versions["meta"]):
        versions["previous"] = resolve_versions(versions["previous"], count)
        values = {name: np.concatenate([values[name], versions[name]]) for name in values}
    columns = {
        "ops": d.OpColumns(**sink.columns("ops", max(count, 1))),
        "values": d.ValueColumns(**values),
        "calls": d.CallColumns(**sink.columns("calls")),
        "stats": d.StatColumns(**sink.columns("stats")),
        "allocations": d.AllocationColumns(**sink.columns("allocations")),
        "device_work": d.DeviceWorkColumns(**sink.columns("device_work")),
    }
    return trace_data(tables, assembler, columns, sink.column("storages", "nbytes"), store), assembler


def trace_data(
    tables: Tables, assembler: Assembler, columns: dict[str, Any], storages: Array, store: Store | None
) -> d.TraceData:
    """The trace of tables of columns, and of the small tables beside them."""
    info = dict(tables.info) | {"external": assembler.external}
    if assembler.evicted:
        info["evicted"] = assembler.evicted
    places: IntArray = np.array(tables.places, dtype=np.int64).reshape(-1, 6)
    parent, code, line, end_line, column, end_column = (
        np.ascontiguousarray(one, dtype=np.int32) for one in places.T
    )
    frames = d.FrameColumns(parent, code, line, end_line, column, end_column)
    return d.TraceData(
        **columns, frames=frames, modules=tables.modules, codes=tables.codes,
        files=tables.files, metas=tables.metas, forms=tables.forms, names=assembler.names.all,
        storages=storages, schemas=tables.schemas, info=info,
        steps=assembler.steps(int(tables.info.get("duration_ns", 0))), captures=assembler.captures(),
        store=store,
    )  # fmt: skip
