"""Which recordings run on which thread. Hooks, which are the process's, find theirs here."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from sightline.recording.torchapi import dispatch_depth, dispatch_mode_at

if TYPE_CHECKING:
    from sightline.recording.lanes import Lane

#: The lanes of each thread on which a recording was started, in order of starting.
active: Final[dict[int, list[Lane]]] = {}


def lanes_here() -> list[Lane]:
    """The recordings of this thread; an autograd worker has those of the thread it works for."""
    found = active.get(get_ident())
    if found is not None:
        return found
    modes: list[Any] = [dispatch_mode_at(i) for i in range(dispatch_depth())]
    sessions = [mode.session for mode in modes if hasattr(mode, "session")]
    return [session.lane_here() for session in sessions if getattr(session, "running", False)]
