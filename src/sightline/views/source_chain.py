"""Ops under the chain of source lines that ran them, line by line as they come.

`ChainWriter` holds which source lines are open and says what has to be written before the next op: only
what differs from the op before. The finished view (`code`) and the live one (`live`) both use it, so they
print the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Final, Protocol

from sightline.notation import position_text
from sightline.views.outline import Line, Span, printable, width

ARROW: Final = "⬇️"
_ALIGNED: Final = 72  #: numbers stand below each other, but for those of ops wider than this
#: What an op line begins with in these phases.
PHASE_MARKS: Final = {"backward": "⟵ ", "recompute": "↺ "}


class FrameLike(Protocol):
    """A source position: a `Frame` row, a `ChainFrame`, or whatever a recorder has at hand.

    It may also have ``end_line``, ``indent``, without which no expression is marked in its line, and
    ``call``: the module call entered from this line. A line that enters another call than before is written
    again, so that the iterations of a loop can be told apart.
    """

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def function(self) -> str: ...
    @property
    def code(self) -> str: ...
    @property
    def columns(self) -> tuple[int, int] | None: ...


@dataclass(frozen=True, slots=True)
class ChainFrame:
    """A source position as plain data."""

    file: str
    line: int
    function: str
    code: str  #: the source line, stripped; empty where it is not at hand
    columns: tuple[int, int] | None = None
    end_line: int = -1  #: where the expression ends, if not on this line
    call: int = -1  #: id of the module call entered from here, where one was and it matters
    indent: int = -1  #: bytes before the code in its line, from which columns are counted; -1 if not known


#: Stands in for the chain of an op that no Python code ran.
NO_SOURCE: Final = ChainFrame("", 0, "", "(no Python source)")


@dataclass(slots=True)
class SourceLine:
    """A source line about to be written, with the columns of the expressions that ran in it."""

    depth: int
    place: FrameLike
    columns: list[tuple[int, int]] = field(default_factory=list)

    def spans(self) -> tuple[Span, ...]:
        place = self.place
        columns, indent = tuple(self.columns), getattr(place, "indent", -1)
        return _source_spans(place.file, place.line, place.function, place.code, columns, indent)


@dataclass(frozen=True, slots=True)
class Note:
    """Any other line: an arrow, a header, an op."""

    depth: int
    content: tuple[Span, ...]
    numbers: tuple[Span, ...] = ()  #: the statistics of an op's result, which stand after it
    pad: int = 0  #: columns of space before them, to have those of several ops below each other

    def spans(self) -> tuple[Span, ...]:
        return (*self.content, Span(" " * (1 + self.pad)), *self.numbers) if self.numbers else self.content


Entry = SourceLine | Note


class ChainWriter:
    """Which source lines are open, and what to write before the next op."""

    def __init__(self) -> None:
        self._chain: list[FrameLike] = []
        self._lines: list[SourceLine] = []
        self._descended = True  # whether an arrow (or nothing) already follows the innermost open line
        self._phase = "forward"
        self.floor = 0  #: open lines below this depth stay open over a change of phase

    @property
    def depth(self) -> int:
        """How many source lines are open: the depth of what is written next."""
        return len(self._chain)

    def shared(self, chain: Sequence[FrameLike]) -> int:
        """How many of the open lines the chain begins with."""
        return shared_lines(self._chain, chain)

    def op(
        self,
        chain: Sequence[FrameLike],
        phase: str,
        content: tuple[Span, ...],
        numbers: tuple[Span, ...] = (),
    ) -> list[Entry]:
        """The lines of one op: what differs in its chain from the one before, and the op itself."""
        chain = chain or (NO_SOURCE,)
        entries = self.turn(phase)
        entries += self.descend(chain, len(chain), further=False)
        entries.append(Note(len(chain), content, numbers))
        self._descended = False
        return entries

    def turn(self, phase: str) -> list[Entry]:
        """A header where the phase changes; every line below the floor is closed."""
        if phase == self._phase:
            return []
        self._phase = phase
        self.close(self.floor)
        return [Note(self.floor, (Span(f"── {phase} " + "─" * (40 - len(phase)), "title"),))]

    def descend(self, chain: Sequence[FrameLike], depth: int, *, further: bool) -> list[Entry]:
        """Open the first ``depth`` lines of a chain; ``further`` says that something deeper follows."""
        shared = min(self.shared(chain), depth)
        for at, place in enumerate(chain[:shared]):
            _add_columns(self._lines[at], place)
            if getattr(place, "call", -1) >= 0:
                self._chain[at] = place
        entries: list[Entry] = []
        deeper = shared < depth or further
        if shared == len(self._chain) and shared and deeper and not self._descended:
            entries.append(Note(shared, (Span(ARROW, "dim"),)))
        self.close(shared)
        for at in range(shared, depth):
            place = chain[at]
            line = SourceLine(at, place)
            _add_columns(line, place)
            entries.append(line)
            self._lines.append(line)
            self._chain.append(place)
            if at < depth - 1 or further:
                entries.append(Note(at + 1, (Span(ARROW, "dim"),)))
        self._descended = further
        return entries

    def close(self, depth: int) -> None:
        """Close the open lines from a depth on, so that they are written again when they come again."""
        if depth < len(self._chain):
            self._descended = True
        del self._chain[depth:], self._lines[depth:]


def shared_lines(one: Sequence[FrameLike], other: Sequence[FrameLike]) -> int:
    """How many lines two chains have in common from the outermost in, entering the same calls."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            if a.line != b.line or a.file != b.file or a.function != b.function:
                break
            calls = getattr(a, "call", -1), getattr(b, "call", -1)
            if calls[0] != calls[1] and -1 not in calls:
                break
        count += 1
    return count


