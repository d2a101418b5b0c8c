"""A snapshot of a session as plain data: its small tables, and the `TraceData` built from all of it.

The facts that only torch knows enter the tables here: argument names, FLOPs, the operators as written.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

import torch

from sightline.assemble.batch import LateRows, Operation, Tables
from sightline.assemble.memory_sink import assemble
from sightline.data.trace_data import TraceData
from sightline.process_rank import job_digest, this_rank
from sightline.recording.distributed import groups_since
from sightline.recording.flops import flops_of, has_formula, needs_formula
from sightline.recording.operations import OpInfo, schemas_of
from sightline.recording.source_positions import SourcePositions, operator_names
from sightline.recording.streaming.batches import whole_batch

if TYPE_CHECKING:
    from sightline.recording.session import Session


class TableSnapshot:
    """The small tables of a session; an update only adds to them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._infos: list[OpInfo] = []
        self._sources = SourcePositions(session.stacks)
        operator = operator_names(session.stacks)
        metas, forms = session.values.metas, session.arguments.forms.all
        self.tables = Tables(
            flops=flops_of(self._infos, metas, forms),
            operator=lambda stack, info: operator(stack, self._infos[info].name),
            places=self._sources.places, codes=self._sources.codes, files=self._sources.files,
            one_tensor=session.arguments.one_tensor, begin=session.begin,
            first_sequence=session.first_sequence, aten_passage=session.handler_overhead.aten,
            api_passage=session.handler_overhead.api,
            whole_ops=session.engine == "native",
            fingerprint=bool(getattr(session.statistics_source, "fingerprint", False)),
        )  # fmt: skip

    def update(self) -> Tables:
        """The tables with everything that is known by now."""
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
        if session.captures is not None:
            tables.lost_captures = session.captures.lost
        return tables


def tables_of(session: Session) -> Tables:
    """The small tables as they are now."""
    return TableSnapshot(session).update()


def operation_of(info: OpInfo) -> Operation:
    """An operation as the assembly needs it."""
    return Operation(
        info.name, info.flavour, info.backward, info.relabels, info.keeps_order, has_formula(info),
        needs_formula(info),
    )  # fmt: skip


def info_of(session: Session) -> dict[str, Any]:
    """The trace's info: the facts of the recording as a whole."""
    return {
        "name": session.name, "ops": session.level, "torch": str(torch.__version__),
        "python": platform.python_version(), "pid": os.getpid(), "duration_ns": session.elapsed(),
        "faults": list(session.faults), "fault_count": session.fault_count,
        "exception": session.exception, "compiled": session.compiled, "engine": session.engine,
        "engine_reason": session.engine_reason,
        "compilations": session.compilations, "compile_ns": session.compile_time,
        "threads": session.threads,
        "unrecorded_calls": session.unrecorded_calls, "unrecorded_module": session.unrecorded_module,
        "check": None if session.check is None else "nonfinite",
        "allow": [] if session.check is None else session.check.allowed,
        "checked": 0 if session.check is None else session.check.checked,
        "left_out": 0 if session.captures is None else session.captures.left_out,
        "allocator": session.allocator_statistics(),
        "time": session.time, "device_own_ns": session.device_work.own,
        "asked": {} if session.observer is None else session.observer.requested(),
        "training": session.training.summary(), "warnings": session.warnings.rows(),
        **({} if session.running else {"gradients": session.training.norms()}),
        "precision": _precision(),
        **session.modules.summary(),
        **_rank(session),
    }  # fmt: skip


def _precision() -> dict[str, Any]:
    """How float32 products may be rounded; empty where torch refuses to tell."""
    try:
        return {
            "float32_matmul": torch.get_float32_matmul_precision(),
            "cudnn_tf32": torch.cuda.is_initialized() and bool(torch.backends.cudnn.allow_tf32),
        }
    except RuntimeError:
        return {}


def _rank(session: Session) -> dict[str, Any]:
    """Which process of a distributed job this is, and with whom it talks."""
    process = this_rank()
    groups = groups_since(session.begin)
    if process is None:
        return groups
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "rank": process.rank, "local_rank": process.local_rank, "world_size": process.world_size,
        "restart": process.restart, "job": job_digest(), "began_ns": session.wall_begin,
        "seed": torch.initial_seed(),
        "rank_device": f"cuda:{torch.cuda.current_device()}" if cuda else "cpu", **groups,
        "waits": session.waits.summary(),
    }  # fmt: skip


def build(session: Session) -> TraceData:
    """The recording so far. The session goes on unharmed if it is still running."""
    if session.stream_writer is not None:
        return session.stream_writer.data()
    batch = whole_batch(session)
    store = None if session.captures is None else session.captures.store()
    data, assembler = assemble(tables_of(session), [([batch], True)], LateRows(absent=batch.absent), store)
    if session.exception is not None:  # only its explanation needs the op of an autograd node
        session.node_ops = assembler.node_ops()
    return data
