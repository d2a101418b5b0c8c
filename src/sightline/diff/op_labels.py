"""Where an op stands: its name as it is written, its line and its module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sightline.diff.side import Side
from sightline.notation import position_text


@dataclass(frozen=True, slots=True)
class OpLabel:
    """An op of one recording, for people: ``* at port.py:40 (blocks.0.mixer)``."""

    op: int
    name: str  #: as it is written: ``F.linear``, ``*``
    aten: str
    file: str
    line: int
    function: str
    code: str
    module: str

    @property
    def position(self) -> str:
        """``port.py:40``; empty where nothing is known."""
        return position_text(self.file, self.line) if self.file else ""

    def __str__(self) -> str:
        return f"{self.name}{self.where}"

    @property
    def where(self) -> str:
        """`` at port.py:40 (blocks.0.mixer)``."""
        position = f" at {self.position}" if self.file else ""
        return f"{position} ({self.module})" if self.module else position

    def to_dict(self) -> dict[str, Any]:
        return {"op": self.op, "name": self.name, "aten": self.aten, "file": self.file, "line": self.line,
                "function": self.function, "code": self.code, "module": self.module}  # fmt: skip


class OpLabels:
    """Finds the places of ops of one side."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def of(self, op: int) -> OpLabel:
        side = self._side
        row = side.index.ops[op]
        parent = row.parent
        file, line, function, code = "", 0, "", ""
        shown = int(side.index.op_user_frames[op])
        if shown >= 0:
            frame = side.index.frames[shown]
            file, line, function, code = frame.file, frame.line, frame.function, frame.code
        module = side.label(int(side.data.ops.call[op]))
        return OpLabel(op, (parent or row).name, row.name, file, line, function, code, module)
