"""Where an op is written: the `Frame` rows of a trace."""

from __future__ import annotations

from sightline.notation import position_text
from sightline.trace import data as d
from sightline.trace.table import Row, optional


class Frame(Row):
    """A place in the source on the way to an op: file, line, columns, function, and who called it."""

    __slots__ = ()

    @property
    def _code(self) -> d.CodeInfo:
        return self._data.raw.codes[int(self._data.raw.frames.code[self.id])]

    @property
    def file(self) -> str:
        return self._code.file

    @property
    def function(self) -> str:
        """Qualified name of the function: ``Net.forward``."""
        return self._code.function

    @property
    def line(self) -> int:
        return int(self._data.raw.frames.line[self.id])

    @property
    def code(self) -> str:
        """The source line, stripped; empty where the source is not at hand."""
        return self._data.raw.source_lines.line(self.file, self.line).strip()

    @property
    def columns(self) -> tuple[int, int] | None:
        """First and last column of the expression on its line, 0-based, in bytes; None if unknown."""
        frames = self._data.raw.frames
        if frames.column[self.id] < 0:
            return None
        return int(frames.column[self.id]), int(frames.end_column[self.id])

    @property
    def end_line(self) -> int:
        return int(self._data.raw.frames.end_line[self.id])

    @property
    def parent(self) -> Frame | None:
        return optional(Frame, self._data, self._data.raw.frames.parent[self.id])

    @property
    def chain(self) -> list[Frame]:
        """The frames that led here, outermost first, this one last."""
        found: list[Frame] = []
        at: Frame | None = self
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    @property
    def position(self) -> str:
        return position_text(self.file, self.line)

    def __repr__(self) -> str:
        return f"<Frame {self.position} in {self.function}>"
