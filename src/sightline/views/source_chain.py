"""Ops under the chain of source lines that ran them, one op at a time.

`ChainWriter` keeps the open source lines and returns the lines to write before the next op: those that
differ from the lines of the op before. The finished view (`code`) and the live one (`live`) both use it, so
they print the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Final

from sightline.data.live_events import SourceFrame
from sightline.notation import position_text
from sightline.views.rendering import Line, Span, printable, width

ARROW: Final = "⬇️"
_ALIGNED: Final = 72  #: statistics are aligned, except after ops wider than this
#: The mark of an op in these phases.
PHASE_MARKS: Final = {"backward": "⟵ ", "recompute": "↺ "}


#: The chain of an op that no Python code ran.
NO_SOURCE: Final = SourceFrame("", 0, 0, "", "(no Python source)", None)


@dataclass(slots=True)
class SourceLine:
    """A source line to be written, with the columns of the expressions that ran in it."""

    depth: int
    frame: SourceFrame
    columns: list[tuple[int, int]] = field(default_factory=list)

    def spans(self) -> tuple[Span, ...]:
        frame = self.frame
        return _source_spans(
            frame.file, frame.line, frame.function, frame.code, tuple(self.columns), frame.indent
        )


@dataclass(frozen=True, slots=True)
class Note:
    """Any other line: an arrow, a header, an op."""

    depth: int
    content: tuple[Span, ...]
    statistics: tuple[Span, ...] = ()  #: of an op's result, written after it
    pad: int = 0  #: spaces before them, to align those of several ops

    def spans(self) -> tuple[Span, ...]:
        if not self.statistics:
            return self.content
        return (*self.content, Span(" " * (1 + self.pad)), *self.statistics)


Entry = SourceLine | Note


class ChainWriter:
    """Keeps the open source lines, and returns the entries to write before the next op."""

    def __init__(self) -> None:
        self._chain: list[SourceFrame] = []
        self._lines: list[SourceLine] = []
        self._descended = True  # whether an arrow (or nothing) already follows the innermost open line
        self._phase = "forward"
        self.floor = 0  #: open lines below this depth stay open over a change of phase

    @property
    def depth(self) -> int:
        """The number of open source lines: the depth of the next entry."""
        return len(self._chain)

    def shared(self, chain: Sequence[SourceFrame]) -> int:
        """How many of the open lines a chain shares; those around an open repeat also over several calls."""
        return shared_lines(self._chain, chain, self.floor)

    def op(
        self, chain: Sequence[SourceFrame], phase: str, content: tuple[Span, ...],
        statistics: tuple[Span, ...] = (),
    ) -> list[Entry]:  # fmt: skip
        """The lines of one op: the part of its chain that is not open, and the op itself."""
        chain = chain or (NO_SOURCE,)
        entries = self.turn(phase)
        entries += self.descend(chain, len(chain), further=False)
        entries.append(Note(len(chain), content, statistics))
        self._descended = False
        return entries

    def turn(self, phase: str) -> list[Entry]:
        """A header where the phase changes; every line below the floor is closed."""
        if phase == self._phase:
            return []
        self._phase = phase
        self.close(self.floor)
        return [Note(self.floor, (Span(f"── {phase} " + "─" * (40 - len(phase)), "title"),))]

    def descend(self, chain: Sequence[SourceFrame], depth: int, *, further: bool) -> list[Entry]:
        """Open the first ``depth`` lines of a chain; ``further`` says that something deeper follows."""
        shared = min(self.shared(chain), depth)
        for at, frame in enumerate(chain[:shared]):
            _add_columns(self._lines[at], frame)
            if frame.call >= 0:
                self._chain[at] = frame
        entries: list[Entry] = []
        deeper = shared < depth or further
        if shared == len(self._chain) and shared and deeper and not self._descended:
            entries.append(Note(shared, (Span(ARROW, "dim"),)))
        self.close(shared)
        for at in range(shared, depth):
            frame = chain[at]
            line = SourceLine(at, frame)
            _add_columns(line, frame)
            entries.append(line)
            self._lines.append(line)
            self._chain.append(frame)
            if at < depth - 1 or further:
                entries.append(Note(at + 1, (Span(ARROW, "dim"),)))
        self._descended = further
        return entries

    def close(self, depth: int) -> None:
        """Close the open lines from a depth on, so that they are written again if they run again."""
        if depth < len(self._chain):
            self._descended = True
        del self._chain[depth:], self._lines[depth:]


def shared_lines(one: Sequence[SourceFrame], other: Sequence[SourceFrame], any_call: int = 0) -> int:
    """How many outer lines two chains share, entering the same calls; the first ``any_call`` whichever."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            if a.line != b.line or a.file != b.file or a.function != b.function:
                break
            if count >= any_call and a.call != b.call and -1 not in (a.call, b.call):
                break
        count += 1
    return count


