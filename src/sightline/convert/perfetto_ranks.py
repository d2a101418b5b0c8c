"""The ranks of a distributed job as one timeline: a process for each, and an arrow through each collective.

An arrow leads from the rank that came first to the one that came last. Ranks are written one after the other,
on the common clock of `sightline.ranks.collective_waits`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sightline._version import __version__
from sightline.convert.atomic_files import atomic_text
from sightline.convert.encoding import json_text
from sightline.convert.perfetto import EventWriter
from sightline.ranks.collective_waits import Waiting
from sightline.ranks.desync import GroupTable
from sightline.ranks.merge import Run
from sightline.trace.bundle import load
from sightline.trace.data import TraceData
from sightline.trace.index import Index


def ranks_to_perfetto(run: Run, path: str | os.PathLike[str]) -> None:
    """Write all ranks to a file that appears complete or not at all; ``.gz`` compresses it."""
    waiting = Waiting.of(run)
    arrows = [(table, waiting.times(table, "start")) for table in waiting.tables]
    with atomic_text(path) as file:
        file.write('{"traceEvents":[\n')
        separator = ""
        for rank, record in run.records.items():
            data = load(record.path)
            writer = EventWriter(Index(shifted(data, waiting.offsets[rank])), pid=rank + 1, order=rank)
            for events in (*writer.events(), *_arrows(writer, run, rank, arrows)):
                if events:
                    file.write(separator + ",\n".join(events))
                    separator = ",\n"
            data.close()
        about = {"recorder": f"sightline {__version__}", "ranks": str(len(run.records))}
        file.write(f'\n],"displayTimeUnit":"ms","otherData":{json_text(about)}}}\n')


def shifted(data: TraceData, ns: int) -> TraceData:
    """A recording whose times are so much later."""
    ops, calls, work, memory = data.ops, data.calls, data.device_work, data.allocations
    return replace(
        data,
        ops=replace(ops, start=ops.start + ns),
        calls=replace(calls, start=calls.start + ns),
        device_work=replace(work, launch=work.launch + ns, start=work.start + ns),
        allocations=replace(
            memory, start=memory.start + ns, end=np.where(memory.end >= 0, memory.end + ns, memory.end)
        ),
        steps=[replace(step, start=step.start + ns) for step in data.steps],
    )


def _arrows(
    writer: EventWriter, run: Run, rank: int, arrows: list[tuple[GroupTable, NDArray[np.float64]]]
) -> Iterator[list[str]]:
    """This rank's part of the arrow of each collective that another rank has too."""
    for number, (table, times) in enumerate(arrows):
        calls = run.records[rank].groups.get(table.group)
        if calls is None or rank not in table.ranks:
            continue
        row = table.ranks.index(rank)
        cells, own = table.cells(row, calls)
        columns = np.arange(cells.start, cells.stop)
        common = (~np.isnan(times[:, columns])).sum(axis=0) > 1
        first = np.nanargmin(times[:, columns], axis=0) == row
        last = np.nanargmax(times[:, columns], axis=0) == row
        yield [
            writer.flow(int(op), "s" if begins else "f" if ends else "t", f"{number}.{column}")
            for op, column, is_common, begins, ends in zip(
                calls.op[own].tolist(), columns.tolist(), common.tolist(), first.tolist(), last.tolist(),
                strict=True,
            )
            if is_common
        ]  # fmt: skip
