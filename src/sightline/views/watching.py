"""The live views: what a recorder in progress tells them is printed at once, as code or as a log."""

from __future__ import annotations

from typing import IO

from sightline.analysis.places import torch_file
from sightline.trace.events import CallHappened, OpHappened
from sightline.views.blocks import OK, RAISED, ModuleEvent
from sightline.views.blocks import OpEvent as LogOp
from sightline.views.live import LiveCode, OpEvent
from sightline.views.live_log import LiveLog


class WatchCode:
    """Prints ops under their source lines: aten ops where they are recorded, else API calls."""

    def __init__(self, ops: str, stream: IO[str] | None = None, *, color: bool | None = None) -> None:
        self._level = "api" if ops == "api" else "aten"
        self._live = LiveCode(stream, color=color)

    def op(self, event: OpHappened) -> None:
        """Print an op of the level that is shown, under its lines."""
        if event.level == self._level:
            inputs, outputs = [str(meta) for meta in event.inputs], [str(meta) for meta in event.outputs]
            self._live.op(
                OpEvent(
                    event.name, event.form, inputs, event.result.fill(outputs), event.chain, event.phase,
                    event.raised,
                )
            )  # fmt: skip

    def enter(self, event: CallHappened) -> None:
        """Module calls show as the lines they run."""

    def leave(self, event: CallHappened) -> None:
        """Module calls show as the lines they run."""


class WatchLog:
    """Prints a block per module call and operation: API calls where they are recorded, else aten ops."""

    def __init__(self, ops: str, stream: IO[str] | None = None, *, color: bool | None = None) -> None:
        self._level = "aten" if ops == "aten" else "api"
        self._live = LiveLog(color=color, file=stream)

    def op(self, event: OpHappened) -> None:
        """Print an operation of the forward pass."""
        if event.level == self._level and event.phase == "forward":
            own = [place for place in event.chain if not torch_file(place.file)]
            self._live.op(
                LogOp(
                    event.name, event.flavour, own[-1].function if own else "", event.depth, event.form,
                    event.inputs, event.result, event.outputs, RAISED if event.raised else OK,
                )
            )  # fmt: skip

    def enter(self, event: CallHappened) -> None:
        self._live.enter(_module_event(event))

    def leave(self, event: CallHappened) -> None:
        self._live.exit(_module_event(event))


def _module_event(event: CallHappened) -> ModuleEvent:
    return ModuleEvent(
        event.path, event.type, event.extra, event.depth, event.leaf, event.form, event.inputs, event.result,
        event.outputs, RAISED if event.raised else OK, root=event.root,
    )  # fmt: skip
