"""From a session to a `TraceData`: once, after the block, or for a snapshot of the run so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sightline.recording.gathering import batch_of, tables_of
from sightline.trace.assembly.raw import Late
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
    made, assembler = assemble(tables_of(session), [([batch], True)], Late(), store)
    if session.exception is not None:  # only its explanation asks which op made an autograd node
        session.node_ops = assembler.node_ops()
    return made
