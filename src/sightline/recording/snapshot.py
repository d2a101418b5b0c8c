"""A session as plain data: the batches and small tables that an `Assembler` takes, and the built `TraceData`.

Everything that only torch knows enters the tables here: argument names, FLOPs, how a call was written.
"""

from __future__ import annotations

import os
import platform
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sightline.ranks import this_rank
from sightline.recording.flops import flops_of, has_formula, needs_formula
from sightline.recording.operations import OpInfo, schemas_of
from sightline.recording.source_positions import SourcePositions, operator_names
from sightline.trace.assembly.arrays import IntArray, Rows
from sightline.trace.assembly.batch import (
    Batch,
    LateRows,
    Operation,
    Streams,
    Tables,
    ValueUpdate,
    no_counts,
    no_floats,
)
from sightline.trace.assembly.layout import FRESH_WIDTH, V_WIDTH
from sightline.trace.assembly.memory_sink import assemble
from sightline.trace.data import TraceData

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


class TableSnapshot:
    """The small tables of a session, brought up to date when asked; what is in them stays as it is."""

    def __init__(self, session: SessionBase) -> None:
        self._session = session
        self._infos: list[OpInfo] = []
        self._sources = SourcePositions(session.stacks)
        written = operator_names(session.stacks)
        metas, forms = session.values.metas, session.arguments.forms.all
        self.tables = Tables(
            flops=flops_of(self._infos, metas, forms),
            operator=lambda stack, info: written(stack, self._infos[info].name),
            places=self._sources.places, codes=self._sources.codes, files=self._sources.files,
            one_tensor=session.arguments.one_tensor, begin=session.begin,
            first_sequence=session.first_sequence, aten_passage=session.handler_overhead.aten,
            api_passage=session.handler_overhead.api,
            whole_ops=session.engine == "native",
            fingerprint=bool(getattr(session.readings, "fingerprint", False)),
        )  # fmt: skip

    def update(self) -> Tables:
        """Everything there is now."""
        session, tables = self._session, self.tables
        session.refresh()
        for info in session.infos[len(self._infos) :]:
            self._infos.append(info)
            tables.operations.append(operation_of(info))
            tables.schemas |= schemas_of([info])
        tables.metas += session.values.metas[len(tables.metas) :]
        tables.forms += session.arguments.forms.all[len(tables.forms) :]
        self._sources.update()
        if session.module_infos is not None:
            tables.modules = session.module_infos
        elif len(tables.modules) != len(session.modules.all):
            tables.modules = session.modules.infos()
        tables.kernels = session.device_work.names
        tables.info = info_of(session)
        return tables


def tables_of(session: SessionBase) -> Tables:
    """The small tables as they are now."""
    return TableSnapshot(session).update()


def operation_of(info: OpInfo) -> Operation:
    """What the assembly needs to know of an operation."""
    return Operation(
        info.name, info.flavour, info.backward, info.relabels, info.keeps_order, has_formula(info),
        needs_formula(info),
    )  # fmt: skip


def batch_of(session: SessionBase) -> Batch:
    """Everything the session holds; it goes on unharmed if it is still running."""
    values = session.values
    # Rows refer to what was written before them: first those that refer to most.
    opened = session.open_rows()
    ops, calls, memory = session.ops.numbers(), session.calls.numbers(), session.memory.numbers()
    floats, counts = no_floats(), no_counts()
    if session.readings is not None:
        floats, counts = session.readings.columns()
    return Batch(
        rows=Streams(ops, calls, values.stream.numbers(), values.fresh.numbers(), floats, counts),
        memory=memory, device=session.device_work.rows, nbytes=pairs_of(values.storage_bytes),
        updates=learned_of(session), steps=list(session.steps),
        captures=[] if session.captures is None else list(session.captures.infos),
        open_ops=opened[0], open_calls=opened[1],
    )  # fmt: skip


def learned_of(session: SessionBase) -> list[ValueUpdate]:
    """Kinds and names of values that became known after they were written."""
    kinds, names = dict(session.values.kinds), dict(session.values.names)
    return [ValueUpdate(value, kinds.get(value, -1), names.get(value, "")) for value in {**kinds, **names}]


def pairs_of(held: dict[int, int]) -> IntArray:
    """A dict as pairs of numbers."""
    return np.fromiter(chain.from_iterable(list(held.items())), dtype=np.int64)


def info_of(session: SessionBase) -> dict[str, Any]:
    """What is said of the whole recording."""
    return {
        "name": session.name, "ops": session.level, "torch": str(torch.__version__),
        "python": platform.python_version(), "pid": os.getpid(), "duration_ns": session.elapsed(),
        "faults": list(session.faults), "fault_count": session.fault_count,
        "exception": session.exception, "compiled": session.compiled, "engine": session.engine,
        "compilations": session.compilations, "compile_ns": session.compile_time,
        "threads": session.threads,
        "check": None if session.check is None else "nonfinite",
        "allow": [] if session.check is None else session.check.allowed,
        "checked": 0 if session.check is None else session.check.checked,
        "left_out": 0 if session.captures is None else session.captures.left_out,
        "allocator": session.allocator_readings(),
        "time": session.time, "device_own_ns": session.device_work.own,
        "asked": {} if session.observer is None else session.observer.asked(),
        "training": session.training.told(),
        **({} if session.running else {"gradients": session.training.norms()}),
        **session.modules.told(),
        **_rank(),
    }  # fmt: skip


def _rank() -> dict[str, int]:
    """Which process of a distributed job this is."""
    here = this_rank()
    if here is None:
        return {}
    return {"rank": here.rank, "local_rank": here.local_rank, "world_size": here.world_size}


def build(session: SessionBase) -> TraceData:
    """The recording so far. The session goes on unharmed if it is still running."""
    if session.keeper is not None:
        data: TraceData = session.keeper.data()
        return data
    batch = batch_of(session)
    store = None if session.captures is None else session.captures.store()
    made, assembler = assemble(tables_of(session), [([batch], True)], LateRows(absent=_absent(batch)), store)
    if session.exception is not None:  # only its explanation asks which op made an autograd node
        session.node_ops = assembler.node_ops()
    return made


def _absent(batch: Batch) -> IntArray:
    """Values that got a number and never a row: an interrupt came in between."""
    ids = np.concatenate([
        Rows(batch.rows.values, V_WIDTH).ids, batch.rows.fresh.reshape(-1, FRESH_WIDTH)[:, 0],
    ])  # fmt: skip
    there = np.zeros(int(ids.max(initial=-1)) + 1, dtype=bool)
    there[ids] = True
    return np.flatnonzero(~there)
