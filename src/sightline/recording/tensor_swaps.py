"""``torch.utils.swap_tensors`` inside a recording: ``module.to(…)`` where it swaps parameters.

torch refuses to swap a tensor to which anybody has a weak reference, and recordings know tensors by these. So
while anything records they let go of both tensors for the moment of a swap. Afterwards each object has the
other's data, and is found to be a new version of its own value where it is next used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from sightline.recording.thread_state import active

if TYPE_CHECKING:
    from sightline.recording.session_base import SessionBase


class SwapWatch:
    """Stands in for ``torch.utils.swap_tensors`` while anything records."""

    def __init__(self) -> None:
        self._real: Any = None

    def install(self) -> None:
        """Take its place."""
        if torch.utils.swap_tensors != self.swap:
            self._real = torch.utils.swap_tensors
            torch.utils.swap_tensors = self.swap

    def remove(self) -> None:
        """Give it back, unless somebody has put another there since."""
        if torch.utils.swap_tensors == self.swap:
            torch.utils.swap_tensors = self._real

    def swap(self, t1: Any, t2: Any) -> None:
        """Swap two tensors, of which no recording knows meanwhile."""
        held: list[tuple[SessionBase, Any, Any]] = []
        for session in _sessions():
            for tensor in (t1, t2):
                try:
                    held.append((session, tensor, session.let_go(tensor)))
                except Exception as error:
                    session.note_fault(error)
        try:
            self._real(t1, t2)
        finally:
            for session, tensor, known in held:
                try:
                    session.take_back(tensor, known)
                except Exception as error:
                    session.note_fault(error)


def _sessions() -> list[SessionBase]:
    """Every recording of the process: any of them may know the tensors."""
    plain = [state.session for states in list(active.values()) for state in states]
    native = sys.modules.get("sightline.recording.native.installation")
    found = [] if native is None else [one for here in list(native.sessions.values()) for one in here]
    return [*plain, *found]
