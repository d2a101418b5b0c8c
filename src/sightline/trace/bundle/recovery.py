"""From a journal to a trace: at the end of a recording, as a bundle; of one that was cut off, in memory.

A bundle is made in segments, with the columns on disk in between, so that what it takes does not grow with
the recording.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from sightline.errors import DamagedFile
from sightline.trace import data as d
from sightline.trace.assembly.assembler import Assembler
from sightline.trace.assembly.batch import Batch, LateRows, Tables
from sightline.trace.assembly.layout import O_WIDTH
from sightline.trace.assembly.memory_sink import SINK_COLUMNS, assemble, final_info, frame_columns
from sightline.trace.assembly.ring import add_placeholders, keep_last, merge_batches
from sightline.trace.bundle import checks, json_codec, schema
from sightline.trace.bundle.database import FAULTS, word
from sightline.trace.bundle.disk_sink import SpoolSink
from sightline.trace.bundle.journal import JOURNAL, UNKNOWN_TENSOR, Journal
from sightline.trace.bundle.limits import check_written
from sightline.trace.bundle.schema import Damage
from sightline.trace.bundle.writer import SpooledColumns, save_columns
from sightline.trace.tensor_stores import ShardStore, Store

#: About how many ops are assembled at once.
SEGMENT: Final = 1 << 14


def segments(journal: Journal, size: int = SEGMENT) -> Iterator[tuple[list[Batch], bool]]:
    """The batches of a journal, some at a time, with whether they are the last."""
    held: list[Batch] = []
    numbers = 0
    for number in range(len(journal)):
        batch = journal.batch(number)
        held.append(batch)
        numbers += len(batch.rows.ops)
        if numbers >= size * (O_WIDTH + 3) and number < len(journal) - 1:
            yield held, False
            held, numbers = [], 0
    yield held, True


def finish(
    journal: Journal, tables: Tables, folder: Path, store: Store | None, *, source: bool = True,
    environment: bool = True,
) -> tuple[str, Assembler]:  # fmt: skip
    """Save a recording that has ended; the journal goes when the bundle is there."""
    spool = SpoolSink(folder / f".spool-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        assembler = Assembler(tables, journal.late(), spool)
        for batches, last in segments(journal):
            assembler.add(batches, last)
        data = d.TraceData(
            **{kind: cls(**_empty(kind)) for kind, cls in schema.KINDS.items() if kind != "frames"},
            frames=frame_columns(tables.places), modules=tables.modules, codes=tables.codes,
            files=tables.files, metas=tables.metas, forms=tables.forms, names=assembler.names.all,
            storages=np.zeros(0, dtype=np.int64), schemas=tables.schemas,
            info=final_info(tables, assembler),
            steps=assembler.steps(int(tables.info.get("duration_ns", 0))), captures=assembler.captures(),
            store=store,
        )  # fmt: skip
        columns = SpooledColumns(spool, data)
        line = save_columns(data, columns, folder, source=source, environment=environment, sweep=(JOURNAL,))
        return line, assembler
    finally:
        spool.close()


def _empty(kind: str) -> dict[str, Any]:
    return {
        name: np.zeros(int(name.endswith("_offsets")), dtype=dtype)
        for name, dtype in SINK_COLUMNS[kind].items()
    }


def in_memory(journal: Journal, tables: Tables, store: Store | None) -> tuple[d.TraceData, Assembler]:
    """The whole of a journal, or of ``last=N`` what the last ops need."""
    count = tables.info.get("last")
    if count is None and journal.lost:
        every = merge_batches([journal.batch(number) for number in range(len(journal))])
        tables.metas.append(UNKNOWN_TENSOR)
        batch = add_placeholders(every, len(tables.metas) - 1)
        return assemble(tables, [([batch], True)], LateRows(), store, sparse=True)
    if count is None:
        return assemble(tables, segments(journal), journal.late(), store)
    gone = int(tables.info.get("dropped") or 0)
    every = merge_batches([journal.batch(number) for number in range(len(journal))])
    batch, left_out = keep_last(every, int(count), gone)
    tables.info["dropped"] = gone + left_out
    return assemble(tables, [([batch], True)], LateRows(), store, sparse=True)


class OpenedJournal(NamedTuple):
    """What a journal holds."""

    data: d.TraceData
    sources: dict[str, str]
    environment: dict[str, Any]


def open_journal(path: Path) -> OpenedJournal:
    """What a journal holds, as a trace."""
    try:
        journal = Journal(path)
        try:
            return _recovered(path, journal)
        finally:
            journal.close()
    except Damage as why:
        raise DamagedFile(f"{path} is damaged: {why}.") from None
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror or error}.") from error
    except FAULTS as error:
        raise DamagedFile(
            f"{path} is damaged: {word(str(error).rstrip('.') or type(error).__name__)}."
        ) from error


def _recovered(path: Path, journal: Journal) -> OpenedJournal:
    """What is whole in a journal: all but a frame that was altered, or else everything before it."""
    if journal.lost:
        try:
            return _opened(path, journal)
        except (Damage, *FAULTS):
            journal.leave_out(journal.lost[0])
    return _opened(path, journal)


def _opened(path: Path, journal: Journal) -> OpenedJournal:
    if not len(journal):
        raise Damage("its process ended before anything was written")
    tables = journal.tables()
    if not isinstance(tables.info, dict):
        raise Damage("it does not say what it is")
    tables.info["unfinished"] = True
    checks.check_info(tables.info)
    folder = path.parent / schema.TENSORS
    store = ShardStore(folder, lenient=True) if folder.is_dir() else None
    _tell_lost(tables.info, journal, store)
    data, _ = in_memory(journal, tables, store)
    _check(data, journal.size)
    there = {info.key for info in store.captures()} if store is not None else set()
    kept = [info for info in data.captures if info.key in there]  # the last ones may not have been written
    sources: dict[str, str] = {}
    environment: dict[str, Any] = {}
    for head in journal.heads():
        sources |= {str(file): str(text) for file, text in head.get("sources", ())}
        if "environment" in head:
            environment = json_codec.loads(head["environment"])
    return OpenedJournal(replace(data, captures=kept, store=store if kept else None), sources, environment)


def _tell_lost(info: dict[str, Any], journal: Journal, store: ShardStore | None) -> None:
    """Say what was there once and cannot be read: nothing is missing in silence."""
    lost = [f"{len(journal.lost)} of its batches"] if journal.lost else []
    lost += [f"the tensors in {name}" for name in (store.damaged() if store is not None else ())]
    if lost:
        info["faults"] = [*info.get("faults", ()), f"Damaged and left out: {', '.join(lost)}."]
        info["fault_count"] = (info.get("fault_count") or 0) + 1


def _check(data: d.TraceData, size: int) -> None:
    """What is asked of every file: that nothing in it points anywhere else."""
    counts = {kind: len(getattr(data, kind)) for kind in schema.KINDS}
    counts |= {"storages": len(data.storages), "names": len(data.names), "codes": len(data.codes)}
    counts |= {"metas": len(data.metas), "forms": len(data.forms), "modules": len(data.modules)}
    for kind, lists in (("ops", data.ops), ("calls", data.calls)):
        counts |= {f"{kind}.inputs": len(lists.inputs), f"{kind}.outputs": len(lists.outputs)}
    checks.check_modules(data.modules)
    checks.check_metas(data.metas)
    for kind in schema.KINDS:
        for name in schema.columns_of(kind):
            column = getattr(getattr(data, kind), name)
            checks.check_column(kind, name, column, counts)
            check_written(data, kind, name, column, size)
    checks.check_spans(data.calls.first_op, data.calls.end_op, counts)
    checks.check_steps(data.steps, counts)
    checks.check_captures(data.captures, counts)
