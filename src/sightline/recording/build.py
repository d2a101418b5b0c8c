"""From a session to a `TraceData`: once, after the block, or for a snapshot of the run so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sightline.recording.gathering import batch_of, tables_of
from sightline.trace.assembly.layout import FRESH_WIDTH, V_WIDTH
from sightline.trace.assembly.numbers import Numbers, Rows
from sightline.trace.assembly.raw import Batch, Late
from sightline.trace.assembly.sinks import assemble
from sightline.trace.data import TraceData

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


def build(session: SessionBase) -> TraceData:
    """The recording so far. The session goes on unharmed if it is still running."""
    if session.keeper is not None:
        data: TraceData = session.keeper.data()
        return data
    batch = batch_of(session)
    store = None if session.captures is None else session.captures.store()
    made, assembler = assemble(tables_of(session), [([batch], True)], Late(absent=_absent(batch)), store)
    if session.exception is not None:  # only its explanation asks which op made an autograd node
        session.node_ops = assembler.node_ops()
    return made


def _absent(batch: Batch) -> Numbers:
    """Values that got a number and never a row: an interrupt came in between."""
    ids = np.concatenate([
        Rows(batch.rows.values, V_WIDTH).ids, batch.rows.fresh.reshape(-1, FRESH_WIDTH)[:, 0],
    ])  # fmt: skip
    there = np.zeros(int(ids.max(initial=-1)) + 1, dtype=bool)
    there[ids] = True
    return np.flatnonzero(~there)