def op_spans(name: str, arguments: str, outputs: str, phase: str = "forward", *, raised: bool = False,
             times: int = 1) -> tuple[Span, ...]:  # fmt: skip
    """An op as a comment: ``# mul.Tensor(f32[2], 3) -> f32[2];``; the arguments with their brackets."""
    spans = [Span(f"# {PHASE_MARKS.get(phase, '')}", "dim"), Span(name, "op"), Span(arguments)]
    if raised:
        spans.append(Span(" !! raised", "error"))
    elif outputs:
        spans += [Span(" -> ", "dim"), Span(outputs, "shape"), Span(";", "dim")]
    else:
        spans.append(Span(";", "dim"))
    if times > 1:
        spans.append(Span(f" ×{times}", "number"))
    return tuple(spans)


#: An entry of the view or a finished line, with the depths of the repeats open around it.
PlacedEntry = tuple[Entry | Line, tuple[int, ...]]


def align_statistics(placed: Sequence[PlacedEntry]) -> list[PlacedEntry]:
    """The entries with the statistics of consecutive ops aligned; those of very wide ops follow directly."""
    result: list[PlacedEntry] = []
    for notes, group in groupby(placed, key=lambda item: isinstance(item[0], Note) and item[0].depth):
        entries = list(group)
        if notes is False:
            result += entries
            continue
        widths = [
            sum(width(printable(span.text)) for span in entry.content)
            if isinstance(entry, Note) and entry.statistics
            else 0
            for entry, _ in entries
        ]
        column = max((wide for wide in widths if wide <= _ALIGNED), default=0)
        for (entry, repeats), wide in zip(entries, widths, strict=True):
            if isinstance(entry, Note) and wide < column:
                entry = replace(entry, pad=column - wide)
            result.append((entry, repeats))
    return result


def entry_line(entry: Entry, repeats: Sequence[int] = ()) -> Line:
    """An entry as a line of the outline; ``repeats`` are the depths at which a repeat is open."""
    return Line(entry.spans(), gutter(entry.depth, repeats))


def gutter(depth: int, repeats: Sequence[int] = ()) -> str:
    """The prefix of a line: ``│ `` per open source line, ``┊ `` per open repeat.

    >>> gutter(2, [1])
    '│ ┊ │ '
    """
    if not repeats:
        return "│ " * depth
    return "".join("┊ " * repeats.count(at) + ("│ " if at < depth else "") for at in range(depth + 1))


def _add_columns(line: SourceLine, frame: SourceFrame) -> None:
    columns = frame.columns
    if columns is None:
        return
    if frame.end_line > frame.line:
        columns = (columns[0], 1 << 30)  # an expression over several lines: to the end of this one
    if columns not in line.columns:
        line.columns.append(columns)


@lru_cache(maxsize=8192)
def _source_spans(
    file: str, line: int, function: str, code: str, columns: tuple[tuple[int, int], ...], indent: int
) -> tuple[Span, ...]:
    if not file:
        return (Span(code, "dim"),)
    where = Span(f"# {position_text(file, line)} in {function}:", "dim")
    if not code:
        return (where,)
    return (*_highlight(code, columns, indent), Span("  "), where)


def _highlight(code: str, columns: Sequence[tuple[int, int]], indent: int) -> list[Span]:
    """The source line with its expressions highlighted; columns count bytes of the line in the file."""
    if not columns or indent < 0:
        return [Span(code, "code")]
    raw = code.encode(errors="surrogatepass")  # a damaged recording may hold any text
    spans: list[Span] = []
    at = 0
    for start, end in sorted(columns):
        start, end = max(start - indent, at), min(end - indent, len(raw))
        if start >= end:
            continue
        if start == at and spans:  # adjacent to the one before
            spans[-1] = Span(spans[-1].text + _decoded(raw[start:end]), "mark")
        else:
            spans += [Span(_decoded(raw[at:start]), "code"), Span(_decoded(raw[start:end]), "mark")]
        at = end
    spans.append(Span(_decoded(raw[at:]), "code"))
    return [span for span in spans if span.text]


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace")