def op_spans(name: str, arguments: str, outputs: str, phase: str = "forward", *, raised: bool = False,
             times: int = 1) -> tuple[Span, ...]:  # fmt: skip
    """An op as the comment it is written as: ``# mul.Tensor(f32[2], 3) -> f32[2];``."""
    spans = [Span(f"# {PHASE_MARKS.get(phase, '')}", "dim"), Span(name, "op"), Span(f"({arguments})")]
    if raised:
        spans.append(Span(" !! raised", "error"))
    elif outputs:
        spans += [Span(" -> ", "dim"), Span(outputs, "shape"), Span(";", "dim")]
    else:
        spans.append(Span(";", "dim"))
    if times > 1:
        spans.append(Span(f" ×{times}", "number"))
    return tuple(spans)


#: An entry of the view, or a line already made, with the depths of the repeats open around it.
Placed = tuple[Entry | Line, tuple[int, ...]]


def aligned(placed: Sequence[Placed]) -> list[Placed]:
    """The entries with the numbers of ops that follow each other set in one column.

    An op that is wider than most leaves the column alone: its numbers follow it.
    """
    made: list[Placed] = []
    for notes, group in groupby(placed, key=lambda item: isinstance(item[0], Note) and item[0].depth):
        entries = list(group)
        if notes is not False:
            entries = _in_a_column(entries)
        made += entries
    return made


def _in_a_column(entries: list[Placed]) -> list[Placed]:
    widths = [_columns(entry) if isinstance(entry, Note) else 0 for entry, _ in entries]
    column = max((wide for wide in widths if wide <= _ALIGNED), default=0)
    return [
        (replace(entry, pad=column - wide), repeats)
        if isinstance(entry, Note) and wide < column
        else (entry, repeats)
        for (entry, repeats), wide in zip(entries, widths, strict=True)
    ]


def _columns(note: Note) -> int:
    """How wide an op is that has numbers after it."""
    return sum(width(printable(span.text)) for span in note.content) if note.numbers else 0


def as_line(entry: Entry, repeats: Sequence[int] = ()) -> Line:
    """An entry as a line of the outline; ``repeats`` are the depths at which a repeat is open."""
    return Line(entry.spans(), gutter(entry.depth, repeats))


def gutter(depth: int, repeats: Sequence[int] = ()) -> str:
    """What a line begins with: ``│ `` per open source line, ``┊ `` per open repeat.

    >>> gutter(2, [1])
    '│ ┊ │ '
    """
    if not repeats:
        return "│ " * depth
    return "".join("┊ " * repeats.count(at) + ("│ " if at < depth else "") for at in range(depth + 1))


def _add_columns(line: SourceLine, place: FrameLike) -> None:
    columns = place.columns
    if columns is None:
        return
    if getattr(place, "end_line", place.line) > place.line:
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
    return (*_highlighted(code, columns, indent), Span("  "), where)


def _highlighted(code: str, columns: Sequence[tuple[int, int]], indent: int) -> list[Span]:
    """The source line with its expressions marked; columns count bytes of the line as it is in the file."""
    if not columns or indent < 0:
        return [Span(code, "code")]
    raw = code.encode(errors="surrogatepass")  # text out of a bundle may be odd
    spans: list[Span] = []
    at = 0
    for start, end in sorted(columns):
        start, end = max(start - indent, at), min(end - indent, len(raw))
        if start >= end:
            continue
        if start == at and spans:  # next to the one before: one mark
            spans[-1] = Span(spans[-1].text + _decoded(raw[start:end]), "mark")
        else:
            spans += [Span(_decoded(raw[at:start]), "code"), Span(_decoded(raw[start:end]), "mark")]
        at = end
    spans.append(Span(_decoded(raw[at:]), "code"))
    return [span for span in spans if span.text]


def _decoded(raw: bytes) -> str:
    return raw.decode(errors="replace")
