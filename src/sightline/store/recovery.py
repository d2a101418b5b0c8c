"""From a journal to a trace: a bundle when a recording ends, a trace in memory when its process was killed.

A bundle is assembled in segments, with the columns on disk in between, so that the memory it takes does not
grow with the recording.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.assemble.assembler import Assembler
from sightline.assemble.batch import Batch, LateRows, Tables
from sightline.assemble.last_ops import Dropped, add_placeholders, keep_last, merge_batches
from sightline.assemble.memory_sink import assemble, trace_data
from sightline.data import trace_data as d
from sightline.data.trace_data import Store
from sightline.schema.streams import OP
from sightline.store import bundle_schema as schema
from sightline.store import checks, json_codec
from sightline.store.damage import READ_ERRORS, Damage, TooLarge, damage_reported
from sightline.store.disk_sink import DiskSink
from sightline.store.journal import JOURNAL, UNKNOWN_TENSOR, Journal
from sightline.store.limits import check_text_size
from sightline.store.shards.stores import ShardStore
from sightline.store.soundness import check_all, sound_part
from sightline.store.writer import DiskColumns, save_columns

#: About how many ops are assembled at once.
SEGMENT: Final = 1 << 14


def segments(journal: Journal, size: int = SEGMENT) -> Iterator[tuple[list[Batch], bool]]:
    """The batches of a journal, some at a time, with whether they are the last."""
    segment: list[Batch] = []
    length = 0
    for number in range(len(journal)):
        batch = journal.batch(number)
        segment.append(batch)
        length += len(batch.rows.ops)
        if length >= size * (OP.width + 3) and number < len(journal) - 1:
            yield segment, False
            segment, length = [], 0
    yield segment, True


def finish_recording(
    journal: Journal, tables: Tables, folder: Path, store: Store | None, *, source: bool = True,
    environment: bool = True,
) -> tuple[str, Assembler]:  # fmt: skip
    """Save a recording that has ended as a bundle, and remove its journal."""
    sink = DiskSink(folder / f".spool-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        assembler = Assembler(tables, journal.late(), sink)
        for batches, last in segments(journal):
            assembler.add(batches, last)
        empty = {kind: table.none() for kind, table in schema.KINDS.items() if kind != "frames"}
        data = trace_data(tables, assembler, empty, np.zeros(0, dtype=np.int64), store)
        columns = DiskColumns(sink, data)
        line = save_columns(data, columns, folder, source=source, environment=environment, sweep=(JOURNAL,))
        return line, assembler
    finally:
        sink.close()


def assemble_journal(journal: Journal, tables: Tables, store: Store | None) -> tuple[d.TraceData, Assembler]:
    """The trace of a whole journal, or with ``last=N`` the part that its last ops need."""
    count = tables.info.get("last")
    if count is None and journal.lost:
        batches = [journal.batch(number) for number in range(len(journal))]
        tables.metas.append(UNKNOWN_TENSOR)
        tables.gaps = [batches[number - 1].end for number in journal.lost if 0 < number < len(batches)]
        batch = add_placeholders(merge_batches(batches), len(tables.metas) - 1)
        return assemble(tables, [([batch], True)], LateRows(), store, sparse=True)
    if count is None:
        return assemble(tables, segments(journal), journal.late(), store)
    merged = merge_batches([journal.batch(number) for number in range(len(journal))])
    batch, dropped = keep_last(merged, int(count), tables.operations, Dropped.from_info(tables.info))
    tables.info |= dropped.to_info()
    tables.sequences = dropped.sequences
    tables.info.pop("dropped_sequences", None)  # needed here only
    return assemble(tables, [([batch], True)], LateRows(), store, sparse=True)


class OpenedJournal(NamedTuple):
    """The contents of a journal."""

    data: d.TraceData
    sources: dict[str, str]
    environment: dict[str, Any]


def open_journal(path: Path) -> OpenedJournal:
    """Read a journal as a trace; a damaged one raises one clear error."""
    with damage_reported(path), closing(Journal(path)) as journal:
        return _read_undamaged(path, journal)


def _read_undamaged(path: Path, journal: Journal) -> OpenedJournal:
    """The trace of a journal's undamaged frames: of all, or of as many from the first on as fit together."""
    try:
        return _read(path, journal)
    except TooLarge:
        raise
    except (Damage, *READ_ERRORS) as error:
        good, bad, opened = 0, len(journal), None
        while bad - good > 1:
            middle = (good + bad) // 2
            journal.leave_out(middle)
            try:
                opened = _read(path, journal)
                good = middle
            except (Damage, *READ_ERRORS):
                bad = middle
        if opened is None:
            raise error from None
        return opened


def _read(path: Path, journal: Journal) -> OpenedJournal:
    if not len(journal):
        raise Damage("its process ended before anything was written")
    tables = journal.tables()
    if not isinstance(tables.info, dict):
        raise Damage("its info is not a table")
    tables.info["unfinished"] = True
    checks.check_info(tables.info)
    folder = path.parent / schema.TENSORS
    store = ShardStore(folder, lenient=True) if folder.is_dir() else None
    batches = len(journal.lost) + journal.left_out
    lost = [f"{batches} of its batches"] if batches else []
    lost += [f"the tensors in {name}" for name in (store.damaged() if store is not None else ())]
    if lost:
        info = tables.info
        info["faults"] = [*info.get("faults", ()), f"Damaged and left out: {', '.join(lost)}."]
        info["fault_count"] = (info.get("fault_count") or 0) + 1
    data, _ = assemble_journal(journal, tables, store)
    data = sound_part(data)
    check_all(data)
    for kind in schema.KINDS:
        for name in schema.columns_of(kind):
            check_text_size(data, kind, name, getattr(getattr(data, kind), name), journal.size)
    stored = {info.key for info in store.captures()} if store is not None else set()
    captures = [info for info in data.captures if info.key in stored]  # a kill may have lost the last ones
    sources: dict[str, str] = {}
    environment: dict[str, Any] = {}
    for head in journal.heads():
        sources |= {str(file): str(text) for file, text in head.get("sources", ())}
        if "environment" in head:
            environment = json_codec.loads(head["environment"])
    data = replace(data, captures=captures, store=store if captures else None)
    return OpenedJournal(data, sources, environment)
